"""Reading a capture: rows as memory-mapped tensors, each checked against its digest the first time it is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from harness.capture.heads import load_head
from harness.capture.inventory import array_column, present_manifest, stored_key
from harness.capture.manifest import Manifest, RowEntry
from harness.capture.rowfile import corrupt, read_metadata, read_row_file
from harness.digest import file_digest
from harness.errors import CaptureError
from harness.types import CapturedRow, EngineIdentity, Head, Hidden, Logits, Panel

#: Field of `CapturedRow` -> column of the row file.
COLUMNS = {name: name for name in ("target", "top1", "nll", "p_top1", "entropy")} | {"lse": "logsumexp"}


@dataclass(frozen=True)
class Capture:
    """An open capture. Cheap to open; the head is read and checked when it is first asked for."""

    folder: Path
    manifest: Manifest
    _checked: set[int] = field(default_factory=set, repr=False)

    @property
    def sha256(self) -> str:
        """Digest of identity, head, panel and the rows that are there; the same wherever the files lie."""
        return self.manifest.sha256

    @property
    def identity(self) -> EngineIdentity:
        return self.manifest.key.identity

    @property
    def rows(self) -> list[int]:
        """Indices of the rows that are there."""
        return [entry.row for entry in self.manifest.rows]

    @property
    def label(self) -> str:
        """``partial 1/10`` where rows are missing, else empty."""
        have, planned = self.manifest.rows_present, self.manifest.rows_planned
        return "" if have == planned else f"partial {have}/{planned}"

    @cached_property
    def head(self) -> Head | None:
        """The teacher's head, None for the logits form."""
        sha256 = self.manifest.key.head_sha256
        return None if sha256 is None else load_head(self.folder.parent, sha256)

    def entry(self, index: int) -> RowEntry:
        """The manifest's entry of a row."""
        for entry in self.manifest.rows:
            if entry.row == index:
                return entry
        have, planned = self.manifest.rows_present, self.manifest.rows_planned
        what = f"row {index} is not in {self.folder.name} ({have} of {planned} rows are)"
        raise CaptureError(what, "run `fidelity teacher capture` again: it adds what is missing")

    def row(self, index: int, *, check: bool = True) -> CapturedRow:
        """One row, its wide array mapped from the file where that is proven to be safe.

        Args:
            check: compare the file with its digest the first time this row is read.

        Raises:
            CaptureError: the row is not there, or its file is not what the manifest says.
        """
        entry = self.entry(index)
        path = self.folder / entry.file
        if check and index not in self._checked:
            self.check_file(entry)
            self._checked.add(index)
        name, dtype = array_column(self.manifest.key)
        arrays, columns = read_row_file(path, {name: dtype}, tuple(COLUMNS.values()))
        outputs = Hidden(states_TH=arrays[name]) if name == "states" else Logits(logits_TV=arrays[name])
        return CapturedRow(
            index=index, outputs=outputs, **{field: columns[column] for field, column in COLUMNS.items()}
        )

    def check_file(self, entry: RowEntry) -> None:
        """Refuse a row file that changed since its manifest was written, or says another dtype or cut point."""
        path = self.folder / entry.file
        try:
            same = file_digest(path) == entry.file_sha256
        except FileNotFoundError as error:
            again = "run `fidelity teacher capture` again: it adds what is missing"
            raise CaptureError(f"{entry.file} is missing", again) from error
        if not same:
            raise corrupt(entry.file, "its SHA-256 is not that of the manifest")
        if stored_key(read_metadata(path), entry.file) != self.manifest.key:
            raise corrupt(entry.file, "its metadata and the manifest name different captures")

    def require_panel(self, panel: Panel) -> None:
        """Refuse when this is the capture of another panel."""
        ours = self.manifest.key.panel_sha256
        if ours != panel.sha256:
            raise CaptureError(
                f"{self.folder.name} is a capture over panel {self.manifest.panel_name} ({ours[:12]}), "
                f"not over {panel.name} ({panel.sha256[:12]})",
                "capture the teacher over this panel: fidelity teacher capture",
            )

    def require_teacher(self, identity: EngineIdentity) -> list[str]:
        """Refuse when another model made this capture; what may differ is returned as notes.

        Weights, head, tokenizer and dtypes must be equal by digest. Names and revisions are labels (two revisions of
        equal content are one teacher); engine version, device and settings are proven by reproducing rows.
        """
        ours = self.identity
        must = (
            "weights_sha256",
            "config_sha256",
            "head_sha256",
            "tokenizer_sha256",
            "weights_dtype",
            "compute_dtype",
            "lane",
            "engine",
        )
        wrong = _changes(ours, identity, must)
        if wrong:
            raise CaptureError(
                f"{self.folder.name} is the capture of another teacher: {'; '.join(wrong)}",
                "capture this teacher into a folder of its own: fidelity teacher capture",
            )
        return _changes(ours, identity, ("model", "revision", "version", "device", "settings"))


def _changes(ours: EngineIdentity, theirs: EngineIdentity, names: tuple[str, ...]) -> list[str]:
    return [
        f"{name} {getattr(ours, name)}, not {getattr(theirs, name)}"
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]


def open_capture(folder: Path, *, panel: Panel | None = None, identity: EngineIdentity | None = None) -> Capture:
    """Open a capture; with ``panel`` or ``identity``, refuse one of another panel or teacher.

    Raises:
        CaptureError: no capture is there, or it is not the one that is wanted.
    """
    capture = Capture(folder, present_manifest(folder))
    if panel is not None:
        capture.require_panel(panel)
    if identity is not None:
        capture.require_teacher(identity)
    return capture
