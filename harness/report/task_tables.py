"""The tables of a task comparison as plain text cells, and its sentences."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.model import Figure
from harness.compare.task_model import ItemPair, TaskComparison, TaskComparisons, TeacherAgreement
from harness.numbers import MISSING, count, number, percent, signed, supported_decimals
from harness.report.comparison_tables import interval_text
from harness.report.table import Table


def tables(found: TaskComparisons) -> list[Table]:
    """Accuracies, one table of differences for each pair, and agreement with the teacher."""
    made = [accuracies(found)]
    made += [differences(found, at) for at in range(len(found.arms) - 1)]
    if any(task.teacher for task in found.tasks):
        made.append(agreement(found))
    if found.bars:
        made.append(bars(found))
    return made


def accuracies(found: TaskComparisons) -> Table:
    """Every task of every arm with lm-eval's own standard error; groups as micro and macro averages."""
    rows = []
    for task in found.tasks:
        rows.append((task.task, task.arms[0].which, *(arm.shown for arm in task.arms)))
        if task.arms[0].macro is not None:
            macro = [MISSING if arm.macro is None else f"{arm.macro:.4f}" for arm in task.arms]
            rows.append((f"  macro, mean of {task.tasks} tasks", "", *macro))
        if task.arms[0].extraction_failure_rate is not None:
            rows.append(("  answers not read", "", *(_rate(arm.extraction_failure_rate) for arm in task.arms)))
            rows.append(("  cut off", "", *(_rate(arm.truncation_rate) for arm in task.arms)))
    title = f"Tasks, suite {found.suite}: accuracy ± one standard error"
    return Table(title, ("task", "items", *found.arms), rows)


def _rate(share: float | None) -> str:
    return MISSING if share is None else percent(share)


def differences(found: TaskComparisons, at: int) -> Table:
    """One candidate against the baseline on every task."""
    first = found.tasks[0].pairs[at]
    rows = [row for task in found.tasks for row in _pair_rows(task, task.pairs[at])]
    header = ("task", "difference [95 %]", "lost / won", "p (McNemar)", "margin of the right answer", "verdict and why")
    return Table(f"{first.other} - {first.baseline}, item by item", header, rows)


def _pair_rows(task: TaskComparison, pair: ItemPair) -> list[tuple[str, ...]]:
    flips = MISSING if pair.lost is None or pair.won is None else f"{pair.lost} / {pair.won}"
    p = MISSING if pair.p is None else number(pair.p)
    verdict = f"{pair.verdict}: {pair.reason}"
    rows: list[tuple[str, ...]] = [(task.task, points(pair.difference), flips, p, nats(pair.margin_change), verdict)]
    if pair.bootstrap is not None:
        rows.append(("  paired bootstrap over items", points(pair.bootstrap), "", "", "", ""))
    if pair.by_subject is not None:
        by_subject = f"  by subject ({pair.by_subject.n})"
        rows.append((by_subject, points(pair.by_subject), "", "", nats(pair.margin_change_by_subject), ""))
    if pair.detectable is not None:
        shown = f"{100 * pair.detectable:.2g} pp"
        rows.append(("  smallest difference shown with 80 % power", shown, "", "", "", ""))
    return rows


def points(figure: Figure) -> str:
    """``+0.71 pp [-1.3, +2.7]``."""
    if figure.low is None or figure.high is None:
        return f"{signed(100 * figure.estimate, 2)} pp"
    places = supported_decimals(100 * figure.low, 100 * figure.high)
    return f"{signed(100 * figure.estimate, places)} pp {interval_text(figure, 100.0)}"


def nats(figure: Figure | None) -> str:
    """``-0.031 [-0.052, -0.010] nats``."""
    if figure is None or figure.low is None or figure.high is None:
        return MISSING
    places = supported_decimals(figure.low, figure.high)
    return f"{signed(figure.estimate, places)} {interval_text(figure)} nats"


def agreement(found: TaskComparisons) -> Table:
    """Flips against the teacher's answers, as in "Accuracy is Not All You Need" (arXiv 2407.09141)."""
    rows = [_agreement_row(task, arm) for task in found.tasks for arm in task.teacher]
    header = (
        "task",
        "candidate",
        "the teacher's choice [95 %]",
        "right to wrong",
        "wrong to right",
        "wrong to another wrong",
        "KL over the choices, mean nats",
    )
    return Table(f"Against the teacher {found.teacher}", header, rows)


def _agreement_row(task: TaskComparison, arm: TeacherAgreement) -> tuple[str, ...]:
    share = f"{percent(arm.share, 1)} [{100 * arm.low:.1f}, {100 * arm.high:.1f}]"
    flips = (count(arm.right_to_wrong), count(arm.wrong_to_right), count(arm.wrong_to_another_wrong))
    kl = MISSING
    if arm.choice_kl is not None:
        kl = f"{number(arm.choice_kl.estimate)} {interval_text(arm.choice_kl)}".removesuffix(f" {MISSING}")
    return (task.task, arm.arm, share, *flips, kl)


def bars(found: TaskComparisons) -> Table:
    """Registered bars on tasks and what came out."""
    words = {True: "met", False: "NOT met", None: "not measured"}
    rows = [
        (bar.arm, bar.name, bar.statement, number(bar.value), number(bar.threshold), words[bar.met])
        for bar in found.bars
    ]
    return Table("Registered bars on tasks", ("candidate", "bar", "condition", "value", "threshold", ""), rows)


def sentence(task: TaskComparison, pair: ItemPair) -> str:
    """``mmlu: B against A is within noise: +0.7 pp [-1.3, 2.7], 4 of 281 answers flipped each way ...``."""
    flips = "not paired" if pair.flips is None else f"{count(pair.flips)} of {count(pair.n)} outcomes flipped"
    return f"{task.task}: {pair.other} against {pair.baseline} is {pair.verdict}: {points(pair.difference)}, {flips}."


def sentences(found: TaskComparisons) -> list[str]:
    """One for every task and pair."""
    return [sentence(task, pair) for task in found.tasks for pair in task.pairs]


def markdown(found: Sequence[TaskComparisons]) -> str:
    """The report's section about tasks; empty where there is none."""
    blocks = []
    for comparison in found:
        blocks += [table.section for table in tables(comparison)]
        lines = [*(f"deviation: {text}" for text in comparison.deviations), *comparison.warnings, HOW]
        blocks.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(blocks) + "\n" if blocks else ""


HOW = (
    "Items are matched by the hashes of prompt and target. The interval of a difference is Student's t over items, "
    "and over subjects below it; better or worse needs McNemar's exact test, equivalent the suite's margin; all else "
    "is within noise."
)
