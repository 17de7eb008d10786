"""Hidden states through heads: against the oracle, in every mix, and independent of threads and plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from harness.errors import ScoreError, UsageError
from harness.scoring import blas, blas_choice, score_hidden, score_logits, score_outputs, teacher_stats, walk
from harness.types import Head, Hidden, Logits, Scores
from tests.scoring.scoring_oracle import head_logits, oracle_scores
from tests.scoring.test_scoring_properties import assert_scores

HIDDEN, VOCAB = 64, 2300


def make_head(seed: int, *, dtype: torch.dtype = torch.bfloat16, rows: int = VOCAB, **kwargs: Any) -> Head:
    weight = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 0.3
    kwargs.setdefault("vocab_size", rows)
    return Head(weight_VH=weight.to(dtype), sha256=f"head {seed} {dtype} {rows}", **kwargs)


def states(seed: int, n: int, *, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(other: torch.Tensor, seed: int, size: float) -> torch.Tensor:
    noise = torch.randn(other.shape, generator=torch.Generator().manual_seed(seed))
    return (other.float() + size * noise).to(other.dtype)


def assert_equal(one: Scores, two: Scores) -> None:
    for field in fields(Scores):
        np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name), err_msg=field.name)


HEADS = {
    "bf16": make_head(1),
    "fp16": make_head(1, dtype=torch.float16),
    "fp32": make_head(1, dtype=torch.float32),
    "bias": make_head(1, bias_V=torch.linspace(-2, 2, VOCAB)),
    "scale and soft-cap": make_head(1, scale=2.5, softcap=10.0),
    "padded": make_head(1, vocab_size=VOCAB - 1200),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("second", [True, False])
def test_against_the_oracle(name: str, second: bool) -> None:
    """Looser than from logits by the rounding of the products, which the oracle makes in another order."""
    head, teacher = HEADS[name], states(2, 30)
    candidate, targets = near(teacher, 3, 0.1), np.arange(30) * 7
    found = score_hidden(teacher, candidate, targets, teacher_head=head, candidate_head=head, second_pass=second)
    wanted = oracle_scores(head_logits(teacher, head), head_logits(candidate, head), targets, head.vocab_size)
    np.testing.assert_allclose(found.kl, wanted.kl, rtol=3e-5)
    np.testing.assert_allclose(found.kl_reverse, wanted.kl_reverse, rtol=3e-5)
    for column in ("nll_teacher", "nll_candidate", "entropy_teacher", "entropy_candidate", "p_top1_teacher"):
        np.testing.assert_allclose(getattr(found, column), getattr(wanted, column), rtol=3e-5, atol=1e-5)
    for column in ("outside_teacher", "outside_candidate"):
        np.testing.assert_allclose(getattr(found, column), getattr(wanted, column), rtol=3e-5)
    for column in ("top1_teacher", "top1_candidate", "agree", "nonfinite_teacher"):
        np.testing.assert_array_equal(getattr(found, column), getattr(wanted, column))
    if second:
        np.testing.assert_allclose(found.tv, wanted.tv, rtol=3e-5)
        assert (found.top5_overlap == wanted.top5_overlap).mean() > 0.9
        assert (found.rank == wanted.rank).mean() > 0.9
    else:
        assert np.isnan(found.tv).all() and (found.rank == -1).all() and (found.top5_overlap == -1).all()


@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("count", [1, 13, 100])
def test_itself_is_exactly_zero(second: bool, count: int) -> None:
    """The same states through the same head: 0.0, not nearly, wherever a position stands in its product."""
    teacher = states(4, count)
    scores = score_hidden(
        teacher, teacher.clone(), np.zeros(count, int), teacher_head=HEADS["bf16"], candidate_head=HEADS["bf16"],
        second_pass=second,
    )  # fmt: skip
    assert (scores.kl == 0.0).all() and (scores.kl_reverse == 0.0).all() and scores.agree.all()
    assert not second or ((scores.tv == 0.0).all() and (scores.rank == 1).all() and (scores.top5_overlap == 5).all())


def test_own_heads_of_different_widths() -> None:
    """Sides may differ in hidden size, dtype and head; only the vocabulary is common."""
    wide = Head(weight_VH=torch.randn(VOCAB, 96, generator=torch.Generator().manual_seed(5)) * 0.2,
                vocab_size=VOCAB, sha256="wide")  # fmt: skip
    teacher = torch.randn(20, 96, generator=torch.Generator().manual_seed(6)).half()
    candidate, targets = states(7, 20, dtype=torch.float32), np.arange(20)
    head = HEADS["bf16"]
    found = score_hidden(teacher, candidate, targets, teacher_head=wide, candidate_head=head, second_pass=True)
    wanted = oracle_scores(head_logits(teacher, wide), head_logits(candidate, head), targets)
    assert_scores(found, wanted, kl_rel=3e-5)


@pytest.fixture(params=list(blas.PRODUCTS))
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each matrix product in turn, fixed by the environment variable."""
    monkeypatch.setenv(blas.VARIABLE, request.param)
    blas_choice.cache_clear()
    yield request.param
    blas_choice.cache_clear()


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("second", [True, False, None])
def test_threads_and_plans_do_not_move_a_digit(second: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 12 positions, strips of one tile, one thread or three: the same bits."""
    teacher = states(8, 100)
    candidate = near(teacher, 9, 0.3)
    kwargs: dict[str, Any] = {"teacher_head": HEADS["padded"], "candidate_head": HEADS["padded"]}
    one = score_hidden(teacher, candidate, np.arange(100), second_pass=second, threads=1, **kwargs)
    assert_equal(one, score_hidden(teacher, candidate, np.arange(100), second_pass=second, threads=3, **kwargs))
    monkeypatch.setattr(walk, "MOST_ROWS", 24)
    if second is not None:
        monkeypatch.setattr(walk, "STRIP_BYTES", 24 * 4 * VOCAB)
    assert_equal(one, score_hidden(teacher, candidate, np.arange(100), second_pass=second, threads=2, **kwargs))


def test_hidden_against_logits() -> None:
    """A capture in logits form beside a candidate with a head, and the other way round."""
    head, teacher = HEADS["padded"], states(10, 25)
    candidate, targets = near(teacher, 11, 0.2), np.arange(25)
    t_logits = torch.from_numpy(head_logits(teacher, head))
    c_logits = torch.from_numpy(head_logits(candidate, head))
    wanted = oracle_scores(t_logits, c_logits, targets, head.vocab_size)
    for second in (True, False):
        left = score_outputs(Logits(logits_TV=t_logits), Hidden(states_TH=candidate), targets, candidate_head=head,
                             vocab_size=head.vocab_size, second_pass=second)  # fmt: skip
        right = score_outputs(Hidden(states_TH=teacher), Logits(logits_TV=c_logits), targets, teacher_head=head,
                              vocab_size=head.vocab_size, second_pass=second)  # fmt: skip
        for found in (left, right):
            np.testing.assert_allclose(found.kl, wanted.kl, rtol=3e-5)
            np.testing.assert_allclose(found.outside_teacher, wanted.outside_teacher, rtol=3e-5)
            np.testing.assert_allclose(found.outside_candidate, wanted.outside_candidate, rtol=3e-5)
        assert not second or np.allclose(left.tv, wanted.tv, rtol=3e-5)


def test_capture_numbers_are_the_score_s() -> None:
    """What a capture stores of a row is, bit for bit, the teacher's side of scoring that row."""
    teacher, targets = states(12, 40), np.arange(40)
    stats = teacher_stats(teacher, targets, HEADS["bf16"])
    scores = score_hidden(
        teacher, near(teacher, 13, 0.2), targets, teacher_head=HEADS["bf16"], candidate_head=HEADS["bf16"]
    )
    np.testing.assert_array_equal(stats.nll, scores.nll_teacher)
    np.testing.assert_array_equal(stats.entropy, scores.entropy_teacher)
    np.testing.assert_array_equal(stats.top1, scores.top1_teacher)
    np.testing.assert_array_equal(stats.p_top1, scores.p_top1_teacher)
    logits = head_logits(teacher, HEADS["bf16"]).astype(np.float64)
    np.testing.assert_allclose(stats.lse, np.log(np.exp(logits).sum(1)), rtol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_hidden_state(value: float) -> None:
    """Its position is NaN and counted, soft-cap or not; its neighbours keep their digits."""
    for name in ("bf16", "scale and soft-cap"):
        teacher = states(14, 20)
        broken = near(teacher, 15, 0.1)
        kwargs: dict[str, Any] = {"teacher_head": HEADS[name], "candidate_head": HEADS[name], "second_pass": True}
        whole = score_hidden(teacher, broken, np.zeros(20, int), **kwargs)
        broken[3, 5] = value
        scores = score_hidden(teacher, broken, np.zeros(20, int), **kwargs)
        assert np.flatnonzero(np.isnan(scores.kl)).tolist() == [3]
        assert scores.nonfinite_candidate[3] == VOCAB and scores.nonfinite_teacher[3] == 0
        assert scores.rank[3] == -1 and scores.top1_candidate[3] == -1 and not scores.agree[3]
        np.testing.assert_allclose(scores.nll_teacher, whole.nll_teacher, rtol=1e-7)
        for column in ("kl", "nll_teacher", "nll_candidate", "tv"):
            one, two = getattr(scores, column), getattr(whole, column)
            np.testing.assert_array_equal(np.delete(one, 3), np.delete(two, 3))


def test_bf16_head_is_never_rounded_to_bf16_logits() -> None:
    """fp32 logits of a bf16 head keep differences that bf16 logits lose; a KL of 1e-5 survives."""
    teacher = states(16, 50)
    candidate, head = near(teacher, 17, 0.01), HEADS["bf16"]
    found = score_hidden(teacher, candidate, np.zeros(50, int), teacher_head=head, candidate_head=head)
    exact = [states_TH.double() @ head.weight_VH.double().T for states_TH in (teacher, candidate)]
    wanted = oracle_scores(exact[0], exact[1], np.zeros(50, int))
    np.testing.assert_allclose(found.kl.mean(), wanted.kl.mean(), rtol=1e-4)
    coarse = score_logits(exact[0].bfloat16(), exact[1].bfloat16(), np.zeros(50, int))
    assert abs(coarse.kl.mean() / wanted.kl.mean() - 1) > 0.1


def test_each_product_gives_the_same_result(product: str) -> None:
    """The choice of library moves digits of the products only, and is said."""
    assert blas_choice().name == product and blas_choice().library and blas_choice().gflops > 0
    for name in ("bias", "fp16", "fp32"):
        test_against_the_oracle(name, True)
    test_itself_is_exactly_zero(True, 13)


def test_sides_are_not_stacked_where_the_library_gives_rows_other_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose digits depend on the row: each side then gets its own, and itself is still exactly 0."""

    def fussy(states_RH: np.ndarray, tile: np.ndarray, out: np.ndarray) -> None:
        np.matmul(states_RH, tile.T, out=out)
        out *= 1 + np.arange(len(out), dtype=np.float32)[:, None] * 1e-6

    picky = blas.Blas(name="picky", library="", gflops=1.0, stacks=False, multiply=fussy)
    monkeypatch.setattr(walk, "blas_choice", lambda: picky)
    test_itself_is_exactly_zero(True, 100)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bad input names what is wrong and the repair."""
    head, good, targets = HEADS["bf16"], states(18, 4), np.zeros(4, int)

    def refused(match: str, teacher: torch.Tensor, other: Head = head, ids: np.ndarray = targets) -> None:
        with pytest.raises(ScoreError, match=match):
            score_hidden(teacher, good, ids, teacher_head=other, candidate_head=head)

    refused("32 wide", good[:, :32])
    refused("not \\[positions, width\\]", good[0])
    refused("torch.float64", good.double())
    refused("3 positions, the candidate 4", good[:3])
    refused("no position", good[:0])
    refused("targets of shape \\[3\\]", good, ids=targets[:3])
    refused("target 2300 at position 2", good, ids=np.array([0, 1, VOCAB, 3]))
    refused("not token ids", good, ids=targets.astype(float))
    refused("vocabulary of 2200, the candidate 2300", good, make_head(1, vocab_size=2200))
    refused("declares a vocabulary of 9999", good, make_head(1, vocab_size=9999))
    refused("a bias of \\[7\\]", good, make_head(1, bias_V=torch.zeros(7)))
    refused("soft-cap", good, make_head(1, softcap=0.0))
    with pytest.raises(ScoreError, match="no head"):
        score_outputs(Hidden(states_TH=good), Hidden(states_TH=good), targets, teacher_head=head)
    with pytest.raises(ScoreError, match="6 columns"):
        score_logits(torch.zeros(1, 6), torch.zeros(1, 6), np.zeros(1, int), vocab_size=8)
    monkeypatch.setenv(blas.VARIABLE, "atlas")
    blas_choice.cache_clear()
    with pytest.raises(UsageError, match="atlas"):
        blas_choice()
    blas_choice.cache_clear()
