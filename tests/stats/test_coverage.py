"""Simulated coverage of nominal 95 % intervals: the generative model, and the figures of a longer run of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from harness.stats import (
    Estimate,
    Totals,
    block_bootstrap,
    bootstrap_interval,
    log_t_interval,
    max_t_bands,
    mean_interval,
    row_log_ratio,
    t_interval,
    woodruff,
)

REPLICATES, ROWS, LENGTH = 1500, 32, 256
#: Three Monte Carlo standard errors at a coverage of 0.94.
SLACK = 3 * (0.94 * 0.06 / REPLICATES) ** 0.5


def covers(estimate: Estimate, truth: float) -> bool:
    assert estimate.low is not None and estimate.high is not None
    return estimate.low <= truth <= estimate.high


def mod_pair(rng: np.random.Generator, rows: int = ROWS, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Per-position KL of two arms: lognormal with row sd .5 and position sd 1.5; B = A times mean-one noise."""
    a_RL = np.exp(-5 + 0.5 * rng.standard_normal((rows, 1)) + 1.5 * rng.standard_normal((rows, LENGTH)))
    row_noise = np.exp(0.25 * rng.standard_normal((rows, 1)) - 0.25**2 / 2)
    position_noise = np.exp(0.4 * rng.standard_normal((rows, LENGTH)) - 0.4**2 / 2)
    return a_RL, factor * a_RL * row_noise * position_noise


def paired(seed: int, count: int = REPLICATES, factor: float = 1.0) -> Iterator[tuple[Totals, Totals]]:
    rng = np.random.default_rng(seed)
    counts = np.full(ROWS, float(LENGTH))
    for _ in range(count):
        a_RL, b_RL = mod_pair(rng, factor=factor)
        yield Totals(a_RL.sum(axis=1), counts), Totals(b_RL.sum(axis=1), counts)


@pytest.fixture(scope="module")
def no_effect() -> list[tuple[Totals, Totals]]:
    return list(paired(101))


def test_paired_t_covers_at_32_rows(no_effect: list[tuple[Totals, Totals]]) -> None:
    """In a longer run .950 for t, .903 for BCa."""
    t_share = np.mean([covers(t_interval(b.minus(a)), 0.0) for a, b in no_effect])
    bca = [covers(bootstrap_interval(b.minus(a), method="bca", resamples=1000), 0.0) for a, b in no_effect[:600]]
    assert 0.93 - SLACK <= t_share <= 0.975
    assert np.mean(bca) < t_share - 0.01


def test_positions_as_units_do_not_cover() -> None:
    """Taking positions as independent covers a fraction of 95 % for one arm's mean (.28 in a longer run)."""
    rng, truth, hits = np.random.default_rng(102), float(np.exp(-5 + 0.125 + 1.125)), 0
    for _ in range(200):
        a_RL, _ = mod_pair(rng)
        half = 1.96 * a_RL.std() / a_RL.size**0.5
        hits += abs(a_RL.mean() - truth) < half
    assert hits / 200 < 0.6


def test_one_arms_mean_covers_by_bootstrap_t(no_effect: list[tuple[Totals, Totals]]) -> None:
    """In a longer run .942 at 32 rows, mod."""
    truth = float(np.exp(-5 + 0.125 + 1.125))
    arms = [a for a, _ in no_effect]
    share = np.mean([covers(bootstrap_interval(a, method="bootstrap-t", resamples=1000), truth) for a in arms])
    assert share >= 0.93 - SLACK


def test_log_ratio_covers_with_a_true_effect() -> None:
    """In a longer run .946-.947; the geometric ratio of row means, whose truth is estimated from 40,000 rows."""
    rng = np.random.default_rng(103)
    a_RL, b_RL = mod_pair(rng, rows=40_000, factor=1.5)
    truth = float(np.exp(np.mean(np.log(b_RL.mean(axis=1)) - np.log(a_RL.mean(axis=1)))))
    share = np.mean([covers(row_log_ratio(a, b), truth) for a, b in paired(104, 800, 1.5)])
    assert share >= 0.93 - 3 * (0.94 * 0.06 / 800) ** 0.5


