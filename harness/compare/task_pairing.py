"""Task runs that belong in one table, their items side by side, and a candidate's answers against the teacher's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import logsumexp

from harness.compare.model import Estimated
from harness.compare.task_model import TeacherAgreement
from harness.errors import IncomparableError, UsageError
from harness.stats import group_totals, log_t_interval, wilson
from harness.tasks.items import read_items
from harness.tasks.receipt import TaskReceipt, TaskResult, load_receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """One model's run; ``items`` is None where only counts were published."""

    name: str
    receipt: TaskReceipt
    items: pd.DataFrame | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFolder:
    """A folder that `fidelity tasks` or `fidelity import-lm-eval` wrote, and its receipt; items are not read."""

    folder: Path
    receipt: TaskReceipt

    def result(self, entry: str) -> TaskResult:
        """The result of an entry of its suite that it has."""
        found = self.receipt.result(entry)
        assert found is not None
        return found

    def alias(self, entry: str) -> str:
        """The entry's short name, where lm-eval has one."""
        found = self.receipt.result(entry)
        return (found.alias if found else "").strip() or entry


def load_tasks(folders: Sequence[Path]) -> list[TaskFolder]:
    """Read the receipts of tasks folders."""
    return [TaskFolder(folder=folder, receipt=load_receipt(folder)) for folder in folders]


def load_task_run(path: Path) -> TaskRun:
    """Read a folder that `fidelity tasks` or `fidelity import-lm-eval` wrote."""
    folder = path if path.is_dir() else path.parent
    receipt = load_receipt(folder)
    table = read_items(folder, receipt)
    return TaskRun(name=receipt.name, receipt=receipt, items=None if table is None else table.to_pandas())


def load_task_runs(paths: Sequence[Path]) -> list[TaskRun]:
    """Read several and give each a name of its own."""
    if len(paths) < 2:
        raise UsageError("a comparison needs two runs or more", "name at least two folders with tasks.json")
    named: list[TaskRun] = []
    for run in map(load_task_run, paths):
        taken = {other.name for other in named}
        name, number = run.name, 2
        while name in taken:
            name, number = f"{run.name} ({number})", number + 1
        named.append(replace(run, name=name))
    return named


def require_comparable(runs: Sequence[TaskRun]) -> list[str]:
    """Refuse runs that did not ask the same; the entries that all of them have.

    Raises:
        IncomparableError: another lm-eval, lane, task definition, number of shots or metric.
    """
    first = runs[0].receipt
    for run in runs[1:]:
        _same("lm_eval version", runs[0].name, first.environment.get("lm_eval"), run, "lm_eval")
        if run.receipt.lane != first.lane:
            raise IncomparableError(
                f"{runs[0].name} was asked in the {first.lane} lane, {run.name} in the {run.receipt.lane} lane",
                "run both in the same way",
            )
    entries = [entry for entry in first.suite.entries if all(run.receipt.result(entry) for run in runs)]
    if not entries:
        raise IncomparableError(f"{runs[0].name} and {runs[1].name} have no task in common", "run the same suite")
    for entry in entries:
        for run in runs[1:]:
            _same_task(entry, runs[0], run)
    return entries


def _same(what: str, name: str, value: object, run: TaskRun, key: str) -> None:
    other = run.receipt.environment.get(key)
    if value != other:
        raise IncomparableError(f"{what}: {name} has {value}, {run.name} has {other}", "run both with the same one")


def _same_task(entry: str, base: TaskRun, run: TaskRun) -> None:
    pairs = zip(base.receipt.leaves(entry), run.receipt.leaves(entry), strict=False)
    for ours, theirs in [*pairs, (_result(base, entry), _result(run, entry))]:
        for field in ("name", "metric", "version", "num_fewshot", "config_sha256"):
            a, b = getattr(ours, field), getattr(theirs, field)
            # What a published file does not say cannot differ.
            if a != b and a not in (None, "") and b not in (None, ""):
                raise IncomparableError(
                    f"{entry}: {field} of {ours.name} is {_short(a)} for {base.name}, {_short(b)} for {run.name}",
                    "these are two benchmarks; run both with the same suite and lm-eval version",
                )


def _short(value: object) -> str:
    text = str(value)
    return text[:12] if len(text) == 64 else text


def _result(run: TaskRun, entry: str) -> TaskResult:
    found = run.receipt.result(entry)
    if found is None:
        raise ValueError(f"{run.name} has no {entry}")
    return found


