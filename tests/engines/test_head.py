"""A head read from a checkpoint is the head that transformers builds from it, whatever its name and shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.engines.head import head_logits, head_of, head_of_folder
from harness.engines.hf import load_model
from harness.errors import EngineError


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16, "vocab_size": 20} | config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def weight(rows: int = 20, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_equals_the_one_of_transformers(teacher_folder: Path) -> None:
    ours, theirs = head_of_folder(teacher_folder), head_of(load_model(teacher_folder, torch.float32, "cpu"))
    assert ours.sha256 == theirs.sha256 and torch.equal(ours.weight_VH, theirs.weight_VH)
    assert head_of_folder(teacher_folder, vocab_size=200).vocab_size == 200


@pytest.mark.parametrize(("config", "model_class"), [("Gemma2Config", "Gemma2ForCausalLM"), ("CohereConfig", "")])
def test_tied_capped_and_scaled(tmp_path: Path, config: str, model_class: str) -> None:
    """Gemma caps its logits, Cohere scales them; both tie the head to the embedding."""
    import transformers

    settings = getattr(transformers, config)(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    made = getattr(transformers, model_class or config.replace("Config", "ForCausalLM"))(settings)
    made.to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path, torch.float32, "cpu")
    ours, theirs = head_of_folder(tmp_path), head_of(model)
    assert ours.sha256 == theirs.sha256
    assert (ours.softcap is not None) or ours.scale != 1.0
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        states = model.model(input_ids=ids).last_hidden_state[0]
        torch.testing.assert_close(head_logits(ours, states), model(input_ids=ids).logits[0], rtol=1e-4, atol=1e-4)


def test_names_of_wrapped_models(tmp_path: Path) -> None:
    nested = {"hidden_size": 16, "vocab_size": 18, "final_logit_softcapping": 7.0}
    names = {"language_model.lm_head.weight": weight(24), "language_model.model.embed_tokens.weight": weight(24) * 2}
    head = head_of_folder(write(tmp_path, names, text_config=nested, vocab_size=99))
    assert torch.equal(head.weight_VH, weight(24)) and (head.vocab_size, head.softcap) == (18, 7.0)


def test_an_untied_head_goes_before_the_embedding_and_keeps_its_bias(tmp_path: Path) -> None:
    names = {"lm_head.weight": weight(), "lm_head.bias": torch.ones(20), "model.embed_tokens.weight": weight() * 2}
    head = head_of_folder(write(tmp_path, names))
    assert torch.equal(head.weight_VH, weight()) and head.bias_V is not None and head.scale == 1.0


def test_float16_that_bfloat16_cannot_hold_is_kept(tmp_path: Path) -> None:
    stored = weight(dtype=torch.float16)
    head = head_of_folder(write(tmp_path, {"lm_head.weight": stored}))
    assert head.weight_VH.dtype == torch.float32 and torch.equal(head.weight_VH, stored.float())


def test_a_checkpoint_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="has no output head under lm_head"):
        head_of_folder(write(tmp_path / "m", {"model.norm.weight": torch.ones(16)}))
