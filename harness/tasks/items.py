"""items.parquet: what one model made of every item, in hashes and numbers. No text of a question or an answer.

``loglikelihoods`` are those of the choices in nats, ``chosen`` the likeliest of them and ``margin`` that of the right
answer over the best wrong one; for tasks that generate, ``answer_hash`` stands for the answer that was read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.digest import file_digest
from harness.errors import IncomparableError, Refused, UsageError
from harness.store import write_table
from harness.tasks.receipt import ITEMS, TaskReceipt

Outcome = Literal["right", "wrong", "unparsable", "truncated"]
#: What lm-eval's regular-expression filters return where nothing matches.
NOTHING_READ = ("[invalid]", "")

_COLUMNS: dict[str, pa.DataType] = {
    "task": pa.string(),
    "doc_id": pa.int32(),
    "filter": pa.string(),
    "doc_hash": pa.string(),
    "prompt_hash": pa.string(),
    "target_hash": pa.string(),
    "correct": pa.int8(),
    "outcome": pa.string(),
    "target": pa.int16(),
    "chosen": pa.int16(),
    "loglikelihoods": pa.list_(pa.float64()),
    "margin": pa.float64(),
    "answer_hash": pa.string(),
    "truncated": pa.bool_(),
}
SCHEMA = pa.schema(_COLUMNS)

#: Whether an answer was cut off at the token limit.
Truncated = Callable[[str], bool]


def item_rows(
    task: str, samples: Iterable[Mapping[str, Any]], metric: str, truncated: Truncated | None = None
) -> list[dict[str, Any]]:
    """lm-eval's logged samples of one task as rows of `SCHEMA`, in the order of documents.

    Raises:
        UsageError: the metric is not there, or is no 0/1 outcome.
    """
    return [_row(task, sample, metric, truncated) for sample in samples]


def _row(task: str, sample: Mapping[str, Any], metric: str, truncated: Truncated | None) -> dict[str, Any]:
    value = sample.get(metric)
    if value not in (0, 1):
        metrics = ", ".join(sorted(sample.get("metrics", [])))
        raise UsageError(
            f"{task}: {metric} is {'not there' if value is None else f'{value}, not 0 or 1'}",
            f"name an accuracy as the suite's metric; this task has {metrics}",
        )
    row: dict[str, Any] = {name: sample[name] for name in ("doc_id", "filter", "doc_hash", "prompt_hash")}
    row |= {"task": task, "target_hash": sample["target_hash"], "correct": int(value)}
    if _is_choice(sample):
        return row | _choice(sample) | {"outcome": "right" if value else "wrong", "answer_hash": None}
    return row | _generated(sample, bool(value), truncated)


def _is_choice(sample: Mapping[str, Any]) -> bool:
    return not isinstance(sample["filtered_resps"][0], str)


def _choice(sample: Mapping[str, Any]) -> dict[str, Any]:
    values = [float(response[0]) for response in sample["filtered_resps"]]
    target = _target_index(sample)
    margin = None
    if 0 <= target < len(values) > 1:
        margin = values[target] - max(v for i, v in enumerate(values) if i != target)
    return {
        "target": target,
        "chosen": int(np.argmax(values)),
        "loglikelihoods": values,
        "margin": margin,
        "truncated": None,
    }


def _target_index(sample: Mapping[str, Any]) -> int:
    """Position of the right choice; -1 where the task has no single one."""
    target = sample["target"]
    if isinstance(target, (int, np.integer)) and not isinstance(target, bool):
        return int(target)
    choices = [arguments[1].strip() for arguments in sample["arguments"]]
    return choices.index(target.strip()) if isinstance(target, str) and choices.count(target.strip()) == 1 else -1


def _generated(sample: Mapping[str, Any], right: bool, truncated: Truncated | None) -> dict[str, Any]:
    """A generated answer: wrong, unreadable and cut off are kept apart."""
    text, read = _first(sample["resps"]), _first(sample["filtered_resps"])
    cut = truncated(text) if truncated is not None else None
    outcome: Outcome = "right" if right else "wrong"
    if not right and read in NOTHING_READ:
        outcome = "truncated" if cut else "unparsable"
    answer = hashlib.sha256(read.encode()).hexdigest()
    return {
        "outcome": outcome,
        "target": -1,
        "chosen": -1,
        "loglikelihoods": None,
        "margin": None,
        "answer_hash": answer,
        "truncated": cut,
    }


def _first(responses: Any) -> str:
    while not isinstance(responses, str):
        responses = responses[0]
    return responses


def items_table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table of `SCHEMA`."""
    return pa.Table.from_pylist([dict(row) for row in rows], schema=SCHEMA)


def write_items(folder: Path, table: pa.Table) -> str:
    """Write items.parquet and return its digest."""
    write_table(folder / ITEMS, table, compression="zstd")
    return file_digest(folder / ITEMS)


def read_items(folder: Path, receipt: TaskReceipt) -> pa.Table | None:
    """The items of a receipt; None where it has none (published results without samples).

    Raises:
        Refused, IncomparableError: the file is gone, or is not the one that the receipt was made from.
    """
    if not receipt.items_sha256:
        return None
    file = folder / ITEMS
    if not file.is_file():
        raise Refused(f"{folder.name} has no {ITEMS}", "copy it beside tasks.json, or run the tasks again")
    if file_digest(file) != receipt.items_sha256:
        raise IncomparableError(f"{folder.name}/{ITEMS} is not what its tasks.json was made from", "run again")
    return pq.read_table(file)
