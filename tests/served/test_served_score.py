"""A served row against its teacher: bounds below the exact KL, the estimate around it, and nothing made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from harness.errors import EngineError, ScoreError
from harness.measure import summary
from harness.measure.result import intervals
from harness.measure.rows import row_table, scores_of
from harness.served import score as served
from harness.served.known_ids import ask_of
from harness.served.score import receipt_extras, score_served
from harness.types import SCORE_DTYPES, Scores
from tests.served.made_answers import Served, T, made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return made(tmp_path_factory.mktemp("teacher") / "capture")


# ---- the server's own top k ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["hidden", "logits"])
def test_bounds_of_a_servers_top_k(tmp_path: Path, form: str) -> None:
    served_by = made(tmp_path / form, form=form, rows=1)
    exact, last = served_by.exact[0], np.full(T - 1, -1e-6)
    for k in (5, 20, 100, 600):
        scores, extras = served_by.score(0, k)
        assert (scores.kl >= last - 2e-6).all() and (scores.kl <= exact.kl + 2e-6).all()
        assert (extras["kl_capped"] >= scores.kl - 2e-6).all() and (extras["kl_capped"] <= exact.kl + 2e-6).all()
        last = scores.kl
        np.testing.assert_allclose(scores.nll_candidate, exact.nll_candidate, atol=1e-5)
        np.testing.assert_allclose(scores.nll_teacher, exact.nll_teacher, atol=1e-5)
        np.testing.assert_allclose(scores.entropy_teacher, exact.entropy_teacher, atol=1e-5)
        for name in ("top1_teacher", "top1_candidate", "agree", "agree_lowest_id", "top5_overlap"):
            np.testing.assert_array_equal(getattr(scores, name), getattr(exact, name), err_msg=name)
        ranked = scores.rank > 0
        np.testing.assert_array_equal(scores.rank[ranked], exact.rank[ranked])
        assert ranked.mean() > 0.9
        for name in ("kl_reverse", "tv", "entropy_candidate", "outside_teacher", "outside_candidate"):
            assert np.isnan(getattr(scores, name)).all(), name
        assert extras["all_known"].all() and extras["agree_known"].all()
        assert np.isnan(extras["kl_tail_estimate"]).all()
        assert {name: values.dtype.name for name, values in extras.items()} == dict(served.EXTRA_DTYPES)
        assert {name: getattr(scores, name).dtype.name for name in SCORE_DTYPES} == dict(SCORE_DTYPES)
    assert scores.kl.mean() == pytest.approx(exact.kl.mean(), rel=1e-3)


def test_the_gap_is_the_uncovered_mass_times_the_divergence_of_the_tails(small: Served) -> None:
    scores, extras = small.score(0, 20)
    row, head = small.capture.row(0), small.capture.head
    assert head is not None
    lp, lq = torch.log_softmax(row.states_TH.double() @ head.weight_VH.double().T, -1).numpy(), small.lq[0]
    outside = np.ones(lp.shape, dtype=bool)
    np.put_along_axis(outside, small.answer(small.panel.rows[0], 20).ids_TK.astype(np.int64), False, axis=1)
    np.put_along_axis(outside, row.target[:, None].astype(np.int64), False, axis=1)
    p, q = np.where(outside, np.exp(lp), 0.0), np.where(outside, np.exp(lq), 0.0)
    uncovered, theirs = p.sum(1), q.sum(1)
    np.testing.assert_allclose(1 - extras["captured_teacher_mass"], uncovered, atol=1e-6)
    np.testing.assert_allclose(1 - extras["captured_candidate_mass"], theirs, atol=1e-6)
    tails = np.where(outside, p * (lp - lq), 0.0).sum(1) - uncovered * np.log(uncovered / theirs)
    np.testing.assert_allclose(small.exact[0].kl - scores.kl, tails, atol=3e-6)
    assert extras["kl_shortfall"].mean() == pytest.approx(tails.mean(), rel=0.5)


def test_sentinels_go_to_the_tail_and_nan_makes_a_position_invalid(small: Served) -> None:
    """-9999 and null arrive as -inf, so not observed; NaN makes the position invalid; no term of p times 9999."""
    row = small.panel.rows[0]
    answer = small.answer(row, 20)
    logprobs = answer.logprobs_TK.copy()
    logprobs[4, 7:] = -np.inf
    logprobs[9, 3] = np.nan
    scores, extras = small.score(0, 20, logprobs_TK=logprobs)
    plain, whole = small.score(0, 20)
    assert 0 <= scores.kl[4] <= plain.kl[4] and np.isfinite(scores.kl[4])
    assert not extras["all_known"][4] and extras["captured_teacher_mass"][4] < whole["captured_teacher_mass"][4]
    assert np.isnan(scores.kl[9]) and scores.nonfinite_candidate[9] == 1 and scores.top1_candidate[9] == -1
    assert not extras["agree_known"][9] and not scores.agree[9]
    others = np.setdiff1d(np.arange(T - 1), [4, 9])
    np.testing.assert_array_equal(scores.kl[others], plain.kl[others])


def test_ties_in_the_servers_list_count_as_its_choice(small: Served) -> None:
    row = small.panel.rows[0]
    answer = small.answer(row, 20)
    ids, logprobs = answer.ids_TK.copy(), answer.logprobs_TK.copy()
    at = int(np.flatnonzero(small.exact[0].agree)[0])
    logprobs[at, 1] = logprobs[at, 0]
    ids[at, :2] = ids[at, 1::-1]
    scores, _ = small.score(0, 20, ids_TK=ids, logprobs_TK=logprobs)
    assert scores.agree[at] and scores.tied_candidate[at]
    assert scores.top1_candidate[at] == ids[at, :2].min()


def test_answers_that_cannot_be_scored(small: Served) -> None:
    row = small.panel.rows[0]
    answer = small.answer(row, 20)
    twice = answer.ids_TK.copy()
    twice[2, 5] = twice[2, 6]
    with pytest.raises(EngineError, match=r"row 0, position 2: the server names token \d+ twice"):
        small.score(0, 20, ids_TK=twice)
    with pytest.raises(EngineError, match="add up to 1"):
        small.score(0, 600, logprobs_TK=small.answer(row, 600).logprobs_TK + 0.01)
    with pytest.raises(EngineError, match="other shapes"):
        small.score(0, 20, target_logprob_T=answer.target_logprob_T[:-1])


def test_a_candidate_equal_to_its_teacher_is_at_zero(tmp_path: Path) -> None:
    """Rounding of fp32 log-probabilities leaves less than 1e-6 nats, and no position below -1e-6."""
    same = made(tmp_path / "same", noise=0.0, rows=1)
    scores, extras = same.score(0, 50)
    assert np.abs(scores.kl).max() < 1e-6 and np.abs(extras["kl_capped"]).max() < 1e-6
    assert scores.agree.all()


# ---- ids of our choice -----------------------------------------------------------------------------------------------


def asked_scores(served_by: Served, index: int, k: int, m: int, own: int = 0) -> tuple[Scores, dict[str, np.ndarray]]:
    row = served_by.panel.rows[index]
    asked = ask_of(served_by.capture, row, k, m, seed=3)
    answer = served_by.answer(row, own, asked)
    return score_served(served_by.capture, served_by.capture.row(index), row, answer, asked, None)


def test_fixed_ids_bound_and_estimate(small: Served) -> None:
    """The bound lies below the exact KL, the estimate's mean within four of its own standard errors of it."""
    parts = [asked_scores(small, i, 20, 64) for i in range(3)]
    kl, exact = (
        np.concatenate([s.kl for s in side]) for side in ([p[0] for p in parts], [small.exact[i] for i in range(3)])
    )
    assert (kl <= exact + 2e-6).all()
    total, error = (np.concatenate([p[1][name] for p in parts]) for name in ("kl_tail_estimate", "kl_tail_se"))
    spread = np.sqrt((error**2).sum()) / len(total)
    assert abs(total.mean() - exact.mean()) < 4 * spread
    assert exact.mean() - kl.mean() > 4 * spread  # what the bound lacks is far beyond the estimate's error
    z = (total - exact) / error
    assert 0.8 < z.std() < 1.3


