"""Task runs that belong to measurements: found by the digest of the weights, beside or inside the run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.compare.items import compare_task_runs
from harness.compare.items_model import TaskComparisons
from harness.compare.model import BarOutcome, Comparison
from harness.receipt import load_measurement
from harness.registration import Registration, check_bars, task_deviations
from harness.tasks.receipt import FILE, TaskReceipt, load_receipt

#: What stands for weights that nobody digested.
UNKNOWN = "unknown"
#: How a registered bar names a task's accuracy.
PREFIX = "tasks."


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A task run and where it lies."""

    folder: Path
    receipt: TaskReceipt


def is_task_run(path: Path) -> bool:
    """Whether a folder (or tasks.json itself) holds tasks and no measurement."""
    folder = path if path.is_dir() else path.parent
    return (folder / FILE).is_file() and not (folder / "measurement.json").is_file()


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
        arms = [_best(of_suite, arm.candidate.weights_sha256) for arm in comparison.arms]
        present = [arm for arm in arms if arm is not None]
        if len(present) == len(arms):
            teacher = _best(of_suite, comparison.teacher.weights_sha256)
            found = compare_task_runs([run.folder for run in present], teacher=teacher.folder if teacher else None)
            found = renamed(found, [arm.name for arm in comparison.arms])
            made.append(registered(found, registration, present[-1].receipt.limit))
    return made


def _around(runs: Sequence[Path]) -> list[Found]:
    """Every task run in the folders or beside them, once, in the order of names."""
    folders = [(run if run.is_dir() else run.parent).resolve() for run in runs]
    places = {p for f in folders for p in (f, *f.iterdir(), *f.parent.iterdir()) if (p / FILE).is_file()}
    return [Found(folder=place, receipt=load_receipt(place)) for place in sorted(places)]


def _best(runs: Sequence[Found], weights: str) -> Found | None:
    """The run of these weights: a complete one before a partial one, then the one with more items."""
    mine = [run for run in runs if run.receipt.model.weights_sha256 == weights != UNKNOWN]
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
    return made.model_copy(update={"arms": list(names), "tasks": tasks})


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
    """With the registered bars on tasks, and what departs from the tasks that were registered (FAULTS B 47)."""
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
