"""A packed linear is checked once, every refusal one line that names the module; row-wise tables against the oracle."""

import numpy as np
import pytest
import torch

from harness.errors import CheckpointError
from harness.exl3.census import take_census
from harness.exl3.checkpoint import Checkpoint, open_checkpoint
from harness.exl3.codebook import marker_int32
from harness.exl3.decode import dense_weight
from harness.exl3.tensors import Exl3Linear, decode_embedding, ring_states
from tests.exl3 import oracle
from tests.exl3.made_folders import write

NAME = "model.layers.3.self_attn.q_proj"


def parts(bits: float = 3, rows: int = 256, columns: int = 128, codebook: str = "mcg") -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    trellis = rng.integers(-32768, 32768, (rows // 16, columns // 16, int(16 * bits)), dtype=np.int16)
    made = {"trellis": torch.from_numpy(trellis), "suh": torch.ones(rows).half(), "svh": torch.ones(columns).half()}
    marker = marker_int32(codebook)
    return made if marker is None else made | {codebook: torch.tensor(marker, dtype=torch.int32)}


@pytest.mark.parametrize("codebook", ["3inst", "mcg", "mul1"])
def test_codebook_comes_from_the_marker_and_rate_from_the_shape(codebook):
    layer = Exl3Linear.from_tensors(NAME, parts(2, codebook=codebook))
    assert (layer.codebook, layer.bits, layer.padded_shape) == (codebook, 2, (256, 128))
    assert (layer.in_features, layer.out_features, layer.bias) == (256, 128, None)


def test_numpy_tensors_and_a_marker_of_shape_one_are_accepted():
    given = {suffix: np.atleast_1d(tensor.numpy()) for suffix, tensor in parts().items()}
    assert Exl3Linear.from_tensors(NAME, given).codebook == "mcg"


def test_example_of_the_format():
    """K=3, in=4096, out=2048 is a trellis [256, 128, 48]."""
    given = parts(3, 4096, 2048)
    assert list(given["trellis"].shape) == [256, 128, 48]
    assert Exl3Linear.from_tensors(NAME, given).bits == 3


@pytest.mark.parametrize("bits", [1.5, 2.5, 3.5])
def test_half_rates_need_mul1(bits):
    assert Exl3Linear.from_tensors(NAME, parts(bits, codebook="mul1")).bits == bits
    for codebook in ("mcg", "3inst"):
        with pytest.raises(CheckpointError, match=f"{bits} bits need the mul1 codebook"):
            Exl3Linear.from_tensors(NAME, parts(bits, codebook=codebook))


def test_legacy_sign_fields_are_lsb_first():
    given = parts()
    del given["suh"], given["svh"]
    given["su"] = torch.zeros(16, dtype=torch.int16)
    given["sv"] = torch.zeros(8, dtype=torch.int16)
    given["su"][1], given["sv"][0] = 0b100, -32768  # bit 2 of word 1; bit 15 of word 0
    layer = Exl3Linear.from_tensors(NAME, given)
    assert (layer.suh == -1).nonzero().flatten().tolist() == [18]
    assert (layer.svh == -1).nonzero().flatten().tolist() == [15]
    assert layer.suh.dtype == layer.svh.dtype == torch.float16
    plain = Exl3Linear.from_tensors(NAME, parts())
    expected = dense_weight(plain)
    expected[:, 18] *= -1
    expected[15] *= -1
    assert torch.equal(dense_weight(layer), expected)


def test_bias_is_kept_padded_and_cast_to_half():
    given = parts() | {"bias": torch.arange(128, dtype=torch.float32) / 3}
    layer = Exl3Linear.from_tensors(NAME, given, out_features=100)
    assert layer.bias is not None and torch.equal(layer.bias, given["bias"].half())
    assert (layer.in_features, layer.out_features) == (256, 100)


def drop(*names):
    return lambda given: {suffix: tensor for suffix, tensor in given.items() if suffix not in names}


def put(**tensors):
    return lambda given: {**given, **tensors}


MCG = torch.tensor(marker_int32("mcg"), dtype=torch.int32)
BAD = {
    "no trellis": (drop("trellis"), f"the tensor {NAME}.trellis is missing"),
    "no suh": (drop("suh"), f"the tensor {NAME}.suh is missing"),
    "no svh": (drop("svh"), f"the tensor {NAME}.svh is missing"),
    "two markers": (put(mul1=torch.tensor(marker_int32("mul1"))), "at most one codebook"),
    "unknown marker": (put(mcg=torch.tensor(0x1234, dtype=torch.int32)), "unknown codebook marker mcg = 0x00001234"),
    "other's marker": (put(mcg=torch.tensor(marker_int32("mul1"))), "unknown codebook marker mcg = 0x83dcd12d"),
    "empty marker": (put(mcg=torch.zeros(0, dtype=torch.int32)), r"marker mcg has shape \[0\]"),
    "obsolete part": (put(scale=torch.ones(1)), "unknown part 'scale'"),
    "trellis dtype": (put(trellis=torch.zeros(16, 8, 48, dtype=torch.int32)), "trellis is int32"),
    "trellis rank": (put(trellis=torch.zeros(16, 384, dtype=torch.int16)), "impossible trellis shape"),
    "trellis width": (put(trellis=torch.zeros(16, 8, 50, dtype=torch.int16)), "50 words wide has no legal rate"),
    "trellis K=9": (put(trellis=torch.zeros(16, 8, 144, dtype=torch.int16)), "144 words wide has no legal rate"),
    "not padded": (put(trellis=torch.zeros(15, 8, 48, dtype=torch.int16)), "multiples of 128"),
    "empty trellis": (put(trellis=torch.zeros(0, 8, 48, dtype=torch.int16)), "impossible trellis shape"),
    "suh length": (
        put(suh=torch.ones(128).half()),
        r"suh is torch.float16 \[128\]; the trellis asks for float16 \[256\]",
    ),
    "svh dtype": (put(svh=torch.ones(128)), "svh is torch.float32"),
    "infinite scale": (put(suh=torch.full((256,), float("inf")).half()), "suh holds values that are not finite"),
    "nan scale": (put(svh=torch.full((128,), float("nan")).half()), "svh holds values that are not finite"),
    "bias length": (put(bias=torch.ones(100)), r"bias is torch.float32 \[100\], not float16 \[128\]"),
    "integer bias": (put(bias=torch.ones(128, dtype=torch.int32)), "bias is torch.int32"),
}


@pytest.mark.parametrize("case", BAD)
def test_refusal_is_one_line_that_names_the_module(case):
    change, message = BAD[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        Exl3Linear.from_tensors(NAME, change(parts()))
    assert caught.value.what.startswith(NAME) and "\n" not in caught.value.what and caught.value.repair


def test_bad_legacy_field_is_refused():
    given = drop("suh")(parts()) | {"su": torch.zeros(15, dtype=torch.int16)}
    with pytest.raises(CheckpointError, match=r"su is torch.int16 \[15\]; the trellis asks for int16 \[16\]"):
        Exl3Linear.from_tensors(NAME, given)


@pytest.mark.parametrize("sizes", [(257, 128), (128, 128), (256, 129), (256, 0)])
def test_sizes_that_padding_cannot_explain_are_refused(sizes):
    """The config of another model must not load."""
    with pytest.raises(CheckpointError, match="padded to (256|128), not to the next multiple"):
        Exl3Linear.from_tensors(NAME, parts(), in_features=sizes[0], out_features=sizes[1])


# ---- row-wise embedding tables ---------------------------------------------------------------------------------------


TABLE = "model.embed_tokens"


def dense_table(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    return decode_embedding(checkpoint.tables[name], checkpoint.tensor)


def embedding(rows: int, groups: int, bits: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(bits)
    rings = rng.integers(-32768, 32768, (rows, groups, 1 + 16 * bits), dtype=np.int16)
    rings[..., 0] = rng.uniform(0.01, 2, (rows, groups)).astype(np.float16).view(np.int16)
    signs = rng.choice([-1.0, 1.0], (groups, 256)).astype(np.float16)
    return {
        f"{TABLE}.trellis": torch.from_numpy(rings.reshape(rows, -1)),
        f"{TABLE}.signs": torch.from_numpy(signs),
    }


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
def test_states_are_sums_of_shifted_symbols(bits):
    words = np.random.default_rng(bits).integers(-32768, 32768, (2, 10 * bits), dtype=np.int16)
    for ring, states in zip(words, ring_states(words, 160, bits), strict=True):
        stream = [int(ring[p // 16]) >> (p % 16) & 1 for p in range(160 * bits)]
        symbols = [sum(stream[i * bits + b] << b for b in range(bits)) for i in range(160)]
        expected = [sum(symbols[(i - j) % 160] << (j * bits) for j in range(16)) & 0xFFFF for i in range(160)]
        assert states.tolist() == expected


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_embedding_equals_the_oracle(tmp_path, bits):
    made = embedding(3, 2, bits)
    checkpoint = open_checkpoint(write(tmp_path / "table", made))
    dense = dense_table(checkpoint, TABLE).numpy()
    assert dense.shape == (3, 512) and dense.dtype == np.float32
    words = made[f"{TABLE}.trellis"].numpy().reshape(3, 2, -1)
    index = np.arange(256)
    parity = np.array([[(-1.0) ** bin(a & b).count("1") for a in index] for b in index])
    for row in range(3):
        for group in range(2):
            value = np.array(oracle.ring_value(words[row, group], 256, bits))
            expected = made[f"{TABLE}.signs"][group].numpy().astype(float) * (parity @ value) / 16
            assert np.allclose(
                dense[row, 256 * group : 256 * group + 256], expected, atol=2e-6 * np.abs(value).max() * 16
            )


def test_rows_are_joined_over_chunks(tmp_path, monkeypatch):
    from harness.exl3 import tensors as rowwise

    checkpoint = open_checkpoint(write(tmp_path / "table", embedding(7, 1, 4)))
    whole = dense_table(checkpoint, TABLE)
    monkeypatch.setattr(rowwise, "_ROWS_AT_ONCE", 3)
    assert torch.equal(dense_table(checkpoint, TABLE), whole)


def test_census_counts_a_table(tmp_path):
    census = take_census(open_checkpoint(write(tmp_path / "table", embedding(7, 2, 4))))
    rate = census.tables[TABLE]
    assert (rate.weights, rate.mean_k) == (7 * 512, 4)
    assert rate.bytes == 7 * 2 * 65 * 2 + 2 * 256 * 2 == census.whole.bytes


def test_ngram_tables_are_refused_by_name(tmp_path):
    name = "model.ngram_embedding.shard_0"
    made = {
        f"{name}.trellis": torch.zeros(5, 41, dtype=torch.int16),
        "model.ngram_embedding.head_bias": torch.zeros(2, 160),
    }
    checkpoint = open_checkpoint(write(tmp_path / "table", made))
    with pytest.raises(CheckpointError, match=f"{name} is a hashed n-gram table, which no transformers model uses"):
        dense_table(checkpoint, name)
    assert take_census(checkpoint).tables[name].mean_k == 4


def test_impossible_tables_are_refused(tmp_path):
    made = embedding(3, 2, 4)
    made[f"{TABLE}.trellis"] = made[f"{TABLE}.trellis"][:, :-1].contiguous()
    checkpoint = open_checkpoint(write(tmp_path / "table", made))
    with pytest.raises(CheckpointError, match=f"{TABLE}: impossible row-wise table"):
        dense_table(checkpoint, TABLE)
