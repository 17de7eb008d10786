"""Small distributions whose scores are known by hand; each real fault named by its number in the fault list."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from harness.errors import ScoreError
from harness.scoring import score_hidden, score_logits
from harness.types import Head, Scores


def logits(*rows: list[float]) -> torch.Tensor:
    """Log-probabilities as fp32 logits; 0 becomes -inf."""
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.array(rows)).astype(np.float32))


def one(p: list[float], q: list[float], target: int = 0) -> Scores:
    return score_logits(logits(p), logits(q), np.array([target]), second_pass=True)


def test_direction_is_teacher_to_candidate() -> None:
    """KL((.9,.1) || (.5,.5)) is 0.368064, the other way 0.510826."""
    scores = one([0.9, 0.1], [0.5, 0.5])
    assert scores.kl[0] == pytest.approx(0.368064, abs=1e-6)
    assert scores.kl_reverse[0] == pytest.approx(0.510826, abs=1e-6)
    assert scores.tv[0] == pytest.approx(0.4, abs=1e-6)


def test_teacher_zero_is_a_zero_term() -> None:
    """A21a: p = 0 adds nothing forward, and infinity backward."""
    scores = one([0.5, 0.5, 0.0], [0.5, 0.25, 0.25])
    assert scores.kl[0] == pytest.approx(0.346574, abs=1e-6)
    assert scores.kl_reverse[0] == math.inf


def test_both_zero_is_a_zero_term() -> None:
    """A21b: -inf on both sides is no NaN."""
    scores = one([0.5, 0.0, 0.5], [0.25, 0.0, 0.75])
    assert scores.kl[0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-6)
    assert math.isfinite(scores.kl_reverse[0])


def test_candidate_zero_is_infinite() -> None:
    """A21c: p > 0 and q = 0."""
    assert one([0.5, 0.5], [1.0, 0.0]).kl[0] == math.inf


def test_teacher_target_zero_is_infinite_nll() -> None:
    """A21d."""
    scores = one([1.0, 0.0], [0.5, 0.5], target=1)
    assert scores.nll_teacher[0] == math.inf
    assert scores.nll_candidate[0] == pytest.approx(math.log(2))


def test_no_broadcast_and_no_empty_row() -> None:
    """(T,V) against (1,V) and T = 0 are errors."""
    with pytest.raises(ScoreError, match="3 positions, the candidate 1"):
        score_logits(torch.zeros(3, 4), torch.zeros(1, 4), np.zeros(3, int))
    with pytest.raises(ScoreError, match="no position"):
        score_logits(torch.zeros(0, 4), torch.zeros(0, 4), np.zeros(0, int))


def test_nan_positions_are_counted_never_dropped() -> None:
    """One NaN entry makes its position NaN and leaves the others alone."""
    teacher, candidate = torch.zeros(3, 5), torch.zeros(3, 5)
    candidate[1, 2] = math.nan
    scores = score_logits(teacher, candidate, np.zeros(3, int))
    assert np.isnan(scores.kl).tolist() == [False, True, False]
    assert scores.nonfinite_candidate.tolist() == [0, 1, 0]
    assert scores.nonfinite_teacher.tolist() == [0, 0, 0]
    assert scores.top1_candidate.tolist() == [0, -1, 0]
    assert not scores.agree[1]


def test_ties() -> None:
    """Teacher's tops are ids 3 and 9; the candidate chooses 9."""
    teacher, candidate = torch.zeros(1, 12), torch.zeros(1, 12)
    teacher[0, [3, 9]] = 5.0
    candidate[0, 9] = 5.0
    scores = score_logits(teacher, candidate, np.array([0]))
    assert bool(scores.agree[0]) and not scores.agree_lowest_id[0]
    assert bool(scores.tied_teacher[0]) and not scores.tied_candidate[0]


def test_padding_is_outside_the_softmax() -> None:
    """5 % of the candidate's mass on padding is reported; the scores renormalise without it."""
    teacher = logits([0.5, 0.3, 0.2, 0.0])
    candidate = logits([0.45, 0.25, 0.25, 0.05])
    scores = score_logits(teacher, candidate, np.array([0]), vocab_size=3)
    alone = score_logits(teacher[:, :3], candidate[:, :3], np.array([0]))
    assert scores.kl[0] == pytest.approx(alone.kl[0], rel=1e-9)
    assert scores.outside_candidate[0] == pytest.approx(0.05, rel=1e-6)
    assert scores.outside_teacher[0] == 0.0