def test_fixed_ids_without_a_list_know_only_a_certain_choice(small: Served) -> None:
    scores, extras = asked_scores(small, 0, 20, 0)
    exact = small.exact[0]
    certain = scores.top1_candidate >= 0
    assert 0.1 < certain.mean() < 1
    np.testing.assert_array_equal(scores.top1_candidate[certain], exact.top1_candidate[certain])
    np.testing.assert_array_equal(scores.agree[extras["agree_known"]], exact.agree[extras["agree_known"]])
    assert not scores.agree[~extras["agree_known"]].any() and extras["agree_known"].sum() > certain.sum()
    assert (scores.top5_overlap == -1).all() and np.isnan(extras["kl_tail_estimate"]).all()
    listed, more = asked_scores(small, 0, 20, 0, own=5)
    np.testing.assert_array_equal(listed.top1_candidate, exact.top1_candidate)
    np.testing.assert_array_equal(listed.top5_overlap, exact.top5_overlap)
    np.testing.assert_array_equal(listed.kl, scores.kl)
    assert more["agree_known"].all()


def test_an_id_that_the_server_did_not_score(small: Served) -> None:
    row = small.panel.rows[0]
    asked = ask_of(small.capture, row, 20, 4, seed=3)
    answer = small.answer(row, 0, asked)
    assert answer.asked_TM is not None
    values = answer.asked_TM.copy()
    values[5, 21], values[6, 3] = -np.inf, -np.inf
    scores, extras = score_served(
        small.capture, small.capture.row(0), row, replace(answer, asked_TM=values), asked, None
    )
    assert not extras["all_known"][[5, 6]].any() and extras["all_known"].sum() == T - 3
    assert np.isnan(extras["kl_tail_estimate"][[5, 6]]).all() and np.isfinite(scores.kl[[5, 6]]).all()
    with pytest.raises(EngineError, match="other shapes"):
        score_served(small.capture, small.capture.row(0), row, replace(answer, asked_TM=None), asked, None)
    with pytest.raises(ScoreError, match="one drawn id"):
        ask_of(small.capture, row, 20, 1, seed=3)


