"""The card's table Task benchmarks, from tasks.json and items.parquet: every benchmark with n, ± and a verdict.

Where both sides hold the same items the difference is paired (McNemar, flips); else it is not, and says so. Where the
teacher ran the benchmark too, a second table holds each arm's answers against the teacher's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml, parse_eval_result_entries

from harness.compare.model import Figure
from harness.compare.task_teacher import agreement_of
from harness.compare.tasks import compare_task_runs
from harness.errors import Refused, UsageError
from harness.numbers import MISSING, bracket, count, number, percent, signed, supported_decimals, with_interval
from harness.report.card_tables import scaled
from harness.report.frontmatter import TaskResult as IndexResult
from harness.report.frontmatter import dump, require_plain
from harness.tasks.receipt import TaskReceipt, TaskResult, load_receipt, selection

#: Benchmarks that the Hub lists, by lm-eval task: dataset, task id of its eval.yaml, config and split.
HUB = {
    "gpqa_diamond_zeroshot": ("Idavidrein/gpqa", "diamond", "gpqa_diamond", "train"),
    "gpqa_diamond_n_shot": ("Idavidrein/gpqa", "diamond", "gpqa_diamond", "train"),
    "gsm8k": ("openai/gsm8k", "gsm8k", "main", "test"),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", "mmlu_pro", "default", "test"),
}
NOT_RUN = "not run"
#: Datasets of other well-known tasks, for model-index only.
DATASETS = {"mmlu": ("cais/mmlu", "all", "test")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLine:
    """One benchmark: the teacher's value, one for each arm, and the subject's difference to the baseline."""

    name: str
    n: str
    teacher: str
    values: tuple[str, ...]
    difference: str = ""
    flips: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementLine:
    """One arm's answers to one benchmark against the teacher's own, as cells."""

    name: str
    arm: str
    same: str
    right_to_wrong: str
    wrong_to_right: str
    wrong_to_another_wrong: str
    choice_kl: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """One tasks folder, read."""

    folder: Path
    receipt: TaskReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """The tables, what departs from the suite, and the subject's own runs for front matter and .eval_results.

    ``teacher`` is its name where it ran too, else empty.
    """

    arms: tuple[str, ...]
    teacher: str
    lines: list[TaskLine]
    agreement: list[AgreementLine]
    notes: list[str]
    subject: list[TaskRun]


def load_tasks(folders: Sequence[Path]) -> list[TaskRun]:
    """Read tasks folders."""
    return [TaskRun(folder=folder, receipt=load_receipt(folder)) for folder in folders]


def task_table(
    runs: Sequence[TaskRun], arms: Sequence[tuple[str, str]], subject: str, *, teacher: tuple[str, str] | None = None
) -> TaskTable | None:
    """Lay task runs beside the arms ``(name, weights digest)``; the baseline first, the subject last.

    Args:
        teacher: its name and weights digest; its own run may be among ``runs``.

    Raises:
        UsageError: a task run belongs to no arm.
    """
    if not runs:
        return None
    known = [run for run in runs if teacher is not None and _is_of(run.receipt, teacher)]
    by_arm: dict[str, list[TaskRun]] = {}
    for run in runs:
        owner = _arm_of(run.receipt, arms, or_none=run in known)
        if owner is not None:
            by_arm.setdefault(owner, []).append(run)
    names = [name for name, _ in arms if name in by_arm and name != subject]
    names += [subject] if subject in by_arm else []
    found = _Runs(names=tuple(names), by_arm=by_arm, teacher=known)
    return _table(found, runs, subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """Task runs by arm, and the teacher's own."""

    names: tuple[str, ...]
    by_arm: dict[str, list[TaskRun]]
    teacher: list[TaskRun]


def _table(found: _Runs, runs: Sequence[TaskRun], subject: str) -> TaskTable:
    of_arms = [run for name in found.names for run in found.by_arm[name]]
    entries = dict.fromkeys((run.receipt.suite.sha256, entry) for run in of_arms for entry in run.receipt.suite.entries)
    rows = [_rows(found, suite, entry) for suite, entry in entries]
    return TaskTable(
        arms=found.names,
        teacher=found.teacher[0].receipt.name if found.teacher else "",
        lines=[line for line, _, _ in rows],
        agreement=[line for _, lines, _ in rows for line in lines],
        notes=list(dict.fromkeys([*_notes(runs), *(text for _, _, texts in rows for text in texts)])),
        subject=found.by_arm.get(subject, []),
    )


