"""Writing a card's folder, and checking that it still says what its receipts say."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.compare import save_comparison
from harness.errors import UsageError
from harness.interop.g4 import slug
from harness.receipt import load_measurement
from harness.report.card import FOLDER, Card, Options, Part, build_card, find_subject
from harness.report.card_file import merged_readme, stale_lines
from harness.report.card_pictures import draw_all, shown
from harness.report.card_tasks import load_tasks
from harness.store import atomic_path, folder_lock, write_json, write_text
from harness.tasks.receipt import FILE as TASKS
from harness.tasks.receipt import ITEMS, load_receipt

README = "README.md"
#: What `fidelity verify` needs to render the same card again, beside the receipts.
RECORD = f"{FOLDER}/card.json"


def write_card(
    parts: Sequence[Part], options: Options, folder: Path, *, positions: bool = False, tasks: Sequence[Path] = ()
) -> Card:
    """Write README.md, the pictures and copies of the receipts into ``folder``."""
    with folder_lock(folder):
        home, subject = find_subject(parts, options.subject)
        if options.pictures:
            draw_all(home, subject, folder)
        receipts = copy_receipts(parts, folder, positions=positions)
        card = _card(parts, options, folder, tasks)
        readme = folder / README
        write_text(readme, merged_readme(_text(readme), card.block, card.keys))
        for name, text in card.files.items():
            write_text(folder / name, text)
        task_folders = [_copy_tasks(run, folder / FOLDER) for run in tasks]
        write_json(folder / RECORD, options_record(options, subject, receipts, task_folders))
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


def options_record(options: Options, subject: str, receipts: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
    """The options and the receipts' folders, in order."""
    return {
        "format": "exl3-fidelity/card/1",
        "receipts": list(receipts),
        "tasks": list(tasks),
        "subject": subject,
        "decimals": options.decimals,
        "base_model": options.base_model,
        "repo": options.repo,
        "model_name": options.model_name,
        "pictures": options.pictures,
    }


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


def read_record(folder: Path) -> tuple[list[Path], list[Path], Options]:
    """Folders of the receipts, folders of the tasks, and the options of a card that lies in ``folder``."""
    file = folder / RECORD
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        names = ("subject", "decimals", "base_model", "repo", "model_name", "pictures")
        fields = {name: record[name] for name in names}
        receipts, tasks = ([folder / FOLDER / name for name in record[kind]] for kind in ("receipts", "tasks"))
        return receipts, tasks, Options(**fields)
    except FileNotFoundError as error:
        raise UsageError(f"{folder.name} has no {RECORD}", "name a folder that `fidelity card` wrote") from error
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{RECORD} cannot be read: {error}", "write the card again") from error


def copy_receipts(parts: Sequence[Part], folder: Path, *, positions: bool) -> list[str]:
    """Put the receipts beside the card, so that a stranger can check it; positions only when asked (they are large).

    Returns the folders that the card is made of, in order: comparisons, and runs that stand alone.
    """
    made_of = []
    for number, part in enumerate(parts, start=1):
        copies = [_copy_run(run, folder / FOLDER, positions) for run in part.runs]
        if part.comparison is not None:
            name = "comparison" if number == 1 else f"comparison-{number}"
            save_comparison(folder / FOLDER / name, part.comparison)
            copies = [name]
        made_of += copies
    return made_of


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
    for name in (TASKS, ITEMS):
        original, copy = source / name, target / folder / name
        if original.is_file() and original.resolve() != copy.resolve():
            with atomic_path(copy) as temporary:
                shutil.copyfile(original, temporary)
    return folder
