"""Per-position scores of a candidate against its teacher: arrays in, arrays out.

Hidden states go through each side's own head, tile by tile, in fp32 products; a panel's logits are never held. What
the arrays mean:

* ``agree``: the sets of ids that share the largest logit, teacher's and candidate's, have an id in common;
  ``agree_lowest_id`` compares the lowest id of each set.
* ``rank``: 1 + the number of candidate logits above the one of the teacher's lowest top id.
* ``top5_overlap``: ids in both top fives, ties broken to the lowest id. ``tv``: half the sum of ``|p - q|``.
* NaN and +inf are counted in ``nonfinite_*`` and make their side's results NaN (ids -1), and the pair's; nothing is
  dropped or clamped. -inf is a probability of zero: it adds nothing where both sides have it, and makes a divergence
  infinite where the other side has probability. A row of nothing but -inf counts as non-finite throughout.
* A KL is exact to about 1e-6 of itself above 1e-9; rounding can leave one negative by about 1e-15, and it is kept.
* Without a second pass ``tv`` is NaN, ``top5_overlap`` and ``rank`` are -1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from harness.errors import ScoreError
from harness.scoring import gpu
from harness.scoring.state import Sides, finish
from harness.scoring.walk import Source, Walked, walk
from harness.types import SCORE_DTYPES, Head, Hidden, Logits, Scores

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
    """Score hidden states ``[T, H]`` of both sides, each through its own head; ``H`` may differ.

    Both heads must declare the same ``vocab_size``. ``second_pass=None`` computes total variation, top-5 overlap and
    rank where that costs under a quarter more (see `harness.scoring.walk`). Where there is a CUDA device it does the
    work (see `harness.scoring.gpu`), else ``threads`` cores. Raises ScoreError.
    """
    teacher = _source("teacher", Hidden(states_TH=teacher_TH), teacher_head)
    candidate = _source("candidate", Hidden(states_TH=candidate_TH), candidate_head)
    return _score(teacher, candidate, targets_T, None, second_pass, threads)


def score_logits(
    teacher_TV: torch.Tensor,
    candidate_TV: torch.Tensor,
    targets_T: np.ndarray | torch.Tensor,
    *,
    vocab_size: int | None = None,
    second_pass: bool | None = None,
    threads: int | None = None,
) -> Scores:
    """Score logits ``[T, V]``; columns past ``vocab_size`` are padding and may differ in number. Raises ScoreError."""
    teacher = _source("teacher", Logits(logits_TV=teacher_TV), None)
    candidate = _source("candidate", Logits(logits_TV=candidate_TV), None)
    return _score(teacher, candidate, targets_T, vocab_size, second_pass, threads)


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
    """Score any mix of hidden states (with their head) and logits; ``vocab_size`` is declared for logits."""
    sides = _source("teacher", teacher, teacher_head), _source("candidate", candidate, candidate_head)
    return _score(*sides, targets_T, vocab_size, second_pass, threads)


def teacher_stats(
    teacher: torch.Tensor,
    targets_T: np.ndarray | torch.Tensor,
    head: Head | None = None,
    *,
    vocab_size: int | None = None,
    threads: int | None = None,
) -> TeacherStats:
    """Logsumexp, NLL, entropy and top-1 of hidden states ``[T, H]`` with their head, or of logits ``[T, V]``."""
    outputs = Hidden(states_TH=teacher) if head is not None else Logits(logits_TV=teacher)
    source = _source("teacher", outputs, head)
    sides, _ = _walk(source, source, targets_T, vocab_size, False, threads)
    return TeacherStats(
        lse=sides.lse[0],
        nll=sides.nll[0],
        entropy=sides.entropy[0],
        top1=sides.top1[0],
        p_top1=sides.p_top1,
        nonfinite=sides.nonfinite[0],
    )


def _source(name: str, outputs: Hidden | Logits, head: Head | None) -> Source:
    if isinstance(outputs, Logits):
        check_matrix(f"the {name}'s logits", outputs.logits_TV)
        return Source(matrix=outputs.logits_TV, head=None)
    if head is None:
        raise ScoreError(f"the {name} gives hidden states but no head", "pass the head they belong to")
    check_matrix(f"the {name}'s hidden states", outputs.states_TH)
    check_head(name, outputs.states_TH, head)
    return Source(matrix=outputs.states_TH, head=head)


def _walk(
    teacher: Source,
    candidate: Source,
    targets_T: np.ndarray | torch.Tensor,
    vocab_size: int | None,
    second: bool | None,
    threads: int | None,
) -> tuple[Sides, Walked]:
    check_pair(teacher.matrix, candidate.matrix)
    vocab = common_vocabulary(
        declared_vocabulary("teacher", teacher.width, teacher.head, vocab_size),
        declared_vocabulary("candidate", candidate.width, candidate.head, vocab_size),
    )
    targets = check_targets(targets_T, len(teacher.matrix), vocab)
    on = gpu.device()
    if on is None:
        walked = walk((teacher, candidate), targets, vocab, second=second, threads=threads)
    else:
        walked = gpu.walk((teacher, candidate), targets, vocab, second=second, on=on)
    return finish(walked.state, vocab), walked


def _score(
    teacher: Source,
    candidate: Source,
    targets_T: np.ndarray | torch.Tensor,
    vocab_size: int | None,
    second: bool | None,
    threads: int | None,
) -> Scores:
    sides, walked = _walk(teacher, candidate, targets_T, vocab_size, second, threads)
    columns = {
        "kl": sides.kl,
        "kl_reverse": sides.kl_reverse,
        "agree": sides.joint,
        "agree_lowest_id": (sides.top1[0] == sides.top1[1]) & (sides.top1[0] >= 0) & ~np.isnan(sides.kl),
        "p_top1_teacher": sides.p_top1,
        **_second(walked.second_T3, len(sides.kl)),
    }
    for side, name in enumerate(("teacher", "candidate")):
        columns[f"nll_{name}"] = sides.nll[side]
        columns[f"entropy_{name}"] = sides.entropy[side]
        columns[f"top1_{name}"] = sides.top1[side]
        columns[f"tied_{name}"] = sides.tied[side]
        columns[f"nonfinite_{name}"] = sides.nonfinite[side]
        columns[f"outside_{name}"] = _outside(walked.padding_T2[:, side], sides.lse[side])
    return Scores(**{name: columns[name].astype(dtype) for name, dtype in SCORE_DTYPES.items()})


def _second(second_T3: np.ndarray, positions: int) -> dict[str, np.ndarray]:
    if not len(second_T3):
        second_T3 = np.tile([np.nan, -1.0, -1.0], (positions, 1))
    return {"tv": second_T3[:, 0], "top5_overlap": second_T3[:, 1], "rank": second_T3[:, 2]}


def _outside(padding_T: np.ndarray, lse_T: np.ndarray) -> np.ndarray:
    """Share of the probability, padding included, that lies on padding columns."""
    with np.errstate(invalid="ignore"):
        share = np.exp(padding_T - np.logaddexp(padding_T, lse_T))
    return np.where(padding_T == -np.inf, 0.0, share)


# ---- what may be scored: shapes, ranges and dtypes, checked once before any arithmetic -------------------------------


def check_matrix(name: str, matrix: torch.Tensor) -> None:
    """Refuse anything but a two-dimensional float tensor with at least one row."""
    if matrix.ndim != 2:
        raise ScoreError(f"{name} have shape {list(matrix.shape)}, not [positions, width]", "pass one row of a panel")
    if matrix.shape[0] == 0:
        raise ScoreError(f"{name} hold no position", "a row of T tokens has T - 1 scored positions: give at least two")
    if matrix.dtype not in FLOATS:
        raise ScoreError(f"{name} are {matrix.dtype}", "give float32, bfloat16 or float16")


def check_pair(teacher: torch.Tensor, candidate: torch.Tensor) -> None:
    """Refuse two sides of unequal length; nothing is ever broadcast."""
    if teacher.shape[0] != candidate.shape[0]:
        raise ScoreError(
            f"the teacher has {teacher.shape[0]} positions, the candidate {candidate.shape[0]}",
            "score both over the same row, each without its last token",
        )


def check_targets(targets_T: np.ndarray | torch.Tensor, positions: int, vocab_size: int) -> np.ndarray:
    """The next-token ids as int64 ``[T]``; refuses a wrong count or an id outside the vocabulary."""
    targets = np.asarray(targets_T.cpu() if isinstance(targets_T, torch.Tensor) else targets_T)
    if targets.shape != (positions,):
        raise ScoreError(
            f"{positions} positions but targets of shape {list(targets.shape)}",
            "targets are the row's ids without the first, one per scored position",
        )
    if not np.issubdtype(targets.dtype, np.integer):
        raise ScoreError(f"targets are {targets.dtype}, not token ids", "pass integer ids")
    outside = np.flatnonzero((targets < 0) | (targets >= vocab_size))
    if len(outside):
        where = int(outside[0])
        raise ScoreError(
            f"target {int(targets[where])} at position {where} is outside the vocabulary of {vocab_size}",
            "the panel was sealed with another tokenizer: check the panel and the head's vocab_size",
        )
    return targets.astype(np.int64)


def check_head(name: str, states_TH: torch.Tensor, head: Head) -> None:
    """Refuse a head that does not fit its hidden states."""
    rows, width = head.weight_VH.shape
    if states_TH.shape[1] != width:
        raise ScoreError(
            f"the {name}'s hidden states are {states_TH.shape[1]} wide, its head expects {width}",
            "use the head that belongs to these hidden states",
        )
    if not 0 < head.vocab_size <= rows:
        raise ScoreError(
            f"the {name}'s head has {rows} rows but declares a vocabulary of {head.vocab_size}",
            "declare the tokenizer's vocabulary, at most the head's rows",
        )
    if head.bias_V is not None and head.bias_V.shape != (rows,):
        raise ScoreError(
            f"the {name}'s head has {rows} rows but a bias of {list(head.bias_V.shape)}", "repair the head"
        )
    if head.softcap is not None and not head.softcap > 0:
        raise ScoreError(f"the {name}'s head has soft-cap {head.softcap}", "a soft-cap is positive, or None")


def common_vocabulary(teacher: int, candidate: int) -> int:
    """The one vocabulary both sides declare; refuses two different ones."""
    if teacher != candidate:
        raise ScoreError(
            f"the teacher declares a vocabulary of {teacher}, the candidate {candidate}",
            "a divergence needs one support: declare the tokenizer's vocab_size on both sides",
        )
    return teacher


def declared_vocabulary(name: str, width: int, head: Head | None, declared: int | None) -> int:
    """A side's vocabulary: its head's, else what is declared for logits, else all of their columns."""
    if head is not None:
        return head.vocab_size
    if declared is not None and not 0 < declared <= width:
        raise ScoreError(
            f"a vocabulary of {declared} is declared but the {name} has {width} columns",
            "declare the tokenizer's vocabulary; both sides must cover it",
        )
    return width if declared is None else declared
