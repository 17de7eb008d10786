"""What may be scored: shapes, ranges and dtypes are checked once, here, before any arithmetic."""

from __future__ import annotations

import numpy as np
import torch

from harness.errors import ScoreError
from harness.types import Head

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
    if head.norm is not None and head.norm.weight_H.shape != (width,):
        raise ScoreError(
            f"the {name}'s final norm has shape {list(head.norm.weight_H.shape)}, its head expects [{width}]",
            "use the norm that belongs to this head",
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
