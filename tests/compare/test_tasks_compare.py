"""Paired comparison of task items, against scipy and plain loops; what is refused, and what is only noise."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from harness.compare.task_model import TaskPair, load_task_comparisons, save_task_comparisons
from harness.compare.task_pairing import choice_kl
from harness.compare.tasks import compare_task_runs, judge
from harness.errors import IncomparableError, Refused, UsageError
from harness.report.task_tables import markdown, sentences, tables
from harness.report.words import task_reason, task_warnings, worded_tasks
from harness.stats import compare_items
from harness.tasks.importing import import_results
from tests.tasks.made_runs import choice_item, outcome_item, sha, subjects, write_run

REFERENCE = Path(__file__).parents[2] / "../shared/reference/lm_eval"


def flipped(n: int, lost: int, won: int) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes of two models, 70 % right, that differ in so many items each way."""
    a = np.arange(n) % 10 < 7
    b = a.copy()
    b[np.flatnonzero(a)[:lost]] = False
    b[np.flatnonzero(~a)[:won]] = True
    return a, b


def test_against_scipy_and_plain_formulas(tmp_path: Path) -> None:
    a, b = flipped(400, 31, 12)
    order = np.random.default_rng(3).permutation(400)
    a, b = a[order], b[order]
    runs = [write_run(tmp_path / n, n, subjects(x, 20), group="all") for n, x in (("a", a), ("b", b))]
    found = compare_task_runs(runs)
    pair = found.tasks[0].pairs[0]
    assert (pair.paired, pair.lost, pair.won, pair.n) == (True, 31, 12, 400)
    assert pair.p == pytest.approx(stats.binomtest(12, 43).pvalue, rel=1e-12)
    difference = b.astype(float) - a
    error = difference.std() / math.sqrt(400)
    half = stats.t.ppf(0.975, 399) * error
    assert pair.difference.estimate == pytest.approx(-19 / 400)
    assert (pair.difference.low, pair.difference.high) == pytest.approx((-19 / 400 - half, -19 / 400 + half))
    by_subject = difference.reshape(20, 20).mean(axis=1)
    clustered = stats.t.interval(0.95, 19, by_subject.mean(), by_subject.std(ddof=1) / math.sqrt(20))
    assert pair.by_subject is not None and pair.by_subject.n == 20
    assert (pair.by_subject.low, pair.by_subject.high) == pytest.approx(clustered)
    resampled = np.random.default_rng(0).choice(difference, (20_000, 400)).mean(axis=1)
    assert pair.bootstrap is not None
    assert (pair.bootstrap.low, pair.bootstrap.high) == pytest.approx(np.quantile(resampled, [0.025, 0.975]), abs=0.003)
    assert pair.detectable is not None
    found_in = stats.nct.sf(stats.t.ppf(0.975, 399), 399, pair.detectable / error)
    assert found_in == pytest.approx(0.8, abs=1e-6), "four in five such suites find it, by the noncentral t"
    assert pair.verdict == "worse" and task_reason(pair) == f"McNemar's exact p = {pair.p:.3g}"
    assert pair.same_choice == 400 - 43


def test_mean_change_of_the_margin_sees_what_accuracy_does_not(tmp_path: Path) -> None:
    """No answer flips, and every margin shrinks by about 0.1 nats."""
    rng = np.random.default_rng(2)
    loss = rng.normal(0.1, 0.02, 60)
    runs = []
    for name, change in (("a", np.zeros(60)), ("b", loss)):
        rows = [choice_item("t", n, [-1.0 - change[n], -3.0, -4.0, -5.0]) for n in range(60)]
        runs.append(write_run(tmp_path / name, name, {"t": rows}))
    pair = compare_task_runs(runs).tasks[0].pairs[0]
    assert (
        pair.flips == 0
        and pair.verdict == "within noise"
        and task_reason(pair).startswith("no item flipped; up to 6.0%")
    )
    assert pair.margin_change is not None and pair.margin_change.estimate == pytest.approx(-loss.mean())
    expected = stats.t.interval(0.95, 59, -loss.mean(), loss.std(ddof=1) / math.sqrt(60))
    assert (pair.margin_change.low, pair.margin_change.high) == pytest.approx(expected)
    assert pair.p_margin_change == pytest.approx(stats.ttest_1samp(loss, 0).pvalue, rel=1e-6)
    assert pair.by_subject is None and pair.detectable is None


