"""README front matter through huggingface_hub: one model-index entry, base_model, other people's keys untouched.

The Hub merges results that share task, dataset type, config, split and revision, and keeps one model-index entry
only; so panel, lane and estimator stand in those fields. What it would drop or rewrite fails here, before it is
published.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCardData,
    eval_result_entries_to_yaml,
    parse_eval_result_entries,
)

from harness.compare.task_pairing import TaskFolder
from harness.errors import Refused, UsageError
from harness.tasks.receipt import TaskResult, selection

PANEL_TYPE = "fidelity-panel"
#: In the args of each metric of ours: how our results are found again in a README that holds others.
OURS = {"measured_by": "exl3-fidelity"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_BLOCK = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*\r?$\n?", re.DOTALL | re.MULTILINE)
_KEY = re.compile(r"^[^\s#'\"\-][^:\n]*:", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelResult:
    """The numbers of one measurement that go into model-index."""

    panel: str
    panel_sha256: str
    lane: str
    estimator: str
    values: dict[str, float]
    args: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexResult:
    """One benchmark's accuracy for model-index."""

    task: str
    dataset: str
    config: str
    split: str
    value: float
    args: dict[str, Any]


METRIC_NAMES = {
    "kl_divergence": "KL(teacher||candidate), mean, nats",
    "kl_divergence_lower_bound": "KL(teacher||candidate), mean of a lower bound, nats",
    "top1_agreement": "top-1 agreement with the teacher",
    "perplexity_per_token": "perplexity per token",
}


def panel_results(result: PanelResult) -> list[EvalResult]:
    """Our results of one panel; the estimator is part of the split, so that a bound never joins an exact value."""
    split = result.lane if result.estimator == "exact" else f"{result.lane}-{result.estimator.replace('_', '-')}"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=PANEL_TYPE,
            dataset_name=f"{result.panel} ({split})",
            dataset_config=result.panel,
            dataset_split=split,
            dataset_revision=result.panel_sha256,
            metric_type=name,
            metric_name=METRIC_NAMES[name],
            metric_value=value,
            metric_args=OURS | result.args,
        )
        for name, value in result.values.items()
    ]


def task_results(results: Sequence[IndexResult]) -> list[EvalResult]:
    """Accuracies of benchmarks as results of their own."""
    return [
        EvalResult(
            task_type="text-generation",
            task_name=result.task,
            dataset_type=result.dataset,
            dataset_name=result.task,
            dataset_config=result.config,
            dataset_split=result.split,
            metric_type="accuracy",
            metric_name="accuracy",
            metric_value=result.value,
            metric_args=OURS | result.args,
        )
        for result in results
    ]


def our_keys(
    *, model_name: str, base_model: str | None, results: Sequence[EvalResult], tags: Sequence[str] = ()
) -> dict[str, Any]:
    """The front-matter keys that a card owns, as huggingface_hub writes them."""
    for result in results:
        # The Hub's writer drops a None without a word; a number that is missing must be heard of.
        require_plain({"value": result.metric_value, "args": result.metric_args}, result.metric_type)
    data = ModelCardData(
        model_name=model_name,
        base_model=base_model,
        base_model_relation="quantized" if base_model else None,
        tags=list(tags) or None,
        eval_results=list(results),
    )
    keys: dict[str, Any] = data.to_dict()
    require_plain(keys)
    return keys


def require_plain(value: Any, where: str = "front matter") -> None:
    """Refuse what YAML or the Hub would drop or misread: None, NaN, infinities, numpy scalars, other objects."""
    if isinstance(value, dict):
        for key, inner in value.items():
            require_plain(inner, f"{where}.{key}")
    elif type(value) is list:
        for index, inner in enumerate(value):
            require_plain(inner, f"{where}[{index}]")
    elif type(value) not in (str, int, float, bool) or (type(value) is float and not math.isfinite(value)):
        raise Refused(
            f"{where} is {value!r} ({type(value).__name__}), which a model card cannot hold",
            "measure again without non-finite positions, or leave this metric out of the card",
        )


# ---- an existing README ----------------------------------------------------------------------------------------------


def split_readme(text: str) -> tuple[str, str]:
    """Front matter (without its fences) and body; the front matter is empty where there is none."""
    found = _BLOCK.match(text)
    return (found.group(1), text[found.end() :]) if found else ("", text)


def parse(front: str) -> dict[str, Any]:
    """The front matter as a dict; refused where it is not one, or has two model-index entries."""
    try:
        data = yaml.safe_load(front) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"the README's front matter is not YAML: {str(error).splitlines()[0]}", "repair it") from error
    if not isinstance(data, dict):
        raise UsageError("the README's front matter is not a mapping", "repair it")
    index = data.get("model-index") or []
    if not isinstance(index, list):
        raise UsageError("the README's model-index is no list", "write it as a list of one entry: - name: ...")
    if len(index) > 1:
        raise UsageError(
            f"the README's model-index has {len(index)} entries and the Hub keeps only the last",
            "merge them into one entry first",
        )
    return data


def merged_front(front: str, ours: dict[str, Any]) -> str:
    """``front`` with our keys set; the lines of every other key stay as they are, comments included."""
    data = parse(front)
    values = dict(ours)
    if "model-index" in ours:
        values["model-index"] = _merged_index(data.get("model-index") or [], ours["model-index"])
    if "tags" in ours:
        there = data.get("tags") or []
        values["tags"] = [*there, *(tag for tag in ours["tags"] if tag not in there)]
    for key in ("base_model", "base_model_relation"):
        if key in values and data.get(key):
            _require_same(key, data[key], values.pop(key))
    text = front
    for key, value in values.items():
        if data.get(key) != value:
            text = _with_key(text, key, dump({key: value}))
    _require_merged(text, {**data, **values})
    return text


