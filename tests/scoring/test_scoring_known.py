"""The teacher's side of a served row: log-probabilities at any ids, its top k, and ids drawn from the tail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.errors import ScoreError
from harness.scoring import known
from harness.scoring.known import teacher_logprobs_at, teacher_top_and_tail
from harness.types import Hidden
from tests.capture.made_captures import make_head
from tests.served.made_answers import Served, T, V, made, states


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return made(tmp_path_factory.mktemp("teacher") / "capture")


def test_teacher_logprobs_are_those_of_the_whole_product(small: Served) -> None:
    row, head = small.capture.row(0), small.capture.head
    assert head is not None
    lp = torch.log_softmax((row.states_TH.double() @ head.weight_VH.double().T), -1).numpy()
    ids = np.random.default_rng(0).integers(0, V, (T - 1, 30)).astype(np.int32)
    ids[3, 5] = -1
    found = teacher_logprobs_at(row, head, ids)
    assert np.isnan(found[3, 5]) and found.dtype == np.float64
    wanted = np.take_along_axis(lp, np.maximum(ids, 0).astype(np.int64), 1)
    np.testing.assert_allclose(found[ids >= 0], wanted[ids >= 0], atol=1e-5)
    nll = teacher_logprobs_at(row, head, row.target[:, None])[:, 0]
    np.testing.assert_allclose(-nll, row.nll, atol=1e-5)
    whole = teacher_top_and_tail(row, head, 3, also_TL=np.stack([row.target, row.top1], axis=1))
    np.testing.assert_array_equal(-whole.also_logp_TL[:, 0], row.nll)
    np.testing.assert_array_equal(whole.also_logp_TL[:, 1], whole.logp_TK[:, 0])


def test_a_head_with_bias_softcap_and_padding() -> None:
    """The gathered rows of a head keep all that it does to a logit; padding is no part of anything."""
    from harness.capture import CapturedRow
    from harness.scoring import teacher_stats

    plain = make_head(vocab=V)
    head = replace(
        plain,
        vocab_size=V - 9,
        bias_V=torch.linspace(-2, 2, V),
        softcap=30.0,
        scale=0.25,
    )
    hidden, target = states(9)[:-1], np.arange(T - 1, dtype=np.int32)
    stats = teacher_stats(hidden, target, head)
    row = CapturedRow(
        index=0,
        outputs=Hidden(states_TH=hidden),
        target=target,
        top1=stats.top1,
        nll=stats.nll,
        p_top1=stats.p_top1,
        lse=stats.lse,
        entropy=stats.entropy,
    )
    np.testing.assert_allclose(-teacher_logprobs_at(row, head, target[:, None])[:, 0], stats.nll, atol=1e-5)
    found = teacher_top_and_tail(row, head, 5, 3, seed=1)
    np.testing.assert_array_equal(found.ids_TK[:, 0], stats.top1)
    assert found.ids_TK.max() < V - 9 and found.tail_ids_TM.max() < V - 9
    np.testing.assert_allclose(np.exp(found.logp_TK).sum(1) + found.tail_mass_T, 1.0, atol=1e-6)


def test_top_k_and_ties_to_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert known.top_ids(logits, 3).tolist() == [[1, 3, 2], [0, 1, 2]]
    assert known.top_ids(logits, 4).tolist() == [[1, 3, 2, 4], [0, 1, 2, 3]]


def test_drawn_ids_do_not_depend_on_blocks_and_follow_the_tail(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    row, head = small.capture.row(1), small.capture.head
    assert head is not None
    one = teacher_top_and_tail(row, head, 20, 400, seed=7)
    monkeypatch.setattr(known, "STRIP_BYTES", 4 * V * 24)
    monkeypatch.setattr(known, "DRAW_BYTES", 8 * V * 5)
    monkeypatch.setattr(known, "default_threads", lambda: 1)
    again = teacher_top_and_tail(row, head, 20, 400, seed=7)
    for name in ("ids_TK", "logp_TK", "tail_ids_TM", "tail_logp_TM", "tail_mass_T"):
        np.testing.assert_array_equal(getattr(one, name), getattr(again, name), err_msg=name)
    assert (teacher_top_and_tail(row, head, 20, 400, seed=8).tail_ids_TM != one.tail_ids_TM).any()
    lp = torch.log_softmax((row.states_TH.double() @ head.weight_VH.double().T), -1).numpy()
    order = np.argsort(-lp, axis=1)
    np.testing.assert_array_equal(one.ids_TK, order[:, :20])
    for t in (0, 40, 79):
        assert not set(one.tail_ids_TM[t]) & set(one.ids_TK[t])
        tail = np.exp(lp[t, order[t, 20:]])
        assert one.tail_mass_T[t] == pytest.approx(tail.sum(), rel=1e-5)
        counts = np.bincount(one.tail_ids_TM[t], minlength=V)[order[t, 20:]]
        expected = 400 * tail / tail.sum()
        # Chi-square over the tail's first ids and all others together.
        cells = [(counts[:30], expected[:30]), (counts[30:].sum(keepdims=True), expected[30:].sum(keepdims=True))]
        chi = sum((((c - e) ** 2)[e > 1e-9] / e[e > 1e-9]).sum() for c, e in cells)
        assert chi < 75


def test_ids_outside_the_vocabulary_are_refused(small: Served) -> None:
    bad = np.full((T - 1, 1), V, np.int32)
    with pytest.raises(ScoreError, match="token 700 at position 0 is outside"):
        teacher_logprobs_at(small.capture.row(0), small.capture.head, bad)
    with pytest.raises(ScoreError, match="top 701"):
        teacher_top_and_tail(small.capture.row(0), small.capture.head, 701)
