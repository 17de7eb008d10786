"""From counts to the results of tasks and groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.digest import json_digest
from harness.tasks.pooling import Count, pool
from harness.tasks.receipt import TaskResult


def leaf_result(task: str, count: Count, *, metric: str, original: int | None, **known: Any) -> TaskResult:
    """One task's result; ``known`` are further fields of `TaskResult`."""
    return TaskResult(
        name=task,
        kind="task",
        metric=metric,
        n=count.n,
        original=original,
        correct=count.correct,
        value=count.accuracy,
        stderr=count.stderr,
        **({"alias": task} | known),
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