def _require_same(key: str, theirs: Any, ours: Any) -> None:
    if theirs not in (ours, [ours]):
        raise UsageError(
            f"the README says {key}: {theirs}, the receipts say {ours}",
            f"correct {key} in the README, or give --base-model",
        )


def _merged_index(theirs: list[Any], ours: list[Any]) -> list[Any]:
    """One entry: other people's results first, untouched, then ours; an old result of ours is replaced."""
    kept = [result for entry in theirs for result in _results(entry) if not _is_ours(result)]
    name = (theirs[0].get("name") if theirs else None) or ours[0]["name"]
    return [{"name": name, "results": [*kept, *ours[0]["results"]]}]


def _is_ours(result: dict[str, Any]) -> bool:
    metrics = result.get("metrics") or []
    arguments = [metric.get("args") for metric in metrics if isinstance(metric, dict)]
    return any(isinstance(one, dict) and one.get("measured_by") == OURS["measured_by"] for one in arguments)


def _results(entry: Any) -> list[dict[str, Any]]:
    """Results of an entry of the README's model-index, which may be written with none.

    Raises:
        UsageError: it is no entry, so what it says would be lost.
    """
    found = (entry.get("results") or []) if isinstance(entry, dict) else None
    if not isinstance(found, list) or not all(isinstance(result, dict) for result in found):
        raise UsageError(
            "the README's model-index is no list of entries with results", "write it as the Hub wants it, or remove it"
        )
    return found


class _Dumper(yaml.SafeDumper):
    """Quotes text that another YAML reader would take for a number, such as a digest of digits and one ``e``."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    looks_numeric = re.fullmatch(r"[-+0-9._eE]+", text) is not None
    style = "'" if looks_numeric else (None if text.isprintable() else '"')
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump(value: Any) -> str:
    """YAML text with the keys in their order and no line folded."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)
    return text


def _with_key(front: str, key: str, chunk: str) -> str:
    """Replace the lines of one top-level key, or add them at the end."""
    starts = [match.start() for match in _KEY.finditer(front)] + [len(front)]
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        if front[start:stop].split(":", 1)[0].strip() == key:
            tail = re.search(r"(?:^[ \t]*#[^\n]*\n|^[ \t]*\n)*\Z", front[start:stop], re.MULTILINE)
            comments = tail.group(0) if tail else ""
            return front[:start] + chunk + comments + front[stop:]
    return (front if not front or front.endswith("\n") else front + "\n") + chunk


def _require_merged(text: str, expected: dict[str, Any]) -> None:
    try:
        same = parse(text) == expected
    except UsageError:
        same = False
    if not same:
        raise Refused(
            "the merged front matter does not read back as it was meant",
            "put every key of the README's front matter on a line of its own, in block style",
        )


# ---- tasks for the Hub -----------------------------------------------------------------------------------------------

#: Benchmarks that the Hub lists, by lm-eval task: dataset, task id of its eval.yaml, config and split.
HUB = {
    "gpqa_diamond_zeroshot": ("Idavidrein/gpqa", "diamond", "gpqa_diamond", "train"),
    "gpqa_diamond_n_shot": ("Idavidrein/gpqa", "diamond", "gpqa_diamond", "train"),
    "gsm8k": ("openai/gsm8k", "gsm8k", "main", "test"),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", "mmlu_pro", "default", "test"),
}
#: Datasets of other well-known tasks, for model-index only.
DATASETS = {"mmlu": ("cais/mmlu", "all", "test")}


def index_results(runs: Sequence[TaskFolder]) -> list[IndexResult]:
    """One model's accuracies for model-index."""
    out = []
    for run in runs:
        for entry in run.receipt.suite.entries:
            result = run.result(entry)
            dataset, config, split = _dataset(entry, result)
            chosen = selection(run.receipt, entry)
            if not chosen.startswith("all "):
                split = f"{split}, {chosen}"
            args = {"n": result.n, "selection": chosen, "suite_sha256": run.receipt.suite.sha256}
            if result.stderr is not None:
                args["stderr"] = result.stderr
            name = run.alias(entry)
            out.append(
                IndexResult(task=name, dataset=dataset, config=config, split=split, value=result.value, args=args)
            )
    return out


def _dataset(entry: str, result: TaskResult) -> tuple[str, str, str]:
    """Dataset, configuration and split; the lm_eval package's own questions are of the development split."""
    if entry in HUB:
        dataset, _, config, split = HUB[entry]
    else:
        dataset, config, split = DATASETS.get(entry, ("lm-eval", entry, "test"))
    return dataset, config, "dev" if result.data == "wheel" else split


def hub_files(runs: Sequence[TaskFolder], repo: str | None) -> dict[str, str]:
    """``.eval_results/*.yaml`` by file name: whole benchmarks that the Hub lists; values in percent."""
    files = {}
    for run in runs:
        for entry in run.receipt.suite.entries:
            if entry not in HUB or run.receipt.status != "complete" or run.receipt.limit.get(entry) is not None:
                continue
            dataset, task, _, _ = HUB[entry]
            result = run.result(entry)
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
