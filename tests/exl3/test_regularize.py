"""Scaling and rotation against the formula of the format in float64."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from harness.errors import CheckpointError
from harness.exl3.regularize import best_rms, blockwise, padded, random_signs, regularize


def hadamard_blocks(size: int) -> np.ndarray:
    """B_size: Sylvester blocks of 128 by the sign rule (-1)^popcount(i & j), float64."""
    index = np.arange(128)
    signs = np.array([[(-1.0) ** int(i & j).bit_count() for j in index] for i in index])
    return np.kron(np.eye(size // 128), signs / np.sqrt(128))


def made(weight: np.ndarray, rms: float = 1.2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, columns = weight.shape
    regular = regularize("w", weight, (random_signs(rows, 0, "in"), random_signs(columns, 0, "out")), rms)
    return regular.rotated, regular.suh, regular.svh


def test_the_formula_gives_the_matrix_back() -> None:
    weight = np.random.default_rng(0).standard_normal((256, 384)).astype(np.float32) * 0.02
    weight *= np.random.default_rng(1).uniform(0.1, 3, (256, 1)).astype(np.float32)
    rotated, suh, svh = made(weight)
    inner = hadamard_blocks(256) @ rotated.astype(np.float64) @ hadamard_blocks(384)
    back = suh.astype(np.float64)[:, None] * inner * svh.astype(np.float64)[None, :]
    assert np.abs(back - weight).max() <= 2e-6 * np.abs(weight).max()
    assert np.sqrt(np.mean(rotated.astype(np.float64) ** 2)) == pytest.approx(1.2, rel=1e-3)
    assert suh.dtype == svh.dtype == np.float16
    assert 0.9 < np.abs(svh.astype(float)).mean() < 1.1, "the size of the matrix belongs to suh"


def test_blockwise_is_its_own_inverse_on_both_sides() -> None:
    values = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    for axis in (0, 1):
        assert np.allclose(blockwise(blockwise(values, axis), axis), values, atol=1e-5)
    assert np.allclose(blockwise(values, 1), values @ hadamard_blocks(256), atol=1e-5)
    assert np.allclose(blockwise(values, 0), hadamard_blocks(128) @ values, atol=1e-5)


def test_padding_and_empty_rows_get_zero_scales_and_full_blocks() -> None:
    weight = np.zeros((256, 256), np.float32)
    weight[:192, :160] = np.random.default_rng(0).standard_normal((192, 160))
    weight[5] = weight[:, 9] = 0
    rotated, suh, svh = made(weight)
    assert not suh[192:].any() and suh[5] == 0 and suh[:5].all()
    assert not svh[160:].any() and svh[9] == 0 and svh[:9].all()
    blocks = rotated.reshape(2, 128, 2, 128).astype(np.float64)
    assert np.sqrt((blocks**2).mean((1, 3))) == pytest.approx(1.2, rel=0.1), "half-empty blocks are not left small"


def test_a_matrix_of_zeros_stays_one() -> None:
    rotated, suh, svh = made(np.zeros((128, 128), np.float32))
    assert not rotated.any() and not suh.any() and not svh.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    weight = np.ones((128, 128), np.float32)
    weight[3, 4] = bad
    with pytest.raises(CheckpointError, match="w holds values that are not finite"):
        made(weight)


@pytest.mark.parametrize("size", [1e-9, 1e9])
def test_sizes_beyond_fp16_scales_are_refused(size: float) -> None:
    weight = np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32) * np.float32(size)
    with pytest.raises(CheckpointError, match="fp16 scales"):
        made(weight)


def test_signs_follow_from_seed_and_name() -> None:
    one = random_signs(1000, 0, "a")
    assert set(np.unique(one)) == {-1.0, 1.0} and abs(one.mean()) < 0.2
    assert np.array_equal(one, random_signs(1000, 0, "a"))
    assert not np.array_equal(one, random_signs(1000, 0, "b")) and not np.array_equal(one, random_signs(1000, 1, "a"))


def test_sizes_and_rms() -> None:
    assert [padded(size) for size in (1, 128, 129, 576)] == [128, 128, 256, 640]
    assert best_rms(2, "mcg") > best_rms(6, "mcg") > 0.8
    assert best_rms(2, "mul1") < best_rms(2.5, "mul1") + 0.2


CODED = """
import hashlib
import numpy as np
from harness.exl3.encode import Rate, SignNames, encode_linear
weight = np.random.default_rng(1).standard_normal((256, 384)).astype(np.float32)
parts = encode_linear("m", weight, Rate(bits=3.0, codebook="mcg"), SignNames(seed=0, input="a", output="b"))
print({name: hashlib.sha256(part.tobytes()).hexdigest() for name, part in parts.items()})
"""


def test_coded_bytes_do_not_depend_on_the_processor() -> None:
    """Two generations of processors as BLAS and numpy see them, both present in this one: the same bytes."""
    older = {"OPENBLAS_CORETYPE": "Nehalem", "NPY_DISABLE_CPU_FEATURES": "X86_V4 X86_V3 AVX512F AVX2 FMA3"}
    newer = {"OPENBLAS_CORETYPE": "Haswell"}
    said = [
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CODED],
            env=os.environ | seen,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seen in (older, newer)
    ]
    assert said[0] == said[1] and "trellis" in said[0]
