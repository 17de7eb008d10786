"""What departs from the registration, in words; printed wherever results are, the card included."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
