"""The card's table Task benchmarks, from tasks.json and items.parquet: every benchmark with n, ± and a verdict.

Where both sides hold the same items the difference is paired (McNemar, flips); else it is not, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml, parse_eval_result_entries

from harness.compare.items import compare_task_runs
from harness.compare.model import Figure
from harness.errors import Refused, UsageError
from harness.report.card_tables import scaled
from harness.report.frontmatter import TaskResult as IndexResult
from harness.report.frontmatter import dump, require_plain
from harness.report.numbers import bracket, count, number, signed, supported_decimals
from harness.tasks.receipt import TaskReceipt, TaskResult, load_receipt, selection

#: Benchmarks that the Hub lists, by lm-eval task: dataset, task id of its eval.yaml, config and split.
HUB = {
    "gpqa_diamond_zeroshot": ("Idavidrein/gpqa", "diamond", "gpqa_diamond", "train"),
    "gpqa_diamond_n_shot": ("Idavidrein/gpqa", "diamond", "gpqa_diamond", "train"),
    "gsm8k": ("openai/gsm8k", "gsm8k", "main", "test"),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", "mmlu_pro", "default", "test"),
}
#: Datasets of other well-known tasks, for model-index only.
DATASETS = {"mmlu": ("cais/mmlu", "all", "test")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """One benchmark: a value for each arm, and the subject's difference to the baseline."""

    name: str
    n: str
    arms: tuple[str, ...]
    values: tuple[str, ...]
    difference: str = ""
    flips: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """One tasks folder, read."""

    folder: Path
    receipt: TaskReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """The table, what departs from the suite, and the subject's own runs for front matter and .eval_results."""

    arms: tuple[str, ...]
    lines: list[TaskLine]
    notes: list[str]
    subject: list[TaskRun]


def load_tasks(folders: Sequence[Path]) -> list[TaskRun]:
    """Read tasks folders."""
    return [TaskRun(folder=folder, receipt=load_receipt(folder)) for folder in folders]


def task_table(runs: Sequence[TaskRun], arms: Sequence[tuple[str, str]], subject: str) -> TaskTable | None:
    """Lay task runs beside the arms ``(name, weights digest)``; the baseline first, the subject last.

    Raises:
        UsageError: a task run belongs to no arm.
    """
    if not runs:
        return None
    by_arm: dict[str, list[TaskRun]] = {}
    for run in runs:
        by_arm.setdefault(_arm_of(run.receipt, arms), []).append(run)
    names = [name for name, _ in arms if name in by_arm and name != subject]
    names += [subject] if subject in by_arm else []
    entries = dict.fromkeys((run.receipt.suite.sha256, entry) for run in runs for entry in run.receipt.suite.entries)
    lines = [line for suite, entry in entries for line in _lines(by_arm, names, suite, entry)]
    notes = [f"{run.receipt.name}: {text}" for run in runs for text in [*run.receipt.deviations, *run.receipt.notes]]
    return TaskTable(arms=tuple(names), lines=lines, notes=list(dict.fromkeys(notes)), subject=by_arm.get(subject, []))


def _arm_of(receipt: TaskReceipt, arms: Sequence[tuple[str, str]]) -> str:
    weights = receipt.model.weights_sha256
    for name, digest in arms:
        if (weights not in ("", "unknown") and weights == digest) or receipt.name == name:
            return name
    known = ", ".join(name for name, _ in arms)
    raise UsageError(
        f"the tasks of {receipt.name} belong to none of {known}",
        "name tasks of the measured checkpoints, or --name them",
    )


def _lines(by_arm: dict[str, list[TaskRun]], names: Sequence[str], suite: str, entry: str) -> list[TaskLine]:
    """The line of one entry of one suite; runs of another suite of the same task are another line (FAULTS A 69)."""
    found = {name: run for name in names if (run := _run_of(by_arm[name], suite, entry)) is not None}
    if not found:
        return []
    results = {name: run.receipt.result(entry) for name, run in found.items()}
    shown = tuple(r.shown if (r := results.get(name)) else "not run" for name in names)
    last = next(reversed(found))
    line = TaskLine(
        name=f"{_alias(found[last].receipt, entry)} ({selection(found[last].receipt, entry)})",
        n=count(_result(found[last], entry).n),
        arms=tuple(names),
        values=shown,
    )
    if len(names) < 2 or names[0] not in found or names[-1] not in found:
        return [line]
    difference, flips, verdict = _difference(found[names[0]], found[names[-1]], entry)
    return [
        TaskLine(
            name=line.name,
            n=line.n,
            arms=line.arms,
            values=shown,
            difference=difference,
            flips=flips,
            verdict=verdict,
        )
    ]


