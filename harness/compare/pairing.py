"""Laying arms side by side: the same rows and positions of each, finite in all of them.

A position that is NaN or infinite in one arm is left out of every arm, and counted: means over each arm's own finite
positions would flatter the one that broke. Suffix N: observations (positions, or rows where only row means exist).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np

from harness.compare.load import Arm
from harness.compare.metrics import Metric
from harness.errors import IncomparableError
from harness.measure.quantities import unit_codes
from harness.measure.receipt import RowSummary
from harness.stats import Totals

Unit = Literal["document", "row"]

#: The teacher's own NLL may differ this much between two runs against one capture (arithmetic of two devices).
TEACHER_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """Totals by unit or row, and which units or rows these are (indices into `Aligned.units` or `Aligned.rows`)."""

    totals: Totals
    index_G: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """Arms on their common rows. ``finite_N`` marks observations that are finite in every arm.

    ``row_N`` and ``unit_N`` are indices into ``rows`` and ``units``; ``weight_N`` is 1 for a position and the number
    of positions for a row mean. ``columns`` and ``position_N`` exist for ``basis == "positions"`` only.
    """

    arms: tuple[Arm, ...]
    basis: Literal["positions", "rows"]
    unit: Unit
    rows: tuple[RowSummary, ...]
    units: tuple[str, ...]
    row_N: np.ndarray
    unit_N: np.ndarray
    weight_N: np.ndarray
    finite_N: np.ndarray
    nonfinite: tuple[int, ...]
    columns: tuple[dict[str, np.ndarray], ...] = ()
    by_row: tuple[dict[int, RowSummary], ...] = ()
    rows_left_out: tuple[int, ...] = ()
    rows_excluded: tuple[int, ...] = ()
    teacher_difference: float = 0.0

    @property
    def positions(self) -> int:
        """Positions on which all arms are compared."""
        return int(self.weight_N[self.finite_N].sum())

    @property
    def excluded(self) -> int:
        """Positions of the common rows that are not finite in some arm."""
        return int(self.weight_N[~self.finite_N].sum())

    def values(self, metric: Metric) -> list[np.ndarray] | None:
        """The metric of every arm ``[N]``; None where an arm does not have it."""
        if self.basis == "positions":
            found = [np.asarray(metric.values(columns), dtype=np.float64) for columns in self.columns]
        elif metric.row_field is None:
            return None
        else:
            found = [self._row_means(rows, metric.row_field) for rows in self.by_row]
        return None if any(np.isnan(values[self.finite_N]).all() for values in found) else found

    def _row_means(self, rows: dict[int, RowSummary], field: str) -> np.ndarray:
        means = [getattr(rows[row.row], field) for row in self.rows]
        return np.array([np.nan if mean is None else mean for mean in means], dtype=np.float64)

    def mask(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Observations that are finite in every arm, in this metric too."""
        return reduce(np.logical_and, (np.isfinite(v) for v in values), self.finite_N)

    def by_unit(self, values_N: np.ndarray, mask_N: np.ndarray) -> Grouped:
        """Totals over units of the observations in ``mask_N``."""
        return _grouped(values_N, self.weight_N, self.unit_N, mask_N, len(self.units))

    def by_rows(self, values_N: np.ndarray, mask_N: np.ndarray) -> Grouped:
        """Totals over rows of the observations in ``mask_N``."""
        return _grouped(values_N, self.weight_N, self.row_N, mask_N, len(self.rows))


def _grouped(values_N: np.ndarray, weight_N: np.ndarray, code_N: np.ndarray, mask_N: np.ndarray, size: int) -> Grouped:
    weights, codes = weight_N[mask_N], code_N[mask_N]
    counts = np.bincount(codes, weights=weights, minlength=size)
    sums = np.bincount(codes, weights=values_N[mask_N] * weights, minlength=size)
    index_G = np.flatnonzero(counts > 0)
    return Grouped(totals=Totals(sums[index_G], counts[index_G]), index_G=index_G)


def align(arms: Sequence[Arm], *, unit: Unit, excluded_rows: Sequence[int] = ()) -> Aligned:
    """Lay comparable arms side by side on their common rows; intervals will resample ``unit``.

    Raises:
        IncomparableError: no common row, other positions or tokens in a row, or another teacher's numbers.
    """
    summaries = [{row.row: row for row in arm.measurement.per_row} for arm in arms]
    everywhere = reduce(set.intersection, (set(rows) for rows in summaries))
    anywhere = reduce(set.union, (set(rows) for rows in summaries), set[int]())
    common = sorted(everywhere - set(excluded_rows))
    if not common:
        raise IncomparableError("the measurements have no row in common", "measure the same rows of the panel")
    _require_same_rows(arms, summaries, common)
    rows = tuple(summaries[0][row] for row in common)
    dropped = sorted(anywhere - everywhere), sorted(everywhere & set(excluded_rows))
    whole = all(arm.columns is not None for arm in arms)
    if whole:
        aligned = _align_positions(arms, rows, unit, *dropped)
    else:
        aligned = _align_rows(arms, rows, unit, summaries, *dropped)
    if not aligned.finite_N.any():
        raise IncomparableError("no position is finite in every measurement", "measure the broken one again")
    return aligned


