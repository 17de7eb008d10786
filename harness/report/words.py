"""What comparisons say in words: the sentence for a card, the reasons of verdicts, and warnings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.compare.model import ArmResult, Comparison, Difference, Pair, Unlike
from harness.compare.task_model import RunNotes, TaskComparison, TaskComparisons, TaskPair
from harness.numbers import count, number, percent, supported_decimals

#: How a unit is shown: factor and name. Shares are compared in percentage points.
UNITS = {"nats": (1.0, " nats"), "share": (100.0, " pp")}


def worded(comparison: Comparison) -> Comparison:
    """The comparison with its sentences, reasons and warnings written in, as comparison.json has them."""
    pairs = [_worded_pair(comparison, pair) for pair in comparison.pairs]
    return comparison.model_copy(update={"pairs": pairs, "warnings": warnings(comparison)})


def _worded_pair(comparison: Comparison, pair: Pair) -> Pair:
    told = [
        d.model_copy(update={"reason": reason(comparison, pair, d), "margin_source": margin_source(d)})
        for d in pair.differences
    ]
    return pair.model_copy(update={"sentence": sentence(pair.primary), "differences": told})


def sentence(difference: Difference) -> str:
    """``lower by 0.0225 nats (95 % CI 0.0207 to 0.0243), lower on 505 of 512 contexts``."""
    signs = difference.signs
    factor, unit = UNITS[difference.unit]
    shown = (difference.band or difference.difference).scaled(factor)
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
    return f"{opening}: {name} {sentence(first)}."


def reason(comparison: Comparison, pair: Pair, d: Difference) -> str:
    """Why a verdict is what it is: the statistics' own reason, or what held it back."""
    match d.held:
        case None:
            return d.reason
        case "no direction":
            return "its direction is no matter of fidelity"
        case "not finite":
            return _broken(comparison, pair)
        case "at the floor":
            return "both are at the floor: nothing above the engine's own noise"
        case "below the floor":
            return _below_the_floor(comparison)
        case "tails":
            return _tails_decide(pair)
        case "Holm":
            return f"does not survive Holm's correction (p = {d.p_holm:.3g})"


def bars_title(c: Comparison) -> str:
    """What bars are called: registered only where the registration is of this question."""
    return "Exploratory bars" if c.status == "exploratory" else "Registered bars"


def margin_source(d: Difference) -> str:
    """Where a margin is from: ``registered: 0.0025``, ``exploratory default: 0.1 of the baseline``."""
    stated = d.margin_stated
    if stated is None:
        return d.margin_source
    of = "" if stated.margin_kind == "absolute" else " of the baseline"
    return f"{'registered' if d.margin_registered else 'exploratory default'}: {stated.margin:.4g}{of}"


def _broken(comparison: Comparison, pair: Pair) -> str:
    """Which arm has more positions that are not finite."""
    counts = {arm.name: arm.nonfinite for arm in comparison.arms}
    more = counts[pair.other] - counts[pair.baseline]
    which = "the candidate" if more > 0 else "the baseline"
    return f"{which} has {abs(more)} more positions that are not finite; they are in no mean"


def _below_the_floor(comparison: Comparison) -> str:
    floor = comparison.reference("floor")
    assert floor is not None  # a verdict is held back by a floor only where there is one
    return f"the difference is smaller than the floor of {floor.kl.estimate:.4g} nats"


def _tails_decide(pair: Pair) -> str:
    assert pair.tails is not None  # held back by the tails' figures
    return (
        f"the part outside the known tokens can hold {number(pair.tails.could_move)} nats where ln(p/q) varies by "
        f"{number(pair.tails.log_range)}: it could undo this"
    )


# ---- warnings --------------------------------------------------------------------------------------------------------


def warnings(comparison: Comparison) -> list[str]:
    """What a reader must know before the numbers, each thing once."""
    c = comparison
    found = [*registration_warnings(c), *(text for one in c.unlike for text in unlike_warnings(c, one))]
    found += common_warnings(c)
    found += [f"a check failed: {check}" for check in c.failed_checks]
    found += [text for arm in c.arms for text in arm_warnings(arm)]
    found += [text for pair in c.pairs for text in pair_warnings(pair)]
    found += [*several_warning(len(c.pairs)), *lower_bound_warning(c)]
    found += [text for pair in c.pairs for text in tails_warning(pair)]
    found += floor_warning(c)
    return list(dict.fromkeys([*found, *(note for arm in c.arms for note in arm.notes)]))


def registration_warnings(c: Comparison) -> list[str]:
    """A registration that is named and not here, or that was changed."""
    if c.registration is not None and c.registration.changed_since_commit:
        return ["registration.toml was changed since its commit"]
    return [
        f"the panel is registered as {sha[:12]}, what was registered is not here: name --panel"
        for sha in c.unread_registrations
    ]


def unlike_warnings(c: Comparison, unlike: Unlike) -> list[str]:
    """What differs between comparable arms and may have moved a number."""
    both = f"{c.arms[0].name} and {unlike.other}"
    found = [
        f"{both} ran with another {name} ({left} and {right}): part of the difference"
        for name, (left, right) in [*unlike.engine.items(), *unlike.settings.items()]
    ]
    if unlike.versions:
        found.append(f"{both} were measured under other versions ({', '.join(unlike.versions)})")
    if unlike.teacher_revision is not None:
        left, right = unlike.teacher_revision
        found.append(f"the teacher's revision is named {left} and {right}; its contents are equal")
    return [*found, f"{both} are the same measurement"] if unlike.same_measurement else found


