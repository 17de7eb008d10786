"""torch and the oracle agree bit for bit on W^; dense weights agree with float64, and numba with torch bit for bit."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.exl3 import decode, decode_torch
from harness.exl3.codebook import CODEBOOKS, table
from harness.exl3.layout import WIDTHS
from harness.exl3.tensors import Exl3Linear
from tests.exl3 import oracle

CASES = [(bits, name) for bits in WIDTHS for name in CODEBOOKS if bits == int(bits) or name == "mul1"]


def linear(bits=3.0, codebook="mcg", rows=256, columns=384, seed=0) -> Exl3Linear:
    rng = np.random.default_rng(seed)
    trellis = rng.integers(-32768, 32768, (rows // 16, columns // 16, WIDTHS[bits]), dtype=np.int16)
    return Exl3Linear(
        name="layer",
        trellis=torch.from_numpy(trellis),
        suh=torch.from_numpy(rng.normal(size=rows).astype(np.float16)),
        svh=torch.from_numpy(rng.normal(size=columns).astype(np.float16)),
        codebook=codebook,
        bias=None,
        in_features=rows,
        out_features=columns,
    )


def rotated_of(layer: Exl3Linear) -> np.ndarray:
    return oracle.rotated(layer.trellis.numpy(), layer.codebook)


def rotated_by_torch(layer: Exl3Linear) -> np.ndarray:
    values = torch.from_numpy(table(layer.codebook).copy()).to(layer.trellis.device)
    return decode_torch._rotated(layer.trellis, values).cpu().numpy()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("bits, codebook", CASES)
def test_rotated_matrix_is_bit_exact(bits, codebook):
    layer = linear(bits, codebook, 128, 256)
    rotated = rotated_of(layer)
    assert rotated.dtype == np.float16 and rotated.shape == (128, 256)
    for a, b in ((0, 0), (3, 9), (7, 15)):
        expected = oracle.tile(layer.trellis[a, b].numpy(), bits, codebook)
        got = rotated[16 * a : 16 * a + 16, 16 * b : 16 * b + 16].view(np.uint16)
        assert np.array_equal(got, expected)
    assert np.array_equal(rotated_by_torch(layer).view(np.uint16), rotated.view(np.uint16))


@pytest.mark.parametrize("bits, codebook", CASES)
def test_dense_weight_equals_float64_and_torch_bit_for_bit(bits, codebook):
    layer = linear(bits, codebook)
    dense = decode.dense_weight(layer)
    exact = oracle.dense(rotated_of(layer), layer.suh.numpy(), layer.svh.numpy())
    # Each transform adds 128 terms in fp32, pairwise: the error is a few roundings of the row's scale.
    scale = np.abs(layer.svh.numpy().astype(float))[:, None] * np.abs(layer.suh.numpy().astype(float)) * 1.3
    assert np.max(np.abs(dense.numpy() - exact) / (scale + 1e-30)) < 2e-6
    assert same_bits(decode_torch.dense_weight(layer), dense)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_cast_once_from_float32(dtype):
    layer = linear(columns=1280)
    expected = decode.dense_weight(layer).to(dtype)
    assert same_bits(decode.dense_weight(layer, dtype), expected)
    assert same_bits(decode_torch.dense_weight(layer, dtype), expected)


def test_float16_strips_of_a_wide_layer_join(monkeypatch):
    layer = linear(columns=1280)
    expected = decode.dense_weight(layer).half()
    monkeypatch.setattr(decode, "_STRIP", 6)
    assert same_bits(decode.dense_weight(layer, torch.float16), expected)


def test_torch_chunks_join(monkeypatch):
    layer = linear(columns=640)
    expected = decode_torch.dense_weight(layer)
    monkeypatch.setattr(decode_torch, "_CHUNK", 256 * 300)
    assert same_bits(decode_torch.dense_weight(layer), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoder", [decode, decode_torch], ids=["numba", "torch"])
def test_padding_is_cropped_and_out_is_filled_without_a_stray_write(decoder, dtype):
    """A head padded to 128 columns has rows of noise past the vocabulary."""
    layer = linear()
    expected = decode.dense_weight(layer, dtype)[:300, :200]
    cropped = replace(layer, in_features=200, out_features=300)
    assert same_bits(decoder.dense_weight(cropped, dtype), expected)
    stack = torch.full((3, 400, 260), 7.0, dtype=dtype)
    view = stack[1, 50:350, 30:230]
    assert decoder.dense_weight(cropped, dtype, out=view) is view
    assert same_bits(view, expected)
    view.fill_(7.0)
    assert bool((stack == 7).all())


def test_run_time_form_gives_the_same_output():
    """``y = (((x * suh) B) W^ B) * svh`` is the dense product: sign and scale lie outside of the transforms."""
    layer = linear()
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    inner = x * layer.suh.double()
    rotated = torch.from_numpy(rotated_of(layer)).double()
    hidden = torch.from_numpy(oracle.hadamard(256)), torch.from_numpy(oracle.hadamard(384))
    y = ((inner @ hidden[0]) @ rotated @ hidden[1]) * layer.svh.double()
    assert torch.allclose(x @ decode.dense_weight(layer).double().T, y, rtol=1e-5, atol=1e-4)


def test_zero_output_channels_are_exact_zeros():
    layer = linear()
    layer.svh[5] = 0
    layer.svh[300] = 0
    dense = decode.dense_weight(layer)
    assert not dense[[5, 300]].any() and dense[6].any()


def test_subnormal_scales_are_not_flushed():
    layer = linear()
    layer.suh.fill_(6e-8)  # the smallest fp16 subnormal
    dense, exact = (
        decode.dense_weight(layer),
        oracle.dense(rotated_of(layer), layer.suh.numpy(), layer.svh.numpy()),
    )
    assert dense.any() and np.allclose(dense.numpy(), exact, rtol=1e-3, atol=1e-12)
    assert same_bits(decode_torch.dense_weight(layer), dense)


def test_result_does_not_depend_on_threads_or_on_callers_at_once():
    layer = linear(rows=1024, columns=1024)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = decode.dense_weight(layer, torch.bfloat16)
        torch.set_num_threads(4)
        with ThreadPoolExecutor(4) as pool:
            dense = list(pool.map(lambda _: decode.dense_weight(layer, torch.bfloat16), range(8)))
    finally:
        torch.set_num_threads(threads)
    assert all(same_bits(d, alone) for d in dense)


@pytest.mark.parametrize(
    "dtype, out",
    [
        (torch.float64, None),
        (torch.float32, torch.empty(384, 255)),
        (torch.bfloat16, torch.empty(384, 256)),
        (torch.float32, torch.empty(256, 384).T),
    ],
)
def test_wrong_dtype_or_out_is_a_programmer_error(dtype, out):
    with pytest.raises(ValueError, match="dense weights are|out must be"):
        decode.dense_weight(linear(), dtype, out=out)


def test_butterflies_are_the_block_hadamard():
    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    wanted = torch.from_numpy(oracle.hadamard(256)) @ values.double()
    assert torch.allclose(decode_torch._butterflies(values).double() / 128**0.5, wanted, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits, codebook", CASES)
def test_cuda_equals_cpu_bit_for_bit(bits, codebook):
    layer = linear(bits, codebook)
    moved = replace(layer, trellis=layer.trellis.cuda(), suh=layer.suh.cuda(), svh=layer.svh.cuda())
    assert np.array_equal(rotated_by_torch(moved).view(np.uint16), rotated_of(layer).view(np.uint16))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert same_bits(decode_torch.dense_weight(moved, dtype).cpu(), decode.dense_weight(layer, dtype))
