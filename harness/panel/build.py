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
    Bos,
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
    seal_name,
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
        sealed = read_lock(target)
        different = sealed.differences(built.lock)
        if different:
            raise PanelError(
                f"panel {built.lock.name}: what was built is not what is sealed (different: {', '.join(different)}; "
                f"built {built.lock.sha256[:12]}, sealed {sealed.sha256[:12]})",
                "use the sealed recipe, texts and tokenizer; or --reseal: older results are then another panel's",
            )
        write_rows(target, built.rows)
        return panel_of(sealed, built.rows)
    write_seal(target, built.lock, built.rows)
    return panel_of(built.lock, built.rows)


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
    for folder, lock in list_seals(path):
        if lock.tokenizer.sha256 == tokenizer.sha256:
            return folder
    return path if is_default else path / SEALS_FOLDER / seal_name(tokenizer)


def make_panel(path: Path, recipe: Recipe, tokenizer: Tokenizer, name: str) -> Built:
    """Rows and lock of a recipe for one tokenizer; nothing is written."""
    bos = bos_of(recipe, tokenizer)
    windows: list[list[Window]] = []
    files: list[LockFile] = []
    read = short = 0
    with phase(f"panel {recipe.name}", total=len(recipe.sources), unit="tokens", item="source") as advance:
        for number, source in enumerate(recipe.sources):
            texts, locks = read_source(source, number, path, tokenizer)
            documents = tokenize(texts, source, tokenizer)
            cut = cut_source(documents, source, number, recipe, bos, tokenizer)
            windows.append(choose(cut, source, number, recipe))
            files += locks
            read += len(documents)
            short += sum(not some for some in cut)
            advance(1, float(sum(len(document.ids_T) for document in documents)))
    order = interleave(windows, recipe)
    rows = make_rows(order, recipe)
    overlap = check_rows(rows, recipe, tokenizer)
    lock = _lock(recipe, tokenizer, name, order, rows, files, LockParts(read=read, short=short, overlap=overlap))
    return Built(rows=tuple(rows), lock=lock)


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


def tokenize(texts: Sequence[Text], source: AnySource, tokenizer: Tokenizer) -> list[Document]:
    """Ids of each document without added special tokens; text that spells a special token is refused."""
    documents = []
    for text in texts:
        ids_T = np.array(tokenizer(text.text, add_special_tokens=False, verbose=False).input_ids, dtype=np.int32)
        spelled = sorted(set(ids_T.tolist()) & set(tokenizer.all_special_ids))
        if spelled and not isinstance(source, ChatSource) and not source.allow_special:
            tokens = ", ".join(tokenizer.convert_ids_to_tokens(spelled))
            raise PanelError(
                f"{text.name} spells special tokens in plain text: {tokens}",
                "exclude that document, or set allow_special = true in its source",
            )
        documents.append(Document(name=text.name, ids_T=ids_T))
    return documents


def cut_source(
    documents: Sequence[Document], source: AnySource, number: int, recipe: Recipe, bos: Bos, tokenizer: Tokenizer
) -> list[list[Window]]:
    """The windows of each document of a source; refused when they cannot fill its rows."""
    if not documents:
        raise PanelError(f"source {number} ({source.domain}) has no documents", "correct the recipe")
    whole = join(documents, tokenizer.eos_token_id) if recipe.cross_documents else documents
    windows = [windows_of(document, recipe, bos) for document in whole]
    limit = source.rows if recipe.cross_documents else source.rows_per_document
    usable = sum(min(len(some), limit) for some in windows)
    if usable < source.rows:
        shortest = [
            f"{d.name}: {len(w)} full windows in {len(d.ids_T)} tokens" for d, w in zip(whole, windows, strict=True)
        ]
        listed = "; ".join(shortest[:5]) + (f"; and {len(shortest) - 5} more" if len(shortest) > 5 else "")
        raise PanelError(
            f"source {number} ({source.domain}) is to give {source.rows} rows of {recipe.length} tokens and gives "
            f"{usable} ({listed})",
            "give longer or more documents, or ask for fewer rows, or raise rows_per_document",
        )
    return windows


@dataclass(frozen=True, slots=True, kw_only=True)
class LockParts:
    read: int
    short: int
    overlap: float


def _lock(
    recipe: Recipe,
    tokenizer: Tokenizer,
    name: str,
    order: Sequence[tuple[int, Window]],
    rows: Sequence[Row],
    files: Sequence[LockFile],
    parts: LockParts,
) -> Lock:
    return Lock(
        name=recipe.name,
        sha256=panel_digest([row.sha256 for row in rows]),
        recipe_sha256=recipe.sha256,
        unit=recipe.unit,
        length=recipe.length,
        bos=recipe.bos,
        tokenizer=describe(recipe, tokenizer, name),
        counts=LockCounts(
            rows=len(rows),
            positions=sum(len(row.ids_T) - 1 for row in rows),
            documents=len({row.document for row in rows}),
            read=parts.read,
            short=parts.short,
            domains=recipe.domains,
        ),
        largest_overlap=round(parts.overlap, 6),
        versions={library: importlib.metadata.version(library) for library in LIBRARIES if _has(library)},
        sources=list(files),
        rows=[
            LockRow(
                row=row.index, document=row.document, domain=row.domain, source=number, start=w.start, sha256=row.sha256
            )
            for row, (number, w) in zip(rows, order, strict=True)
        ],
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
