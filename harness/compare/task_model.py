"""task-comparison.json: two or more models on the same task items. The first arm is the baseline.

Warnings and the reasons of verdicts follow from the other fields: `harness.report.words` writes them into the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, RootModel

from harness.compare.model import BarOutcome, Estimated
from harness.records import Sealed, Strict, load_json
from harness.store import write_receipt

TASK_COMPARISON_FILE = "task-comparison.json"
Verdict = Literal["better", "worse", "equivalent", "within noise"]


class TaskArm(Strict):
    """One model on one task or group: ``stderr`` is lm-eval's, ``low`` and ``high`` Wilson's interval."""

    name: str
    key: str
    n: int
    correct: int
    accuracy: float
    stderr: float | None
    low: float
    high: float
    macro: float | None
    which: str
    extraction_failure_rate: float | None
    truncation_rate: float | None


class TeacherAgreement(Strict):
    """One arm against the teacher's own answers, item by item.

    ``choice_kl`` is KL(teacher||candidate) over the choices of an item, mean in nats: it moves before an answer does.
    """

    arm: str
    n: int
    same_choice: int
    low: float
    high: float
    right_to_wrong: int
    wrong_to_right: int
    wrong_to_another_wrong: int
    choice_kl: Estimated | None

    @property
    def share(self) -> float:
        """Share of items with the teacher's choice."""
        return self.same_choice / self.n


class TaskPair(Strict):
    """One candidate against the baseline. Without pairing only ``difference`` (Newcombe's, unpaired) is there.

    ``lost`` are items that only the baseline answers right, ``won`` those that only the candidate does.
    ``margin_change`` is the mean change of the right answer's log-likelihood over the best wrong one, in nats.
    ``may_flip`` is the largest share of items like these that may flip, where none did. ``reason`` is that of
    `harness.stats.decide`, where a verdict rests on it.
    """

    baseline: str
    other: str
    paired: bool
    why_not: str
    n: int
    difference: Estimated
    bootstrap: Estimated | None
    by_subject: Estimated | None
    p: float | None
    lost: int | None
    won: int | None
    same_choice: int | None
    margin_change: Estimated | None
    margin_change_by_subject: Estimated | None
    p_margin_change: float | None
    detectable: float | None
    margin: float
    verdict: Verdict
    may_flip: float | None = None
    reason: str = ""

    @property
    def flips(self) -> int | None:
        """Items whose outcome changed, either way."""
        return None if self.lost is None or self.won is None else self.lost + self.won


class TaskComparison(Strict):
    """One entry of a suite over all arms."""

    task: str
    metric: str
    tasks: int
    arms: list[TaskArm]
    pairs: list[TaskPair]
    teacher: list[TeacherAgreement] = Field(default_factory=list)


class RunNotes(Strict):
    """What is said of one arm's run: its label, tasks that were not run and why, entries that not every run has."""

    name: str
    label: str
    missing: dict[str, str]
    alone: list[str]


class TaskComparisons(Sealed):
    format: Literal["exl3-fidelity/task-comparison/1"] = "exl3-fidelity/task-comparison/1"
    suite: str
    suite_sha256: str
    primary: str
    lane: Literal["weights", "served"]
    arms: list[str]
    keys: list[str]
    teacher: str | None
    teacher_key: str | None
    teacher_lane: Literal["weights", "served"] | None = None
    runs: list[RunNotes] = Field(default_factory=list)
    tasks: list[TaskComparison]
    bars: list[BarOutcome] = Field(default_factory=list)
    deviations: list[str] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)


def save_task_comparisons(folder: Path, found: list[TaskComparisons]) -> None:
    """Write task-comparison.json: one entry a suite."""
    write_receipt(folder / TASK_COMPARISON_FILE, [comparison.model_dump() for comparison in found])


class _File(RootModel[list[TaskComparisons]]):
    """task-comparison.json as a whole."""


def load_task_comparisons(path: Path) -> list[TaskComparisons]:
    """Read task-comparison.json from its folder or from the file itself."""
    file = path / TASK_COMPARISON_FILE if path.is_dir() else path
    return load_json(file, _File, "name a folder that `fidelity compare` wrote, or compare again").root
