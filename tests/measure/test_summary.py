"""The numbers of a measurement from hand-made positions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.measure import summary
from harness.types import SCORE_DTYPES, Scores


def make_scores(kl: list[float], **columns: list[float]) -> Scores:
    """Scores with the given KL; other columns are ordinary unless given."""
    n = len(kl)
    defaults = {"rank": 1, "top5_overlap": 5, "agree": True, "agree_lowest_id": True}
    arrays = {name: np.full(n, defaults.get(name, 0), dtype=dtype) for name, dtype in SCORE_DTYPES.items()}
    arrays["kl"] = np.array(kl)
    for name, values in columns.items():
        arrays[name] = np.array(values, dtype=SCORE_DTYPES[name])
    return Scores(**arrays)


def summarise(scores: Scores, units: int = 1) -> dict:
    row_N = np.arange(len(scores)) % units
    return summary.summarise(scores, np.zeros(len(scores), dtype=int), np.arange(len(scores)), row_N)


def test_means_and_perplexity_are_token_level():
    """NLL of 10 nats over 5 tokens is ppl_token e^2, and the name says so."""
    out = summarise(make_scores([0.1] * 5, nll_teacher=[2.0] * 5, nll_candidate=[1.0, 2.0, 3.0, 2.0, 2.0]))
    assert out["ppl_token_teacher"] == pytest.approx(math.e**2, rel=1e-15)
    assert out["ppl_token_candidate"] == pytest.approx(math.e**2, rel=1e-15)
    assert not any(name == "ppl" for name in out)


def test_infinite_kl_is_kept_and_located():
    """Never dropped, never clamped."""
    scores = make_scores([0.1, math.inf, 0.3])
    out, counted = summarise(scores), summary.counts(scores)
    assert out["kl_mean"] == math.inf
    assert out["kl_max_at"] == {"row": 0, "position": 1}
    assert counted["infinite_kl"] == 1 and counted["nonfinite_positions"] == 1


def test_negative_rounding_is_counted_and_not_clamped():
    """-3e-7 stays in the mean and is counted; it is not "beyond rounding"."""
    scores = make_scores([-3e-7, 3e-7])
    assert summarise(scores)["kl_mean"] == 0.0
    counted = summary.counts(scores)
    assert (counted["negative_kl"], counted["negative_kl_beyond_rounding"]) == (1, 0)
    assert summary.counts(make_scores([-1e-3]))["negative_kl_beyond_rounding"] == 1


def test_means_of_many_positions_use_float64():
    """2e6 copies of 0.1 as float32 would drift."""
    out = summarise(make_scores([0.1] * 2_000_000))
    assert out["kl_mean"] == pytest.approx(0.1, abs=1e-12)


def test_p999_needs_positions_beyond_it():
    """2,047 positions support no p99.9."""
    assert summarise(make_scores(list(np.linspace(0, 1, 2047))))["kl_p999"] is None
    many = make_scores(list(np.linspace(0, 1, 60000)))
    assert summarise(many, units=10)["kl_p999"] == pytest.approx(0.999, abs=1e-4)
    assert summarise(many, units=9)["kl_p999"] is None and summarise(many)["kl_p99"] is not None


def test_quantiles_are_order_statistics():
    out = summarise(make_scores([float(i) for i in range(1, 101)]))
    assert (out["kl_p50"], out["kl_p95"], out["kl_p99"], out["kl_max"]) == (50.0, 95.0, 99.0, 100.0)


def test_tail_rates_and_delta_p():
    scores = make_scores([0.05, 0.2, 2.0, 0.0], nll_teacher=[math.log(2)] * 4, nll_candidate=[math.log(4)] * 4)
    out = summarise(scores)
    assert (out["tail_rate_0.1"], out["tail_rate_1"]) == (0.5, 0.25)
    assert out["delta_p_mean"] == pytest.approx(-0.25)
