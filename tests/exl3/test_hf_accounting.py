"""Every tensor is used, skipped by a named rule, or an error; every parameter is filled, or an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from harness.errors import CheckpointError
from harness.exl3.hf import load_exl3
from tests.exl3 import made_packs
from tests.exl3.made_packs import Pack, Spec

Tensors = dict[str, torch.Tensor]


def spec(name: str) -> Spec | None:
    return Spec(bits=2) if made_packs.every_linear(name) else None


@pytest.fixture
def llama(tmp_path: Path) -> Pack:
    return made_packs.pack(made_packs.llama(), tmp_path, spec)


@pytest.fixture
def mixtral(tmp_path: Path) -> Pack:
    return made_packs.pack(made_packs.mixtral(), tmp_path, spec)


def drop(*endings: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if not k.endswith(endings)}


def add(**more: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name.replace("__", "."): value for name, value in more.items()}


BROKEN = {
    # change of the tensors, what the refusal must name
    "norm-missing": (drop("model.norm.weight"), "model.norm.weight"),
    "linear-missing": (drop(*(f"layers.1.mlp.up_proj.{s}" for s in ("trellis", "suh", "svh", "mcg"))), "up_proj"),
    "scales-missing": (drop("layers.1.mlp.up_proj.suh"), "up_proj"),
    "head-missing": (drop("lm_head.weight"), "lm_head"),
    "extra-plain": (add(model__layers__0__mlp__extra__weight=torch.zeros(3)), "mlp.extra.weight"),
    "extra-beside-linear": (add(model__layers__0__mlp__up_proj__weight_scale_inv=torch.zeros(1)), "weight_scale_inv"),
    "dense-and-packed": (add(model__layers__0__mlp__up_proj__weight=torch.zeros(256, 128)), "up_proj"),
    "wrong-shape": (add(model__norm__weight=torch.zeros(5)), "model.norm.weight"),
    "bias-without-place": (
        add(model__layers__0__mlp__up_proj__bias=torch.zeros(256, dtype=torch.float16)),
        "up_proj",
    ),
    "two-names-of-one-parameter": (add(norm__weight=torch.zeros(128)), "both model.norm.weight"),
    "fp8-beside-exl3": (
        add(lm_head__weight=torch.zeros(made_packs.VOCAB, 128, dtype=torch.float8_e4m3fn)),
        "lm_head.weight is F8",
    ),
    "unknown-marker": (add(model__layers__0__mlp__up_proj__mcg=torch.tensor(7, dtype=torch.int32)), "marker"),
    "impossible-trellis": (
        add(model__layers__0__mlp__up_proj__trellis=torch.zeros(8, 16, 50, dtype=torch.int16)),
        "up_proj",
    ),
    "trellis-of-another-size": (
        add(model__layers__0__mlp__up_proj__trellis=torch.zeros(16, 16, 32, dtype=torch.int16)),
        "up_proj",
    ),
    "not-finite-scale": (
        add(model__layers__0__mlp__up_proj__suh=torch.full((128,), float("nan"), dtype=torch.float16)),
        "up_proj",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_checkpoint_is_refused_by_name(how: str, llama: Pack) -> None:
    """Wrong weights loaded, no error; a "newly initialized" parameter is a hard stop."""
    change, named = BROKEN[how]
    llama.rewrite(change(llama.tensors()))
    for load in (load_exl3, lambda folder: AutoModelForCausalLM.from_pretrained(folder)):
        with pytest.raises(CheckpointError, match=named) as caught:
            load(llama.packed)
        assert caught.value.repair


@pytest.mark.parametrize(
    ("endings", "named"),
    [
        (("layers.1.block_sparse_moe.experts.2.w1.",), "expert 2"),
        (tuple(f"experts.3.w{i}." for i in (1, 2, 3)), r"experts \[3\]"),
    ],
)
def test_missing_expert_is_named(endings: tuple[str, ...], named: str, mixtral: Pack) -> None:
    kept = {k: v for k, v in mixtral.tensors().items() if not any(end in k for end in endings)}
    mixtral.rewrite(kept)
    with pytest.raises(CheckpointError, match=named):
        load_exl3(mixtral.packed)


def test_expert_too_many_is_refused(mixtral: Pack) -> None:
    tensors = mixtral.tensors()
    more = {k.replace("experts.3.", "experts.4."): v.clone() for k, v in tensors.items() if "experts.3." in k}
    mixtral.rewrite(tensors | more)
    with pytest.raises(CheckpointError, match="no expert 4"):
        load_exl3(mixtral.packed)


def test_packed_and_plain_experts_in_one_stack_are_refused(mixtral: Pack) -> None:
    tensors = mixtral.tensors()
    name = "model.layers.0.block_sparse_moe.experts.1.w2"
    kept = {k: v for k, v in tensors.items() if not k.startswith(name)}
    mixtral.rewrite(kept | {f"{name}.weight": torch.zeros(128, 128)})
    with pytest.raises(CheckpointError, match=r"expert|experts"):
        load_exl3(mixtral.packed)


def test_multi_token_prediction_is_skipped_by_a_named_rule(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.glm5_next(layers=3, experts=4), tmp_path, spec)
    twin = AutoModelForCausalLM.from_pretrained(pack.dense, dtype=torch.float32).state_dict()
    home = "model.language_model.layers"
    last = {k: v for k, v in pack.tensors().items() if f"{home}.2." in k}
    head = {k.replace(f"{home}.2.", f"{home}.3."): v.clone() for k, v in last.items()}
    head |= {f"{home}.3.eh_proj.weight": torch.zeros(128, 256), "mtp.norm.weight": torch.zeros(128)}
    # As converters ship it: one more file beside the shards, unknown to any index.
    save_file(head, pack.packed / "mtp.safetensors", metadata={"format": "pt"})
    model = load_exl3(pack.packed, dequantize=True, dtype=torch.float32)
    assert all(torch.equal(value, twin[name]) for name, value in model.state_dict().items())
    assert set(model.accounting.skipped) == set(head)
    assert model.accounting.summary() == {
        "multi-token-prediction layer": len(head) - 1,
        "multi-token-prediction head": 1,
    }


def test_a_missing_layer_count_is_no_excuse(llama: Pack) -> None:
    """One layer fewer in config.json: a decoder layer is never taken for a prediction layer."""
    llama.edit_config(lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"layers\.1\.") as caught:
        load_exl3(llama.packed)
    assert "config.json counts 1" in caught.value.repair


def test_vision_layers_are_not_taken_for_prediction_heads(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.glm5_next(layers=3, experts=4), tmp_path, spec)
    pack.rewrite(pack.tensors() | {"model.visual.layers.7.norm.weight": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="visual.layers.7"):
        load_exl3(pack.packed)


@pytest.mark.parametrize("stale", ["lists-a-lost-shard", "misses-a-shard", "no-index"])
def test_index_is_never_trusted(stale: str, llama: Pack) -> None:
    tensors = llama.tensors()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    llama.rewrite({})
    (llama.packed / "model.safetensors").unlink()
    for file, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, llama.packed / file, metadata={"format": "pt"})
    index = {key: file for file, keys in halves.items() for key in keys}
    if stale == "lists-a-lost-shard":
        index = {key: file.replace("of-00002", "of-00003") for key, file in index.items()}
    if stale == "misses-a-shard":
        index = {key: file for key, file in index.items() if "00001-of" in file}
    if stale != "no-index":
        text = json.dumps({"metadata": {}, "weight_map": index})
        (llama.packed / "model.safetensors.index.json").write_text(text)
    twin = AutoModelForCausalLM.from_pretrained(llama.dense, dtype=torch.float32).state_dict()
    for model in (
        load_exl3(llama.packed, dequantize=True, dtype=torch.float32),
        AutoModelForCausalLM.from_pretrained(llama.packed, dtype=torch.float32).dequantize(torch.float32),
    ):
        assert all(torch.equal(value, twin[name]) for name, value in model.state_dict().items())


def test_a_backup_beside_the_model_is_left_out(llama: Pack) -> None:
    name = "model.norm.weight"
    norm = llama.tensors()[name].float()
    save_file({name: torch.full((128,), 2.0)}, llama.packed / "patch.safetensors", metadata={"format": "pt"})
    assert torch.equal(load_exl3(llama.packed, dtype=torch.float32).model.norm.weight, norm)


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"quant_method": "exl3", "bits": 8.0, "codebook": "mul1", "head_bits": 6},
        {
            "quant_method": "exl3",
            "bits": 7,
            "codebook": "3inst",
            "layer_bits": {"0": 5},
            "head_bits": 16,
            "scope": "glm53_routed_experts_only",
            "non_routed_dtype_policy": "bf16_as_stored",
            "mtp_experts": "source",
        },
    ],
)
def test_config_is_advisory(config: dict[str, object] | None, llama: Pack) -> None:
    """Wrong bits, codebook and layer_bits, or no quantisation block at all: the shards decide."""
    llama.edit_config(
        lambda c: c.pop("quantization_config") if config is None else c.update(quantization_config=config)
    )
    twin = AutoModelForCausalLM.from_pretrained(llama.dense, dtype=torch.float32).state_dict()
    model = load_exl3(llama.packed, dequantize=True, dtype=torch.float32)
    assert all(torch.equal(value, twin[name]) for name, value in model.state_dict().items())


def test_plain_checkpoint_is_not_loaded_as_exl3(llama: Pack) -> None:
    with pytest.raises(CheckpointError, match="EXL3"):
        load_exl3(llama.dense)


def test_folder_without_shards_is_refused(llama: Pack) -> None:
    for shard in llama.packed.glob("*.safetensors"):
        shard.unlink()
    with pytest.raises(CheckpointError):
        load_exl3(llama.packed)


def test_truncated_shard_is_refused(llama: Pack) -> None:
    shard = llama.packed / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    with pytest.raises(CheckpointError):
        load_exl3(llama.packed)