def test_widths_differ_beyond_a_declared_vocabulary() -> None:
    """8 against 6 columns is an error until 6 is declared."""
    wide, narrow = torch.zeros(1, 8), torch.zeros(1, 6)
    with pytest.raises(ScoreError, match="vocabulary of 8, the candidate 6"):
        score_logits(wide, narrow, np.array([0]))
    scores = score_logits(wide, narrow, np.array([0]), vocab_size=6)
    assert scores.kl[0] == 0.0
    assert scores.outside_teacher[0] == pytest.approx(0.25)


def head(weight: torch.Tensor, **kwargs: object) -> Head:
    return Head(weight_VH=weight, vocab_size=len(weight), sha256=str(id(weight)), **kwargs)  # type: ignore[arg-type]


def test_own_heads_show_a_quantised_head() -> None:
    """Equal hidden states, a rounded head: zero through a shared head, positive through each one's own."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(7, 32, generator=generator).bfloat16()
    weight = torch.randn(50, 32, generator=generator)
    rounded = (weight * 4).round() / 4
    targets = np.arange(7)
    own = score_hidden(states, states, targets, teacher_head=head(weight), candidate_head=head(rounded))
    shared = score_hidden(states, states, targets, teacher_head=head(weight), candidate_head=head(weight))
    assert (own.kl > 1e-4).all()
    assert (shared.kl == 0).all() and (shared.tv == 0).all() and shared.agree.all()


def test_a_padding_column_is_never_top() -> None:
    """The largest logit of all lies on padding; no choice, tie or rank sees it."""
    teacher, candidate = torch.zeros(1, 40), torch.zeros(1, 40)
    teacher[0, 5] = candidate[0, 5] = 2.0
    teacher[0, 33] = candidate[0, 33] = 9.0
    scores = score_logits(teacher, candidate, np.array([0]), vocab_size=33, second_pass=True)
    assert scores.top1_teacher[0] == scores.top1_candidate[0] == 5 and scores.rank[0] == 1
    assert scores.outside_teacher[0] == pytest.approx((6 + math.e**9) / (38 + math.e**2 + math.e**9), rel=1e-6)


def test_centred_half_logits_are_fine_enough_to_store() -> None:
    """The capture's fp16 of (logit - largest) against the logits themselves, log-probabilities down to -40."""
    teacher = torch.linspace(-40, 0, 5000).repeat(2, 1) + torch.tensor([[0.0], [17.3]])
    stored = (teacher - teacher.amax(-1, keepdim=True)).half()
    scores = score_logits(teacher, stored, np.array([0, 4999]))
    assert (scores.kl < 1e-6).all()
    np.testing.assert_allclose(scores.nll_candidate, scores.nll_teacher, atol=2e-2)


def test_a_tiny_kl_is_kept_raw_and_not_negative_beyond_rounding() -> None:
    """Differences of one unit in the last place; nothing is clamped, nothing is below -1e-15."""
    generator = torch.Generator().manual_seed(3)
    teacher = torch.randn(200, 3000, generator=generator) * 3
    candidate = torch.nextafter(teacher, torch.full_like(teacher, math.inf))
    scores = score_logits(teacher, candidate, np.zeros(200, int))
    assert (scores.kl >= -1e-15).all() and (scores.kl < 1e-12).all() and (scores.kl != 0).any()


def test_masks_of_finite_size() -> None:
    """The least fp32 number and -1e4 as masks: a probability of zero, never a term of p times 1e38 or 1e4."""
    teacher = torch.randn(3, 2000, generator=torch.Generator().manual_seed(4))
    masked = teacher.clone()
    masked[:, 100:140] = torch.finfo(torch.float32).min
    also = teacher.clone()
    also[:, 100:140] = -1e4
    scores = score_logits(masked, also, np.zeros(3, int), second_pass=True)
    assert (np.abs(scores.kl) < 1e-12).all() and (np.abs(scores.kl_reverse) < 1e-12).all() and (scores.tv < 1e-12).all()
    gone = teacher.clone()
    gone[:, 100:140] = -torch.inf
    scores = score_logits(masked, gone, np.zeros(3, int), second_pass=True)
    assert (np.abs(scores.kl) < 1e-12).all() and (scores.nonfinite_candidate == 0).all()
