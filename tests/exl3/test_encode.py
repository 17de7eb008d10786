"""One linear encoded and decoded by the project's own reader; LDLQ against its definition and plain rounding."""

from __future__ import annotations

import numpy as np
import pytest

from harness.exl3.codebook import MARKERS, Codebook
from harness.exl3.decode import dense_weight
from harness.exl3.encode import (
    Rate,
    SignNames,
    block_factor,
    decoded,
    encode_linear,
    ldlq_states,
    rotated_hessian,
    search_matrix,
)
from harness.exl3.tensors import Exl3Linear
from tests.exl3 import oracle
from tests.exl3.oracle import proxy_loss

SIGNS = SignNames(seed=0, input="in", output="out")


def gaussian(out_features: int, in_features: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((out_features, in_features)).astype(np.float32) * 0.03


@pytest.mark.parametrize(
    ("bits", "codebook", "shape"),
    [(3, "mcg", (128, 256)), (2, "mcg", (100, 200)), (3, "mul1", (128, 128)), (3, "3inst", (128, 128))],
)
def test_decoding_gives_the_weights_back_within_the_rate(
    bits: float, codebook: Codebook, shape: tuple[int, int]
) -> None:
    weight = gaussian(*shape)
    parts = encode_linear("w", weight, Rate(bits=bits, codebook=codebook), SIGNS)
    linear = Exl3Linear.from_tensors("w", parts, in_features=shape[1], out_features=shape[0])
    assert (linear.bits, linear.codebook) == (bits, codebook)
    error = dense_weight(linear).numpy() - weight
    # Padding spreads the same weights over more coded numbers, so 100 x 200 does better than the rate says.
    assert 0.6 < np.mean(error**2) / np.mean(weight**2) * 4**bits < 1.2


def test_zero_rows_and_columns_decode_to_exact_zeros() -> None:
    weight = gaussian(128, 128)
    weight[7], weight[:, 50] = 0, 0
    parts = encode_linear("w", weight, Rate(bits=2, codebook="mcg"), SIGNS)
    dense = dense_weight(Exl3Linear.from_tensors("w", parts))
    assert not dense[7].any() and not dense[:, 50].any()


def test_parts_have_the_shapes_and_types_of_the_format() -> None:
    bias = np.linspace(-1, 1, 100, dtype=np.float32)
    parts = encode_linear("w", gaussian(100, 200), Rate(bits=3, codebook="mcg"), SIGNS, bias=bias)
    assert {name: (part.shape, str(part.dtype)) for name, part in parts.items()} == {
        "trellis": ((16, 8, 48), "int16"),
        "suh": ((256,), "float16"),
        "svh": ((128,), "float16"),
        "mcg": ((), "int32"),
        "bias": ((128,), "float16"),
    }
    assert int(parts["mcg"]) & 0xFFFFFFFF == MARKERS["mcg"]
    assert np.array_equal(parts["bias"][:100], bias.astype(np.float16)) and not parts["bias"][100:].any()
    assert "mcg" not in encode_linear("w", gaussian(128, 128), Rate(bits=3, codebook="3inst"), SIGNS)


def test_the_bytes_do_not_depend_on_threads_and_progress_adds_up() -> None:
    weight, done = gaussian(256, 300), []
    rate = Rate(bits=2, codebook="mcg")
    one = encode_linear("w", weight, rate, SIGNS, threads=1, report=done.append)
    three = encode_linear("w", weight, rate, SIGNS, threads=3)
    assert all(np.array_equal(one[name], three[name]) for name in one)
    assert sum(done) == 256 * 384


def test_states_and_decoded_matrix_match_the_reader() -> None:
    rotated = np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32)
    states = search_matrix(rotated, Rate(bits=3, codebook="mcg"))
    near = decoded(states, "mcg")
    assert np.mean((near - rotated) ** 2) < 0.05
    parts = encode_linear("w", gaussian(256, 128), Rate(bits=3, codebook="mcg"), SIGNS)
    linear = Exl3Linear.from_tensors("w", parts)
    ours = decoded(oracle.all_states(linear.trellis.numpy()), "mcg")
    assert np.array_equal(oracle.rotated(linear.trellis.numpy(), "mcg").astype(np.float32), ours)


# ---- LDLQ ------------------------------------------------------------------------------------------------------------


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