def common_warnings(c: Comparison) -> list[str]:
    """What the arms do not have in common."""
    found, on = [], c.paired_on
    if on.rows_left_out:
        found.append(f"rows {_list(on.rows_left_out)} are not in every measurement and are left out")
    if on.teacher_difference:
        found.append(f"the teacher's own NLL differs by up to {on.teacher_difference:.2g} nats between runs")
    return found


def _list(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    return shown if len(rows) <= 8 else f"{shown} and {len(rows) - 8} more"


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


def tails_warning(pair: Pair) -> list[str]:
    """By how much the tails would have to differ to change the sign."""
    tails = pair.tails
    if tails is None or tails.overturning is None or tails.difference == 0:
        return []
    lower = pair.baseline if tails.difference > 0 else pair.other
    uncovered = tails.uncovered_baseline if tails.difference > 0 else tails.uncovered_other
    return [
        f"{pair.other} - {pair.baseline}: {percent(uncovered)} of the teacher's mass is outside the known tokens of "
        f"{lower}; if its KL there is {number(tails.overturning)} nats above the other's, the order of the two turns"
    ]


def several_warning(candidates: int) -> list[str]:
    """Choosing the best of several on one panel flatters it."""
    if candidates < 2:
        return []
    return [
        f"{candidates} candidates were compared on one panel: the best one's number is flattered by the choice; "
        "measure the winner again on a panel that took no part in it"
    ]


def lower_bound_warning(c: Comparison) -> list[str]:
    """What a difference of two lower bounds leaves out."""
    if c.estimator != "lower_bound":
        return []
    masses = [arm.captured_mass for arm in c.arms if arm.captured_mass is not None]
    known = f" (teacher mass outside: {percent(1 - min(masses))} on average)" if masses else ""
    return [
        "both sides are lower bounds of KL: the part outside the known tokens"
        f"{known} is in neither number, nor in the difference"
    ]


def floor_warning(c: Comparison) -> list[str]:
    """That the floor is not known, when it is not."""
    return (
        []
        if c.reference("floor")
        else ["no floor was measured: how much of each KL is the engine's own noise is not known"]
    )


# ---- comparisons of tasks --------------------------------------------------------------------------------------------

#: Differences between two arms' shares of unreadable answers from which on a warning is due.
UNREADABLE_DIFFERENCE = 0.01


def worded_tasks(found: TaskComparisons) -> TaskComparisons:
    """The comparison with its reasons and warnings written in, as task-comparison.json has them."""
    tasks = [
        task.model_copy(
            update={"pairs": [pair.model_copy(update={"reason": task_reason(pair)}) for pair in task.pairs]}
        )
        for task in found.tasks
    ]
    return found.model_copy(update={"tasks": tasks, "warnings": task_warnings(found)})


def task_reason(pair: TaskPair) -> str:
    """Why a verdict on a task is what it is."""
    if pair.reason:
        return pair.reason
    if not pair.paired:
        low, high = pair.difference.low, pair.difference.high
        held = low is not None and high is not None and low <= 0 <= high
        return "the unpaired interval " + ("holds 0: not distinguishable" if held else "leaves 0")
    if pair.may_flip is not None:
        return f"no item flipped; up to {pair.may_flip:.1%} of items like these may"
    test = f"McNemar's exact p = {pair.p:.3g}"
    return test if pair.verdict in ("better", "worse") else f"{pair.lost} lost and {pair.won} won: {test}"


def task_warnings(found: TaskComparisons) -> list[str]:
    """What a reader must know before the accuracies, each thing once."""
    told = [f"{run.name} is {run.label}" for run in found.runs if run.label]
    told += [text for run in found.runs for text in _run_warnings(run)]
    told += [text for task in found.tasks for text in _one_task_warnings(found, task)]
    if found.teacher_lane is not None and found.teacher_lane != found.lane:
        told.append(f"the teacher was asked in the {found.teacher_lane} lane, the arms in the other")
    return list(dict.fromkeys([*told, *_contrary(found.tasks)]))


def _run_warnings(run: RunNotes) -> list[str]:
    told = [f"{run.name}: {task} was not run ({why})" for task, why in run.missing.items()]
    return told + [f"{run.name}: {entry} is not in every run" for entry in run.alone]


def _one_task_warnings(found: TaskComparisons, task: TaskComparison) -> list[str]:
    told = _reading_warnings(task)
    told += [f"{task.task}: not paired ({pair.why_not})" for pair in task.pairs if not pair.paired]
    if found.teacher is not None and len(task.teacher) < len(task.arms):
        told.append(f"{task.task}: the teacher's items are not those of every arm")
    return told


def _reading_warnings(task: TaskComparison) -> list[str]:
    """Answers that could not be read, and arms that differ in them."""
    rates = [arm.extraction_failure_rate for arm in task.arms if arm.extraction_failure_rate is not None]
    told = []
    if rates and max(rates) > 2 * UNREADABLE_DIFFERENCE:
        told.append(f"{task.task}: no answer could be read from {max(rates):.1%} of one arm's outputs")
    if rates and max(rates) - min(rates) > UNREADABLE_DIFFERENCE:
        told.append(f"{task.task}: the arms differ by {max(rates) - min(rates):.1%} in answers that cannot be read")
    return told


def _contrary(tasks: Sequence[TaskComparison]) -> list[str]:
    """Tasks that point different ways within noise have no winner."""
    told = []
    for pairs in zip(*(task.pairs for task in tasks), strict=True):
        signs = {np.sign(pair.difference.estimate) for pair in pairs} - {0.0}
        if len(signs) > 1 and all(pair.verdict in ("within noise", "equivalent") for pair in pairs):
            told.append(f"{pairs[0].other} - {pairs[0].baseline}: the tasks point different ways, within noise")
    return told
