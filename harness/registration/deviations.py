"""What departs from the registration, in words; printed wherever results are, the card included."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.measure.receipt import Measurement
from harness.registration.model import Registration

RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """How a comparison was in fact made."""

    primary: str
    unit: str
    interval: str
    confidence: float
    resamples: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BarResult:
    """A registered bar and what came out; ``met`` is None where its metric was not measured."""

    name: str
    statement: str
    value: float | None
    threshold: float | None
    met: bool | None


def deviations(registration: Registration, measurement: Measurement) -> list[str]:
    """How one measurement departs from the registration; empty when it does not."""
    found = _digest_deviation(registration, measurement)
    planned = registration.rows or measurement.rows_planned
    expected = planned - len({e.row for e in registration.exclusions if e.row < planned})
    measured = {row.row for row in measurement.per_row}
    if measurement.rows_measured < expected:
        found.append(f"{measurement.rows_measured} rows measured, {expected} registered")
    excluded = sorted(measured & {e.row for e in registration.exclusions})
    if excluded:
        found.append(f"rows {', '.join(map(str, excluded))} were registered as excluded, and are in the summary")
    if registration.unit and registration.unit != measurement.panel.unit:
        found.append(f"intervals resample {measurement.panel.unit}s, registered is {registration.unit}s")
    return found


def _digest_deviation(registration: Registration, measurement: Measurement) -> list[str]:
    carried = measurement.panel.registration_sha256
    if carried == registration.sha256:
        return []
    said = f"registration {carried[:12]}" if carried else "no registration"
    return [f"measured under {said}, not under {registration.sha256[:12]}"]


def analysis_deviations(registration: Registration, made: Analysis) -> list[str]:
    """How a comparison departs from the registered analysis."""
    registered = {
        "primary metric": registration.primary.metric,
        "unit of resampling": registration.unit or made.unit,
        "interval": registration.interval,
        "confidence": registration.confidence,
        "resamples": registration.resamples,
        "seed": registration.seed,
    }
    actual = (made.primary, made.unit, made.interval, made.confidence, made.resamples, made.seed)
    return [
        f"{name} {used}, registered is {planned}"
        for (name, planned), used in zip(registered.items(), actual, strict=True)
        if used != planned
    ]


def task_deviations(registration: Registration, limits: Mapping[str, int | None]) -> list[str]:
    """Tasks run with another limit than registered, not run, or not registered at all (``limits`` by task name)."""
    planned = {task.name: task.limit for task in registration.tasks}
    found = [f"task {name} is registered and was not run" for name in planned if name not in limits]
    found += [f"task {name} was run and is not registered" for name in limits if name not in planned]
    for name in planned:
        if name in limits and limits[name] != planned[name]:
            found.append(f"task {name}: {_items(limits[name])}, registered {_items(planned[name])}")
    return found


def _items(limit: int | None) -> str:
    return "all items" if limit is None else f"the first {limit} items of each task"


def check_bars(
    registration: Registration, candidate: Mapping[str, float], baseline: Mapping[str, float]
) -> list[BarResult]:
    """Every registered bar against a candidate's values, in the order registered."""
    results = []
    for bar in registration.bars:
        threshold = bar.value if bar.value is not None else baseline.get(bar.metric)
        value = candidate.get(bar.metric)
        known = value is not None and threshold is not None
        results.append(
            BarResult(
                name=bar.name,
                statement=f"{bar.metric} {bar.relation} {bar.reference or f'{bar.value:g}'}",
                value=value,
                threshold=threshold,
                met=RELATIONS[bar.relation](value, threshold) if known else None,  # type: ignore[arg-type]
            )
        )
    return results


def excluded_rows(registration: Registration | None) -> Sequence[int]:
    """Rows that the registration leaves out."""
    return sorted(e.row for e in registration.exclusions) if registration else []