def test_thirty_lost_and_twenty_won_of_14042_is_noise() -> None:
    """McNemar's exact p is 0.2026; not "worse"."""
    a, b = flipped(14_042, 30, 20)
    found = compare_items(a, b)
    assert found.p == pytest.approx(0.2026, abs=5e-5)
    assert judge(found, 0.0005) == ("within noise", "")
    told = TaskPair.model_construct(
        paired=True, may_flip=None, reason="", verdict="within noise", lost=found.a_only, won=found.b_only, p=found.p
    )
    assert task_reason(told) == "30 lost and 20 won: McNemar's exact p = 0.203"
    assert judge(found, 0.01)[0] == "equivalent"


@pytest.mark.parametrize(
    ("lost", "won", "margin", "verdict"),
    [(30, 5, 0.0, "worse"), (5, 30, 0.0, "better"), (5, 5, 0.0, "within noise"), (2, 3, 0.03, "equivalent")],
)
def test_verdicts(lost: int, won: int, margin: float, verdict: str) -> None:
    assert judge(compare_items(*flipped(500, lost, won)), margin)[0] == verdict


def test_no_flip_is_equivalent_only_among_many() -> None:
    same = np.ones(2000, dtype=bool)
    assert judge(compare_items(same, same), 0.01)[0] == "equivalent"
    assert judge(compare_items(same[:100], same[:100]), 0.01)[0] == "within noise"


def test_better_needs_the_exact_test_too() -> None:
    """Six lost of 200: the t interval leaves 0, the exact p is 0.031; five: the interval leaves 0, p is 0.0625."""
    six, five = (compare_items(*flipped(200, n, 0)) for n in (6, 5))
    assert five.difference.high is not None and five.difference.high < 0
    assert judge(six, 0.0)[0] == "worse" and judge(five, 0.0)[0] == "within noise"


# ---- the teacher -----------------------------------------------------------------------------------------------------


def test_agreement_with_the_teacher(tmp_path: Path) -> None:
    """Right to wrong, wrong to right, wrong to another wrong, counted by hand."""
    teacher = [outcome_item("t", n, right, 1) for n, right in enumerate([True, True, True, False, False, False])]
    quant = [
        outcome_item("t", 0, True),
        outcome_item("t", 1, False, 2),
        outcome_item("t", 2, True),
        outcome_item("t", 3, True),
        outcome_item("t", 4, False, 1),
        outcome_item("t", 5, False, 3),
    ]
    runs = [write_run(tmp_path / n, n, {"t": rows}) for n, rows in (("T", teacher), ("q", quant))]
    again = write_run(tmp_path / "t2", "T2", {"t": teacher})
    found = compare_task_runs([again, runs[1]], teacher=runs[0])
    first, second = found.tasks[0].teacher
    assert (first.arm, first.same_choice, first.right_to_wrong, first.wrong_to_right) == ("T2", 6, 0, 0)
    assert first.choice_kl is not None and first.choice_kl.estimate == 0
    assert (second.right_to_wrong, second.wrong_to_right, second.wrong_to_another_wrong) == (1, 1, 1)
    assert second.same_choice == 3 and second.share == 0.5
    assert (second.low, second.high) == pytest.approx(stats.binomtest(3, 6).proportion_ci(method="wilson"))
    assert found.teacher == "T"


def test_divergence_over_the_choices_by_hand() -> None:
    p, q = np.log([0.9, 0.1]) - 7, np.log([0.5, 0.5]) - 3
    assert choice_kl(p, q) == pytest.approx(0.368064, abs=1e-6)
    assert choice_kl(q, p) == pytest.approx(0.510826, abs=1e-6)
    assert choice_kl(p, p) == 0


def test_a_teacher_of_other_items_is_said(tmp_path: Path) -> None:
    rows = [outcome_item("t", n, True) for n in range(8)]
    runs = [write_run(tmp_path / n, n, {"t": rows}) for n in "ab"]
    teacher = write_run(tmp_path / "T", "T", {"t": rows[:4]})
    found = compare_task_runs(runs, teacher=teacher)
    assert found.tasks[0].teacher == []
    assert "t: the teacher's items are not those of every arm" in task_warnings(found)


