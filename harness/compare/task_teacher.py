"""A candidate's answers against the teacher's own: flips each way, and the divergence over the choices.

As in "Accuracy is Not All You Need" (arXiv 2407.09141): answers that change are told apart from answers that get worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import logsumexp

from harness.compare.model import Figure
from harness.compare.task_model import TeacherAgreement
from harness.compare.task_pairing import TaskRun, choices_of, load_task_run, paired_items, require_comparable
from harness.stats import group_totals, log_t_interval, wilson


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


def _choice_kl(t: pd.DataFrame, c: pd.DataFrame) -> Figure | None:
    """Mean KL(teacher||candidate) over the choices of an item, nats."""
    if t.loglikelihoods.isna().any() or c.loglikelihoods.isna().any():
        return None
    values_N = np.array([choice_kl(p, q) for p, q in zip(t.loglikelihoods, c.loglikelihoods, strict=True)])
    totals = group_totals(values_N, np.arange(len(values_N)))
    return Figure.of(log_t_interval(totals, unit="item"))


def choice_kl(teacher: Sequence[float], candidate: Sequence[float]) -> float:
    """KL of two distributions over the choices, each normalised over them; nats."""
    p = np.asarray(teacher, dtype=float) - logsumexp(teacher)
    q = np.asarray(candidate, dtype=float) - logsumexp(candidate)
    # exp(d) - 1 - d is the same sum and never negative.
    d = q - p
    return float((np.exp(p) * (np.expm1(d) - d)).sum())
