"""What a capture's folder really holds, counted from its files: a manifest is a claim, files are the fact."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from harness.capture.manifest import (
    FORMAT,
    MANIFEST,
    TORCH_DTYPES,
    CaptureKey,
    Manifest,
    RowEntry,
    capture_digest,
    differences,
    load_manifest,
)
from harness.capture.rowfile import corrupt, read_array, read_metadata
from harness.digest import file_digest, tensor_digest
from harness.errors import CaptureError


def row_name(index: int) -> str:
    return f"row-{index:04d}.parquet"


def array_column(key: CaptureKey) -> tuple[str, torch.dtype]:
    """The wide column of a form and its dtype."""
    return "states" if key.form == "hidden" else "logits", TORCH_DTYPES[key.dtype]


def stored_key(note: Mapping[str, Any], file: str) -> CaptureKey:
    """The key that a row file's metadata holds."""
    key = note.get("key")
    if note.get("format") != FORMAT or not isinstance(key, dict):
        raise corrupt(file, f"its format is {note.get('format')!r}, not {FORMAT!r}")
    if not key.get("cut_point"):
        raise CaptureError(
            f"{file} does not say where its hidden states were cut (before or after the final norm)",
            "capture the teacher again",
        )
    try:
        return CaptureKey.model_validate(key)
    except ValueError as error:
        raise corrupt(file, str(error).splitlines()[0]) from error


def entry_of(path: Path) -> tuple[RowEntry, dict[str, Any]]:
    """A row file's entry and metadata, from the file alone.

    Raises:
        CaptureError: unreadable, or its captured array does not have the digest it was written with.
    """
    note = read_metadata(path)
    key = stored_key(note, path.name)
    if tensor_digest(read_array(path, *array_column(key))) != note.get("states_sha256"):
        raise corrupt(path.name, "its captured array does not have the digest it was written with")
    names = [name for name in RowEntry.model_fields if name not in ("file", "file_sha256")]
    fields = {name: note.get(name) for name in names} | {"file": path.name, "file_sha256": file_digest(path)}
    return RowEntry.model_validate(fields), note


def manifest_of(folder: Path) -> Manifest:
    """The manifest of the row files that are there, each one read and checked."""
    found = [entry_of(path) for path in sorted(folder.glob("row-*.parquet"))]
    if not found:
        raise CaptureError(f"{folder.name} holds no capture", "run `fidelity teacher capture` for it")
    key = stored_key(found[0][1], found[0][0].file)
    for entry, note in found:
        other = stored_key(note, entry.file)
        if other != key:
            what = f"{folder.name} mixes captures: {entry.file}: {'; '.join(differences(other, key))}"
            raise CaptureError(what, f"delete {entry.file} and run capture again")
    plan, width = found[0][1]["panel"], found[0][1]["width"]
    return counted(key, [entry for entry, _ in found], plan["name"], width, plan["rows"], plan["positions"])


def counted(
    key: CaptureKey, entries: list[RowEntry], panel_name: str, width: int, rows: int, positions: int
) -> Manifest:
    """A manifest of ``entries`` out of ``rows`` planned rows."""
    entries = sorted(entries, key=lambda entry: entry.row)
    return Manifest(
        sha256=capture_digest(key, entries),
        key=key,
        panel_name=panel_name,
        width=width,
        rows_planned=rows,
        rows_present=len(entries),
        positions_planned=positions,
        positions_present=sum(entry.positions for entry in entries),
        rows=entries,
    )


def present_manifest(folder: Path) -> Manifest:
    """The folder's manifest, corrected to the row files that exist.

    A capture that was stopped has no manifest and is read from its files. A manifest that claims more rows than
    there are files (a shard with the manifest of the whole) is cut down to them; rows that came later are added.
    """
    files = {path.name for path in folder.glob("row-*.parquet")}
    if not (folder / MANIFEST).exists() and files:
        return manifest_of(folder)
    claim = load_manifest(folder)
    entries = [entry for entry in claim.rows if entry.file in files]
    added = [_added(folder / name, claim.key) for name in sorted(files - {entry.file for entry in claim.rows})]
    if len(entries) == len(claim.rows) and not added:
        return claim
    if not entries and not added:
        raise CaptureError(
            f"{folder.name} claims {claim.rows_present} rows and holds none", "fetch its row files, or capture again"
        )
    plan = (claim.panel_name, claim.width, claim.rows_planned, claim.positions_planned)
    return counted(claim.key, entries + added, *plan)


def _added(path: Path, key: CaptureKey) -> RowEntry:
    entry, note = entry_of(path)
    other = stored_key(note, path.name)
    if other != key:
        what = f"{path.parent.name} mixes captures: {path.name}: {'; '.join(differences(other, key))}"
        raise CaptureError(what, f"delete {path.name} and run capture again")
    return entry
