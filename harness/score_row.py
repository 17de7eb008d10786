"""One row's outputs against its captured teacher."""

from __future__ import annotations

import numpy as np

from harness.capture import Capture, CapturedRow
from harness.errors import EngineError, IncomparableError
from harness.scoring import TeacherStats, score_outputs, teacher_stats
from harness.types import Head, Hidden, Logits, Outputs, Row, Scores, TopK


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
    return score_outputs(
        full(stored.outputs),
        first_positions(full(outputs), len(targets)),
        targets,
        teacher_head=capture.head,
        candidate_head=head,
        vocab_size=vocab,
        second_pass=True,
    )


def one_sided(outputs: Outputs, head: Head | None, targets_T: np.ndarray) -> TeacherStats:
    """Log-sum-exp, NLL, entropy and top-1 of one side at its first ``len(targets_T)`` positions."""
    cut = first_positions(full(outputs), len(targets_T))
    if isinstance(cut, Hidden):
        return teacher_stats(cut.states_TH, targets_T, head)
    return teacher_stats(cut.logits_TV, targets_T)


def full(outputs: Outputs) -> Hidden | Logits:
    """Outputs that hold a whole distribution at each position; top-k outputs do not."""
    if isinstance(outputs, TopK):
        raise EngineError("top-k outputs hold no full distribution", "ask the engine for hidden states or logits")
    return outputs


def first_positions(outputs: Hidden | Logits, count: int) -> Hidden | Logits:
    """The first ``count`` positions (the last token of a row predicts nothing that is scored)."""
    if isinstance(outputs, Hidden):
        return Hidden(states_TH=outputs.states_TH[:count])
    return Logits(logits_TV=outputs.logits_TV[:count])
