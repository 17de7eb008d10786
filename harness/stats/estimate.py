"""What every interval of this package returns: a number, its interval, and how the interval was made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its interval.

    ``low`` and ``high`` are None where no honest interval exists; ``note`` then says why, and otherwise holds
    a warning or nothing. ``unit`` is what was resampled (row, document, item) and ``n`` how many of them there are.
    """

    estimate: float
    low: float | None
    high: float | None
    method: str
    confidence: float
    unit: str
    n: int
    standard_error: float | None = None
    note: str = ""

    @property
    def has_interval(self) -> bool:
        """Whether both ends exist."""
        return self.low is not None and self.high is not None

    def bounds(self) -> dict[str, Any] | None:
        """The fields of `harness.measure.receipt.Interval`, or None where there is no interval."""
        if not self.has_interval:
            return None
        return {name: getattr(self, name) for name in ("low", "high", "method", "confidence", "unit", "n")}


def without_interval(estimate: float, *, method: str, confidence: float, unit: str, n: int, note: str) -> Estimate:
    """An estimate that has no interval, with the reason."""
    return Estimate(
        estimate=estimate, low=None, high=None, method=method, confidence=confidence, unit=unit, n=n, note=note
    )
