"""From positions.parquet to the tables of a report: a frame in, small frozen rows out.

Every interval resamples the panel's unit (document or row). Non-finite values stay in a mean, which then is not
finite and has no interval: a table never hides what the receipt counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from harness.errors import Refused
from harness.measure import quantities
from harness.measure.quantities import QUANTILES, QUANTITIES, TAILS, interval_of
from harness.measure.receipt import Measurement
from harness.measure.summary import CONFIDENCE_EDGES
from harness.stats import Estimate, group_totals, t_interval, without_interval, woodruff
from harness.types import SCORE_DTYPES

#: A rise of the mean KL from the first to the last tenth of a row that is called out.
RISE_RATIO = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One line of a table by bucket: its label, its half-open range, its positions and the estimates in it."""

    label: str
    start: float
    stop: float
    positions: int
    kl: Estimate
    agreement: Estimate

    @property
    def agreed(self) -> float | None:
        """Top-1 agreement; None where the candidate's choice is not known everywhere in the bucket."""
        return None if np.isnan(self.agreement.estimate) else self.agreement.estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """Least-squares slope of KL over position within rows, nats per 1,000 positions, averaged over units."""

    estimate: Estimate
    first: float
    last: float
    rising: bool

    @property
    def ratio(self) -> float:
        """Mean KL of the last tenth over that of the first."""
        return self.last / self.first if self.first > 0 else float("nan")


def load_positions(folder: Path) -> pd.DataFrame:
    """Read positions.parquet; refuses a file that lacks a column of the format."""
    file = folder / "positions.parquet"
    if not file.exists():
        raise Refused(f"{folder.name} has no positions.parquet", "copy it beside measurement.json, or measure again")
    frame = pq.read_table(file).to_pandas()
    missing = [name for name in ("row", "position", "target", *SCORE_DTYPES) if name not in frame.columns]
    if missing:
        raise Refused(f"{folder.name}/positions.parquet lacks the columns {', '.join(missing)}", "measure again")
    return frame


def units_of(frame: pd.DataFrame, measurement: Measurement) -> np.ndarray:
    """The resampling unit of each position ``[N]``, numbered as the receipt's intervals number them."""
    document_of = {row.row: row.document for row in measurement.per_row}
    return quantities.units_of(measurement.panel.unit, frame["row"].to_numpy(), document_of)


def mean_of(name: str, values: np.ndarray, units: np.ndarray, unit: str) -> Estimate:
    """Mean of the named quantity with its interval over units; no interval where the mean is not finite."""
    values = np.asarray(values, dtype=np.float64)
    if not np.isfinite(values).all():
        bad = int((~np.isfinite(values)).sum())
        return _not_finite(float(values.mean()), units, unit, f"{bad} values are not finite")
    return interval_of(name, group_totals(values, units), unit=unit)


def quantity(name: str, frame: pd.DataFrame, units: np.ndarray, unit: str) -> Estimate:
    """Mean and interval of one of `QUANTITIES` over these positions."""
    return mean_of(name, QUANTITIES[name].values_N(frame), units, unit)


def _not_finite(value: float, units: np.ndarray, unit: str, note: str) -> Estimate:
    n = len(np.unique(units))
    return without_interval(value, method="none", confidence=0.95, unit=unit, n=n, note=note)


def _bucket(label: str, part: pd.DataFrame, units: np.ndarray, unit: str, start: float = 0, stop: float = 0) -> Bucket:
    return Bucket(
        label=label,
        start=start,
        stop=stop,
        positions=len(part),
        kl=quantity("kl_mean", part, units, unit),
        agreement=_agreement(part, units, unit),
    )


def _agreement(part: pd.DataFrame, units: np.ndarray, unit: str) -> Estimate:
    """Top-1 agreement; NaN, with the reason, where a server does not tell every choice."""
    unknown = int(((part["top1_candidate"] < 0) & np.isfinite(part["kl"])).sum())
    if unknown:
        return _not_finite(float("nan"), units, unit, f"the candidate's choice is not known at {unknown} positions")
    return mean_of("top1_agreement", part["agree"].to_numpy(), units, unit)


def by_position(frame: pd.DataFrame, units: np.ndarray, unit: str, bins: int = 10) -> list[Bucket]:
    """KL and agreement by tenth of the row length, each with its interval over units."""
    longest = int(frame["position"].max()) + 1
    edges = np.unique(np.linspace(0, longest, min(bins, longest) + 1).round().astype(int))
    code = np.searchsorted(edges, frame["position"].to_numpy(), side="right") - 1
    out = []
    for index, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        inside = code == index
        if inside.any():
            label = f"{start}-{stop - 1}"
            out.append(_bucket(label, frame[inside], units[inside], unit, float(start), float(stop)))
    return out


