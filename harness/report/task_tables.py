"""Tasks as tables: every task with n, ± and a verdict, for the report and the terminal, and as the card shows them.

Where both sides hold the same items the difference is paired (McNemar, flips); else it is not, and says so. Where the
teacher ran the task too, a second table holds each arm's answers against the teacher's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.compare.model import Estimated
from harness.compare.task_model import TaskComparison, TaskComparisons, TaskPair, TeacherAgreement
from harness.compare.task_pairing import TaskFolder, agreement_of
from harness.compare.tasks import compare_task_runs
from harness.errors import UsageError
from harness.numbers import MISSING, count, number, percent, signed, supported_decimals, with_interval
from harness.report.comparison_tables import BAR_WORDS, interval_text
from harness.report.table import Table
from harness.report.words import task_reason, task_warnings
from harness.tasks.receipt import TaskReceipt, plus_minus, selection

# ---- cells -----------------------------------------------------------------------------------------------------------


def points(figure: Estimated, decimals: int | None = None) -> str:
    """``+0.71 pp [-1.3, +2.7]``; without ``decimals`` as many as the interval supports."""
    if figure.low is None or figure.high is None:
        return f"{signed(100 * figure.estimate, 2)} pp"
    places = supported_decimals(100 * figure.low, 100 * figure.high) if decimals is None else decimals
    return f"{signed(100 * figure.estimate, places)} pp {interval_text(figure, 100.0)}"


def nats(figure: Estimated | None) -> str:
    """``-0.031 [-0.052, -0.010] nats``."""
    if figure is None or figure.low is None or figure.high is None:
        return MISSING
    places = supported_decimals(figure.low, figure.high)
    return f"{signed(figure.estimate, places)} {interval_text(figure)} nats"


def agreement_row(task: str, arm: TeacherAgreement) -> tuple[str, ...]:
    """One arm's answers against the teacher's, as in "Accuracy is Not All You Need" (arXiv 2407.09141)."""
    share = f"{percent(arm.share, 1)} [{100 * arm.low:.1f}, {100 * arm.high:.1f}]"
    flips = (count(arm.right_to_wrong), count(arm.wrong_to_right), count(arm.wrong_to_another_wrong))
    kl = with_interval(arm.choice_kl.estimate, arm.choice_kl) if arm.choice_kl else MISSING
    return (task, arm.arm, share, *flips, kl)


# ---- the report and the terminal -------------------------------------------------------------------------------------

HOW = (
    "Items are matched by the hashes of prompt and target. The interval of a difference is Student's t over items, "
    "and over subjects below it; better or worse needs McNemar's exact test, equivalent the suite's margin; all else "
    "is within noise."
)


def markdown(found: Sequence[TaskComparisons]) -> str:
    """The report's section about tasks; empty where there is none."""
    blocks = []
    for comparison in found:
        blocks += [table.section for table in tables(comparison)]
        lines = [*(f"deviation: {text}" for text in comparison.deviations), *task_warnings(comparison), HOW]
        blocks.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(blocks) + "\n" if blocks else ""


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
        rows.append((task.task, task.arms[0].which, *(plus_minus(arm.accuracy, arm.stderr) for arm in task.arms)))
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


def _pair_rows(task: TaskComparison, pair: TaskPair) -> list[tuple[str, ...]]:
    flips = MISSING if pair.lost is None or pair.won is None else f"{pair.lost} / {pair.won}"
    p = MISSING if pair.p is None else number(pair.p)
    verdict = f"{pair.verdict}: {task_reason(pair)}"
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


def agreement(found: TaskComparisons) -> Table:
    """Flips against the teacher's answers."""
    rows = [agreement_row(task.task, arm) for task in found.tasks for arm in task.teacher]
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


def bars(found: TaskComparisons) -> Table:
    """Bars of the registration on tasks, and what came out."""
    rows = [
        (bar.arm, bar.name, bar.statement, number(bar.value), number(bar.threshold), BAR_WORDS[bar.met])
        for bar in found.bars
    ]
    return Table("Bars of the registration on tasks", ("candidate", "bar", "condition", "value", "threshold", ""), rows)


