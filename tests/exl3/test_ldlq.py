"""LDLQ against its definition and against rounding to nearest."""

from __future__ import annotations

import numpy as np
import pytest

from harness.exl3.decode import dense_weight
from harness.exl3.encode import (
    Rate,
    SignNames,
    block_factor,
    decoded,
    encode_linear,
    ldlq_states,
    proxy_loss,
    rotated_hessian,
    search_matrix,
)
from harness.exl3.tensors import Exl3Linear

RATE = Rate(bits=2, codebook="mcg")


def correlated(size: int, seed: int = 0) -> np.ndarray:
    """Second moment of inputs that mostly live in a quarter of the directions."""
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((4 * size, size // 4)) @ generator.standard_normal((size // 4, size))
    inputs += 0.3 * generator.standard_normal(inputs.shape)
    return inputs.T @ inputs / len(inputs)


def test_block_factor_is_the_block_ldl_of_the_hessian() -> None:
    hessian = correlated(64)
    lower = block_factor(hessian).astype(np.float64) + np.eye(64)
    middle = np.linalg.inv(lower) @ hessian @ np.linalg.inv(lower).T
    outside = middle * (1 - np.kron(np.eye(4), np.ones((16, 16))))
    assert np.abs(outside).max() < 1e-4 * np.abs(middle).max()
    assert not np.triu(block_factor(hessian)).any()


def test_the_loss_is_what_each_block_adds() -> None:
    """tr(E^T H E) = sum over blocks of tr(D_b^T M_b D_b), D_b the rounding of what the block wanted."""
    rotated = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    hessian = correlated(64)
    error = rotated - decoded(ldlq_states(rotated, hessian, RATE), "mcg")
    lower = block_factor(hessian).astype(np.float64) + np.eye(64)
    own = lower.T @ error
    # What a block wanted differs from what it got by the plain distortion of the rate: feedback adds nothing.
    assert np.mean(own**2) * 4**2 / 1.55 < 1.25
    middle = np.linalg.inv(lower) @ hessian @ np.linalg.inv(lower).T
    assert np.sum(own * (middle @ own)) == pytest.approx(np.sum(error * (hessian @ error)), rel=1e-3)


def test_uncorrelated_inputs_give_plain_rounding() -> None:
    rotated = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float32)
    assert np.array_equal(ldlq_states(rotated, np.eye(64), RATE), search_matrix(rotated, RATE))


def test_rotated_hessian_is_the_second_moment_behind_the_scales() -> None:
    generator = np.random.default_rng(0)
    inputs, suh = generator.standard_normal((500, 100)), generator.uniform(0.5, 2, 128).astype(np.float16)
    signs = np.array([[(-1.0) ** int(i & j).bit_count() for j in range(128)] for i in range(128)]) / 128**0.5
    wide = np.pad(inputs, ((0, 0), (0, 28))) * suh.astype(np.float64) @ signs
    moment = wide.T @ wide / 500
    moment += 0.025 * np.mean(np.diag(moment)) * np.eye(128)
    assert np.allclose(rotated_hessian(inputs.T @ inputs / 500, suh), moment, rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        rotated_hessian(np.full((4, 4), np.nan), suh)


def test_less_is_lost_than_by_rounding_to_nearest() -> None:
    generator, hessian = np.random.default_rng(2), correlated(120)
    weight = generator.standard_normal((128, 120)).astype(np.float32) * 0.05
    signs = SignNames(seed=0, input="in", output="out")
    losses, errors = [], []
    for given in (None, hessian):
        parts = encode_linear("w", weight, RATE, signs, hessian=given)
        dense = dense_weight(Exl3Linear.from_tensors("w", parts, in_features=120, out_features=128)).numpy()
        losses.append(proxy_loss((dense - weight).T.astype(np.float64), weight.T.astype(np.float64), hessian))
        errors.append(np.mean((dense - weight) ** 2))
    assert losses[1] < 0.6 * losses[0] and errors[1] > errors[0]
