"""The search against a float64 search, its own plain loops, and the distortion table of the format."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit
from scipy.stats import norm

from harness.exl3.codebook import Codebook, table
from harness.exl3.layout import WIDTHS, pack_states
from harness.exl3.viterbi import _metrics, _plain_step, _vector_step, search, trellis
from tests.exl3.oracle import all_states
from tests.exl3.viterbi_oracle import cost, is_ring, oracle_states

#: D * 4^K of the exact search on 16 Gaussian tiles, and the rms that gave it relative to the codebook's own:
#: section 9 of the format's description.
TABLE: dict[Codebook, tuple[tuple[float, float], ...]] = {
    "3inst": ((1.078, 1.06), (1.102, 0.94), (1.126, 0.94), (1.190, 0.88), (1.200, 0.88), (1.244, 0.88)),
    "mcg": ((1.069, 1.06), (1.104, 0.94), (1.106, 1.0), (1.151, 0.94), (1.209, 0.88), (1.243, 0.88)),
    "mul1": ((1.095, 1.06), (1.098, 1.0), (1.128, 1.0), (1.146, 0.94), (1.157, 0.94), (1.193, 0.88)),
}
QUICK = [(2, "mcg"), (3, "mcg"), (4, "mcg"), (6, "mcg"), (3, "mul1"), (3, "3inst")]
OTHERS = [(k, name) for name in TABLE for k in range(1, 7) if (k, name) not in QUICK]


def values_of(codebook: Codebook) -> tuple[np.ndarray, float]:
    values = table(codebook).astype(np.float64)
    return values, float(np.sqrt(np.mean(values**2)))


def even_gaussian(tiles: int, seed: int) -> np.ndarray:
    """A Gaussian sample without luck: the quantiles in the middle of equal shares, in random order."""
    count = tiles * 256
    quantiles = norm.ppf((np.arange(count) + 0.5) / count)
    return np.random.default_rng(seed).permutation(quantiles).reshape(tiles, 256)


@pytest.mark.parametrize(
    ("bits", "codebook"),
    [(2, "mcg"), (3, "mcg"), (8, "mcg"), (2.5, "mul1")]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (*QUICK[2:], *OTHERS, (7, "mcg"), (7, "mul1"), (8, "mul1"), (1.5, "mul1"), (3.5, "mul1"))
    ],
)
def test_as_good_as_the_float64_search(bits: float, codebook: Codebook) -> None:
    values, rms = values_of(codebook)
    weights = np.random.default_rng(3).standard_normal((2, 256)) * 0.94 * rms
    weights[1, 7], weights[1, 90] = 5.5 * rms, -4.1 * rms  # far out of every codebook
    states = search(weights, bits, codebook)
    assert states.dtype == np.uint16 and is_ring(states, bits)
    assert np.array_equal(all_states(pack_states(states, WIDTHS[bits])), states)
    best = [cost(oracle_states(row, bits, values), row, values) for row in weights]
    ours = [cost(path, row, values) for path, row in zip(states, weights, strict=True)]
    # The narrow costs may lead to another seam, and so to a path a little better or worse.
    assert ours == pytest.approx(best, rel=0.01)


def measured(bits: int, codebook: Codebook) -> tuple[float, float]:
    expected, relative = TABLE[codebook][bits - 1]
    values, rms = values_of(codebook)
    weights = even_gaussian(16, seed=1) * relative * rms
    error = values[search(weights, bits, codebook)] - weights
    return float(np.mean(error**2) / np.mean(weights**2) * 4**bits), expected


@pytest.mark.parametrize(
    ("bits", "codebook"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_distortion_is_that_of_the_table(bits: int, codebook: Codebook) -> None:
    distortion, expected = measured(bits, codebook)
    assert distortion == pytest.approx(expected, rel=0.03)


@njit
def vector_step(t, old, new, weight, floor, odd):  # type: ignore[no-untyped-def]
    if odd:
        return _vector_step(old, new, t.odd_S, weight, floor, t.odd, t.even, t.doublings)
    return _vector_step(old, new, t.even_S, weight, floor, t.even, t.odd, t.doublings)


@pytest.mark.parametrize(
    "bits", [2, 4, 2.5, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3, 5, 6, 1.5, 3.5))]
)
def test_vectors_and_plain_loops_agree_bit_for_bit(bits: float) -> None:
    t, generator = trellis(bits, "mul1"), np.random.default_rng(5)
    fresh, metrics = (len(t.even), len(t.odd)), np.empty(65536, np.uint16)
    for odd in (0, 1):
        d_in, d_out = fresh[odd], fresh[1 - odd]
        old = generator.integers(0, 65536, 65536 >> d_in).astype(np.uint16)
        new, plain = (np.empty(65536 >> d_out, np.uint16) for _ in range(2))
        for weight, floor in ((-32768, 0), (32767, 9), (1234, 300), (-9000, 65535)):
            _metrics(t, float(weight) if abs(weight) <= t.limit else t.limit * np.sign(weight), metrics)
            used = np.int16(np.rint(weight if abs(weight) <= t.limit else t.limit * np.sign(weight)))
            least = vector_step(t, old, new, used, np.uint16(floor), odd)
            assert least == _plain_step(old, plain, metrics, np.uint16(floor), d_in, d_out) == plain.min()
            assert np.array_equal(new, plain)


@pytest.mark.parametrize("bits", [2, 3])
def test_extreme_rows_still_close(bits: int) -> None:
    values, rms = values_of("mcg")
    weights = np.zeros((5, 256))
    weights[1] = 1e6
    weights[2] = -values.max()
    weights[3, 100] = 1e4
    weights[4] = np.where(np.arange(256) % 2, 6.0, -6.0) * rms
    states = search(weights, bits, "mcg")
    assert is_ring(states, bits)
    far = cost(oracle_states(weights[4], bits, values), weights[4], values)
    # 256 such weights in a row drive every path cost to the end of 16 bits; no real tile comes near it.
    assert cost(states[4], weights[4], values) <= 1.05 * far
    assert np.array_equal(states[3], search(weights, bits, "mcg")[3])
    assert abs(values[states[3, 100]] - values.max()) < 0.3


def test_impossible_rates_are_refused() -> None:
    for bits, codebook in ((9, "mcg"), (2.5, "mcg"), (0.5, "mul1")):
        with pytest.raises(ValueError, match="no rate"):
            search(np.zeros((1, 256)), bits, codebook)  # type: ignore[arg-type]
