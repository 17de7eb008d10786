"""The quantities that have a mean: per-position values and kind of interval, each defined once.

The receipt, the reports, a comparison and the card show intervals of these from here, so all show the same ends.
Suffix N: positions. Suffix R: rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from harness.stats import RESAMPLES, SEED, Estimate, Kind, Totals, mean_interval

#: Shares of positions with a KL above so many nats; fixed in advance, so that nobody chooses one that flatters.
TAILS = (0.1, 1.0)
#: Quantiles of the KL in a summary, and those that reports, comparisons and cards show.
SUMMARY_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
QUANTILES = {name: q for name, q in SUMMARY_QUANTILES.items() if name != "p90"}


class Columns(Protocol):
    """Columns of positions.parquet by name: a mapping of arrays, or a frame."""

    def __getitem__(self, name: str, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Quantity:
    """``values_N`` takes columns to float64 ``[N]``, nan where a position has none; ``kind`` decides the interval."""

    kind: Kind
    values_N: Callable[[Columns], np.ndarray]


def column(name: str) -> Callable[[Columns], np.ndarray]:
    """The column itself, as float64."""
    return lambda c: np.asarray(c[name], dtype=np.float64)


def nll_difference(c: Columns) -> np.ndarray:
    """NLL of the true token, candidate minus teacher, nats."""
    return column("nll_candidate")(c) - column("nll_teacher")(c)


def delta_p(c: Columns) -> np.ndarray:
    """Change of the true token's probability, candidate minus teacher."""
    return np.asarray(np.exp(-column("nll_candidate")(c)) - np.exp(-column("nll_teacher")(c)))


def agreement(c: Columns) -> np.ndarray:
    """Whether both choose alike; nan where a server does not tell the candidate's choice."""
    return np.where(np.asarray(c["top1_candidate"]) < 0, np.nan, column("agree")(c))


def top5(c: Columns) -> np.ndarray:
    """Share of the teacher's five most likely tokens among the candidate's; nan where it is not known."""
    overlap = column("top5_overlap")(c)
    return np.where(overlap < 0, np.nan, overlap / 5)


def above(nats: float) -> Callable[[Columns], np.ndarray]:
    """Whether KL exceeds a threshold; nan stays nan."""
    return lambda c: np.where(np.isnan(np.asarray(c["kl"])), np.nan, np.asarray(c["kl"] > nats, dtype=np.float64))


QUANTITIES: dict[str, Quantity] = {
    "kl_mean": Quantity("divergence", column("kl")),
    "kl_reverse_mean": Quantity("divergence", column("kl_reverse")),
    "kl_capped_mean": Quantity("divergence", column("kl_capped")),
    "kl_tail_estimate_mean": Quantity("divergence", column("kl_tail_estimate")),
    "top1_agreement": Quantity("share", agreement),
    "top5_overlap": Quantity("share", top5),
    "tv_mean": Quantity("share", column("tv")),
    **{f"tail_rate_{nats:g}": Quantity("share", above(nats)) for nats in TAILS},
    "delta_p_abs": Quantity("share", lambda c: np.abs(delta_p(c))),
    "delta_p": Quantity("real", delta_p),
    "nll_candidate": Quantity("real", column("nll_candidate")),
    "nll_difference": Quantity("real", nll_difference),
}
#: Those of which a receipt holds the interval.
IN_RECEIPT = (
    "kl_mean",
    "top1_agreement",
    "tv_mean",
    "nll_difference",
    "kl_reverse_mean",
    "top5_overlap",
    *(f"tail_rate_{nats:g}" for nats in TAILS),
)


def interval_of(
    name: str, totals: Totals, *, unit: str, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = SEED
) -> Estimate:
    """The mean of the named quantity with its interval; ``totals`` are of units in the panel's order (`unit_codes`)."""
    kind = QUANTITIES[name].kind
    return mean_interval(totals, kind, confidence=confidence, resamples=resamples, seed=seed, unit=unit)


def quantile_key(name: str) -> str:
    """A quantile's key in a summary: ``kl_p999`` for ``p99.9``."""
    return f"kl_{name.replace('.', '')}"


def units_of(unit: Literal["document", "row"], row_N: np.ndarray, document_of: Mapping[int, str]) -> np.ndarray:
    """The unit of each position ``[N]``, numbered as `unit_codes` numbers the rows that are there."""
    rows, index_N = np.unique(row_N, return_inverse=True)
    return unit_codes(unit, [document_of[int(row)] for row in rows])[index_N]


def unit_codes(unit: Literal["document", "row"], documents: Sequence[str]) -> np.ndarray:
    """The unit of each row ``[R]``: rows are numbered as they come, and documents as they first appear.

    A bootstrap draws units by number, so only one order gives one pair of ends.
    """
    if unit == "row":
        return np.arange(len(documents))
    place = {name: at for at, name in enumerate(dict.fromkeys(documents))}
    return np.array([place[name] for name in documents])
