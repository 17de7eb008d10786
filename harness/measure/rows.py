"""The rows of a run: each scored against its captured teacher, stored in one small Parquet file, joined at the end."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.capture import Capture, CapturedRow
from harness.capture.encode import minus_row_max
from harness.errors import IncomparableError, Refused, StorageError
from harness.scoring import TeacherStats, score_outputs, teacher_stats
from harness.store import require_space, write_table
from harness.types import SCORE_DTYPES, Head, Hidden, Logits, Outputs, Panel, Row, Scores

_KEY = b"measurement"
#: Rough bytes that a scored position takes in positions.parquet and its row file together.
BYTES_PER_POSITION = 300


def targets_of(row: Row) -> np.ndarray:
    """The next token of every scored position, int32 ``[T - 1]``."""
    return np.asarray(row.ids_T[1:], dtype=np.int32)


def score_row(capture: Capture, stored: CapturedRow, outputs: Outputs, head: Head | None, row: Row) -> Scores:
    """Exact per-position scores of one row.

    Args:
        capture: the teacher's capture, for its head.
        stored: the teacher's row.
        outputs: what the candidate's engine gave for all ``T`` tokens.
        head: the candidate's own head, where its outputs are hidden states.
    """
    targets = targets_of(row)
    if len(stored.target) != len(targets):
        raise IncomparableError(
            f"row {row.index}: the capture holds {len(stored.target)} positions, the panel {len(targets)}",
            "capture the teacher again over this panel",
        )
    vocab = head.vocab_size if head else (capture.head.vocab_size if capture.head else None)
    if isinstance(stored.outputs, Logits) and isinstance(outputs, Logits):
        outputs = Logits(logits_TV=minus_row_max(outputs.logits_TV))
    return score_outputs(
        stored.outputs,
        first_positions(outputs, len(targets)),
        targets,
        teacher_head=capture.head,
        candidate_head=head,
        vocab_size=vocab,
        second_pass=True,
    )


def one_sided(outputs: Outputs, head: Head | None, targets_T: np.ndarray) -> TeacherStats:
    """Log-sum-exp, NLL, entropy and top-1 of one side at its first ``len(targets_T)`` positions."""
    cut = first_positions(outputs, len(targets_T))
    if isinstance(cut, Hidden):
        return teacher_stats(cut.states_TH, targets_T, head)
    return teacher_stats(cut.logits_TV, targets_T)


def first_positions(outputs: Outputs, count: int) -> Outputs:
    """The first ``count`` positions (the last token of a row predicts nothing that is scored)."""
    if isinstance(outputs, Hidden):
        return Hidden(states_TH=outputs.states_TH[:count])
    return Logits(logits_TV=outputs.logits_TV[:count])


# ---- storing ---------------------------------------------------------------------------------------------------------


def require_room(folder: Path, rows: Sequence[Row]) -> None:
    """Refuse before the start a disk on which the scores of these rows do not fit."""
    require_space(folder, sum(len(row.ids_T) for row in rows) * BYTES_PER_POSITION, "this measurement")


def row_table(row: Row, scores: Scores, extras: Mapping[str, np.ndarray] | None = None) -> pa.Table:
    """Columns row, position, target, every array of `Scores`, and ``extras`` as they are."""
    positions = len(row.ids_T) - 1
    columns: dict[str, Any] = {
        "row": np.full(positions, row.index, dtype=np.int32),
        "position": np.arange(positions, dtype=np.int32),
        "target": np.asarray(row.ids_T[1:], dtype=np.int32),
    }
    columns |= {name: np.asarray(getattr(scores, name), dtype=dtype) for name, dtype in SCORE_DTYPES.items()}
    return pa.table(columns | dict(extras or {}))


def write_row(folder: Path, key: str, row: Row, scores: Scores, extras: Mapping[str, np.ndarray] | None = None) -> None:
    """Store the scores of one row, marked with the measurement that they belong to.

    ``extras`` are columns of an estimator that is not exact, each with an entry per scored position.
    """
    table = row_table(row, scores, extras).replace_schema_metadata({_KEY: key.encode()})
    write_table(folder / f"row-{row.index:04d}.parquet", table, compression="zstd")


def finished_rows(folder: Path, key: str) -> set[int]:
    """Rows of this measurement that are there and whole; a file that cannot be read counts as missing.

    Raises:
        Refused: rows of another measurement are there: another model, config, panel, option or version of the harness.
    """
    done = set()
    for path in sorted(folder.glob("row-*.parquet")):
        try:
            metadata = pq.read_schema(path).metadata or {}
        except (pa.ArrowInvalid, OSError):
            path.unlink()
            continue
        if metadata.get(_KEY) == key.encode():
            done.add(int(path.stem.removeprefix("row-")))
        else:
            raise Refused(
                f"{folder.parent.name} holds rows of another measurement that was begun there",
                f"give another --out, or remove {folder.parent.name}",
            )
    return done


def join_rows(folder: Path, panel: Panel, rows: Sequence[Row], key: str) -> pa.Table:
    """Write positions.parquet from the row files in panel order, then remove them."""
    parts = folder / "rows"
    missing = sorted({row.index for row in rows} - finished_rows(parts, key))
    if missing:
        raise StorageError(f"rows {missing[:5]} of panel {panel.name} are gone", "run the same command again")
    table = pa.concat_tables([pq.read_table(parts / f"row-{row.index:04d}.parquet") for row in rows])
    table = table.replace_schema_metadata({_KEY: key.encode()}).combine_chunks()
    write_table(folder / "positions.parquet", table, compression="zstd")
    return table


def drop_row_files(folder: Path) -> None:
    """Remove the row files once measurement.json stands."""
    shutil.rmtree(folder / "rows", ignore_errors=True)


def scores_of(table: pa.Table) -> Scores:
    """The `Scores` of a positions table."""
    return Scores(**{name: table[name].to_numpy() for name in SCORE_DTYPES})
