"""Row-wise embedding tables against the symbol-by-symbol oracle; n-gram tables are refused by name."""

import numpy as np
import pytest
import torch

from harness.errors import CheckpointError
from harness.exl3.census import take_census
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.tensors import ring_states
from tests.exl3 import oracle
from tests.exl3.folders import write

NAME = "model.embed_tokens"


def embedding(rows: int, groups: int, bits: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(bits)
    rings = rng.integers(-32768, 32768, (rows, groups, 1 + 16 * bits), dtype=np.int16)
    rings[..., 0] = rng.uniform(0.01, 2, (rows, groups)).astype(np.float16).view(np.int16)
    signs = rng.choice([-1.0, 1.0], (groups, 256)).astype(np.float16)
    return {
        f"{NAME}.trellis": torch.from_numpy(rings.reshape(rows, -1)),
        f"{NAME}.signs": torch.from_numpy(signs),
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
    dense = checkpoint.table(NAME).numpy()
    assert dense.shape == (3, 512) and dense.dtype == np.float32
    words = made[f"{NAME}.trellis"].numpy().reshape(3, 2, -1)
    index = np.arange(256)
    parity = np.array([[(-1.0) ** bin(a & b).count("1") for a in index] for b in index])
    for row in range(3):
        for group in range(2):
            value = np.array(oracle.ring_value(words[row, group], 256, bits))
            expected = made[f"{NAME}.signs"][group].numpy().astype(float) * (parity @ value) / 16
            assert np.allclose(
                dense[row, 256 * group : 256 * group + 256], expected, atol=2e-6 * np.abs(value).max() * 16
            )


def test_rows_are_joined_over_chunks(tmp_path, monkeypatch):
    from harness.exl3 import tensors as rowwise

    checkpoint = open_checkpoint(write(tmp_path / "table", embedding(7, 1, 4)))
    whole = checkpoint.table(NAME)
    monkeypatch.setattr(rowwise, "_ROWS_AT_ONCE", 3)
    assert torch.equal(checkpoint.table(NAME), whole)


def test_census_counts_a_table(tmp_path):
    census = take_census(open_checkpoint(write(tmp_path / "table", embedding(7, 2, 4))))
    rate = census.tables[NAME]
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
        checkpoint.table(name)
    assert take_census(checkpoint).tables[name].mean_k == 4


def test_impossible_tables_are_refused(tmp_path):
    made = embedding(3, 2, 4)
    made[f"{NAME}.trellis"] = made[f"{NAME}.trellis"][:, :-1].contiguous()
    checkpoint = open_checkpoint(write(tmp_path / "table", made))
    with pytest.raises(CheckpointError, match=f"{NAME}: impossible row-wise table"):
        checkpoint.table(NAME)
