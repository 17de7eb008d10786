"""What a lower bound adds to a receipt: how much of the teacher was known, and what the known part cannot say.

Numbers that a server does not give (total variation, the reverse divergence, ...) are withheld by `harness.summary`.
The estimate's standard error is that of drawing the ids, with the panel held fixed; its interval resamples the panel's
unit and holds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from harness.receipt import Interval
from harness.result import Additions
from harness.served.score import EXTRA_DTYPES
from harness.stats.bootstrap import mean_kl_interval
from harness.stats.influence import group_totals
from harness.types import Panel

#: Means that are given an interval of their own beside the bound's.
_MEANS = ("kl_capped", "kl_tail_estimate")


class Positions(Protocol):
    """Columns by name: a pyarrow table or a pandas frame of positions.parquet."""

    def __getitem__(self, name: str, /) -> Any: ...


def additions(table: Positions, panel: Panel) -> Additions:
    """Summary, intervals and counts of a run whose positions hold the columns of `EXTRA_DTYPES`."""
    columns = {name: np.asarray(table[name].to_numpy()) for name in (*EXTRA_DTYPES, "kl", "agree", "top1_candidate")}
    row_N = np.asarray(table["row"].to_numpy())
    return Additions(
        summary=served_summary(columns),
        intervals=served_intervals(columns, row_N, panel),
        counts=served_counts(columns),
    )


def served_summary(columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Masses and shares, and the other numbers beside the bound, in nats."""
    kl, mass = columns["kl"], columns["captured_teacher_mass"]
    valid = mass[np.isfinite(mass)]
    out: dict[str, Any] = {
        "captured_teacher_mass_mean": float(mass.mean()),
        "captured_teacher_mass_p01": float(np.quantile(valid, 0.01, method="inverted_cdf")) if len(valid) else None,
        "captured_teacher_mass_min": float(valid.min()) if len(valid) else None,
        "captured_candidate_mass_mean": float(columns["captured_candidate_mass"].mean()),
        "all_known_share": float(columns["all_known"].mean()),
        "kl_capped_mean": float(columns["kl_capped"].mean()),
        "kl_renormalised_mean": float(columns["kl_renormalised"].mean()),
        "kl_shortfall_mean": float(columns["kl_shortfall"].mean()),
    }
    estimated = _estimated(columns)
    out["kl_tail_estimate_mean"] = float(columns["kl_tail_estimate"].mean()) if estimated else None
    error = columns["kl_tail_se"]
    out["kl_tail_estimate_se"] = float(np.sqrt((error**2).sum()) / len(error)) if estimated else None
    return out | _agreement(columns, kl)


def _estimated(columns: Mapping[str, np.ndarray]) -> bool:
    """Whether every position that has a bound has an estimate too; the mean of some of them would be another number."""
    has = np.isfinite(columns["kl_tail_estimate"])
    return bool(has.any()) and bool((has | ~np.isfinite(columns["kl"])).all())


def _agreement(columns: Mapping[str, np.ndarray], kl: np.ndarray) -> dict[str, float]:
    """Between which shares top-1 agreement lies, where the candidate's choice is not known everywhere."""
    if not (np.isfinite(kl) & (columns["top1_candidate"] < 0)).any():
        return {}
    agreed, unknown = columns["agree"].mean(), (~columns["agree_known"]).mean()
    return {"top1_agreement_low": float(agreed), "top1_agreement_high": float(agreed + unknown)}


def served_counts(columns: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Positions where something that was asked for is not known."""
    has_bound = np.isfinite(columns["kl"])
    out = {
        "top1_unknown": int((columns["top1_candidate"] < 0).sum()),
        "agreement_unknown": int((~columns["agree_known"]).sum()),
        "asked_not_known": int((~columns["all_known"]).sum()),
        "mass_rounded": int(columns["mass_rounded"].sum()),
    }
    if np.isfinite(columns["kl_tail_estimate"]).any():
        out["tail_estimate_unknown"] = int((has_bound & ~np.isfinite(columns["kl_tail_estimate"])).sum())
    return out


def served_intervals(columns: Mapping[str, np.ndarray], row_N: np.ndarray, panel: Panel) -> dict[str, Interval]:
    """Intervals of the other means over the panel's unit; none where a position has no number."""
    labels = np.array([row.document if panel.unit == "document" else str(row.index) for row in panel.rows])
    out = {}
    for name in _MEANS:
        if np.isfinite(columns[name]).all():
            found = mean_kl_interval(group_totals(columns[name], labels[row_N]), unit=panel.unit).bounds()
            if found is not None:
                out[f"{name}_mean"] = Interval(**found)
    return out