def by_confidence(frame: pd.DataFrame, units: np.ndarray, unit: str) -> list[Bucket]:
    """KL and agreement by the teacher's top-1 probability; empty buckets are left out."""
    probability = frame["p_top1_teacher"].to_numpy()
    code = np.clip(np.searchsorted(CONFIDENCE_EDGES, probability, side="right") - 1, 0, len(CONFIDENCE_EDGES) - 2)
    out = []
    for index, (start, stop) in enumerate(zip(CONFIDENCE_EDGES[:-1], CONFIDENCE_EDGES[1:], strict=True)):
        inside = (code == index) & np.isfinite(probability)
        if inside.any():
            out.append(_bucket(f"{start:g}-{stop:g}", frame[inside], units[inside], unit, start, stop))
    return out


def by_domain(frame: pd.DataFrame, units: np.ndarray, measurement: Measurement) -> list[Bucket]:
    """KL and agreement by domain, highest KL first."""
    named = {row.row: row.domain for row in measurement.per_row}
    domain = frame["row"].map(named).to_numpy().astype(str)
    masks = {name: domain == name for name in sorted(set(named.values()))}
    found = [_bucket(name, frame[m], units[m], measurement.panel.unit) for name, m in masks.items() if m.any()]
    return sorted(found, key=lambda bucket: (-np.nan_to_num(bucket.kl.estimate, nan=np.inf), bucket.label))


def tail_rates(frame: pd.DataFrame, units: np.ndarray, unit: str) -> list[tuple[float, Estimate]]:
    """Share of positions whose KL is above each threshold of `TAILS` (NaN counts as above)."""
    kl = frame["kl"].to_numpy()
    return [(nats, mean_of(f"tail_rate_{nats:g}", ~(kl <= nats), units, unit)) for nats in TAILS]


def quantiles(frame: pd.DataFrame, units: np.ndarray, unit: str) -> dict[str, Estimate]:
    """Order statistics of the finite KL with clustered Woodruff intervals; extreme ones may be withheld."""
    kl = frame["kl"].to_numpy()
    finite = np.isfinite(kl)
    if not finite.any():
        return {name: _not_finite(float("nan"), units, unit, "no finite KL") for name in QUANTILES}
    return {name: woodruff(kl[finite], units[finite], q, unit=unit) for name, q in QUANTILES.items()}


def slope(frame: pd.DataFrame, units: np.ndarray, unit: str) -> Slope | None:
    """Does KL grow along the row? Flagged when the slope's interval lies above 0 and the rise is material."""
    finite = np.isfinite(frame["kl"].to_numpy())
    frame, units = frame[finite], units[finite]
    tenths = by_position(frame, units, unit) if len(frame) else []
    if len(tenths) < 3:
        return None
    slopes, owners = _row_slopes(frame, units)
    if len(slopes) == 0:
        return None
    found = t_interval(group_totals(1000 * slopes, owners), unit=unit)
    first, last = tenths[0].kl.estimate, tenths[-1].kl.estimate
    rising = found.low is not None and found.low > 0 and last > RISE_RATIO * first
    return Slope(estimate=found, first=first, last=last, rising=rising)


def _row_slopes(frame: pd.DataFrame, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slope of each row that has two positions or more, nats a position, and the unit that owns it."""
    _, first, row = np.unique(frame["row"].to_numpy(), return_index=True, return_inverse=True)
    x = frame["position"].to_numpy(np.float64)
    centred = x - (np.bincount(row, weights=x) / np.bincount(row))[row]
    spread = np.bincount(row, weights=centred**2)
    product = np.bincount(row, weights=centred * frame["kl"].to_numpy())
    long = spread > 0
    return product[long] / spread[long], units[first][long]


def worst_positions(frame: pd.DataFrame, number: int = 10) -> pd.DataFrame:
    """The positions of highest KL, non-finite ones first; ties in panel order."""
    badness = np.nan_to_num(frame["kl"].to_numpy(), nan=np.inf, posinf=np.inf)
    order = np.lexsort((frame["position"], frame["row"], -badness))
    return frame.iloc[order[:number]]


def top_positions_share(frame: pd.DataFrame) -> float | None:
    """Share of the summed KL in the 1 % of positions with the highest KL; None where the sum is 0 or not finite."""
    kl = np.sort(frame["kl"].to_numpy())[::-1]
    total = float(kl.sum())
    if not np.isfinite(total) or total <= 0:
        return None
    return float(kl[: -(-len(kl) // 100)].sum() / total)
