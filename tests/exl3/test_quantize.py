"""Whole checkpoints quantised, read back, interrupted, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from typer.testing import CliRunner

from harness.cli import app
from harness.cli.exl3 import parse_layer_bits, parse_layers
from harness.errors import CheckpointError, StorageError, UsageError
from harness.exl3 import hf as _registered  # noqa: F401 (transformers then knows the format)
from harness.exl3 import quantize as driver
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.claims import mismatches
from harness.exl3.decode import dense_weight
from harness.exl3.package import MANIFEST
from harness.exl3.quantize import quantize_checkpoint
from harness.exl3.quantize_plan import QuantizeSettings, make_plan
from harness.store import folder_lock

LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 160,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied head, biased attention, bf16."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True, attention_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("about the source")
    return folder


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixtral")
    torch.manual_seed(0)
    config = MixtralConfig(
        **{**LLAMA, "num_hidden_layers": 1, "intermediate_size": 128}, num_local_experts=3, num_experts_per_tok=2
    )
    MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quantised(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything of the Llama at 2 bits, layer 1 at 3, the head at 4; never changed by a test."""
    folder = tmp_path_factory.mktemp("quantised") / "q"
    result = quantize_checkpoint(llama, folder, settings(layer_bits={1: 3}, head_bits=4))
    assert result.linears == 15 and not result.resumed and result.bits == 2.5
    return folder


def settings(**changes: Any) -> QuantizeSettings:
    return QuantizeSettings(**{"bits": 2, **changes})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def relative_error(quantised: Path, source: dict[str, torch.Tensor], module: str, rows: slice = slice(None)) -> float:
    weight = source[f"{module}.weight"].float()
    linear = open_checkpoint(quantised).linear(module, in_features=weight.shape[1], out_features=weight.shape[0])
    return float((dense_weight(linear) - weight).square().mean() / weight.square().mean())


def test_a_llama_reads_back_and_keeps_the_rest(llama: Path, quantised: Path) -> None:
    source, checkpoint = load_file(llama / "model.safetensors"), open_checkpoint(quantised)
    assert len(checkpoint.modules) == 15 and not mismatches(checkpoint)
    for name, module in checkpoint.modules.items():
        bits = 4 if name == "lm_head" else 3 if ".layers.1." in name else 2
        assert (module.bits, module.codebook) == (bits, "mcg")
        if name != "lm_head":
            assert 0.4 < relative_error(quantised, source, name) * 4**bits < 1.25
    head = dense_weight(checkpoint.linear("lm_head", in_features=128, out_features=160))
    embedding = source["model.embed_tokens.weight"].float()
    assert (head - embedding).square().mean() / embedding.square().mean() < 1.25 * 4**-4
    bias = checkpoint.linear("model.layers.0.self_attn.q_proj").bias
    assert torch.equal(bias, source["model.layers.0.self_attn.q_proj.bias"].to(torch.float16))
    for name in checkpoint.plain:
        assert checkpoint.tensor(name).dtype == torch.bfloat16 and torch.equal(checkpoint.tensor(name), source[name])
    assert {name for name in source if "norm" in name or "embed" in name} == set(checkpoint.plain)


def test_the_folder_is_a_genuine_checkpoint(quantised: Path) -> None:
    config = json.loads((quantised / "config.json").read_text())
    about = config["quantization_config"]
    assert config["tie_word_embeddings"] is False
    assert (about["quant_method"], about["head_bits"], about["codebook"]) == ("exl3", 4, "mcg")
    assert about["layer_bits"] == {"0": 2, "1": 3} and about["bits"] == 2 and about["bits_mean"] == 2.5
    storage = json.loads((quantised / "quantization_config.json").read_text())["tensor_storage"]
    entry = storage["model.layers.1.mlp.up_proj"]
    assert entry["bits_per_weight"] == 3 and entry["mcg_multiplier"] == 0xCBAC1FED
    assert entry["stored_tensors"]["model.layers.1.mlp.up_proj.mcg"] == {
        "shape": [],
        "n_bytes": 4,
        "dtype": "torch.int32",
    }
    listed = {key for module in storage.values() for key in module["stored_tensors"]}
    assert listed == set(open_checkpoint(quantised).tensors)
    assert (quantised / "tokenizer.json").read_text() == "{}" and not (quantised / "README.md").exists()
    assert not list((quantised).glob(".partial*"))
    model = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)
    assert torch.isfinite(model(input_ids=torch.arange(8)[None]).logits).all()