def sentence(task: TaskComparison, pair: TaskPair) -> str:
    """``mmlu: B against A is within noise: +0.7 pp [-1.3, 2.7], 4 of 281 answers flipped each way ...``."""
    flips = "not paired" if pair.flips is None else f"{count(pair.flips)} of {count(pair.n)} outcomes flipped"
    return f"{task.task}: {pair.other} against {pair.baseline} is {pair.verdict}: {points(pair.difference)}, {flips}."


def sentences(found: TaskComparisons) -> list[str]:
    """One for every task and pair."""
    return [sentence(task, pair) for task in found.tasks for pair in task.pairs]


# ---- the card --------------------------------------------------------------------------------------------------------

NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """One benchmark: the teacher's value, one for each arm, and the subject's difference to the baseline."""

    name: str
    n: str
    teacher: str
    values: tuple[str, ...]
    difference: str = ""
    flips: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """The tables, what departs from the suite, and the subject's own runs for front matter and .eval_results.

    ``teacher`` is its name where it ran too, else empty.
    """

    arms: tuple[str, ...]
    teacher: str
    lines: list[TaskLine]
    agreement: list[tuple[str, ...]]
    notes: list[str]
    subject: list[TaskFolder]

    @property
    def table(self) -> Table:
        """The card's columns; the teacher's only where it ran too."""
        header = ("benchmark", "n", *self.arms, "difference", "flips", "verdict")
        rows = [(t.name, t.n, *t.values, t.difference, t.flips, t.verdict) for t in self.lines]
        sides = "lr" + "r" * len(self.arms) + "lll"
        if self.teacher:
            header = (*header[:2], "teacher", *header[2:])
            rows = [(*row[:2], t.teacher, *row[2:]) for row, t in zip(rows, self.lines, strict=True)]
            sides = "lr" + sides[1:]
        return Table("Task benchmarks", header, rows, sides=sides)

    @property
    def answers(self) -> Table:
        """Each arm's answers against the teacher's own."""
        header = (
            "benchmark",
            "model",
            "teacher's answer [95 %]",
            "right to wrong",
            "wrong to right",
            "wrong to another wrong",
            "KL over the choices, nats",
        )
        return Table("Against the teacher's own answers", header, self.agreement, sides="llrrrrr")


