"""One linear encoded and decoded by the project's own reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from harness.exl3.codebook import MARKERS, Codebook
from harness.exl3.decode import decode_rotated, dense_weight
from harness.exl3.encode import Rate, SignNames, decoded, encode_linear, search_matrix
from harness.exl3.layout import unpack_states
from harness.exl3.tensors import Exl3Linear

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
    assert np.array_equal(decode_rotated(linear), decode_rotated(linear.cropped(*linear.padded_shape)))


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
    ours = decoded(unpack_states(linear.trellis.numpy()), "mcg")
    assert torch.equal(torch.from_numpy(decode_rotated(linear).astype(np.float32)), torch.from_numpy(ours))
