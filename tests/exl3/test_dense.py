"""A decoded folder holds the same model: transformers alone gives the same logits, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from harness.errors import CheckpointError, UsageError
from harness.exl3.checkpoint import has_trellis
from harness.exl3.hf import load_exl3
from harness.exl3.package import decode_checkpoint
from tests.exl3 import made_packs
from tests.exl3.test_hf_models import logits, mixed, routed_experts


@pytest.mark.parametrize("family", ["llama", "glm5-next"])
def test_the_dense_folder_is_the_same_model(family: str, tmp_path: Path) -> None:
    model, spec = (made_packs.llama(), mixed) if family == "llama" else (made_packs.glm5_next(), routed_experts)
    packed = made_packs.pack(model, tmp_path, spec).packed
    decode_checkpoint(packed, tmp_path / "decoded")
    assert not has_trellis(tmp_path / "decoded")
    auto = AutoModelForCausalLM if family == "llama" else AutoModelForImageTextToText
    plain = auto.from_pretrained(tmp_path / "decoded", dtype=torch.float32).eval()
    assert torch.equal(logits(plain), logits(load_exl3(packed, dequantize=True, dtype=torch.float32)))


def test_refusals(tmp_path: Path) -> None:
    made_packs.llama().save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="no EXL3 tensors"):
        decode_checkpoint(tmp_path / "plain", tmp_path / "new")
    with pytest.raises(UsageError, match="there already"):
        decode_checkpoint(tmp_path / "plain", tmp_path)
