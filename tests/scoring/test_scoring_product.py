"""The project's own matrix product: against exact sums, and its digits independent of everything around them."""

from __future__ import annotations

import importlib.util
from fractions import Fraction
from pathlib import Path

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
import torch

from harness.scoring import packed
from harness.scoring.packed import MOST_DEPTH, Packed, aligned, depth_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def weights(columns: int, hidden: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """What the product takes, and the same numbers in float64."""
    wide = torch.from_numpy(random(columns, hidden, seed=1)).to(dtype)
    raw = wide if dtype == torch.float32 else wide.view(torch.uint16)
    return raw.numpy(), wide.double().numpy()


def product(states: np.ndarray, weight: np.ndarray, is_bf16: bool) -> np.ndarray:
    """Into an array of NaN: every entry has to be written, and none outside."""
    out = aligned(len(states), len(weight))
    out[:] = np.nan
    Packed(states).multiply(weight, is_bf16, out[:, : len(weight)])
    assert np.isnan(out[:, len(weight) :]).all()
    return out[:, : len(weight)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(12, 1, 1), (12, 8, 16), (24, 100, 37), (36, 385, 64), (60, 1000, 50)])
def test_against_float64(shape: tuple[int, int, int], dtype: str) -> None:
    """Any hidden width and any number of columns; the error stays within the bound of a chain of additions."""
    rows, hidden, columns = shape
    states, (raw, exact) = random(rows, hidden), weights(columns, hidden, DTYPES[dtype])
    found = product(states, raw, dtype == "bf16")
    bound = 2.0**-24 * (depth_of(hidden) + 3) * (np.abs(states.astype(float)) @ np.abs(exact).T)
    assert (np.abs(found - states.astype(float) @ exact.T) <= bound).all()


def rounded(value: Fraction) -> Fraction:
    """The nearest fp32 number, ties to even, without a step through float64."""
    if value == 0:
        return value
    exponent = 0
    while abs(value) >= 2 ** (exponent + 1):
        exponent += 1
    while abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit


def test_digits_are_those_of_the_definition() -> None:
    """Chains of fused multiply-adds along blocks of the width, then added: in exact fractions, to the last bit."""
    states, (raw, exact) = random(12, MOST_DEPTH + 20), weights(3, MOST_DEPTH + 20, torch.bfloat16)
    found, depth = product(states, raw, True), depth_of(MOST_DEPTH + 20)
    for row, column in ((0, 0), (5, 2)):
        total = Fraction(0)
        for low in range(0, states.shape[1], depth):
            chain = Fraction(0)
            for k in range(low, min(low + depth, states.shape[1])):
                chain = rounded(Fraction(float(states[row, k])) * Fraction(float(exact[column, k])) + chain)
            total = rounded(total + chain)
        assert Fraction(float(found[row, column])) == total


def test_digits_do_not_depend_on_the_place() -> None:
    """Rows and columns in another order, and any cut of the columns, give the same bits in the other places."""
    states, (raw, _) = random(36, 577), weights(85, 577, torch.bfloat16)
    whole = product(states, raw, True)
    order = np.random.default_rng(2).permutation(36)
    np.testing.assert_array_equal(product(states[order], raw, True), whole[order])
    turned = np.random.default_rng(3).permutation(85)
    np.testing.assert_array_equal(product(states, raw[turned], True), whole[:, turned])
    for low, high in ((0, 16), (16, 17), (17, 85)):
        np.testing.assert_array_equal(product(states, raw[low:high], True), whole[:, low:high])


def test_a_broken_row_keeps_to_itself() -> None:
    states, (raw, _) = random(12, 40), weights(20, 40, torch.bfloat16)
    whole = product(states, raw, True)
    states[7] = np.nan
    broken = product(states, raw, True)
    assert np.isnan(broken[7]).all()
    others = np.arange(12) != 7
    np.testing.assert_array_equal(broken[others], whole[others])


def test_rows_of_an_aligned_array() -> None:
    """They start at cache lines, an odd number of them apart."""
    for width in (1, 16, 1024, 49_152, 50_257):
        out = aligned(3, width)
        assert out.ctypes.data % 64 == 0 and out.strides[0] // 64 % 2 == 1 and out.strides[0] % 64 == 0
        assert width <= out.shape[1] < width + 32


def test_digits_do_not_depend_on_the_width_of_a_register(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same file compiled for the other width: LLVM splits vectors that a processor does not have."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    other = {8: 16, 16: 8}[packed.WIDE]
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"avx512f": other == 16})
    spec = importlib.util.spec_from_file_location("packed_at_another_width", packed.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert again.WIDE == other and again.ROWS != packed.ROWS
    states, (raw, _) = random(36, 577), weights(85, 577, torch.bfloat16)
    here, there = (aligned(36, 85)[:, :85] for _ in range(2))
    packed.Packed(states).multiply(raw, True, here)
    again.Packed(states).multiply(raw, True, there)
    np.testing.assert_array_equal(here, there)