def test_the_asked_ids_are_the_teachers_then_drawn_then_the_target(small: Served) -> None:
    row = small.panel.rows[2]
    asked = ask_of(small.capture, row, 20, 4, seed=3)
    assert asked.ids_TM.shape == (T - 1, 25) and asked.ids_TM.dtype == np.int32
    np.testing.assert_array_equal(asked.ids_TM[:, -1], row.ids_T[1:])
    np.testing.assert_array_equal(asked.ids_TM[:, 0], small.exact[2].top1_teacher)
    np.testing.assert_array_equal(asked.ids_TM, ask_of(small.capture, row, 20, 4, seed=3).ids_TM)


# ---- the numbers of a run --------------------------------------------------------------------------------------------


def run_table(served_by: Served, parts: list[tuple[Scores, dict[str, np.ndarray]]]) -> pa.Table:
    tables = [row_table(row, *part) for row, part in zip(served_by.panel.rows, parts, strict=True)]
    return pa.concat_tables(tables).combine_chunks()


def test_summary_of_fixed_ids(small: Served) -> None:
    table = run_table(small, [asked_scores(small, i, 20, 64) for i in range(3)])
    row_N = table["row"].to_numpy()
    found = receipt_extras(table, small.panel)
    mass = table["captured_teacher_mass"].to_numpy()
    s = found.summary
    assert s["captured_teacher_mass_mean"] == mass.mean() and s["captured_teacher_mass_min"] == mass.min()
    assert s["captured_teacher_mass_p01"] == np.sort(mass)[2]  # the 3rd of 240: 1 % of them lie at or below it
    assert s["all_known_share"] == 1.0
    assert s["kl_tail_estimate_se"] == pytest.approx(np.sqrt((table["kl_tail_se"].to_numpy() ** 2).sum()) / 240)
    assert found.intervals["kl_tail_estimate_mean"].n == 3
    scores = scores_of(table)
    plain = summary.summarise(scores, row_N, table["position"].to_numpy(), row_N)
    for name in ("kl_reverse_mean", "tv_mean", "rank_mean", "entropy_candidate", "outside_teacher_max", "top5_overlap"):
        assert plain[name] is None, name
    assert plain["top1_agreement"] is None and plain["top1_agreement_lowest_id"] is None
    low, high = s["top1_agreement_low"], s["top1_agreement_high"]
    exact = np.concatenate([small.exact[i].agree for i in range(3)]).mean()
    assert low <= exact <= high and low < high and high - low == pytest.approx(found.counts["agreement_unknown"] / 240)
    assert "top1_agreement" not in intervals(scores, table["row"].to_numpy(), small.panel)
    line = summary.row_summary(small.panel, 0, Scores(**{n: getattr(scores, n)[:80] for n in SCORE_DTYPES}))
    assert line.top1_agreement is None and line.tv_mean is None and line.top5_overlap is None


def test_summary_of_a_top_k(small: Served) -> None:
    table = run_table(small, [small.score(i, 20) for i in range(3)])
    row_N = table["row"].to_numpy()
    found, scores = receipt_extras(table, small.panel), scores_of(table)
    assert found.summary["kl_tail_estimate_mean"] is None and found.summary["kl_tail_estimate_se"] is None
    assert "top1_agreement_low" not in found.summary and "tail_estimate_unknown" not in found.counts
    assert found.counts == {
        "top1_unknown": 0,
        "agreement_unknown": 0,
        "asked_not_known": 0,
        "mass_rounded": found.counts["mass_rounded"],
    }
    plain = summary.summarise(scores, row_N, table["position"].to_numpy(), row_N)
    assert plain["top1_agreement"] == np.concatenate([small.exact[i].agree for i in range(3)]).mean()
    assert plain["top5_overlap"] == np.concatenate([small.exact[i].top5_overlap for i in range(3)]).mean() / 5
    assert plain["kl_mean"] < found.summary["kl_capped_mean"] + 1e-6
    assert found.intervals["kl_capped_mean"].low is None
    assert found.intervals["kl_capped_mean"].note == "fewer than 4 documents"


def test_an_estimate_that_is_missing_somewhere_is_withheld(small: Served) -> None:
    table = run_table(small, [asked_scores(small, i, 20, 4) for i in range(3)])
    values = table["kl_tail_estimate"].to_numpy().copy()
    values[7] = np.nan
    place = table.column_names.index("kl_tail_estimate")
    found = receipt_extras(table.set_column(place, "kl_tail_estimate", pa.array(values)), small.panel)
    assert found.summary["kl_tail_estimate_mean"] is None and found.counts["tail_estimate_unknown"] == 1
    assert "kl_tail_estimate_mean" not in found.intervals
