"""Accuracy of tasks and of groups of tasks, and its standard error as lm-eval pools it.

A group's accuracy is *micro* (every item counts the same) unless said otherwise; *macro* is the mean over tasks.
lm-eval's standard error of a group is that within tasks only, pooled over the leaves (for MMLU the 57 subjects, not
the four groups)::

    se_i = sqrt(p_i (1 - p_i) / (n_i - 1))        SE = sqrt(sum((n_i - 1) n_i se_i^2) / (N - k) / N)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Count:
    """Items answered right, of all items of one task."""

    correct: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.n or self.n < 1:
            raise ValueError(f"{self.correct} of {self.n} is no count")

    @property
    def accuracy(self) -> float:
        """Share of items answered right."""
        return self.correct / self.n

    @property
    def stderr(self) -> float | None:
        """Standard error of the accuracy (sample variance); None for one item."""
        if self.n < 2:
            return None
        return math.sqrt(self.accuracy * (1 - self.accuracy) / (self.n - 1))


@dataclass(frozen=True, slots=True)
class Pooled:
    """A group: ``accuracy`` over items, ``macro`` over tasks, and the pooled standard error."""

    correct: int
    n: int
    tasks: int
    accuracy: float
    macro: float
    stderr: float | None


def pool(counts: Sequence[Count]) -> Pooled:
    """Pool the leaves of a group; the standard error is None where a leaf has one item only."""
    if not counts:
        raise ValueError("a group needs a task")
    correct, n = sum(c.correct for c in counts), sum(c.n for c in counts)
    return Pooled(
        correct=correct,
        n=n,
        tasks=len(counts),
        accuracy=correct / n,
        macro=sum(c.accuracy for c in counts) / len(counts),
        stderr=pooled_stderr([c.stderr for c in counts], [c.n for c in counts]),
    )


def pooled_stderr(stderrs: Sequence[float | None], sizes: Sequence[int]) -> float | None:
    """lm-eval's ``pooled_sample_stderr``."""
    if any(error is None for error in stderrs) or sum(sizes) == len(sizes):
        return None
    weighted = sum((n - 1) * n * error**2 for n, error in zip(sizes, stderrs, strict=True) if error is not None)
    return math.sqrt(weighted / (sum(sizes) - len(sizes)) / sum(sizes))


def plus_minus(value: float, stderr: float | None, decimals: int = 4) -> str:
    """``0.8342 ± 0.0105``: one standard error, as published cards print it."""
    if stderr is None:
        return f"{value:.{decimals}f}"
    return f"{value:.{decimals}f} ± {stderr:.{decimals}f}"
