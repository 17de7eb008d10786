"""tasks.json: what a suite found for one model. Hashes and numbers only: no question, answer, path, host or time.

Beside it lies items.parquet, one line an item (`harness.tasks.items.SCHEMA`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from harness.digest import json_digest
from harness.measure.receipt import SideIdentity
from harness.records import Sealed, Strict, load_json
from harness.store import write_receipt
from harness.types import Check

TASKS_FILE = "tasks.json"
ITEMS = "items.parquet"


class SuiteIdentity(Strict):
    """``sha256`` is the digest of the suite's meaning; ``sealed`` says whether every prompt was the sealed one.

    ``margins`` are the largest differences of accuracy that do not matter, by entry, as the suite fixes them.
    """

    name: str
    sha256: str
    sealed: bool
    entries: list[str]
    margins: dict[str, float] = Field(default_factory=dict)


class Value(Strict):
    """One metric of lm-eval, such as ``acc,none``, with its own standard error."""

    value: float
    stderr: float | None


class TaskResult(Strict):
    """One task, or one group of tasks.

    ``value`` is the primary metric (micro average of a group), ``macro`` the mean over a group's tasks. ``stderr``
    is pooled as lm-eval does. ``task_hash`` is lm-eval's digest of all its documents, prompts and targets,
    ``prompts_sha256`` that of prompts and targets alone; ``config_sha256`` that of the task's own definition.
    """

    name: str
    alias: str
    kind: Literal["task", "group"]
    tasks: list[str] = Field(default_factory=list)
    metric: str
    n: int
    original: int | None
    correct: int
    value: float
    stderr: float | None
    macro: float | None = None
    metrics: dict[str, Value] = Field(default_factory=dict)
    version: str = ""
    num_fewshot: int | None = None
    config_sha256: str = ""
    task_hash: str = ""
    prompts_sha256: str = ""
    data: str = ""
    extraction_failures: int | None = None
    truncations: int | None = None

    @property
    def shown(self) -> str:
        """``0.8342 ± 0.0105``."""
        return plus_minus(self.value, self.stderr)

    @property
    def extraction_failure_rate(self) -> float | None:
        """Share of answers from which nothing could be read; None for tasks scored by log-likelihood."""
        return None if self.extraction_failures is None else self.extraction_failures / self.n

    @property
    def truncation_rate(self) -> float | None:
        """Share of answers cut off at the token limit; None for tasks scored by log-likelihood."""
        return None if self.truncations is None else self.truncations / self.n


class Missing(Strict):
    """A task of the suite that was not run, and why."""

    task: str
    why: str


class TaskReceipt(Sealed):
    format: Literal["exl3-fidelity/tasks/1"] = "exl3-fidelity/tasks/1"
    key: str
    name: str
    status: Literal["complete", "partial"]
    lane: Literal["weights", "served"]
    suite: SuiteIdentity
    model: SideIdentity
    limit: dict[str, int | None]
    seeds: dict[str, int]
    chat_template: bool = False
    results: list[TaskResult]
    missing: list[Missing] = Field(default_factory=list)
    items: int
    items_sha256: str
    preflight: list[Check] = Field(default_factory=list)
    environment: dict[str, str]
    deviations: list[str] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    def result(self, name: str) -> TaskResult | None:
        """The result of one task or group."""
        return next((result for result in self.results if result.name == name), None)

    def leaves(self, name: str) -> list[TaskResult]:
        """The tasks of a group, or the task itself."""
        result = self.result(name)
        if result is None:
            return []
        return [result] if result.kind == "task" else [leaf for leaf in map(self.result, result.tasks) if leaf]

    @property
    def label(self) -> str:
        """Empty for a complete run."""
        return "" if self.status == "complete" else self.status


def selection(receipt: TaskReceipt, entry: str) -> str:
    """Which items were asked: ``57 x first 20``, ``all 198`` (a limit is no sample).

    Development questions say so: they are not the benchmark that the task's name stands for.
    """
    result, limit = receipt.result(entry), receipt.limit.get(entry)
    if result is None:
        return ""
    whole = result.original if result.original is not None else result.n
    kind = " development questions" if result.data == "wheel" else ""
    if limit is None or result.n == whole:
        return f"all {result.n:,}{kind}"
    leaves = len(receipt.leaves(entry))
    return (f"{leaves} x first {limit}" if leaves > 1 else f"first {result.n:,} of {whole:,}") + kind


def save_receipt(folder: Path, receipt: TaskReceipt) -> None:
    """Write tasks.json; it comes last, so its existence means that the run is whole."""
    write_receipt(folder / TASKS_FILE, receipt.model_dump())


def load_receipt(path: Path, *, checked: bool = True) -> TaskReceipt:
    """Read tasks.json from its folder or from the file itself."""
    file = path / TASKS_FILE if path.is_dir() else path
    return load_json(
        file, TaskReceipt, "name a folder that `fidelity tasks` wrote, or run the tasks again", seal=checked
    )


# ---- from counts to results ------------------------------------------------------------------------------------------


def leaf_result(task: str, count: Count, *, metric: str, original: int | None, **fields: Any) -> TaskResult:
    """One task's result; ``fields`` are further ones of `TaskResult`."""
    return TaskResult(
        name=task,
        kind="task",
        metric=metric,
        n=count.n,
        original=original,
        correct=count.correct,
        value=count.accuracy,
        stderr=count.stderr,
        **({"alias": task} | fields),
    )


