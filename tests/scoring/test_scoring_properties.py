"""The kernels against float64 over shapes, dtypes, scales, offsets, ties and -inf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.scoring import score_logits, teacher_stats
from harness.types import Scores
from tests.scoring.scoring_oracle import mpmath_kl, oracle_scores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WIDTHS = [1, 2, 5, 7, 8, 15, 16, 17, 63, 64, 80, 100, 1023, 1024, 1040, 1090, 2048, 3001]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Two rows of logits of each side, and targets."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.sampled_from(WIDTHS))
    teacher = rng.standard_normal((2, width)) * draw(st.sampled_from([0.0, 0.1, 2.0, 6.0]))
    teacher[:, rng.integers(width)] += draw(st.sampled_from([0.0, 5.0, 25.0]))
    if draw(st.booleans()):
        teacher = np.sort(teacher, axis=1)
    candidate = teacher + rng.standard_normal((2, width)) * draw(st.sampled_from([0.0, 3e-5, 1e-2, 0.3, 3.0]))
    teacher, candidate = (
        teacher + draw(st.sampled_from([0.0, 40.0, -40.0])),
        candidate + draw(st.sampled_from([0.0, 3.0, -37.3])),
    )
    if draw(st.booleans()):
        teacher, candidate = np.round(teacher * 2) / 2, np.round(candidate * 2) / 2
    for side, share in ((teacher, draw(st.sampled_from([0, 0, 0.3]))), (candidate, draw(st.sampled_from([0, 0, 0.3])))):
        side[rng.random((2, width)) < share] = -np.inf
    if draw(st.booleans()):
        both = rng.random(width) < 0.2
        teacher[:, both] = candidate[:, both] = -np.inf
    kinds = draw(st.sampled_from(list(DTYPES))), draw(st.sampled_from(list(DTYPES)))
    targets = rng.integers(0, width, 2)
    return torch.from_numpy(teacher).to(DTYPES[kinds[0]]), torch.from_numpy(candidate).to(DTYPES[kinds[1]]), targets


def assert_scores(found: Scores, wanted: Scores, *, kl_rel: float = 5e-6) -> None:
    """Divergences to 5e-6 of themselves, sums to 2e-6, choices and counts exactly.

    An entropy is a difference of two numbers as large as the distance of the shift from the side's own maximum, up to
    30 nats where the sides are far apart: it keeps 1e-5 nats.
    """
    np.testing.assert_allclose(found.kl, wanted.kl, rtol=kl_rel, atol=2e-15)
    np.testing.assert_allclose(found.kl_reverse, wanted.kl_reverse, rtol=2 * kl_rel, atol=2e-15)
    for name, atol in (("nll", 2e-6), ("entropy", 1e-5)):
        for side in ("teacher", "candidate"):
            np.testing.assert_allclose(
                getattr(found, f"{name}_{side}"), getattr(wanted, f"{name}_{side}"), rtol=1e-6, atol=atol
            )
    # A total variation of nothing keeps the rounding of one fp32 factor, up to 2**-22.
    for name, atol in (
        ("tv", 2.0**-21),
        ("p_top1_teacher", 2e-7),
        ("outside_teacher", 2e-7),
        ("outside_candidate", 2e-7),
    ):
        np.testing.assert_allclose(getattr(found, name), getattr(wanted, name), rtol=2e-6, atol=atol)
    exact = ["top1_teacher", "top1_candidate", "agree", "agree_lowest_id", "tied_teacher", "tied_candidate"]
    for name in [*exact, "nonfinite_teacher", "nonfinite_candidate", "top5_overlap", "rank"]:
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


@given(pairs())
@settings(max_examples=300, deadline=None)
def test_logits_against_float64(pair: tuple[torch.Tensor, torch.Tensor, np.ndarray]) -> None:
    teacher, candidate, targets = pair
    found = score_logits(teacher, candidate, targets, second_pass=True, threads=1)
    assert_scores(found, oracle_scores(teacher, candidate, targets))


@given(pairs())
@settings(max_examples=60, deadline=None)
def test_itself(pair: tuple[torch.Tensor, torch.Tensor, np.ndarray]) -> None:
    """A teacher against itself: exactly 0, whatever it holds; and the capture's numbers are the score's."""
    teacher, _, targets = pair
    scores = score_logits(teacher, teacher, targets, second_pass=True, threads=1)
    stats = teacher_stats(teacher, targets, threads=1)
    valid = scores.nonfinite_teacher == 0
    for name in ("kl", "kl_reverse", "tv"):
        assert (getattr(scores, name)[valid] == 0).all(), name
    assert scores.agree[valid].all() and (scores.rank[valid] == 1).all()
    np.testing.assert_array_equal(stats.nll, scores.nll_teacher)
    np.testing.assert_array_equal(stats.top1, scores.top1_teacher)


@given(pairs(), st.integers(0, 2**32 - 1), st.sampled_from([np.nan, np.inf]))
@settings(max_examples=100, deadline=None)
def test_nonfinite_entries(pair: tuple[torch.Tensor, torch.Tensor, np.ndarray], seed: int, value: float) -> None:
    """NaN and +inf are counted where they are; the other side and the other row keep their numbers."""
    teacher, candidate, targets = (pair[0].clone(), pair[1].clone(), pair[2])
    rng = np.random.default_rng(seed)
    side = (teacher, candidate)[rng.integers(2)]
    side[rng.integers(2), torch.from_numpy(rng.integers(0, side.shape[1], 3))] = value
    found = score_logits(teacher, candidate, targets, second_pass=True, threads=1)
    wanted = oracle_scores(teacher, candidate, targets)
    assert_scores(found, wanted)
    assert np.isnan(found.kl).tolist() == (found.nonfinite_teacher + found.nonfinite_candidate > 0).tolist()


def rows_like_a_model(n: int, width: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((n, width)) * 2.2
    logits[np.arange(n), rng.integers(0, width, n)] += 11
    return logits.astype(np.float32)


HARD = {
    "KL 1e-10": (0.0, 4e-5),
    "KL 1e-6": (0.0, 4e-3),
    "KL 0.03": (0.0, 0.7),
    "KL 20": (0.0, 8.0),
    "candidate + 37.3": (37.3, 0.02),
    "candidate - 10000": (-1e4, 0.02),
    "candidate + 300, KL 0.03": (300.0, 0.7),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_rows_against_mpmath(name: str) -> None:
    """The two-pass difference of log-probabilities has no correct digit left in several of these."""
    offset, sigma = HARD[name]
    teacher = rows_like_a_model(2, 1500, 3)
    noise = np.random.default_rng(4).standard_normal(teacher.shape) * sigma
    candidate = (teacher + offset + noise).astype(np.float32)
    found = score_logits(torch.from_numpy(teacher), torch.from_numpy(candidate), np.zeros(2, int), threads=1)
    wanted = [mpmath_kl(t, c) for t, c in zip(teacher, candidate, strict=True)]
    np.testing.assert_allclose(found.kl, wanted, rtol=3e-6)


def test_wide_vocabulary_near_zero() -> None:
    """V = 50,000 and near-equal rows; fp32 reductions gave -8e-7 where the truth is 2e-8."""
    teacher = rows_like_a_model(3, 50_000, 5)
    candidate = (teacher + np.random.default_rng(6).standard_normal(teacher.shape) * 5e-4).astype(np.float32)
    found = score_logits(torch.from_numpy(teacher), torch.from_numpy(candidate), np.zeros(3, int))
    wanted = oracle_scores(teacher, candidate, np.zeros(3, int))
    assert (wanted.kl < 1e-6).all() and (wanted.kl > 1e-9).all()
    assert np.abs(found.kl - wanted.kl).max() < 1e-12


def test_long_sums() -> None:
    """2,000,000 equal entries; a running fp32 sum would stop at 2**24 / V of itself."""
    width = 2_000_000
    scores = score_logits(torch.full((1, width), 3.7), torch.full((1, width), -1.0), np.array([width - 1]))
    assert scores.entropy_teacher[0] == pytest.approx(np.log(width), rel=5e-8)
    assert scores.nll_candidate[0] == pytest.approx(np.log(width), rel=5e-8)
    assert abs(scores.kl[0]) < 1e-15


def test_bf16_logits_tie() -> None:
    """20.06 and 20.00 are apart in fp32 and one number in bf16 (its step there is 0.125)."""
    logits = torch.zeros(1, 40)
    logits[0, 7], logits[0, 3] = 20.06, 20.0
    fine = score_logits(logits, logits, np.array([0]))
    coarse = score_logits(logits, logits.bfloat16(), np.array([0]))
    assert not fine.tied_teacher[0] and coarse.tied_candidate[0]
    assert coarse.agree[0] and not coarse.agree_lowest_id[0]
    assert coarse.kl[0] > 1e-5


def test_pinsker_and_threads() -> None:
    """TV <= sqrt(KL / 2), in both directions; and the digits do not depend on the number of threads."""
    teacher = torch.from_numpy(rows_like_a_model(40, 3000, 7))
    noise = torch.randn(teacher.shape, generator=torch.Generator().manual_seed(8))
    candidate = (teacher + noise * torch.linspace(0, 3, 40)[:, None]).half()
    targets = np.arange(40)
    one = score_logits(teacher, candidate, targets, second_pass=True, threads=1)
    assert (one.tv <= np.sqrt(np.minimum(one.kl, one.kl_reverse) / 2) + 1e-7).all()
    for threads in (2, 3):
        other = score_logits(teacher, candidate, targets, second_pass=True, threads=threads)
        for name in Scores.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    part = score_logits(teacher[5:9], candidate[5:9], targets[5:9], second_pass=True, threads=1)
    np.testing.assert_array_equal(one.kl[5:9], part.kl)
