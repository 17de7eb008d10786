"""Two models on the same task items: flips, McNemar's exact test, paired intervals, and agreement with the teacher.

"Within noise" is a verdict. An accuracy moves only when an answer flips; the margin of the right answer and the
divergence over the choices move before that, and are printed beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from harness.compare.model import BarOutcome, Comparison, Estimated
from harness.compare.task_model import RunNotes, TaskArm, TaskComparison, TaskComparisons, TaskPair, Verdict
from harness.compare.task_pairing import (
    TaskFolder,
    TaskRun,
    agreement_with,
    choices_of,
    in_lane,
    load_task_run,
    load_task_runs,
    load_tasks,
    paired_items,
)
from harness.compare.task_pairing import require_comparable as require_same_tasks
from harness.measure.receipt import SideIdentity, load_measurement, same_model
from harness.registration import Registration, check_bars, task_deviations
from harness.stats import (
    Estimate,
    ItemComparison,
    clopper_pearson,
    compare_items,
    decide,
    detectable_difference,
    group_totals,
    newcombe,
    p_of_difference,
    t_interval,
    wilson,
)
from harness.tasks.receipt import TASKS_FILE, TaskResult, selection

#: Largest difference of accuracy that does not matter, where the suite fixes none.
MARGIN = 0.01
ALPHA = 0.05


def compare_task_runs(paths: Sequence[Path], *, teacher: Path | None = None) -> TaskComparisons:
    """Compare task runs; the first is the baseline.

    Args:
        teacher: the teacher's own run of the same suite.

    Raises:
        IncomparableError: they did not ask the same.
    """
    runs = load_task_runs(paths)
    entries = require_same_tasks(runs)
    known = load_task_run(teacher) if teacher else None
    if known is not None:
        require_same_tasks([known, *in_lane(runs, known)])
    first = runs[0].receipt
    tasks = [_task(entry, runs, known, first.suite.margins.get(entry, MARGIN)) for entry in entries]
    return TaskComparisons(
        suite=first.suite.name,
        suite_sha256=first.suite.sha256,
        primary=entries[0],
        lane=first.lane,
        arms=[run.name for run in runs],
        keys=[run.receipt.key for run in runs],
        teacher=known.name if known else None,
        teacher_key=known.receipt.key if known else None,
        tasks=tasks,
        deviations=[f"{run.name}: {text}" for run in runs for text in run.receipt.deviations],
        teacher_lane=known.receipt.lane if known else None,
        runs=[_notes(run, entries) for run in runs],
    )


def _notes(run: TaskRun, entries: Sequence[str]) -> RunNotes:
    receipt = run.receipt
    return RunNotes(
        name=run.name,
        label=receipt.label,
        missing={missing.task: missing.why for missing in receipt.missing},
        alone=[entry for entry in receipt.suite.entries if entry not in entries],
    )


def _task(entry: str, runs: Sequence[TaskRun], teacher: TaskRun | None, margin: float) -> TaskComparison:
    results = [_known(run, entry) for run in runs]
    agreement = [agreement_with(teacher, run, entry) for run in runs] if teacher else []
    return TaskComparison(
        task=entry,
        metric=results[0].metric,
        tasks=len(runs[0].receipt.leaves(entry)),
        arms=[_arm(run, result, entry) for run, result in zip(runs, results, strict=True)],
        pairs=[_pair(entry, runs[0], run, margin) for run in runs[1:]],
        teacher=[found for found in agreement if found is not None],
    )


def _known(run: TaskRun, entry: str) -> TaskResult:
    found = run.receipt.result(entry)
    assert found is not None
    return found


def _arm(run: TaskRun, result: TaskResult, entry: str) -> TaskArm:
    low, high = wilson(result.correct, result.n)
    return TaskArm(
        name=run.name,
        key=run.receipt.key,
        n=result.n,
        correct=result.correct,
        accuracy=result.value,
        stderr=result.stderr,
        low=low,
        high=high,
        macro=result.macro,
        which=selection(run.receipt, entry),
        extraction_failure_rate=result.extraction_failure_rate,
        truncation_rate=result.truncation_rate,
    )


# ---- pairs -----------------------------------------------------------------------------------------------------------


def _pair(entry: str, base: TaskRun, other: TaskRun, margin: float) -> TaskPair:
    items = paired_items(base, other, entry)
    if isinstance(items, str):
        return _unpaired(_known(base, entry), _known(other, entry), base.name, other.name, items, margin)
    a, b = items
    subjects = a.index.get_level_values("task").to_numpy()
    several = len(set(subjects)) > 1
    found = compare_items(a.correct.to_numpy(), b.correct.to_numpy(), subjects if several else None)
    verdict, reason = judge(found, margin)
    change, by_subject = _margin_change(a, b, subjects if several else None)
    return TaskPair(
        baseline=base.name,
        other=other.name,
        paired=True,
        why_not="",
        n=found.n,
        difference=Estimated.of(found.difference),
        bootstrap=Estimated.of(found.bootstrap),
        by_subject=Estimated.of(found.by_cluster) if found.by_cluster else None,
        p=found.p,
        lost=found.a_only,
        won=found.b_only,
        same_choice=int((choices_of(a) == choices_of(b)).sum()),
        margin_change=Estimated.of(change) if change else None,
        margin_change_by_subject=Estimated.of(by_subject) if by_subject else None,
        p_margin_change=p_of_difference(change) if change and change.standard_error is not None else None,
        detectable=_detectable(found),
        margin=margin,
        verdict=verdict,
        may_flip=None if found.a_only or found.b_only else may_flip(found),
        reason=reason,
    )


def judge(found: ItemComparison, margin: float) -> tuple[Verdict, str]:
    """Better or worse needs McNemar's exact test; equivalent needs the margin; all else is within noise.

    The second is the reason that `decide` gives where the verdict is its own, else empty.
    """
    if found.a_only + found.b_only == 0:
        return "equivalent" if may_flip(found) <= margin else "within noise", ""
    decision = decide(found.difference, margin, lower_is_better=False)
    if decision.verdict == "equivalent":
        return "equivalent", decision.reason
    if decision.verdict in ("better", "worse") and found.p < ALPHA:
        return decision.verdict, ""
    return "within noise", ""


def may_flip(found: ItemComparison) -> float:
    """The largest share of items like these that may flip where none did, by Clopper and Pearson's interval."""
    return clopper_pearson(0, found.n)[1]