def _run_of(runs: Sequence[TaskRun], suite: str, entry: str) -> TaskRun | None:
    return next((r for r in runs if r.receipt.suite.sha256 == suite and r.receipt.result(entry) is not None), None)


def _result(run: TaskRun, entry: str) -> TaskResult:
    found = run.receipt.result(entry)
    assert found is not None
    return found


def _alias(receipt: TaskReceipt, entry: str) -> str:
    found = receipt.result(entry)
    return (found.alias if found else "").strip() or entry


# ---- differences -----------------------------------------------------------------------------------------------------


def _difference(a: TaskRun, b: TaskRun, entry: str) -> tuple[str, str, str]:
    """Difference in percentage points with its interval, flips, verdict; paired where the items are the same."""
    made = compare_task_runs([a.folder, b.folder])
    pair = next(task.pairs[0] for task in made.tasks if task.task == entry)
    points = _points(scaled(pair.difference, 100.0))
    verdict = "undecided (within noise)" if pair.verdict == "within noise" else pair.verdict
    if not pair.paired:
        return points, f"not known: {pair.why_not}", f"{verdict}, unpaired"
    flips = f"{pair.lost} lost, {pair.won} won of {count(pair.n)}; McNemar p = {number(pair.p, 3)}"
    if pair.margin_change is not None:
        flips += f"; margin of the right answer {_nats(pair.margin_change)} nats"
    return points, flips, verdict


def _points(difference: Figure) -> str:
    return f"{signed(difference.estimate, 2)} pp {bracket(difference)}"


def _nats(change: Figure) -> str:
    return f"{signed(change.estimate, supported_decimals(change.low, change.high))} {bracket(change)}"


# ---- for the Hub -----------------------------------------------------------------------------------------------------


def index_results(table: TaskTable) -> list[IndexResult]:
    """The subject's accuracies for model-index."""
    out = []
    for run in table.subject:
        for entry in run.receipt.suite.entries:
            result = _result(run, entry)
            dataset, config, split = _dataset(entry)
            chosen = selection(run.receipt, entry)
            if not chosen.startswith("all "):
                split = f"{split}, {chosen}"
            args = {"n": result.n, "selection": chosen, "suite_sha256": run.receipt.suite.sha256}
            if result.stderr is not None:
                args["stderr"] = result.stderr
            name = _alias(run.receipt, entry)
            out.append(
                IndexResult(task=name, dataset=dataset, config=config, split=split, value=result.value, args=args)
            )
    return out


def _dataset(entry: str) -> tuple[str, str, str]:
    if entry in HUB:
        dataset, _, config, split = HUB[entry]
        return dataset, config, split
    return DATASETS.get(entry, ("lm-eval", entry, "test"))


def hub_files(table: TaskTable, repo: str | None) -> dict[str, str]:
    """``.eval_results/*.yaml`` by file name: whole benchmarks that the Hub lists; values in percent."""
    files = {}
    for run in table.subject:
        for entry in run.receipt.suite.entries:
            if entry not in HUB or run.receipt.status != "complete" or run.receipt.limit.get(entry) is not None:
                continue
            dataset, task, _, _ = HUB[entry]
            result = _result(run, entry)
            made = EvalResultEntry(
                dataset_id=dataset,
                task_id=task,
                value=round(100 * result.value, 4),
                source_url=f"https://huggingface.co/{repo}" if repo else None,
                source_name="Model card" if repo else None,
                notes=f"lm-eval {entry}, {result.num_fewshot or 0}-shot, n = {result.n}, accuracy in percent",
            )
            files[f".eval_results/{entry}.yaml"] = _checked_yaml(made)
    return files


def _checked_yaml(entry: EvalResultEntry) -> str:
    """YAML that the Hub's own reader parses back to the same entry."""
    records = eval_result_entries_to_yaml([entry])
    require_plain(records, ".eval_results")
    text = dump(records)
    if parse_eval_result_entries(yaml.safe_load(text)) != [entry]:
        raise Refused(f"{entry.task_id} does not read back as it was written", "report this: it is a fault of ours")
    return text