def _notes(runs: Sequence[TaskRun]) -> list[str]:
    """What the receipts say, with their names; what all of them say once and without."""
    said: dict[str, list[str]] = {}
    for run in runs:
        for text in [*run.receipt.deviations, *run.receipt.notes]:
            said.setdefault(text, []).append(run.receipt.name)
    common = len(runs) > 1
    return [
        text if common and len(names) == len(runs) else f"{', '.join(names)}: {text}" for text, names in said.items()
    ]


def _is_of(receipt: TaskReceipt, model: tuple[str, str]) -> bool:
    """Whether a run is of the model with this name and weights digest."""
    name, digest = model
    weights = receipt.model.weights_sha256
    return (weights not in ("", "unknown") and weights == digest) or receipt.name == name


def _arm_of(receipt: TaskReceipt, arms: Sequence[tuple[str, str]], *, or_none: bool) -> str | None:
    for arm in arms:
        if _is_of(receipt, arm):
            return arm[0]
    if or_none:
        return None
    known = ", ".join(name for name, _ in arms)
    raise UsageError(
        f"the tasks of {receipt.name} belong to none of {known}, and it is not their teacher",
        "name tasks of the measured checkpoints, or --name them",
    )


def _rows(found: _Runs, suite: str, entry: str) -> tuple[TaskLine, list[AgreementLine], list[str]]:
    """One entry of one suite; runs of another suite of the same task are another line (FAULTS A 69)."""
    have = {name: run for name in found.names if (run := _run_of(found.by_arm[name], suite, entry)) is not None}
    results = {name: _result(run, entry) for name, run in have.items()}
    last = have[next(reversed(have))]
    teacher = _run_of(found.teacher, suite, entry)
    name = f"{_alias(last.receipt, entry)} ({selection(last.receipt, entry)})"
    paired = len(found.names) > 1 and found.names[0] in have and found.names[-1] in have
    difference, flips, verdict, notes = (
        _difference(have[found.names[0]], have[found.names[-1]], entry) if paired else ("", "", "", [])
    )
    line = TaskLine(
        name=name,
        n=count(_result(last, entry).n),
        teacher=_result(teacher, entry).shown if teacher else NOT_RUN,
        values=tuple(results[arm].shown if arm in results else NOT_RUN for arm in found.names),
        difference=difference,
        flips=flips,
        verdict=verdict,
    )
    agreement = {arm: _agreement(name, arm, run, teacher, entry) for arm, run in have.items()} if teacher else {}
    unlike = [f"{arm}: its items of {entry} are not the teacher's" for arm, its in agreement.items() if its is None]
    return line, [its for its in agreement.values() if its is not None], [*notes, *unlike]


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


def _difference(a: TaskRun, b: TaskRun, entry: str) -> tuple[str, str, str, list[str]]:
    """Difference in percentage points with its interval, flips, verdict, and warnings; paired where items are equal."""
    made = compare_task_runs([a.folder, b.folder])
    pair = next(task.pairs[0] for task in made.tasks if task.task == entry)
    points = _points(scaled(pair.difference, 100.0))
    verdict = "undecided (within noise)" if pair.verdict == "within noise" else pair.verdict
    if not pair.paired:
        return points, "not paired", f"{verdict}, unpaired", made.warnings
    flips = f"{pair.lost} lost, {pair.won} won of {count(pair.n)}; McNemar p = {number(pair.p, 3)}"
    if pair.margin_change is not None:
        flips += f"; margin of the right answer {_nats(pair.margin_change)} nats"
    return points, flips, verdict, made.warnings


def _agreement(name: str, arm: str, run: TaskRun, teacher: TaskRun, entry: str) -> AgreementLine | None:
    """One arm's answers against the teacher's; None where they did not answer the same items."""
    found = agreement_of(run.folder, teacher.folder, entry)
    if found is None:
        return None
    kl = found.choice_kl
    return AgreementLine(
        name=name,
        arm=arm,
        same=f"{percent(found.share, 1)} [{100 * found.low:.1f}, {100 * found.high:.1f}]",
        right_to_wrong=count(found.right_to_wrong),
        wrong_to_right=count(found.wrong_to_right),
        wrong_to_another_wrong=count(found.wrong_to_another_wrong),
        choice_kl=with_interval(kl.estimate, kl) if kl else MISSING,
    )


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
            dataset, config, split = _dataset(entry, result)
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


def _dataset(entry: str, result: TaskResult) -> tuple[str, str, str]:
    """Dataset, configuration and split; the lm_eval package's own questions are of the development split."""
    if entry in HUB:
        dataset, _, config, split = HUB[entry]
    else:
        dataset, config, split = DATASETS.get(entry, ("lm-eval", entry, "test"))
    return dataset, config, "dev" if result.data == "wheel" else split


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
