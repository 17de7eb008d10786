"""Task runs made of outcomes: receipts and items as `fidelity tasks` writes them, without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from harness.measure.receipt import SideIdentity
from harness.tasks.asking import prompts_digest
from harness.tasks.items import items_table, write_items
from harness.tasks.receipt import Count, SuiteIdentity, TaskReceipt, TaskResult, group_result, leaf_result, save_receipt


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def choice_item(task: str, doc: int, values: Sequence[float], target: int = 0) -> dict[str, Any]:
    """An item whose choices have these log-likelihoods."""
    chosen = int(np.argmax(values))
    rest = max(v for i, v in enumerate(values) if i != target)
    return {
        "task": task,
        "doc_id": doc,
        "filter": "none",
        "doc_hash": sha(f"doc {task} {doc}"),
        "prompt_hash": sha(f"prompt {task} {doc}"),
        "target_hash": sha(str(target)),
        "correct": int(chosen == target),
        "outcome": "right" if chosen == target else "wrong",
        "target": target,
        "chosen": chosen,
        "loglikelihoods": [float(v) for v in values],
        "margin": float(values[target] - rest),
        "answer_hash": None,
        "truncated": None,
    }


def outcome_item(task: str, doc: int, right: bool, wrong_choice: int = 1) -> dict[str, Any]:
    """An item that was answered right or wrong."""
    values = [-3.0, -3.0, -3.0, -3.0]
    values[0 if right else wrong_choice] = -0.5
    return choice_item(task, doc, values)


def side(name: str, **change: Any) -> SideIdentity:
    known = {
        "engine": "exl3",
        "version": "1",
        "model": name,
        "revision": "local",
        "weights_sha256": sha(f"weights {name}"),
        "head_sha256": "h",
        "tokenizer_sha256": "t",
        "weights_dtype": "bfloat16",
        "compute_dtype": "float32",
        "lane": "weights",
        "device": "cpu",
    }
    return SideIdentity.model_validate(known | change)


def write_run(
    folder: Path,
    name: str,
    rows: Mapping[str, Sequence[dict[str, Any]]],
    *,
    group: str = "",
    suite: str = "made",
    lm_eval: str = "0.4.13",
    lane: str = "weights",
    margin: float | None = None,
    leaf: Mapping[str, Any] | None = None,
    **change: Any,
) -> Path:
    """A run folder: ``rows`` by task, pooled into ``group`` where one is named."""
    leaves = [_leaf(task, found, dict(leaf or {})) for task, found in rows.items()]
    results: list[TaskResult] = [*leaves, *([group_result(group, leaves)] if group else [])]
    everything = [row for found in rows.values() for row in found]
    digest = write_items(folder, items_table(everything))
    entries = [group] if group else list(rows)
    known: dict[str, Any] = {
        "key": sha(f"{name} {digest}"),
        "name": name,
        "status": "complete",
        "lane": lane,
        "suite": SuiteIdentity(
            name=suite,
            sha256=sha(suite),
            sealed=True,
            entries=entries,
            margins={} if margin is None else dict.fromkeys(entries, margin),
        ),
        "model": side(name, lane=lane),
        "limit": {},
        "seeds": {},
        "results": results,
        "items": len(everything),
        "items_sha256": digest,
        "environment": {"lm_eval": lm_eval},
    }
    save_receipt(folder, TaskReceipt.model_validate(known | change))
    return folder


def _leaf(task: str, rows: Sequence[dict[str, Any]], change: dict[str, Any]) -> TaskResult:
    known = {
        "metric": "acc",
        "original": len(rows),
        "version": "1.0",
        "num_fewshot": 0,
        "config_sha256": sha(f"config {task}"),
        "prompts_sha256": prompts_digest([(row["prompt_hash"], row["target_hash"]) for row in rows]),
    }
    return leaf_result(task, Count(sum(row["correct"] for row in rows), len(rows)), **(known | change))


def subjects(right: np.ndarray, per: int) -> dict[str, list[dict[str, Any]]]:
    """Outcomes cut into subjects of ``per`` items."""
    return {
        f"s{start // per:02d}": [outcome_item(f"s{start // per:02d}", n, bool(r)) for n, r in enumerate(part)]
        for start in range(0, len(right), per)
        for part in [right[start : start + per]]
    }