def test_few_lognormal_windows_cover_by_t_on_the_log() -> None:
    """Five windows, 2,000 simulations: t on the log covers at least 90 %, its lower end above 0."""
    rng, hits = np.random.default_rng(105), 0
    for _ in range(2000):
        got = log_t_interval(Totals(rng.lognormal(sigma=0.5, size=5), np.ones(5)))
        assert got.low is not None and got.low > 0
        hits += covers(got, float(np.exp(0.125)))
    assert hits / 2000 >= 0.90


def test_woodruff_covers_the_median_and_p99() -> None:
    """In a longer run .950 and .940 at 32 rows."""
    rng, group_N = np.random.default_rng(106), np.repeat(np.arange(ROWS), LENGTH)
    spread = (0.25 + 2.25) ** 0.5
    truths = {0.5: float(np.exp(-5)), 0.99: float(np.exp(-5 + spread * 2.3263478740))}
    hits = dict.fromkeys(truths, 0)
    for _ in range(400):
        values_N = mod_pair(rng)[0].ravel()
        for q, truth in truths.items():
            hits[q] += covers(woodruff(values_N, group_N, q), truth)
    assert min(hits.values()) / 400 >= 0.93 - 3 * (0.94 * 0.06 / 400) ** 0.5


def test_within_row_blocks_cover_under_serial_dependence() -> None:
    """Differences of one row as AR(1), phi .5: an interval that ignores it covers about 74 %."""
    rng, hits, naive, length = np.random.default_rng(107), 0, 0, 1024
    for _ in range(400):
        noise = rng.standard_normal(length + 50)
        for i in range(1, len(noise)):
            noise[i] += 0.5 * noise[i - 1]
        values_T = noise[50:]
        hits += covers(block_bootstrap(values_T, resamples=500), 0.0)
        naive += abs(values_T.mean()) < 1.96 * values_T.std() / length**0.5
    assert hits / 400 >= 0.90
    assert naive / 400 < 0.85


def test_simultaneous_bands_hold_for_all_candidates_at_once() -> None:
    """Eight candidates without effect: the family of bands holds in at least 93 %, single intervals do not."""
    rng, together, single = np.random.default_rng(108), 0, 0
    counts = np.ones(64)
    for _ in range(400):
        shared = rng.standard_normal((64, 1))
        draws_GK = 0.7 * shared + rng.standard_normal((64, 8))
        differences = [Totals(column, counts) for column in draws_GK.T]
        together += all(covers(band, 0.0) for band in max_t_bands(differences))
        single += all(covers(t_interval(d), 0.0) for d in differences)
    assert together / 400 >= 0.93 - 3 * (0.94 * 0.06 / 400) ** 0.5
    assert single / 400 < together / 400 - 0.05


@pytest.mark.parametrize("documents", [4, 8])
def test_shares_of_few_documents_cover(documents: int) -> None:
    """C53: agreement 0.9, intraclass correlation 0.1: t covers .89, Wilson with its quantile .94 (with z .85-.92)."""
    rng, hits, plain, count = np.random.default_rng(109), 0, 0, 2000
    for _ in range(count):
        agreed_G = rng.binomial(2000, rng.beta(0.9 * 9, 0.1 * 9, documents)).astype(float)
        totals = Totals(agreed_G, np.full(documents, 2000.0))
        got = mean_interval(totals, "share")
        assert got.low is not None and got.high is not None and 0 <= got.low <= got.high <= 1
        hits += covers(got, 0.9)
        plain += covers(t_interval(totals), 0.9)
    assert hits / count >= 0.93 - 3 * (0.94 * 0.06 / count) ** 0.5
    assert plain < hits - 0.01 * count


@pytest.mark.parametrize("documents", [4, 8, 16])
def test_divergences_of_few_documents_cover_and_stay_above_zero(documents: int) -> None:
    """C18: lognormal documents, sd .5; the lower end never reaches 0."""
    rng, hits, count = np.random.default_rng(110), 0, 1500
    for _ in range(count):
        totals = Totals(0.01 * rng.lognormal(sigma=0.5, size=documents), np.ones(documents))
        got = mean_interval(totals, "divergence", resamples=1000)
        assert got.low is not None and got.low > 0
        hits += covers(got, 0.01 * float(np.exp(0.125)))
    assert hits / count >= 0.91