def test_a_tied_head_that_is_not_quantised_stays_tied(llama: Path, tmp_path: Path) -> None:
    result = quantize_checkpoint(llama, tmp_path / "q", settings(modules="mlp", layers=(1,)))
    checkpoint = open_checkpoint(tmp_path / "q")
    assert result.linears == 3 and {name.split(".")[2] for name in checkpoint.modules} == {"1"}
    assert checkpoint.config["tie_word_embeddings"] is True
    assert not any("lm_head" in name for name in checkpoint.tensors)


def test_signs_are_shared_by_linears_with_one_input(llama: Path, mixtral: Path) -> None:
    jobs = {job.module: job.signs for job in make_plan(open_checkpoint(llama), settings()).jobs}
    layer = "model.layers.0."
    assert jobs[f"{layer}self_attn.q_proj"].input == jobs[f"{layer}self_attn.v_proj"].input
    assert jobs[f"{layer}mlp.gate_proj"].input == jobs[f"{layer}mlp.up_proj"].input
    assert jobs[f"{layer}mlp.gate_proj"].input != jobs["model.layers.1.mlp.gate_proj"].input
    assert len({signs.output for signs in jobs.values()}) == len(jobs)
    experts = [job.signs for job in make_plan(open_checkpoint(mixtral), settings(modules="routed-experts")).jobs]
    assert len(experts) == 9 and len({signs.input for signs in experts}) == 1 + 3, "down_proj has its own input"