def _detectable(found: ItemComparison) -> float | None:
    """Smallest true difference that so many items with so many flips show with 80 % power; None without a flip."""
    error = found.difference.standard_error
    if not error:
        return None
    return detectable_difference(error * np.sqrt(found.n), found.n)


def _margin_change(
    a: pd.DataFrame, b: pd.DataFrame, subjects: np.ndarray | None
) -> tuple[Estimate | None, Estimate | None]:
    change_N = (b.margin - a.margin).to_numpy(dtype=float)
    finite_N = np.isfinite(change_N)
    if finite_N.sum() < 2:
        return None, None
    by_item = t_interval(group_totals(change_N[finite_N], np.arange(int(finite_N.sum()))), unit="item")
    if subjects is None:
        return by_item, None
    return by_item, t_interval(group_totals(change_N[finite_N], subjects[finite_N]), unit="subject")


def _unpaired(base: TaskResult, other: TaskResult, name: str, second: str, why: str, margin: float) -> TaskPair:
    """Two accuracies of items that cannot be matched: the interval of two independent samples."""
    low, high = newcombe((base.correct, base.n), (other.correct, other.n))
    verdict: Verdict = "within noise" if low <= 0 <= high else ("better" if low > 0 else "worse")
    figure = Estimated(
        estimate=other.value - base.value,
        low=low,
        high=high,
        method="Newcombe's, unpaired",
        confidence=0.95,
        unit="item",
        n=min(base.n, other.n),
        note=f"not paired: {why}",
    )
    return TaskPair(
        baseline=name,
        other=second,
        paired=False,
        why_not=why,
        n=figure.n,
        difference=figure,
        bootstrap=None,
        by_subject=None,
        p=None,
        lost=None,
        won=None,
        same_choice=None,
        margin_change=None,
        margin_change_by_subject=None,
        p_margin_change=None,
        detectable=None,
        margin=margin,
        verdict=verdict,
    )


# ---- task runs that belong to measurements, found by the digest of the weights in the run folders or beside them -----

#: How a registered bar names a task's accuracy.
PREFIX = "tasks."


