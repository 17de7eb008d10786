"""Results that lm-eval wrote elsewhere become a folder that compare and card can read.

Read are lm-eval's own ``results_*.json`` with the ``samples_*.jsonl`` beside it, and the reduced form in which
campaigns publish them (counts a task, no items). Every accuracy and standard error is computed again from counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.digest import file_digest, json_digest
from harness.errors import IncomparableError, UsageError
from harness.measure.receipt import SideIdentity
from harness.store import folder_lock
from harness.tasks.asking import prompts_digest
from harness.tasks.items import item_rows, items_table, write_items
from harness.tasks.receipt import Count, SuiteIdentity, TaskReceipt, TaskResult, group_result, leaf_result, save_receipt
from harness.types import UNKNOWN

REDUCED = "lm-eval-results-reduced-v1"
#: Stated and recomputed values may differ by this much.
TOLERANCE = 1e-9


@dataclass(slots=True)
class _Contents:
    """The files, taken apart: leaves with their counts, groups with their leaves."""

    leaves: dict[str, TaskResult] = field(default_factory=dict)
    groups: dict[str, list[str]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


def import_results(files: Sequence[Path], folder: Path, name: str, *, metric: str = "acc") -> TaskReceipt:
    """Read the result files of one model into ``folder``.

    Raises:
        UsageError: a file is no lm-eval result.
        IncomparableError: a stated accuracy is not what its counts give, or versions of lm-eval differ.
    """
    documents = [(file, _read(file)) for file in files]
    contents = _Contents()
    for file, document in documents:
        _collect(contents, file, document, metric)
    results = [*contents.leaves.values()]
    results += [group_result(g, [contents.leaves[leaf] for leaf in leaves]) for g, leaves in contents.groups.items()]
    for file, document in documents:
        _check_stated(file, document, {result.name: result for result in results})
    with folder_lock(folder):
        digest = write_items(folder, items_table(contents.rows)) if contents.rows else ""
        receipt = _receipt(documents, name, contents, results, digest)
        save_receipt(folder, receipt)
    return receipt


def _read(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"there is no {file.name}", "name a results file that lm-eval wrote") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file.name} is not JSON: {error}", "name a results file that lm-eval wrote") from error
    if not isinstance(document, dict) or not isinstance(document.get("results"), dict):
        raise UsageError(f"{file.name} has no results", "name a results file that lm-eval wrote")
    return document


def _collect(contents: _Contents, file: Path, document: Mapping[str, Any], metric: str) -> None:
    groups = _groups(document)
    for task, stated in document["results"].items():
        if task in groups or f"{metric},none" not in stated:
            continue
        if task in contents.leaves:
            raise UsageError(f"{task} is in two of the files", "name the files of one model, each task once")
        rows = _samples(file, task, metric)
        contents.rows += rows
        contents.leaves[task] = _leaf(document, task, stated, metric, rows)
    contents.groups |= {g: leaves for g, leaves in groups.items() if leaves and set(leaves) <= set(contents.leaves)}


def _groups(document: Mapping[str, Any]) -> dict[str, list[str]]:
    """Leaves of every group."""
    if document.get("schema") == REDUCED:
        members: dict[str, list[str]] = {name: [] for name in document.get("groups", {})}
        for task, stated in document["results"].items():
            for name in members:
                if name == "mmlu" or name == f"mmlu_{stated.get('group')}":
                    members[name].append(task)
        return members
    children: dict[str, list[str]] = {g: c for g, c in document.get("group_subtasks", {}).items() if c}
    return {name: _leaves_of(name, children) for name in children}


def _leaves_of(name: str, children: Mapping[str, list[str]]) -> list[str]:
    return [leaf for c in children[name] for leaf in (_leaves_of(c, children) if c in children else [c])]


def _leaf(
    document: Mapping[str, Any], task: str, stated: Mapping[str, Any], metric: str, rows: Sequence[Mapping[str, Any]]
) -> TaskResult:
    n = int(stated.get("sample_len") or document.get("n-samples", {}).get(task, {}).get("effective", 0))
    if n < 1:
        raise UsageError(f"{task}: the file does not say how many items there were", "use lm-eval 0.4.9 or newer")
    correct = round(stated[f"{metric},none"] * n)
    if rows and (len(rows) != n or sum(row["correct"] for row in rows) != correct):
        raise IncomparableError(
            f"{task}: {sum(row['correct'] for row in rows)} of {len(rows)} samples are right, the results say "
            f"{correct} of {n}",
            "take results and samples of one run",
        )
    samples = document.get("n-samples", {}).get(task, {})
    return leaf_result(
        task,
        Count(correct, n),
        metric=metric,
        original=samples.get("original") or stated.get("original"),
        version=str(document.get("versions", {}).get(task) or document.get("task_version", "")),
        num_fewshot=document.get("n-shot", {}).get(task),
        task_hash=(document.get("task_hashes") or {}).get(task, ""),
        prompts_sha256=prompts_digest([(row["prompt_hash"], row["target_hash"]) for row in rows]) if rows else "",
        alias=str(stated.get("alias", task)),
    )


def _samples(file: Path, task: str, metric: str) -> list[dict[str, Any]]:
    """The samples that lm-eval wrote beside a results file of the same time stamp, if any."""
    stamp = re.fullmatch(r"results_(.+)\.json", file.name)
    beside = file.with_name(f"samples_{task}_{stamp.group(1)}.jsonl") if stamp else None
    if beside is None or not beside.is_file():
        return []
    lines = beside.read_text(encoding="utf-8").split("\n")
    return item_rows(task, [_as_logged(json.loads(line)) for line in lines if line], metric)


def _as_logged(sample: dict[str, Any]) -> dict[str, Any]:
    """lm-eval writes arguments as objects and targets as text; back to the form that it logs."""
    if isinstance(sample["arguments"], dict):
        sample["arguments"] = [(a["arg_0"], a.get("arg_1", "")) for a in sample["arguments"].values()]
    target = sample["target"]
    choice = sample["filtered_resps"] and not isinstance(sample["filtered_resps"][0], str)
    if choice and isinstance(target, str) and target.isdigit() and int(target) < len(sample["filtered_resps"]):
        sample["target"] = int(target)
    return sample


def _check_stated(file: Path, document: Mapping[str, Any], results: Mapping[str, TaskResult]) -> None:
    """Every stated accuracy and standard error must be what the counts give."""
    for name, stated in [*document["results"].items(), *document.get("groups", {}).items()]:
        result = results.get(name)
        if result is None:
            continue
        for key, value in ((result.metric, result.value), (f"{result.metric}_stderr", result.stderr)):
            said = stated.get(f"{key},none")
            if isinstance(said, (int, float)) and value is not None and abs(said - value) > TOLERANCE:
                raise IncomparableError(
                    f"{file.name}: {name} states {key} {said}, its counts give {value}",
                    "the file was edited or belongs to another run; fetch it again",
                )


def _receipt(
    documents: Sequence[tuple[Path, dict[str, Any]]],
    name: str,
    contents: _Contents,
    results: list[TaskResult],
    items_sha256: str,
) -> TaskReceipt:
    versions = {str(document.get("lm_eval_version", UNKNOWN)) for _, document in documents}
    if len(versions) > 1:
        raise IncomparableError(f"the files are of lm-eval {' and '.join(sorted(versions))}", "import one version")
    config = documents[0][1].get("config") or {}
    groups = contents.groups
    inner = {leaf for leaves in groups.values() for leaf in leaves}
    tops = [g for g, leaves in groups.items() if not any(set(leaves) < set(o) for o in groups.values())]
    entries = [*tops, *(leaf for leaf in contents.leaves if leaf not in inner)]
    limits = {entry: _limit_of(documents, entry, contents) for entry in entries}
    digest = json_digest([file_digest(file) for file, _ in documents])
    return TaskReceipt(
        key=digest,
        name=name,
        status="complete",
        lane="served" if "completions" in str(config.get("model", "")) else "weights",
        suite=SuiteIdentity(name="imported", sha256="", sealed=False, entries=entries),
        model=_unknown_model(name, config),
        limit=limits,
        seeds={k: int(config[f"{k}_seed"]) for k in ("random", "numpy", "torch", "fewshot") if f"{k}_seed" in config},
        results=results,
        items=len(contents.rows),
        items_sha256=items_sha256,
        environment={
            "lm_eval": versions.pop(),
            "transformers": str(documents[0][1].get("transformers_version", UNKNOWN)),
        },
        notes=[] if contents.rows else ["published counts without items: no paired comparison is possible"],
    )


def _limit_of(documents: Sequence[tuple[Path, dict[str, Any]]], entry: str, contents: _Contents) -> int | None:
    wanted = contents.groups.get(entry, [entry])[0]
    limit = next((d.get("config", {}).get("limit") for _, d in documents if wanted in d["results"]), None)
    return int(limit) if limit else None


def _unknown_model(name: str, config: Mapping[str, Any]) -> SideIdentity:
    """What a foreign results file says of a model: hardly more than the name that it was given."""
    unknown = ("version", "revision", "weights_sha256", "head_sha256", "tokenizer_sha256", "device")
    known = {
        "engine": str(config.get("model", UNKNOWN)),
        "model": name,
        "lane": "served" if "completions" in str(config.get("model", "")) else "weights",
    }
    dtypes = {"weights_dtype": UNKNOWN, "compute_dtype": UNKNOWN}
    return SideIdentity.model_validate(dict.fromkeys(unknown, UNKNOWN) | dtypes | known)