def test_experts_per_expert_and_stacked_give_the_same_weights(mixtral: Path, tmp_path: Path) -> None:
    quantize_checkpoint(mixtral, tmp_path / "each", settings(modules="routed-experts"))
    each = open_checkpoint(tmp_path / "each")
    assert len(each.modules) == 9 and all(".experts." in name for name in each.modules)
    source = load_file(mixtral / "model.safetensors")
    stacked = tmp_path / "stacked-source"
    save_stacked(source, mixtral, stacked)
    quantize_checkpoint(stacked, tmp_path / "stacked", settings(modules="routed-experts"))
    other = open_checkpoint(tmp_path / "stacked")
    assert set(other.modules) == {
        f"model.layers.0.mlp.experts.{e}.{leaf}_proj" for e in range(3) for leaf in ("gate", "up", "down")
    }
    for e in range(3):
        weight = source[f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"].float()
        linear = other.linear(f"model.layers.0.mlp.experts.{e}.up_proj", in_features=128, out_features=128)
        error = (dense_weight(linear) - weight).square().mean() / weight.square().mean()
        assert 0.4 < float(error) * 4**2 < 1.25


def save_stacked(source: dict[str, torch.Tensor], like: Path, folder: Path) -> None:
    """The same model with its experts fused the way newer classes store them."""
    folder.mkdir()
    kept = {name: tensor for name, tensor in source.items() if ".experts." not in name}
    old = "model.layers.0.block_sparse_moe.experts.{}.w{}.weight"
    pairs = [torch.cat([source[old.format(e, 1)], source[old.format(e, 3)]]) for e in range(3)]
    kept["model.layers.0.mlp.experts.gate_up_proj"] = torch.stack(pairs)
    kept["model.layers.0.mlp.experts.down_proj"] = torch.stack([source[old.format(e, 2)] for e in range(3)])
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((like / "config.json").read_text())


def test_fused_projections_are_split(llama: Path, tmp_path: Path) -> None:
    source = load_file(llama / "model.safetensors")
    parts = [source.pop(f"model.layers.0.self_attn.{leaf}_proj.weight") for leaf in "qkv"]
    for leaf in "qkv":
        source.pop(f"model.layers.0.self_attn.{leaf}_proj.bias")
    source["model.layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)
    folder = tmp_path / "fused"
    folder.mkdir()
    save_file(source, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text((llama / "config.json").read_text())
    quantize_checkpoint(folder, tmp_path / "q", settings(layers=(0,)))
    sizes = {"q": 128, "k": 64, "v": 64}
    for leaf, weight in zip("qkv", parts, strict=True):
        name = f"model.layers.0.self_attn.{leaf}_proj"
        linear = open_checkpoint(tmp_path / "q").linear(name, in_features=128, out_features=sizes[leaf])
        error = (dense_weight(linear) - weight.float()).square().mean() / weight.float().square().mean()
        assert float(error) < 1.25 * 4**-2


def test_a_killed_run_ends_with_the_same_bytes(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize_checkpoint(llama, tmp_path / "whole", settings(modules="mlp"))
    calls, encode = [], driver.encode_linear

    def stop_at_fourth(name: str, *args: Any, **options: Any) -> dict[str, np.ndarray]:
        calls.append(name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(name, *args, **options)

    monkeypatch.setattr(driver, "encode_linear", stop_at_fourth)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(llama, tmp_path / "killed", settings(modules="mlp"))
    assert not (tmp_path / "killed" / MANIFEST).exists() and not list((tmp_path / "killed").glob("*.safetensors"))
    with pytest.raises(UsageError, match="begun with other settings"):
        quantize_checkpoint(llama, tmp_path / "killed", settings(bits=3, modules="mlp"))
    result = quantize_checkpoint(llama, tmp_path / "killed", settings(modules="mlp"))
    assert result.resumed == 3 and not set(calls[:3]) & set(calls[4:])
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    again = quantize_checkpoint(llama, tmp_path / "killed", settings(modules="mlp"))
    assert again.was_complete and again.resumed == 6 and contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_changed_weight_is_encoded_again(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = load_file(llama / "model.safetensors")
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text((llama / "config.json").read_text())
    save_file(source, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(driver, "package", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(folder, tmp_path / "q", settings(modules="mlp"))
    monkeypatch.undo()
    source["model.layers.0.mlp.up_proj.weight"] *= 2
    save_file(source, folder / "model.safetensors", metadata={"format": "pt"})
    assert quantize_checkpoint(folder, tmp_path / "q", settings(modules="mlp")).resumed == 5
    assert relative_error(tmp_path / "q", source, "model.layers.0.mlp.up_proj") < 1.25 * 4**-2


def test_two_shards_have_an_index(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.exl3.package.SHARD_BYTES", 40_000)
    quantize_checkpoint(llama, tmp_path / "q", settings(modules="mlp"))
    shards = sorted(path.name for path in (tmp_path / "q").glob("*.safetensors"))
    index = json.loads((tmp_path / "q/model.safetensors.index.json").read_text())
    assert len(shards) > 1 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    checkpoint = open_checkpoint(tmp_path / "q")
    assert set(index["weight_map"]) == set(checkpoint.tensors) and not checkpoint.notes
    for module in checkpoint.modules.values():
        assert len({part.shard for part in module.parts.values()}) == 1, "a module straddles shards"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rate": ({"bits": 9}, "no rate of 9 bits"),
    "half rate": ({"bits": 2.5}, "only with the mul1"),
    "layer rate": ({"layer_bits": {0: 0.5}}, "no rate of 0.5"),
    "codebook": ({"codebook": "mgc"}, "no codebook mgc"),
    "modules": ({"modules": "attn"}, "no set of modules attn"),
    "head": ({"head_bits": 12}, "cannot have 12 bits"),
    "layer": ({"layers": (1, 2)}, "layer 2 is named"),
    "layer of layer_bits": ({"layer_bits": {7: 3}}, "layer 7 is named"),
    "nothing": ({"modules": "routed-experts"}, "nothing in .* matches"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_make_no_sense_are_refused(case: str, llama: Path, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        quantize_checkpoint(llama, tmp_path / "q", settings(**changes))
    assert not (tmp_path / "q").exists()


def test_sources_that_are_quantised_or_absent_are_refused(quantised: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quantised already"):
        quantize_checkpoint(quantised, tmp_path / "q2", settings())
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        quantize_checkpoint(tmp_path / "empty", tmp_path / "q2", settings())


def test_targets_that_hold_something_else_are_refused(llama: Path, quantised: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="other settings"):
        quantize_checkpoint(llama, quantised, settings())
    (tmp_path / "taken").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "taken/model.safetensors")
    with pytest.raises(UsageError, match="already holds a checkpoint"):
        quantize_checkpoint(llama, tmp_path / "taken", settings())
    with folder_lock(tmp_path / "busy"), pytest.raises(StorageError, match="another run"):
        quantize_checkpoint(llama, tmp_path / "busy", settings())


def test_the_command(llama: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(
        app, ["exl3", "quantize", str(llama), str(tmp_path / "q"), "--bits", "2", "--modules", "mlp", "--layers", "0-0"]
    )
    assert told.exit_code == 0, told.output
    assert "3 linears" in told.output and "2.000 bits" in told.output and "head_bits 16" in told.output
    assert parse_layers("0,3,10-12") == (0, 3, 10, 11, 12)
    assert parse_layer_bits("24=3, 27=2.5") == {24: 3.0, 27: 2.5}
    for wrong in ("a", "3-1", ""):
        with pytest.raises(UsageError, match="no layer or range"):
            parse_layers(wrong)
    with pytest.raises(UsageError, match="not layer=bits"):
        parse_layer_bits("24:3")
