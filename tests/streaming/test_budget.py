"""Sizes as users write them, and the choice between the whole model and streaming."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.engines import budget
from harness.errors import UsageError
from tests import exl3_packs as packs
from tests.exl3_packs import Spec


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 4 * 2**30), ("512M", 512 * 2**20), ("1.5 gb", 3 * 2**29), ("1000", 1000), ("2tib", 2**41), ("7kB", 7168)],
)
def test_sizes(text: str, size: int) -> None:
    assert budget.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 cats", "-1G", "0", "1e9", "4GiB please"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="amount of memory"):
        budget.parse_size(text)


def test_the_whole_model_is_taken_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packs.pack(packs.llama(), tmp_path, lambda name: Spec(bits=2) if packs.every_linear(name) else None)
    twin = load_file(pack.dense / "model.safetensors")
    dense = budget.dense_bytes(pack.packed, torch.float32)
    # k_proj and v_proj have 64 output columns, padded to 128.
    padding = 2 * 2 * 64 * 128 * 4
    assert dense == sum(tensor.numel() * 4 for tensor in twin.values()) + padding
    assert budget.dense_bytes(pack.packed, torch.bfloat16) == dense // 2

    def choose(asked: str | None) -> int | None:
        return budget.streaming_budget(pack.packed, torch.float32, "cpu", asked)

    assert choose(None) is None
    assert choose("4GiB") is None
    assert choose(str(dense)) == dense
    monkeypatch.setattr(budget, "free_memory", lambda device: dense)
    assert choose("auto") == int(dense * budget.AUTO_SHARE)
    monkeypatch.setattr(budget, "free_memory", lambda device: 2 * dense)
    assert choose("auto") is None