def _require_same_rows(arms: Sequence[Arm], summaries: Sequence[dict[int, RowSummary]], common: Sequence[int]) -> None:
    for arm, rows in zip(arms[1:], summaries[1:], strict=True):
        for row in common:
            ours, theirs = summaries[0][row], rows[row]
            for field in ("positions", "document", "domain"):
                if getattr(ours, field) != getattr(theirs, field):
                    raise IncomparableError(
                        f"row {row}: {field} is {getattr(ours, field)!r} in {arms[0].name} and "
                        f"{getattr(theirs, field)!r} in {arm.name}",
                        "measure both on one panel",
                    )


def _units(unit: Unit, rows: Sequence[RowSummary]) -> tuple[tuple[str, ...], np.ndarray]:
    """Unit labels in order of appearance, and the unit of each row."""
    labels = [row.document if unit == "document" else f"row {row.row}" for row in rows]
    return tuple(dict.fromkeys(labels)), unit_codes(unit, labels)


def _align_positions(
    arms: Sequence[Arm], rows: tuple[RowSummary, ...], unit: Unit, left_out: list[int], excluded: list[int]
) -> Aligned:
    wanted = np.array([row.row for row in rows])
    columns = tuple(_rows_of(arm, wanted) for arm in arms)
    difference = _require_same_positions(arms, columns)
    units, unit_R = _units(unit, rows)
    row_N = np.searchsorted(wanted, columns[0]["row"])
    finite = [_finite(c) for c in columns]
    return Aligned(
        arms=tuple(arms),
        basis="positions",
        unit=unit,
        rows=rows,
        units=units,
        row_N=row_N,
        unit_N=unit_R[row_N],
        weight_N=np.ones(len(row_N)),
        finite_N=reduce(np.logical_and, finite),
        nonfinite=tuple(int((~f).sum()) for f in finite),
        columns=columns,
        rows_left_out=tuple(left_out),
        rows_excluded=tuple(excluded),
        teacher_difference=difference,
    )


def _rows_of(arm: Arm, wanted: np.ndarray) -> dict[str, np.ndarray]:
    if arm.columns is None:
        raise ValueError("this arm has no positions")
    keep = np.isin(arm.columns["row"], wanted)
    return {name: values[keep] for name, values in arm.columns.items()}


def _finite(columns: dict[str, np.ndarray]) -> np.ndarray:
    names = ("kl", "nll_candidate", "nll_teacher")
    return reduce(np.logical_and, (np.isfinite(columns[name]) for name in names))


def _require_same_positions(arms: Sequence[Arm], columns: Sequence[dict[str, np.ndarray]]) -> float:
    """Refuse other positions, tokens or teacher numbers; returns the largest difference of the teacher's NLL."""
    base, largest = columns[0], 0.0
    for arm, other in zip(arms[1:], columns[1:], strict=True):
        for name in ("row", "position", "target"):
            if not np.array_equal(base[name], other[name]):
                raise IncomparableError(
                    f"{arms[0].name} and {arm.name} differ in the column {name} of positions.parquet",
                    "measure both on one panel, whole rows each",
                )
        both = np.isfinite(base["nll_teacher"]) & np.isfinite(other["nll_teacher"])
        gap_N = np.abs(base["nll_teacher"] - other["nll_teacher"])[both]
        largest = max(largest, float(gap_N.max(initial=0.0)))
        _require_same_teacher(arms[0], arm, largest)
    return largest


def _require_same_teacher(base: Arm, arm: Arm, gap: float) -> None:
    if gap > TEACHER_TOLERANCE:
        raise IncomparableError(
            f"the teacher's NLL differs by up to {gap:.3g} nats between {base.name} and {arm.name}",
            "measure both against one capture of one teacher",
        )


def _align_rows(
    arms: Sequence[Arm],
    rows: tuple[RowSummary, ...],
    unit: Unit,
    summaries: Sequence[dict[int, RowSummary]],
    left_out: list[int],
    excluded: list[int],
) -> Aligned:
    """Row means only; a row with a non-finite mean in one arm is left out of all."""
    units, unit_R = _units(unit, rows)
    gaps = [max(abs(s[r.row].nll_teacher_mean - r.nll_teacher_mean) for r in rows) for s in summaries]
    for arm, gap in zip(arms, gaps, strict=True):
        _require_same_teacher(arms[0], arm, gap)
    finite = [np.array([_row_is_finite(s[row.row]) for row in rows]) for s in summaries]
    return Aligned(
        arms=tuple(arms),
        basis="rows",
        unit=unit,
        rows=rows,
        units=units,
        row_N=np.arange(len(rows)),
        unit_N=unit_R,
        weight_N=np.array([row.positions for row in rows], dtype=np.float64),
        finite_N=reduce(np.logical_and, finite),
        nonfinite=tuple(sum(s[row.row].nonfinite for row in rows) for s in summaries),
        by_row=tuple(summaries),
        rows_left_out=tuple(left_out),
        rows_excluded=tuple(excluded),
        teacher_difference=max(gaps),
    )


def _row_is_finite(row: RowSummary) -> bool:
    return bool(np.isfinite([row.kl_mean, row.nll_candidate_mean, row.nll_teacher_mean]).all())
