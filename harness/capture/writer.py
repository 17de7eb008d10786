"""Writing a capture: resumable row by row, one writer to a folder, the manifest last."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from harness.capture.encode import Encoded, dtype_name, encode_hidden, encode_logits
from harness.capture.heads import save_head
from harness.capture.inventory import manifest_of, row_name, stored_key
from harness.capture.manifest import (
    FORMAT,
    TORCH_DTYPES,
    CaptureKey,
    Form,
    Manifest,
    differences,
    save_manifest,
)
from harness.capture.rowfile import corrupt, read_metadata, write_row_file
from harness.digest import ids_digest
from harness.errors import CaptureError
from harness.scoring import TeacherStats, teacher_stats
from harness.store import folder_lock, require_space
from harness.types import EngineIdentity, Head, Hidden, Logits, Outputs, Panel, Row

#: Bytes a position besides the captured array: statistics, footer and metadata.
BESIDES = 64


class CaptureWriter:
    """Stores one engine's outputs over one panel in ``folder``; heads lie in ``folder.parent / "heads"``.

    Use it in a ``with`` block, or call `close`: it holds the folder's lock. ``lock=False`` is for a caller that
    holds ``store.folder_lock(folder)`` itself.

    Raises:
        CaptureError: the folder holds rows of another teacher, panel, dtype or form, or a row file is corrupt.
        StorageError: another run is writing there, or the rows do not fit on the disk.
    """

    def __init__(
        self,
        folder: Path,
        identity: EngineIdentity,
        panel: Panel,
        head: Head | None,
        form: Form = "hidden",
        states_dtype: torch.dtype | str = torch.bfloat16,
        *,
        lock: bool = True,
    ) -> None:
        dtype = TORCH_DTYPES.get(states_dtype) if isinstance(states_dtype, str) else states_dtype
        if dtype is None or (form == "hidden") != (head is not None):
            raise ValueError(f"form {form!r} with states_dtype {states_dtype!r} and head {head is not None}")
        self.folder, self.panel, self.head = folder, panel, head
        self.dtype = dtype
        self.key = capture_key(identity, panel, head, form, dtype)
        self._reserved = False
        self._stack = ExitStack()
        if lock:
            self._stack.enter_context(folder_lock(folder))
        try:
            self._drop_half_files()
            self._rows = self._rows_there()
            if head is not None:
                save_head(folder.parent, head)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder back to other writers."""
        self._stack.close()

    def missing_rows(self) -> list[int]:
        """Panel rows that have no file yet, in panel order."""
        return [row.index for row in self.panel.rows if row.index not in self._rows]

    def write_row(self, row: Row, outputs: Outputs, stats: TeacherStats | None = None) -> None:
        """Store one row whole or not at all. A row that is there is left as it is.

        Args:
            outputs: of the capture's form; hidden states and logits have an entry for the last token too, which
                predicts nothing and is not stored.
            stats: of the scored positions, from these very hidden states (`harness.scoring.teacher_stats`); None
                computes them here. Logits always take theirs from what is stored.
        """
        self._require_of_panel(row)
        if row.index in self._rows:
            return
        encoded = self._encode(row, outputs, stats)
        self._reserve(encoded)
        name = row_name(row.index)
        note = {
            "format": FORMAT,
            "key": self.key.model_dump(),
            "panel": self._plan(),
            "row": row.index,
            "positions": len(row.ids_T) - 1,
            "document": row.document,
            "domain": row.domain,
            "ids_sha256": ids_digest(row.ids_T),
            "states_sha256": encoded.sha256,
            "width": encoded.array.shape[1],
        }
        write_row_file(self.folder / name, {encoded.name: encoded.array}, encoded.columns, note)
        self._rows[row.index] = name

    def finish(self) -> Manifest:
        """Check every row file and write the manifest; rows that are missing make the capture partial."""
        if not self._rows:
            raise CaptureError(f"{self.folder.name} holds no row", "capture at least one row")
        manifest = manifest_of(self.folder)
        save_manifest(self.folder, manifest)
        self.close()
        return manifest

    def _plan(self) -> dict[str, str | int]:
        return {"name": self.panel.name, "rows": len(self.panel.rows), "positions": self.panel.positions}

    def _drop_half_files(self) -> None:
        """What a killed run left beside a row it was writing; nobody else writes here."""
        for path in self.folder.glob(".row-*.partial"):
            path.unlink()

    def _rows_there(self) -> dict[int, str]:
        planned = {row.index: row for row in self.panel.rows}
        found: dict[int, str] = {}
        for path in sorted(self.folder.glob("row-*.parquet")):
            note = read_metadata(path)
            stored = stored_key(note, path.name)
            if stored.content() != self.key.content():
                raise CaptureError(
                    f"{self.folder.name} holds another capture: {'; '.join(differences(stored, self.key))}",
                    "give this capture a folder of its own, or delete that one",
                )
            self.key = stored  # one capture goes by one name
            row = planned.get(note["row"])
            if row is None or note["ids_sha256"] != ids_digest(row.ids_T) or path.name != row_name(row.index):
                raise corrupt(path.name, "its token ids are not those of this row of the panel")
            found[row.index] = path.name
        return found

    def _require_of_panel(self, row: Row) -> None:
        ours = next((r for r in self.panel.rows if r.index == row.index), None)
        if ours is None or ids_digest(ours.ids_T) != ids_digest(row.ids_T):
            raise CaptureError(
                f"row {row.index} is not a row of panel {self.panel.name}",
                "capture the rows of the panel that the writer was opened with",
            )

    def _encode(self, row: Row, outputs: Outputs, stats: TeacherStats | None) -> Encoded:
        match self.key.form, outputs:
            case "hidden", Hidden() if self.head is not None:
                if stats is None:
                    stats = teacher_stats(outputs.states_TH[:-1], row.ids_T[1:], self.head)
                return encode_hidden(row, outputs, self.head, self.dtype, stats)
            case "logits", Logits():
                return encode_logits(row, outputs, self.dtype)
        raise CaptureError(
            f"row {row.index}: the engine gave {type(outputs).__name__}, this capture holds the {self.key.form} form",
            "ask the engine for the form of the capture",
        )

    def _reserve(self, encoded: Encoded) -> None:
        """Before the first row: do all the missing ones fit on the disk?"""
        if self._reserved:
            return
        bytes_each = encoded.array.shape[1] * encoded.array.element_size() + BESIDES
        missing = set(self.missing_rows())
        positions = sum(len(row.ids_T) - 1 for row in self.panel.rows if row.index in missing)
        require_space(self.folder, positions * bytes_each, f"the capture of {len(missing)} rows")
        self._reserved = True


def capture_key(
    identity: EngineIdentity, panel: Panel, head: Head | None, form: Form, dtype: torch.dtype
) -> CaptureKey:
    """The key of a capture; refuses an identity that names another head than the one that is stored."""
    if head is not None and identity.head_sha256 != head.sha256:
        raise CaptureError(
            f"the engine says head {identity.head_sha256[:12]} and gives head {head.sha256[:12]}",
            "the identity must hold the digest of the head that the hidden states go into",
        )
    return CaptureKey(
        form=form,
        dtype=dtype_name(dtype),
        cut_point="after_final_norm_before_lm_head" if form == "hidden" else "lm_head_output_minus_row_max",
        head_sha256=None if head is None else head.sha256,
        panel_sha256=panel.sha256,
        identity=identity,
    )