def group_result(name: str, leaves: Sequence[TaskResult], *, alias: str = "", version: str = "") -> TaskResult:
    """A group's result, pooled over its leaves."""
    pooled = pool([Count(leaf.correct, leaf.n) for leaf in leaves])
    originals = [leaf.original for leaf in leaves if leaf.original is not None]
    return TaskResult(
        name=name,
        alias=alias or name,
        kind="group",
        tasks=[leaf.name for leaf in leaves],
        metric=leaves[0].metric,
        n=pooled.n,
        original=sum(originals) if len(originals) == len(leaves) else None,
        correct=pooled.correct,
        value=pooled.accuracy,
        stderr=pooled.stderr,
        macro=pooled.macro,
        version=version,
        num_fewshot=leaves[0].num_fewshot if len({leaf.num_fewshot for leaf in leaves}) == 1 else None,
        config_sha256=_joined([leaf.config_sha256 for leaf in leaves]),
        task_hash=_joined([leaf.task_hash for leaf in leaves]),
        prompts_sha256=_joined([leaf.prompts_sha256 for leaf in leaves]),
        data=leaves[0].data,
        extraction_failures=_total([leaf.extraction_failures for leaf in leaves]),
        truncations=_total([leaf.truncations for leaf in leaves]),
    )


def _total(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _joined(digests: Sequence[str]) -> str:
    """Digest over the leaves' digests; empty where one has none."""
    return json_digest(list(digests)) if all(digests) else ""


@dataclass(frozen=True, slots=True)
class Count:
    """Items answered right, of all items of one task."""

    correct: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.n or self.n < 1:
            raise ValueError(f"{self.correct} of {self.n} is no count")

    @property
    def accuracy(self) -> float:
        """Share of items answered right."""
        return self.correct / self.n

    @property
    def stderr(self) -> float | None:
        """Standard error of the accuracy (sample variance); None for one item."""
        if self.n < 2:
            return None
        return math.sqrt(self.accuracy * (1 - self.accuracy) / (self.n - 1))


@dataclass(frozen=True, slots=True)
class Pooled:
    """A group: ``accuracy`` over items, ``macro`` over tasks, and the pooled standard error."""

    correct: int
    n: int
    tasks: int
    accuracy: float
    macro: float
    stderr: float | None


def pool(counts: Sequence[Count]) -> Pooled:
    """Pool the leaves of a group; the standard error is None where a leaf has one item only."""
    if not counts:
        raise ValueError("a group needs a task")
    correct, n = sum(c.correct for c in counts), sum(c.n for c in counts)
    return Pooled(
        correct=correct,
        n=n,
        tasks=len(counts),
        accuracy=correct / n,
        macro=sum(c.accuracy for c in counts) / len(counts),
        stderr=pooled_stderr([c.stderr for c in counts], [c.n for c in counts]),
    )


def pooled_stderr(stderrs: Sequence[float | None], sizes: Sequence[int]) -> float | None:
    """lm-eval's ``pooled_sample_stderr``."""
    if any(error is None for error in stderrs) or sum(sizes) == len(sizes):
        return None
    weighted = sum((n - 1) * n * error**2 for n, error in zip(sizes, stderrs, strict=True) if error is not None)
    return math.sqrt(weighted / (sum(sizes) - len(sizes)) / sum(sizes))


def plus_minus(value: float, stderr: float | None, decimals: int = 4) -> str:
    """``0.8342 ± 0.0105``: one standard error, as published cards print it."""
    if stderr is None:
        return f"{value:.{decimals}f}"
    return f"{value:.{decimals}f} ± {stderr:.{decimals}f}"