def test_a_teacher_of_another_lane_is_allowed_and_said(tmp_path: Path) -> None:
    rows = [outcome_item("t", n, True) for n in range(8)]
    runs = [write_run(tmp_path / n, n, {"t": rows}, lane="served") for n in "ab"]
    teacher = write_run(tmp_path / "T", "T", {"t": rows})
    found = compare_task_runs(runs, teacher=teacher)
    assert len(found.tasks[0].teacher) == 2
    assert any("teacher was asked in the weights lane" in text for text in task_warnings(found))
    with pytest.raises(IncomparableError, match="a was asked in the served lane, T in the weights lane"):
        compare_task_runs([runs[0], teacher])


# ---- pairing and refusals --------------------------------------------------------------------------------------------


def test_order_and_repeats_do_not_matter(tmp_path: Path) -> None:
    """Items are matched by hash; a question that is asked twice is two items."""
    rows = [outcome_item("t", n, n % 3 > 0) for n in range(9)]
    rows += [row | {"doc_id": 9 + n} for n, row in enumerate(rows[:2])]
    a = write_run(tmp_path / "a", "a", {"t": rows})
    b = write_run(tmp_path / "b", "b", {"t": list(reversed(rows))})
    pair = compare_task_runs([a, b]).tasks[0].pairs[0]
    assert pair.paired and pair.n == 11 and pair.flips == 0


def test_other_items_are_not_paired(tmp_path: Path) -> None:
    """Another prompt under the same document number: no pairing, the unpaired interval, and the reason."""
    rows = [outcome_item("t", n, n % 10 < 7) for n in range(200)]
    other = [dict(row) for row in rows]
    other[5]["prompt_hash"] = sha("another prompt")
    runs = [write_run(tmp_path / "a", "a", {"t": rows}), write_run(tmp_path / "b", "b", {"t": other})]
    pair = compare_task_runs(runs).tasks[0].pairs[0]
    assert not pair.paired and pair.why_not == "1 items are only in a, 1 only in b"
    assert pair.p is None and pair.flips is None and pair.difference.method == "Newcombe's, unpaired"
    assert pair.verdict == "within noise"


def test_a_set_that_says_more_columns_is_the_same_question(tmp_path: Path) -> None:
    rows = [outcome_item("t", n, True) for n in range(5)]
    other = [row | {"doc_hash": sha("more columns")} for row in rows]
    runs = [write_run(tmp_path / "a", "a", {"t": rows}), write_run(tmp_path / "b", "b", {"t": other})]
    assert compare_task_runs(runs).tasks[0].pairs[0].paired


def test_published_counts_two_items_apart(tmp_path: Path) -> None:
    """951 and 953 of 1,140 and 86 and 87 of 198 are "not distinguishable"; no winner is named."""
    if not REFERENCE.is_dir():
        pytest.skip("the published receipts are not here")
    runs = []
    for point in ("a0", "mosaic12l"):
        files = [REFERENCE / f"{point}-mmlu-quick.json", REFERENCE / f"{point}-gpqa-mc.json"]
        import_results(files, tmp_path / point, point)
        runs.append(tmp_path / point)
    found = compare_task_runs(runs)
    mmlu, gpqa = found.tasks
    assert [arm.correct for arm in mmlu.arms] == [951, 953] and [arm.correct for arm in gpqa.arms] == [86, 87]
    for task in found.tasks:
        assert task.pairs[0].verdict == "within noise" and not task.pairs[0].paired
        assert "not distinguishable" in task_reason(task.pairs[0])
    assert mmlu.pairs[0].why_not == "a0 has published counts only"
    shown = tables(found)[0].rows
    assert shown[0] == ("mmlu", "57 x first 20", "0.8342 ± 0.0105", "0.8360 ± 0.0104")
    assert shown[2] == ("gpqa_diamond_zeroshot", "all 198", "0.4343 ± 0.0353", "0.4394 ± 0.0354")


def test_contrary_tasks_have_no_winner(tmp_path: Path) -> None:
    """One task up, the other down, both within noise."""
    a, up = flipped(100, 0, 1)
    _, down = flipped(100, 1, 0)
    rows = lambda x, t: [outcome_item(t, n, bool(r)) for n, r in enumerate(x)]  # noqa: E731
    runs = [
        write_run(tmp_path / "a", "a", {"s": rows(a, "s"), "t": rows(a, "t")}),
        write_run(tmp_path / "b", "b", {"s": rows(up, "s"), "t": rows(down, "t")}),
    ]
    assert "b - a: the tasks point different ways, within noise" in task_warnings(compare_task_runs(runs))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lm_eval": "0.4.2"}, "lm_eval version: a has 0.4.13, b has 0.4.2"),
        ({"leaf": {"config_sha256": "f" * 64}}, "t: config_sha256 of t is .* for a, ffffffffffff for b"),
        ({"leaf": {"num_fewshot": 5}}, "t: num_fewshot of t is 0 for a, 5 for b"),
        ({"leaf": {"version": "2.0"}}, "t: version of t is 1.0 for a, 2.0 for b"),
    ],
)
def test_other_benchmarks_are_refused(change: dict[str, object], said: str, tmp_path: Path) -> None:
    """The same name with another version, shots or metric is another benchmark."""
    rows = {"t": [outcome_item("t", n, True) for n in range(5)]}
    runs = [write_run(tmp_path / "a", "a", rows), write_run(tmp_path / "b", "b", rows, **change)]  # type: ignore[arg-type]
    with pytest.raises(IncomparableError, match=said):
        compare_task_runs(runs)


