"""Per-position scores of a candidate against its teacher: arrays in, arrays out.

Hidden states are sent through each side's own head, tile by tile, in fp32 products; the logits of a whole row are
never held. Entries of NaN or +inf are counted and make the position's results NaN; -inf is a probability of zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from harness.errors import ScoreError
from harness.scoring import inputs, plain
from harness.types import Head, Hidden, Logits, Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStats:
    """What a capture stores of its own distribution, per position; nats, float64 (``top1`` int32, -1 where invalid).

    ``lse`` is the logsumexp of the logits, so that a stored logit can be turned into a log-probability.
    """

    lse: np.ndarray
    nll: np.ndarray
    entropy: np.ndarray
    top1: np.ndarray
    p_top1: np.ndarray
    nonfinite: np.ndarray


def score_outputs(
    teacher: Hidden | Logits,
    candidate: Hidden | Logits,
    targets_T: np.ndarray | torch.Tensor,
    *,
    teacher_head: Head | None = None,
    candidate_head: Head | None = None,
    vocab_size: int | None = None,
    second_pass: bool | None = None,
    threads: int | None = None,
) -> Scores:
    """Score any mix of hidden states (with their head) and logits.

    ``vocab_size`` is the declared vocabulary of a side given as logits; a head declares its own.
    """
    sides = (_Side(teacher, teacher_head, "teacher"), _Side(candidate, candidate_head, "candidate"))
    inputs.check_pair(sides[0].matrix, sides[1].matrix)
    vocab = inputs.common_vocabulary(sides[0].vocabulary(vocab_size), sides[1].vocabulary(vocab_size))
    targets = inputs.check_targets(targets_T, len(sides[0].matrix), vocab)

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for low in range(0, len(targets), plain.CHUNK_ROWS):
            yield sides[0].logits(low), sides[1].logits(low)

    return plain.score_chunks(chunks(), targets, vocab)


def score_hidden(
    teacher_TH: torch.Tensor,
    candidate_TH: torch.Tensor,
    targets_T: np.ndarray | torch.Tensor,
    *,
    teacher_head: Head,
    candidate_head: Head,
    second_pass: bool | None = None,
    threads: int | None = None,
) -> Scores:
    """Score hidden states ``[T, H]`` of both sides, each through its own head."""
    return score_outputs(
        Hidden(states_TH=teacher_TH),
        Hidden(states_TH=candidate_TH),
        targets_T,
        teacher_head=teacher_head,
        candidate_head=candidate_head,
        second_pass=second_pass,
        threads=threads,
    )


def score_logits(
    teacher_TV: torch.Tensor,
    candidate_TV: torch.Tensor,
    targets_T: np.ndarray | torch.Tensor,
    *,
    vocab_size: int | None = None,
    second_pass: bool | None = None,
    threads: int | None = None,
) -> Scores:
    """Score logits ``[T, V]``; columns past ``vocab_size`` are padding and may differ in number."""
    inputs.check_matrix("the teacher's logits", teacher_TV)
    inputs.check_matrix("the candidate's logits", candidate_TV)
    vocab = inputs.logits_vocabulary(teacher_TV, candidate_TV, vocab_size)
    return score_outputs(
        Logits(logits_TV=teacher_TV),
        Logits(logits_TV=candidate_TV),
        targets_T,
        vocab_size=vocab,
        second_pass=second_pass,
        threads=threads,
    )


def teacher_stats(
    teacher: torch.Tensor,
    targets_T: np.ndarray | torch.Tensor,
    head: Head | None = None,
    *,
    vocab_size: int | None = None,
) -> TeacherStats:
    """Logsumexp, NLL, entropy and top-1 of hidden states ``[T, H]`` with their head, or of logits ``[T, V]``."""
    outputs = Hidden(states_TH=teacher) if head is not None else Logits(logits_TV=teacher)
    side = _Side(outputs, head, "teacher")
    vocab = side.vocabulary(vocab_size)
    targets = inputs.check_targets(targets_T, len(teacher), vocab)
    rows = []
    for low in range(0, len(targets), plain.CHUNK_ROWS):
        logits = side.logits(low)[:, :vocab].astype(np.float64)
        rows += [plain.one_side(row, int(targets[low + i])) for i, row in enumerate(logits)]
    return TeacherStats(
        lse=np.array([r["lse"] for r in rows]),
        nll=np.array([r["nll"] for r in rows]),
        entropy=np.array([r["entropy"] for r in rows]),
        top1=np.array([r["top1"] for r in rows], np.int32),
        p_top1=np.array([r["p_top1"] for r in rows]),
        nonfinite=np.array([r["bad"] for r in rows], np.int32),
    )


class _Side:
    """One side's outputs, checked, giving fp32 logits of a few rows at a time."""

    def __init__(self, outputs: Hidden | Logits, head: Head | None, name: str) -> None:
        self.name, self.head = name, head
        if isinstance(outputs, Hidden):
            if head is None:
                raise ScoreError(f"the {name} gives hidden states but no head", "pass the head they belong to")
            inputs.check_matrix(f"the {name}'s hidden states", outputs.states_TH)
            inputs.check_head(name, outputs.states_TH, head)
            self.matrix = outputs.states_TH
        else:
            inputs.check_matrix(f"the {name}'s logits", outputs.logits_TV)
            self.matrix, self.head = outputs.logits_TV, None

    def vocabulary(self, declared: int | None) -> int:
        if self.head is not None:
            return self.head.vocab_size
        if declared is not None and not 0 < declared <= self.matrix.shape[1]:
            raise ScoreError(
                f"a vocabulary of {declared} is declared but the {self.name} has {self.matrix.shape[1]} columns",
                "declare the tokenizer's vocabulary; both sides must cover it",
            )
        return self.matrix.shape[1] if declared is None else declared

    def logits(self, low: int) -> np.ndarray:
        rows = self.matrix[low : low + plain.CHUNK_ROWS]
        return rows.float().numpy() if self.head is None else plain.head_logits(rows, self.head)
