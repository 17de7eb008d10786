"""A tasks folder: accuracies and standard errors again from the items, groups again from their tasks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from harness.errors import IncomparableError, Refused
from harness.tasks.items import read_items
from harness.tasks.pooling import Count, pool
from harness.tasks.receipt import TaskReceipt, TaskResult, load_receipt
from harness.verify.outcome import Finding, Outcome


def verify_tasks(folder: Path) -> Outcome:
    """Check tasks.json against items.parquet; without items, groups and errors against the counts of their tasks."""
    receipt = load_receipt(folder)
    outcome = Outcome(name=f"tasks of {receipt.name}")
    try:
        items = read_items(folder, receipt)
    except (Refused, IncomparableError) as error:
        outcome.findings.append(Finding(where="items.parquet", stated=receipt.items_sha256, found=error.what))
        return outcome
    if items is None:
        outcome.unchecked.append("counts of the tasks: no items were published")
    else:
        outcome.compare("items", receipt.items, items.num_rows)
    again = {result.name: _again(receipt, result, items) for result in receipt.results}
    stated = {
        result.name: {field: getattr(result, field) for field in again[result.name]} for result in receipt.results
    }
    outcome.compare("results", stated, again)
    return outcome


def _again(receipt: TaskReceipt, result: TaskResult, items: pa.Table | None) -> dict[str, float | int | None]:
    counts = [_count(leaf, items) for leaf in receipt.leaves(result.name)]
    pooled = pool(counts)
    found: dict[str, float | int | None] = {
        "n": pooled.n,
        "correct": pooled.correct,
        "value": pooled.accuracy,
        "stderr": pooled.stderr if result.kind == "group" else counts[0].stderr,
    }
    return found | ({"macro": pooled.macro} if result.macro is not None else {})


def _count(leaf: TaskResult, items: pa.Table | None) -> Count:
    """Right answers of one task, under the filter of its primary metric."""
    if items is None:
        return Count(leaf.correct, leaf.n)
    wanted = leaf.metric.partition(",")[2] or "none"
    columns = (items[name].to_pylist() for name in ("task", "filter", "correct"))
    right = [correct for task, name, correct in zip(*columns, strict=True) if task == leaf.name and name == wanted]
    return Count(sum(right), len(right))