def paired_items(a: TaskRun, b: TaskRun, entry: str) -> tuple[pd.DataFrame, pd.DataFrame] | str:
    """Both sides' items of one entry in one order, or why they cannot be paired.

    An item is its task, its prompt and its target by hash; lm-eval's document hash covers columns that no model sees.
    """
    for run in (a, b):
        if run.items is None:
            return f"{run.name} has published counts only"
    ours, theirs = _keyed(a, entry), _keyed(b, entry)
    only_a, only_b = len(ours.index.difference(theirs.index)), len(theirs.index.difference(ours.index))
    if only_a or only_b:
        return f"{only_a} items are only in {a.name}, {only_b} only in {b.name}"
    order = ours.index.sort_values()
    return ours.loc[order], theirs.loc[order]


def _keyed(run: TaskRun, entry: str) -> pd.DataFrame:
    assert run.items is not None
    leaves = run.receipt.leaves(entry)
    found = run.items[run.items.task.isin([leaf.name for leaf in leaves])]
    metric = leaves[0].metric
    found = found[found["filter"] == (metric.split(",", 1)[1] if "," in metric else "none")].copy()
    key = ["task", "prompt_hash", "target_hash"]
    # A question that a task asks twice is two items, in the order of documents.
    found["again"] = found.sort_values("doc_id").groupby(key).cumcount()
    return found.set_index([*key, "again"])


def choices_of(items: pd.DataFrame) -> np.ndarray:
    """What each item was answered with: the number of the choice, or the digest of a generated answer."""
    chosen = items.chosen.astype(int).astype(str)
    return np.where(items.chosen >= 0, chosen, items.answer_hash.fillna("none"))


def agreement_of(path: Path, teacher: Path, entry: str) -> TeacherAgreement | None:
    """One run folder against the teacher's; None where their items are not the same.

    Raises:
        IncomparableError: they did not ask the same.
    """
    run, known = load_task_run(path), load_task_run(teacher)
    require_comparable([known, *in_lane([run], known)])
    return agreement_with(known, run, entry)


def in_lane(runs: Sequence[TaskRun], teacher: TaskRun) -> list[TaskRun]:
    """A teacher may be asked in another lane than the arms (it often cannot be served); all else must be the same."""
    lane = teacher.receipt.lane
    return [replace(run, receipt=run.receipt.model_copy(update={"lane": lane})) for run in runs]


def agreement_with(teacher: TaskRun, run: TaskRun, entry: str) -> TeacherAgreement | None:
    """One arm against the teacher, item by item; None where the teacher did not answer these items."""
    items = paired_items(teacher, run, entry) if teacher.receipt.result(entry) else "not run"
    if isinstance(items, str):
        return None
    t, c = items
    same_N = choices_of(t) == choices_of(c)
    right_t, right_c = t.correct.to_numpy() == 1, c.correct.to_numpy() == 1
    low, high = wilson(int(same_N.sum()), len(t))
    return TeacherAgreement(
        arm=run.name,
        n=len(t),
        same_choice=int(same_N.sum()),
        low=low,
        high=high,
        right_to_wrong=int((right_t & ~right_c).sum()),
        wrong_to_right=int((~right_t & right_c).sum()),
        wrong_to_another_wrong=int((~right_t & ~right_c & ~same_N).sum()),
        choice_kl=_choice_kl(t, c),
    )


def _choice_kl(t: pd.DataFrame, c: pd.DataFrame) -> Estimated | None:
    """Mean KL(teacher||candidate) over the choices of an item, nats."""
    if t.loglikelihoods.isna().any() or c.loglikelihoods.isna().any():
        return None
    values_N = np.array([choice_kl(p, q) for p, q in zip(t.loglikelihoods, c.loglikelihoods, strict=True)])
    totals = group_totals(values_N, np.arange(len(values_N)))
    return Estimated.of(log_t_interval(totals, unit="item"))


def choice_kl(teacher: Sequence[float], candidate: Sequence[float]) -> float:
    """KL of two distributions over the choices, each normalised over them; nats."""
    p = np.asarray(teacher, dtype=float) - logsumexp(teacher)
    q = np.asarray(candidate, dtype=float) - logsumexp(candidate)
    # exp(d) - 1 - d is the same sum and never negative.
    d = q - p
    return float((np.exp(p) * (np.expm1(d) - d)).sum())
