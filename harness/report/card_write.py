"""Writing a card's folder, and checking that it still says what its receipts say."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from harness.compare import save_comparison
from harness.compare.task_pairing import load_tasks
from harness.errors import UsageError
from harness.measure.receipt import load_measurement
from harness.records import Strict, load_json
from harness.report.card import FOLDER, Card, Options, build_card, find_subject
from harness.report.card_file import merged_readme, stale_lines
from harness.report.card_pictures import draw_all, shown
from harness.report.card_sources import Part, collect
from harness.report.words import worded
from harness.store import atomic_path, folder_lock, refuse_paths, slug, write_json, write_text
from harness.tasks.receipt import ITEMS, TASKS_FILE, load_receipt

README = "README.md"
#: What `fidelity verify` needs to render the same card again, beside the receipts.
RECORD = f"{FOLDER}/card.json"


class Record(Strict):
    """card.json: the folders of the receipts beside it, in order, and the options that the card was made with."""

    format: Literal["exl3-fidelity/card/1"] = "exl3-fidelity/card/1"
    receipts: list[str]
    tasks: list[str]
    floor: str | None
    anchors: list[str]
    subject: str
    decimals: int | None
    base_model: str | None
    repo: str | None
    model_name: str | None
    pictures: bool

    @property
    def options(self) -> Options:
        """The options as `build_card` takes them."""
        return Options(**{name: getattr(self, name) for name in OPTIONS})


OPTIONS = ("subject", "decimals", "base_model", "repo", "model_name", "pictures")


def write_card(parts: Sequence[Part], options: Options, folder: Path, *, tasks: Sequence[Path] = ()) -> Card:
    """Write README.md, the pictures and copies of the receipts into ``folder``."""
    with folder_lock(folder):
        home, subject = find_subject(parts, options.subject)
        if options.pictures:
            draw_all(home, subject, folder)
        record = copy_receipts(parts, tasks, folder, options, subject)
        card = _card(parts, options, folder, tasks)
        readme = folder / README
        refuse_paths("the card", card.block)
        write_text(readme, merged_readme(_text(readme), card.block, card.keys))
        for name, text in card.files.items():
            write_text(folder / name, text)
        write_json(folder / RECORD, record.model_dump())
    return card


def check_card(parts: Sequence[Part], options: Options, folder: Path, *, tasks: Sequence[Path] = ()) -> list[str]:
    """What of the card in ``folder`` is stale; empty when it says what the receipts say."""
    readme = folder / README
    current = _text(readme)
    if current is None:
        return [f"{README} is not there"]
    card = _card(parts, options, folder, tasks)
    stale = stale_lines(current, merged_readme(current, card.block, card.keys))
    home, subject = find_subject(parts, options.subject)
    for name, text in card.files.items():
        stale += [f"{name}: {line}" for line in stale_lines(_text(folder / name), text)]
    pictures = [picture.file for picture in shown(home, subject, folder)] if options.pictures else []
    return [*stale, *(f"{file} is not there" for file in pictures if not (folder / file).is_file())]


def _card(parts: Sequence[Part], options: Options, folder: Path, tasks: Sequence[Path]) -> Card:
    home, subject = find_subject(parts, options.subject)
    pictures = shown(home, subject, folder) if options.pictures else []
    return build_card(parts, options, pictures=pictures, tasks=load_tasks(tasks))


def _text(readme: Path) -> str | None:
    """The README with its own line ends."""
    if not readme.is_file():
        return None
    try:
        return readme.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{readme.name} is not UTF-8: {error}", "save it as UTF-8") from error


def read_record(folder: Path) -> Record:
    """The record of a card that lies in ``folder``."""
    if not (folder / RECORD).is_file():
        raise UsageError(f"{folder.name} has no {RECORD}", "name a folder that `fidelity card` wrote")
    return load_json(folder / RECORD, Record, "name a folder that `fidelity card` wrote, or write it again", UsageError)


def parts_of(record: Record, folder: Path) -> list[Part]:
    """The receipts of a card, read again from its own folder."""
    home = folder / FOLDER
    floor = home / record.floor if record.floor else None
    return collect([home / name for name in record.receipts], floor=floor, anchors=[home / a for a in record.anchors])


def copy_receipts(parts: Sequence[Part], tasks: Sequence[Path], folder: Path, options: Options, subject: str) -> Record:
    """Put the receipts beside the card, so that a stranger can check it; positions only when asked (they are large)."""
    home, positions = folder / FOLDER, options.positions
    made_of: list[str] = []
    for number, part in enumerate(parts, start=1):
        copies = [_copy_run(run, home, positions) for run in part.runs]
        if part.comparison is not None:
            name = "comparison" if number == 1 else f"comparison-{number}"
            save_comparison(home / name, worded(part.comparison))
            copies = [name]
        made_of += copies
    floor = next((part.floor for part in parts if part.floor), None)
    anchors = next((part.anchors for part in parts if part.anchors), ())
    return Record(
        receipts=made_of,
        tasks=[_copy_tasks(run, home) for run in tasks],
        floor=_copy_run(floor, home, positions) if floor else None,
        anchors=[_copy_run(anchor, home, positions) for anchor in anchors],
        **{name: getattr(options, name) for name in OPTIONS} | {"subject": subject},
    )


def _copy_run(run: Path, target: Path, positions: bool) -> str:
    source = run if run.is_dir() else run.parent
    measurement = load_measurement(run)
    folder = f"{slug(measurement.name)}-{measurement.key[:8]}"
    for name in ("measurement.json", *(["positions.parquet"] if positions else [])):
        original, copy = source / name, target / folder / name
        if original.is_file() and original.resolve() != copy.resolve():
            with atomic_path(copy) as temporary:
                shutil.copyfile(original, temporary)
    return folder


def _copy_tasks(run: Path, target: Path) -> str:
    """Copies tasks.json and its items: hashes and numbers, no text of a question."""
    source = run if run.is_dir() else run.parent
    receipt = load_receipt(source)
    folder = f"tasks-{slug(receipt.name)}-{receipt.key[:8]}"
    for name in (TASKS_FILE, ITEMS):
        original, copy = source / name, target / folder / name
        if original.is_file() and original.resolve() != copy.resolve():
            with atomic_path(copy) as temporary:
                shutil.copyfile(original, temporary)
    return folder
