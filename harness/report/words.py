"""Sentences: the one for a card, and warnings in plain words."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.model import ArmResult, Comparison, Difference, Figure, Pair, Reference
from harness.numbers import count, number, percent, supported_decimals

#: How a unit is shown: factor and name. Shares are compared in percentage points.
UNITS = {"nats": (1.0, " nats"), "share": (100.0, " pp")}


def sentence(difference: Difference) -> str:
    """``lower by 0.0225 nats (95 % CI 0.0207 to 0.0243), lower on 505 of 512 contexts``."""
    signs = difference.signs
    factor, unit = UNITS[difference.unit]
    shown = _scaled(difference.band or difference.difference, factor)
    size = shown.estimate
    where = _contexts(signs.rows_lower, signs.rows_higher, signs.rows, size)
    if shown.low is None or shown.high is None:
        direction = "lower by" if size < 0 else ("higher by" if size > 0 else "differs by")
        return f"{direction} {number(abs(size))}{unit} ({shown.note}), {where}"
    places = supported_decimals(shown.low, shown.high)
    level = f"{shown.confidence * 100:g} % CI"
    if shown.low <= 0 <= shown.high:
        ends = f"{number(shown.low, places)} to {number(shown.high, places)}"
        return f"differs by {number(size, places)}{unit} ({level} {ends}), {where}"
    near, far = sorted((abs(shown.low), abs(shown.high)))
    direction = "lower" if size < 0 else "higher"
    ends = f"{number(near, places)} to {number(far, places)}"
    return f"{direction} by {number(abs(size), places)}{unit} ({level} {ends}), {where}"


def _scaled(figure: Figure, factor: float) -> Figure:
    ends = {n: None if (end := getattr(figure, n)) is None else factor * end for n in ("low", "high")}
    return figure.model_copy(update={"estimate": factor * figure.estimate, **ends})


def _contexts(lower: int, higher: int, rows: int, size: float) -> str:
    """How many contexts point the way of the mean."""
    noun = "context" if rows == 1 else "contexts"
    if size == 0 and lower == higher == 0:
        return f"the same on {count(rows)} of {count(rows)} {noun}"
    along, word = (lower, "lower") if size < 0 or (size == 0 and lower >= higher) else (higher, "higher")
    return f"{word} on {count(along)} of {count(rows)} {noun}"


def primary_name(comparison: Comparison, pair: Pair) -> str:
    """``mean KL lower bound``: what the sentence speaks of."""
    return f"mean {pair.primary.label.replace('KL', comparison.kl)}"


def pair_headline(comparison: Comparison, pair: Pair) -> str:
    """The verdict in one line: ``B is better than A: KL mean lower by ...``."""
    first = pair.primary
    name = primary_name(comparison, pair)
    opening = {
        "better": f"{pair.other} is better than {pair.baseline}",
        "worse": f"{pair.other} is worse than {pair.baseline}",
        "equivalent": f"{pair.other} and {pair.baseline} are equivalent",
        "undecided": f"{pair.other} against {pair.baseline} is undecided",
        "no verdict": f"{pair.other} against {pair.baseline}: no verdict",
    }[first.verdict]
    return f"{opening}: {name} {pair.sentence}."


def arm_warnings(arm: ArmResult) -> list[str]:
    """What a reader must know about one arm before its numbers."""
    found = []
    if arm.label:
        found.append(f"{arm.name} is {arm.label}")
    if arm.nonfinite:
        infinite = f", {arm.infinite} of them infinite" if arm.infinite else ""
        found.append(
            f"{arm.name}: {count(arm.nonfinite)} positions are not finite{infinite}; they are left out of every arm"
        )
    if arm.share and arm.share.driven_by_one:
        found.append(
            f"{arm.name}: its mean KL is driven by one context: row {arm.share.row} carries {percent(arm.share.share)}"
        )
    if arm.trend and arm.trend.rising:
        found.append(
            f"{arm.name}: KL rises along the row, from {number(arm.trend.first)} in the first tenth "
            f"to {number(arm.trend.last)} in the last: look for a fault that grows with length"
        )
    if arm.at_floor:
        found.append(f"{arm.name} is at the floor: its interval reaches down to the teacher's own noise")
    return found


def pair_warnings(pair: Pair) -> list[str]:
    """What weakens a paired difference."""
    first, found = pair.primary, []
    share = first.share
    if share and share.driven_by_one and first.difference.estimate != 0:
        found.append(
            f"{pair.other} - {pair.baseline}: the difference of {first.label} is driven by one context "
            f"(row {share.row} carries {percent(share.share)} of the absolute differences)"
        )
    detectable = first.resolution.detectable_relative
    if first.verdict == "undecided" and detectable is not None:
        found.append(
            f"{pair.other} - {pair.baseline}: undecided is not equal; this panel resolves a difference of "
            f"{percent(detectable, 1)} of {first.label}"
        )
    return found


def several_warning(candidates: int) -> list[str]:
    """Choosing the best of several on one panel flatters it."""
    if candidates < 2:
        return []
    return [
        f"{candidates} candidates were compared on one panel: the best one's number is flattered by the choice; "
        "measure the winner again on a panel that took no part in it"
    ]


def lower_bound_warning(estimator: str, masses: Sequence[float]) -> list[str]:
    """What a difference of two lower bounds leaves out."""
    if estimator != "lower_bound":
        return []
    known = f" (teacher mass outside: {percent(1 - min(masses))} on average)" if masses else ""
    return [
        "both sides are lower bounds of KL: the part outside the known tokens"
        f"{known} is in neither number, nor in the difference"
    ]


def floor_warning(floor: Reference | None) -> list[str]:
    """That the floor is not known, when it is not."""
    return [] if floor else ["no floor was measured: how much of each KL is the engine's own noise is not known"]