def test_runs_without_a_common_task(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / t, t, {t: [outcome_item(t, 0, True)]}) for t in "st"]
    with pytest.raises(IncomparableError, match="have no task in common"):
        compare_task_runs(runs)
    with pytest.raises(UsageError, match="needs two runs"):
        compare_task_runs(runs[:1])


def test_items_that_were_changed_are_refused(tmp_path: Path) -> None:
    rows = {"t": [outcome_item("t", n, True) for n in range(5)]}
    runs = [write_run(tmp_path / n, n, rows) for n in "ab"]
    frame = pd.read_parquet(runs[1] / "items.parquet")
    frame["correct"] = 0
    frame.to_parquet(runs[1] / "items.parquet")
    with pytest.raises(IncomparableError, match="is not what its tasks.json was made from"):
        compare_task_runs(runs)
    (runs[1] / "items.parquet").unlink()
    with pytest.raises(Refused, match="has no items.parquet"):
        compare_task_runs(runs)


def test_partial_runs_deviations_and_what_is_missing_are_said(tmp_path: Path) -> None:
    rows = {"t": [outcome_item("t", n, True) for n in range(5)]}
    a = write_run(tmp_path / "a", "a", rows)
    b = write_run(
        tmp_path / "b",
        "b",
        rows,
        status="partial",
        missing=[{"task": "gpqa", "why": "gated"}],
        deviations=["t: the first 5 documents of each task, the suite says all"],
    )
    found = compare_task_runs([a, b])
    assert "b is partial" in task_warnings(found) and "b: gpqa was not run (gated)" in task_warnings(found)
    assert found.deviations == ["b: t: the first 5 documents of each task, the suite says all"]


def test_unreadable_answers_are_shown_and_warned_of(tmp_path: Path) -> None:
    """A rate above 2 %, or 1 pp between the arms."""
    rows = {"t": [outcome_item("t", n, True) for n in range(100)]}
    runs = [
        write_run(tmp_path / n, n, rows, leaf={"extraction_failures": f, "truncations": c})
        for n, f, c in (("a", 1, 0), ("b", 5, 3))
    ]
    found = compare_task_runs(runs)
    assert "t: no answer could be read from 5.0% of one arm's outputs" in task_warnings(found)
    assert "t: the arms differ by 4.0% in answers that cannot be read" in task_warnings(found)
    shown = tables(found)[0].rows
    assert ("  answers not read", "", "1.00 %", "5.00 %") in shown and ("  cut off", "", "0 %", "3.00 %") in shown


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_tables_sentences_and_the_record(tmp_path: Path) -> None:
    a, b = flipped(400, 31, 12)
    teacher = write_run(tmp_path / "T", "T", subjects(a, 20), group="all")
    runs = [write_run(tmp_path / n, n, subjects(x, 20), group="all", margin=0.02) for n, x in (("a", a), ("b", b))]
    found = compare_task_runs(runs, teacher=teacher)
    assert found.tasks[0].pairs[0].margin == 0.02
    assert sentences(found) == ["all: b against a is worse: -4.8 pp [-7.9, -1.6], 43 of 400 outcomes flipped."]
    text = markdown([found])
    for part in ("31 / 12", "by subject (20)", "macro, mean of 20 tasks", "Against the teacher T", "0.7000 ± 0.02"):
        assert part in text
    save_task_comparisons(tmp_path, [worded_tasks(found)])
    assert load_task_comparisons(tmp_path) == [worded_tasks(found)]
    assert markdown([]) == ""
    assert all(len(set(map(len, itertools.chain([t.header], t.rows)))) == 1 for t in tables(found))
