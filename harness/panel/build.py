"""Build a panel: recipe -> text -> ids -> rows -> seal. With a seal there, building must reproduce it exactly."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.errors import PanelError
from harness.panel.chat import read_chats
from harness.panel.recipe import AnySource, ChatSource, DatasetSource, Recipe, load_recipe
from harness.panel.rows import (
    Document,
    Window,
    bos_of,
    check_rows,
    choose,
    interleave,
    join,
    make_rows,
    windows_of,
)
from harness.panel.seal import (
    LOCK_FILE,
    ROWS_FILE,
    SEALS_FOLDER,
    Lock,
    LockCounts,
    LockFile,
    LockRow,
    LockTokenizer,
    find_seal,
    list_seals,
    load_panel,
    panel_digest,
    panel_of,
    read_lock,
    read_rows,
    seal_name,
    write_lock,
    write_rows,
    write_seal,
)
from harness.panel.sources import Text, read_dataset, read_plain
from harness.panel.tokenizer import (
    Tokenizer,
    adds_bos,
    load_tokenizer,
    template_digest,
    tokenizer_digest,
    tokenizer_name,
)
from harness.progress import phase
from harness.store import folder_lock
from harness.types import Panel, Row

#: Libraries whose version is recorded: they make ids out of text.
LIBRARIES = ("tokenizers", "transformers", "datasets", "numpy", "pyarrow", "exl3-fidelity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """Rows in order with the lock that seals them."""

    rows: tuple[Row, ...]
    lock: Lock


def build_panel(path: Path, *, tokenizer: str | None = None, out: Path | None = None, reseal: bool = False) -> Panel:
    """Build the panel in folder ``path`` and seal it, or reproduce the seal that lies there.

    Args:
        path: the panel's folder.
        tokenizer: spec of the tokenizer; the recipe's where it is absent.
        out: folder for rows.parquet and lock instead of the panel's own.
        reseal: replace a seal that differs; results under the old one are no longer comparable.

    Raises:
        UsageError: a source or the tokenizer cannot be had.
        PanelError: the text, the rows or the existing seal do not fit.
    """
    path = Path(path)
    recipe = load_recipe(path)
    spec = tokenizer or recipe.tokenizer
    loaded = load_tokenizer(spec)
    built = make_panel(path, recipe, loaded, tokenizer_name(spec))
    target = out or seal_folder(path, recipe, built.lock.tokenizer, is_default=tokenizer in (None, recipe.tokenizer))
    with folder_lock(target):
        return _write(target, built, reseal)


def _write(target: Path, built: Built, reseal: bool) -> Panel:
    if (target / LOCK_FILE).exists() and not reseal:
        sealed = read_lock(target, check=False)
        different = sealed.differences(built.lock)
        if different:
            raise PanelError(
                f"panel {built.lock.name}: what was built is not what is sealed (different: {', '.join(different)}; "
                f"built {built.lock.sha256[:12]}, sealed {sealed.sha256[:12]})",
                "use the sealed recipe, texts and tokenizer; or --reseal: older results are then another panel's",
            )
        if not _holds(target, built.rows):
            write_rows(target, built.rows)
        if sealed.seal_sha256 != sealed.fields_sha256:
            write_lock(target, sealed)
        return panel_of(sealed, built.rows)
    write_seal(target, built.lock, built.rows)
    return panel_of(built.lock, built.rows)


def _holds(folder: Path, rows: Sequence[Row]) -> bool:
    """Whether exactly these rows lie there: then they stay, since another pyarrow would write other bytes."""
    if not (folder / ROWS_FILE).exists():
        return False
    try:
        return [row.sha256 for row in read_rows(folder, folder)] == [row.sha256 for row in rows]
    except PanelError:
        return False


def ensure_built(path: Path, *, tokenizer: str | None = None) -> Panel:
    """The sealed panel; its rows are built first when only recipe and lock lie there (third-party text).

    ``tokenizer`` is a digest, as for `load_panel`.
    """
    path = Path(path)
    if not list_seals(path):
        return build_panel(path)
    folder, _ = find_seal(path, tokenizer)
    if not (folder / ROWS_FILE).exists() and folder == path:
        build_panel(path)
    return load_panel(path, tokenizer=tokenizer)


def seal_folder(path: Path, recipe: Recipe, tokenizer: LockTokenizer, *, is_default: bool) -> Path:
    """Where a seal lies: the folder that has one for this tokenizer, the panel's own, or one under ``seals/``."""
    for folder, lock in list_seals(path, check=False):
        if lock.tokenizer.sha256 == tokenizer.sha256:
            return folder
    return path if is_default else path / SEALS_FOLDER / seal_name(tokenizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one source gives: its windows, its files, and how many documents were read and too short."""

    windows: list[Window]
    files: list[LockFile]
    read: int
    short: int
    tokens: int


def make_panel(path: Path, recipe: Recipe, tokenizer: Tokenizer, name: str) -> Built:
    """Rows and lock of a recipe for one tokenizer; nothing is written."""
    taken: list[Taken] = []
    with phase(f"panel {recipe.name}", total=len(recipe.sources), unit="tokens", item="source") as advance:
        for number in range(len(recipe.sources)):
            taken.append(take(number, path, recipe, tokenizer))
            advance(1, float(taken[-1].tokens))
    order = interleave([one.windows for one in taken], recipe)
    rows = make_rows(order, recipe)
    overlap = check_rows(rows, [number for number, _ in order], recipe, tokenizer)
    lock = make_lock(recipe, describe(recipe, tokenizer, name), taken, order, rows, overlap)
    return Built(rows=tuple(rows), lock=lock)


def take(number: int, path: Path, recipe: Recipe, tokenizer: Tokenizer) -> Taken:
    """Read, tokenise, cut and choose the rows of one source."""
    source = recipe.sources[number]
    texts, files = read_source(source, number, path, tokenizer)
    documents = [tokenize(text, tokenizer) for text in texts]
    windows = cut_source(documents, number, recipe, tokenizer)
    return Taken(
        windows=choose(windows, number, recipe),
        files=files,
        read=len(documents),
        short=sum(not some for some in windows),
        tokens=sum(len(document.ids_T) for document in documents),
    )


def read_source(
    source: AnySource, number: int, folder: Path, tokenizer: Tokenizer
) -> tuple[list[Text], list[LockFile]]:
    """Documents of one source without the excluded ones."""
    if isinstance(source, ChatSource):
        texts, files = read_chats(source, number, folder, tokenizer)
    elif isinstance(source, DatasetSource):
        texts, files = read_dataset(source, number, folder)
    else:
        texts, files = read_plain(source, number, folder)
    unknown = set(source.exclude) - {text.name for text in texts}
    if unknown:
        raise PanelError(f"source {number} excludes documents it does not have: {sorted(unknown)}", "correct exclude")
    return [text for text in texts if text.name not in source.exclude], files


def tokenize(text: Text, tokenizer: Tokenizer) -> Document:
    """Ids of a document without added special tokens."""
    ids = tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids
    return Document(name=text.name, ids_T=np.array(ids, dtype=np.int32))


def cut_source(documents: Sequence[Document], number: int, recipe: Recipe, tokenizer: Tokenizer) -> list[list[Window]]:
    """The windows of each document of a source; refused when they cannot fill its rows."""
    source = recipe.sources[number]
    if not documents:
        raise PanelError(f"source {number} ({source.domain}) has no documents", "correct the recipe")
    bos = bos_of(recipe, tokenizer)
    whole = join(documents, tokenizer.eos_token_id) if recipe.cross_documents else documents
    windows = [windows_of(document, recipe, bos) for document in whole]
    limit = source.rows if recipe.cross_documents else source.rows_per_document
    usable = sum(min(len(some), limit) for some in windows)
    if usable < source.rows:
        found = [
            f"{d.name}: {len(w)} full windows in {len(d.ids_T)} tokens" for d, w in zip(whole, windows, strict=True)
        ]
        listed = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
        raise PanelError(
            f"source {number} ({source.domain}) is to give {source.rows} rows of {recipe.length} tokens and gives "
            f"{usable} ({listed})",
            "give longer or more documents, or ask for fewer rows, or raise rows_per_document",
        )
    return windows


def make_lock(
    recipe: Recipe,
    tokenizer: LockTokenizer,
    taken: Sequence[Taken],
    order: Sequence[tuple[int, Window]],
    rows: Sequence[Row],
    overlap: float,
) -> Lock:
    """The lock that seals ``rows``."""
    sealed = [
        LockRow(
            row=row.index, document=row.document, domain=row.domain, source=number, start=w.start, sha256=row.sha256
        )
        for row, (number, w) in zip(rows, order, strict=True)
    ]
    counts = LockCounts(
        rows=len(rows),
        positions=sum(len(row.ids_T) - 1 for row in rows),
        documents=len({row.document for row in rows}),
        read=sum(one.read for one in taken),
        short=sum(one.short for one in taken),
        domains=recipe.domains,
    )
    return Lock(
        name=recipe.name,
        sha256=panel_digest([row.sha256 for row in rows]),
        recipe_sha256=recipe.sha256,
        unit=recipe.unit,
        length=recipe.length,
        bos=recipe.bos,
        tokenizer=tokenizer,
        counts=counts,
        largest_overlap=round(overlap, 6),
        versions={library: importlib.metadata.version(library) for library in LIBRARIES if _has(library)},
        sources=[file for one in taken for file in one.files],
        rows=sealed,
    )


def describe(recipe: Recipe, tokenizer: Tokenizer, name: str) -> LockTokenizer:
    """What the lock says about a tokenizer; the chat template counts where the recipe uses it."""
    uses_template = any(isinstance(source, ChatSource) for source in recipe.sources)
    return LockTokenizer(
        name=name,
        sha256=tokenizer_digest(tokenizer),
        vocabulary=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        add_bos=adds_bos(tokenizer),
        chat_template_sha256=template_digest(tokenizer) if uses_template else None,
    )


def _has(library: str) -> bool:
    try:
        importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