def task_table(
    runs: Sequence[TaskFolder], arms: Sequence[tuple[str, str]], subject: str, *, teacher: tuple[str, str] | None = None
) -> TaskTable | None:
    """Lay task runs beside the arms ``(name, weights digest)``; the baseline first, the subject last.

    Args:
        teacher: its name and weights digest; its own run may be among ``runs``.

    Raises:
        UsageError: a task run belongs to no arm.
    """
    if not runs:
        return None
    known = [run for run in runs if teacher is not None and _is_of(run.receipt, teacher)]
    by_arm: dict[str, list[TaskFolder]] = {}
    for run in runs:
        owner = _arm_of(run.receipt, arms, or_none=run in known)
        if owner is not None:
            by_arm.setdefault(owner, []).append(run)
    names = [name for name, _ in arms if name in by_arm and name != subject]
    names += [subject] if subject in by_arm else []
    found = _Runs(names=tuple(names), by_arm=by_arm, teacher=known)
    return _table(found, runs, subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """Task runs by arm, and the teacher's own."""

    names: tuple[str, ...]
    by_arm: dict[str, list[TaskFolder]]
    teacher: list[TaskFolder]


def _table(found: _Runs, runs: Sequence[TaskFolder], subject: str) -> TaskTable:
    of_arms = [run for name in found.names for run in found.by_arm[name]]
    entries = dict.fromkeys((run.receipt.suite.sha256, entry) for run in of_arms for entry in run.receipt.suite.entries)
    rows = [_rows(found, suite, entry) for suite, entry in entries]
    return TaskTable(
        arms=found.names,
        teacher=found.teacher[0].receipt.name if found.teacher else "",
        lines=[line for line, _, _ in rows],
        agreement=[line for _, lines, _ in rows for line in lines],
        notes=list(dict.fromkeys([*_notes(runs), *(text for _, _, texts in rows for text in texts)])),
        subject=found.by_arm.get(subject, []),
    )


def _notes(runs: Sequence[TaskFolder]) -> list[str]:
    """What the receipts say, with their names; what all of them say once and without."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for text in [*run.receipt.deviations, *run.receipt.notes]:
            said.setdefault(text, []).append(run.receipt.name)
    common = len(runs) > 1
    return [
        text if common and len(names) == len(runs) else f"{', '.join(names)}: {text}" for text, names in said.items()
    ]


def _is_of(receipt: TaskReceipt, model: tuple[str, str]) -> bool:
    """Whether a run is of the model with this name and weights digest."""
    name, digest = model
    weights = receipt.model.weights_sha256
    return (weights not in ("", "unknown") and weights == digest) or receipt.name == name


def _arm_of(receipt: TaskReceipt, arms: Sequence[tuple[str, str]], *, or_none: bool) -> str | None:
    for arm in arms:
        if _is_of(receipt, arm):
            return arm[0]
    if or_none:
        return None
    known = ", ".join(name for name, _ in arms)
    raise UsageError(
        f"the tasks of {receipt.name} belong to none of {known}, and it is not their teacher",
        "name tasks of the measured checkpoints, or --name them",
    )


def _rows(found: _Runs, suite: str, entry: str) -> tuple[TaskLine, list[tuple[str, ...]], list[str]]:
    """One entry of one suite; runs of another suite of the same task are another line."""
    have = {name: run for name in found.names if (run := _run_of(found.by_arm[name], suite, entry)) is not None}
    results = {name: run.result(entry) for name, run in have.items()}
    last = have[next(reversed(have))]
    teacher = _run_of(found.teacher, suite, entry)
    name = f"{last.alias(entry)} ({selection(last.receipt, entry)})"
    paired = len(found.names) > 1 and found.names[0] in have and found.names[-1] in have
    difference, flips, verdict, notes = (
        _difference(have[found.names[0]], have[found.names[-1]], entry) if paired else ("", "", "", [])
    )
    line = TaskLine(
        name=name,
        n=count(last.result(entry).n),
        teacher=teacher.result(entry).shown if teacher else NOT_RUN,
        values=tuple(results[arm].shown if arm in results else NOT_RUN for arm in found.names),
        difference=difference,
        flips=flips,
        verdict=verdict,
    )
    agreement = {arm: _agreement(name, arm, run, teacher, entry) for arm, run in have.items()} if teacher else {}
    unlike = [f"{arm}: its items of {entry} are not the teacher's" for arm, its in agreement.items() if its is None]
    return line, [its for its in agreement.values() if its is not None], [*notes, *unlike]


def _run_of(runs: Sequence[TaskFolder], suite: str, entry: str) -> TaskFolder | None:
    return next((r for r in runs if r.receipt.suite.sha256 == suite and r.receipt.result(entry) is not None), None)


def _difference(a: TaskFolder, b: TaskFolder, entry: str) -> tuple[str, str, str, list[str]]:
    """Difference in percentage points with its interval, flips, verdict, and warnings; paired where items are equal."""
    made = compare_task_runs([a.folder, b.folder])
    pair = next(task.pairs[0] for task in made.tasks if task.task == entry)
    change = points(pair.difference, 2)
    verdict = "undecided (within noise)" if pair.verdict == "within noise" else pair.verdict
    if not pair.paired:
        return change, "not paired", f"{verdict}, unpaired", task_warnings(made)
    flips = f"{pair.lost} lost, {pair.won} won of {count(pair.n)}; McNemar p = {number(pair.p, 3)}"
    if pair.margin_change is not None:
        flips += f"; margin of the right answer {nats(pair.margin_change)}"
    return change, flips, verdict, task_warnings(made)


def _agreement(name: str, arm: str, run: TaskFolder, teacher: TaskFolder, entry: str) -> tuple[str, ...] | None:
    """One arm's answers against the teacher's; None where they did not answer the same items."""
    found = agreement_of(run.folder, teacher.folder, entry)
    return None if found is None else agreement_row(name, found.model_copy(update={"arm": arm}))
