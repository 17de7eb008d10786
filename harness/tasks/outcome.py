"""From lm-eval's samples to the receipt: counts by task, pooled groups, items, and what departs from the suite."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.environment import environment, source_digest
from harness.errors import Refused
from harness.measure.receipt import SideIdentity
from harness.tasks.asking import prompts_digest
from harness.tasks.items import Truncated, item_rows, items_table, write_items
from harness.tasks.loading import Loaded
from harness.tasks.receipt import (
    Count,
    SuiteIdentity,
    TaskReceipt,
    TaskResult,
    Value,
    group_result,
    leaf_result,
    save_receipt,
)
from harness.tasks.suite import Entry, Suite
from harness.types import Check

if TYPE_CHECKING:
    from harness.tasks.asking import AskingLM

#: Largest difference between lm-eval's own numbers and ours.
AGREEMENT = 1e-9
#: Share of answers that cannot be read from which on a result carries a warning.
UNREADABLE = 0.02
#: Tokens that lm-eval lets a model generate where a task says nothing.
DEFAULT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """How a suite was run."""

    key: str
    suite: Suite
    loaded: Loaded
    identity: SideIdentity
    checks: list[Check]
    sealed: bool
    limit: int | None


def versions() -> dict[str, str]:
    """Versions of what builds prompts and scores answers."""
    return {name: importlib.metadata.version(name) for name in ("lm_eval", "datasets", "tokenizers")}


def build_receipt(
    folder: Path, run: Circumstances, samples: Mapping[str, Sequence[Any]], metrics: Mapping[str, Any], lm: AskingLM
) -> TaskReceipt:
    """Write items.parquet, then tasks.json."""
    rows: list[dict[str, Any]] = []
    results: list[TaskResult] = []
    for leaf, its_samples in samples.items():
        made, result = _leaf(run, leaf, its_samples, metrics[leaf], lm)
        rows += made
        results.append(result)
    results += _groups(run, {result.name: result for result in results}, metrics)
    digest = write_items(folder, items_table(rows))
    receipt = TaskReceipt(
        key=run.key,
        name=run.identity.model.split("/")[-1],
        status="partial" if run.limit is not None or run.loaded.missing else "complete",
        lane=run.identity.lane,
        suite=SuiteIdentity(
            name=run.suite.name,
            sha256=run.suite.sha256,
            sealed=run.sealed,
            entries=[entry.name for entry in run.suite.tasks if entry.name in run.loaded.sources],
            margins={entry.name: entry.margin for entry in run.suite.tasks},
        ),
        model=run.identity,
        limit={entry.name: run.limit or entry.limit for entry in run.suite.tasks},
        seeds=run.suite.seeds.model_dump(),
        results=results,
        missing=run.loaded.missing,
        items=len(rows),
        items_sha256=digest,
        preflight=run.checks,
        environment=environment() | versions() | {"source_sha256": source_digest()},
        deviations=deviations(run),
        notes=notes(run.suite, results),
    )
    save_receipt(folder, receipt)
    return receipt


def _leaf(
    run: Circumstances, leaf: str, samples: Sequence[Any], stated: Mapping[str, Any], lm: AskingLM
) -> tuple[list[dict[str, Any]], TaskResult]:
    entry, task = run.suite.entry(run.loaded.entry_of[leaf]), run.loaded.tasks[leaf]
    rows = item_rows(leaf, samples, entry.metric, _cut_off(task, lm))
    primary = [row for row in rows if row["filter"] == entry.filter]
    count = Count(sum(row["correct"] for row in primary), len(primary))
    generated = task.OUTPUT_TYPE == "generate_until"
    result = leaf_result(
        leaf,
        count,
        metric=_metric_name(entry),
        original=len(task.eval_docs),
        alias=str(stated.get("alias", leaf)),
        metrics=_values(stated),
        version=str(task.VERSION),
        num_fewshot=entry.num_fewshot,
        config_sha256=run.loaded.configs[leaf],
        task_hash=_task_hash(primary),
        prompts_sha256=prompts_digest([(row["prompt_hash"], row["target_hash"]) for row in primary]),
        data=run.loaded.sources[entry.name].kind,
        extraction_failures=_count(primary, "outcome", ("unparsable", "truncated")) if generated else None,
        truncations=_count(primary, "truncated", (True,)) if generated else None,
    )
    _require_agreement(result, stated, entry)
    return rows, result


def _metric_name(entry: Entry) -> str:
    return entry.metric if entry.filter == "none" else f"{entry.metric},{entry.filter}"


def _count(rows: Sequence[Mapping[str, Any]], column: str, values: tuple[object, ...]) -> int:
    return sum(row[column] in values for row in rows)


def _cut_off(task: Any, lm: AskingLM) -> Truncated | None:
    """For tasks that generate: whether an answer used up all the tokens it may have."""
    if task.OUTPUT_TYPE != "generate_until":
        return None
    most = int((task.config.generation_kwargs or {}).get("max_gen_toks", DEFAULT_TOKENS))
    return lambda text: len(lm.inner.tok_encode(text, add_special_tokens=False)) >= most


def _values(stated: Mapping[str, Any]) -> dict[str, Value]:
    """All of lm-eval's metrics of one task or group, with its own standard errors."""
    values = {}
    for key, value in stated.items():
        metric, comma, name = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, (int, float)):
            error = stated.get(f"{metric}_stderr,{name}")
            stderr = float(error) if isinstance(error, (int, float)) else None
            values[key] = Value(value=float(value), stderr=stderr)
    return values