def is_task_run(path: Path) -> bool:
    """Whether a folder (or tasks.json itself) holds tasks and no measurement."""
    folder = path if path.is_dir() else path.parent
    return (folder / TASKS_FILE).is_file() and not (folder / "measurement.json").is_file()


def tasks_of_comparison(comparison: Comparison, runs: Sequence[Path]) -> list[TaskComparisons]:
    """One comparison for every suite that all arms have run, the teacher's own run beside them where there is one.

    Args:
        runs: the arms' run folders, in order; task runs are looked for in them and beside them.
    """
    around = _around(runs)
    registration = _registration(runs)
    made = []
    for suite in dict.fromkeys((run.receipt.suite.name, run.receipt.suite.sha256) for run in around):
        of_suite = [run for run in around if (run.receipt.suite.name, run.receipt.suite.sha256) == suite]
        arms = [_best(of_suite, arm.candidate) for arm in comparison.arms]
        present = [arm for arm in arms if arm is not None]
        if len(present) == len(arms):
            teacher = _best(of_suite, comparison.teacher)
            found = compare_task_runs([run.folder for run in present], teacher=teacher.folder if teacher else None)
            found = renamed(found, [arm.name for arm in comparison.arms])
            made.append(registered(found, registration, present[-1].receipt.limit))
    return made


def _around(runs: Sequence[Path]) -> list[TaskFolder]:
    """Every task run in the folders or beside them, once, in the order of names."""
    folders = [(run if run.is_dir() else run.parent).resolve() for run in runs]
    places = {p for f in folders for p in (f, *f.iterdir(), *f.parent.iterdir()) if (p / TASKS_FILE).is_file()}
    return load_tasks(sorted(places))


def _best(runs: Sequence[TaskFolder], model: SideIdentity) -> TaskFolder | None:
    """The run of this model: a complete one before a partial one, then the one with more items."""
    mine = [run for run in runs if same_model(run.receipt.model, model)]
    return max(mine, key=lambda run: (run.receipt.status == "complete", run.receipt.items), default=None)


def renamed(made: TaskComparisons, names: Sequence[str]) -> TaskComparisons:
    """The arms by the names that the comparison of measurements gives them."""
    called = dict(zip(made.arms, names, strict=True))
    tasks = [
        task.model_copy(
            update={
                "arms": [arm.model_copy(update={"name": called[arm.name]}) for arm in task.arms],
                "pairs": [
                    pair.model_copy(update={"baseline": called[pair.baseline], "other": called[pair.other]})
                    for pair in task.pairs
                ],
                "teacher": [arm.model_copy(update={"arm": called[arm.arm]}) for arm in task.teacher],
            }
        )
        for task in made.tasks
    ]
    runs = [run.model_copy(update={"name": called[run.name]}) for run in made.runs]
    return made.model_copy(update={"arms": list(names), "tasks": tasks, "runs": runs})


def _registration(runs: Sequence[Path]) -> Registration | None:
    """The registration that the measurements carry; whether it is intact is the comparison's own business."""
    for run in runs:
        block = load_measurement(run).registration
        if block and "content" in block:
            return Registration.model_validate(block["content"])
    return None


def registered(
    found: TaskComparisons, registration: Registration | None, limits: Mapping[str, int | None]
) -> TaskComparisons:
    """With the registered bars on tasks, and what departs from the tasks that were registered."""
    if registration is None:
        return found
    ran = {task.task: limits.get(task.task) for task in found.tasks}
    departed = [f"registration: {t}" for t in task_deviations(registration, ran)] if registration.tasks else []
    return found.model_copy(update={"bars": _bars(found, registration), "deviations": [*found.deviations, *departed]})


def _bars(found: TaskComparisons, registration: Registration) -> list[BarOutcome]:
    values = [{f"{PREFIX}{task.task}": task.arms[at].accuracy for task in found.tasks} for at in range(len(found.arms))]
    return [
        BarOutcome(
            arm=name, name=bar.name, statement=bar.statement, value=bar.value, threshold=bar.threshold, met=bar.met
        )
        for name, own in zip(found.arms[1:], values[1:], strict=True)
        for bar in check_bars(registration, own, values[0])
        if bar.statement.startswith(PREFIX)
    ]