def _task_hash(rows: Sequence[Mapping[str, Any]]) -> str:
    """lm-eval's ``task_hashes``: over documents, prompts and targets in order."""
    text = "".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def _groups(run: Circumstances, leaves: Mapping[str, TaskResult], metrics: Mapping[str, Any]) -> list[TaskResult]:
    results = []
    for name, group in run.loaded.groups.items():
        members = [leaves[task.task_name] for task in group.get_all_tasks() if task.task_name in leaves]
        if not members:
            continue
        stated = metrics.get(name, {})
        result = group_result(name, members, alias=str(stated.get("alias", name)), version=str(group.version))
        result = result.model_copy(update={"metrics": _values(stated)})
        _require_agreement(result, stated, run.suite.entry(run.loaded.entry_of[members[0].name]))
        results.append(result)
    return results


def _require_agreement(result: TaskResult, stated: Mapping[str, Any], entry: Entry) -> None:
    """Our pooling is lm-eval's; where it is not, one of the two is not what it is taken for."""
    for key, ours in ((entry.metric, result.value), (f"{entry.metric}_stderr", result.stderr)):
        theirs = stated.get(f"{key},{entry.filter}")
        if isinstance(theirs, (int, float)) and ours is not None and abs(theirs - ours) > AGREEMENT:
            raise Refused(
                f"{result.name}: lm-eval says {key} {theirs}, its samples give {ours}", "report this with the version"
            )


def deviations(run: Circumstances) -> list[str]:
    """What was done otherwise than the suite says."""
    departed = []
    if run.limit is not None:
        for entry in run.suite.tasks:
            if entry.limit != run.limit:
                planned = "all" if entry.limit is None else f"the first {entry.limit}"
                departed.append(f"{entry.name}: the first {run.limit} documents of each task, the suite says {planned}")
    installed = versions()["lm_eval"]
    if installed != run.suite.lm_eval:
        departed.append(f"lm_eval {installed}, the suite says {run.suite.lm_eval}")
    return departed + [f"{missing.task} was not run: {missing.why}" for missing in run.loaded.missing]


def notes(suite: Suite, results: Sequence[TaskResult]) -> list[str]:
    """What a reader must know before the numbers."""
    lines = []
    for entry in suite.tasks:
        result = next((r for r in results if r.name == entry.name), None)
        if result is None:
            continue
        unreadable, cut = result.extraction_failure_rate, result.truncation_rate
        if unreadable is not None and unreadable > UNREADABLE:
            lines.append(f"{entry.name}: no answer could be read from {unreadable:.1%} of the outputs")
        if unreadable is not None and unreadable > 0.8:
            lines.append(f"{entry.name}: extraction, not ability, is what this number shows: no headline")
        if cut:
            lines.append(f"{entry.name}: {cut:.1%} of the outputs were cut off at the token limit")
    if any(result.kind == "group" for result in results):
        lines.append("accuracies of groups are micro averages: every item counts the same; macro is the mean of tasks")
    return lines
