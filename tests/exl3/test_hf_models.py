"""EXL3 through transformers against the same weights dense in plain safetensors: the other side knows no EXL3."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import harness.exl3.hf  # noqa: F401  registers the format
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.hf import Exl3Config, load_exl3
from harness.exl3.hf_packed import PackedTensors, packed_owners
from harness.exl3.tensors import decode_embedding
from tests.exl3 import made_packs
from tests.exl3.made_packs import Pack, Spec

IDS = (torch.arange(64) * 37 % made_packs.VOCAB)[None]
CODEBOOKS = ("mcg", "mul1", "3inst")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits[0]


def mixed(name: str) -> Spec | None:
    """Every linear, with bits, codebook and kind of signs that change from tensor to tensor."""
    if not made_packs.every_linear(name):
        return None
    pick = sum(map(ord, name))
    if pick % 7 == 0:
        return Spec(bits=(1.5, 2.5, 3.5)[pick % 3], codebook="mul1")
    return Spec(bits=1 + pick % 8, codebook=CODEBOOKS[pick % 3], legacy_signs=pick % 5 == 0)


def routed_experts(name: str) -> Spec | None:
    """GLM-5.3-Flash packs: routed experts only, two layers at K=3."""
    return Spec(bits=3 if ".layers.2." in name or ".layers.4." in name else 2) if ".mlp.experts." in name else None


def with_head(name: str) -> Spec | None:
    return Spec(bits=6) if name == "lm_head" else mixed(name)


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[str], Spec | None], Any, int]] = {
    # model, what is packed, how the checkpoint splits what the model class fuses, modules with packed parameters
    "llama": (made_packs.llama, mixed, None, 14),
    "llama-bias-padded": (lambda: made_packs.llama(192, 2, 320, bias=True), with_head, None, 15),
    "llama-576": (lambda: made_packs.llama(576, 1, 192), mixed, None, 7),
    "qwen3": (made_packs.qwen3, mixed, None, 14),
    "qwen3-moe": (made_packs.qwen3_moe, mixed, None, 10),
    "mixtral": (made_packs.mixtral, mixed, None, 10),
    "mixtral-padded": (lambda: made_packs.mixtral(intermediate=96), mixed, None, 10),
    "phi3": (made_packs.phi3, mixed, made_packs.split_fused, 8),
    "glm4": (made_packs.glm4, mixed, made_packs.split_fused, 12),
    "glm5-next": (made_packs.glm5_next, routed_experts, None, 5),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Pack, torch.Tensor]]:
    """Pack of a family and the logits of its dense twin in float32, made once."""
    cache: dict[str, tuple[Pack, torch.Tensor]] = {}

    def make(family: str) -> tuple[Pack, torch.Tensor]:
        if family not in cache:
            model, choose, split, _ = FAMILIES[family]
            pack = made_packs.pack(model(), tmp_path_factory.mktemp(family), choose, split=split)
            twin = AutoModelForCausalLM.from_pretrained(pack.dense, dtype=torch.float32)
            cache[family] = pack, logits(twin)
        return cache[family]

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_model_equals_its_dense_twin(family: str, made: Any) -> None:
    pack, twin = made(family)
    model = load_exl3(pack.packed, dtype=torch.float32)
    owners = packed_owners(model)
    assert len(owners) == FAMILIES[family][3]
    packed_names = {f"{n}.{p}" for n, m in model.named_modules() if m in owners for p in m.exl3_assemblies}
    assert not packed_names & {name for name, _ in model.named_parameters()}, "something dense was kept"
    ours = logits(model)
    assert (ours - twin).abs().max() <= 1e-5 * twin.abs().max()
    assert torch.equal(ours.argmax(-1), twin.argmax(-1))
    stored = {m.exl3_name: m.packed().bits for m in model.modules() if isinstance(m, PackedTensors) and m.exl3_parts}
    assert stored == pack.bits
    assert len(set(pack.bits.values())) > 1, "the test must mix K"


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_at_load_is_bit_equal_and_plain(family: str, made: Any) -> None:
    pack, twin = made(family)
    model = load_exl3(pack.packed, dequantize=True, dtype=torch.float32)
    assert not packed_owners(model) and not any(isinstance(m, PackedTensors) for m in model.modules())
    reference = AutoModelForCausalLM.from_pretrained(pack.dense, dtype=torch.float32)
    wanted = reference.state_dict()
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == {k: tuple(v.shape) for k, v in wanted.items()}
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in reference.named_modules()}
    assert torch.equal(logits(model), twin)


@pytest.mark.parametrize("family", ["llama-bias-padded", "mixtral", "glm5-next"])
def test_bfloat16_is_one_cast_of_the_float32_weight(family: str, made: Any) -> None:
    pack, _ = made(family)
    wanted = AutoModelForCausalLM.from_pretrained(pack.dense, dtype=torch.bfloat16).state_dict()
    ours = load_exl3(pack.packed, dequantize=True, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, wanted[name]) and value.dtype == wanted[name].dtype for name, value in ours.items())


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral", "glm5-next"])
def test_from_pretrained_itself_works(family: str, made: Any) -> None:
    pack, twin = made(family)
    packed = AutoModelForCausalLM.from_pretrained(pack.packed, dtype=torch.float32)
    assert packed.is_quantized and packed.config.quantization_config.quant_method == "exl3"
    assert torch.allclose(logits(packed), twin, rtol=0, atol=1e-5 * float(twin.abs().max()))
    with pytest.warns(UserWarning, match="loading attributes"):
        dense = AutoModelForCausalLM.from_pretrained(
            pack.packed, dtype=torch.float32, quantization_config=Exl3Config(dequantize=True)
        )
    assert torch.equal(logits(dense), twin)
    assert not hasattr(dense.config, "quantization_config") and not hasattr(dense.config, "transformers_weights")


def test_dense_model_saves_as_a_plain_checkpoint(made: Any, tmp_path: Path) -> None:
    pack, twin = made("mixtral")
    load_exl3(pack.packed, dequantize=True, dtype=torch.float32).save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)), twin)


def test_packed_model_refuses_to_save(made: Any, tmp_path: Path) -> None:
    pack, _ = made("llama")
    with pytest.raises(ValueError, match="not serializable"):
        load_exl3(pack.packed, dtype=torch.float32).save_pretrained(tmp_path)


def test_casting_a_packed_model_keeps_the_scales(made: Any) -> None:
    """bf16 scales would be other numbers: casting changes what is decoded to, not what is stored."""
    pack, _ = made("mixtral")
    model = load_exl3(pack.packed, dtype=torch.float32).to(torch.bfloat16)
    wanted = load_exl3(pack.packed, dequantize=True, dtype=torch.bfloat16).state_dict()
    owner = model.model.layers[0].self_attn.q_proj
    assert owner.weight.dtype == torch.bfloat16
    assert torch.equal(owner.weight, wanted["model.layers.0.self_attn.q_proj.weight"])
    assert torch.equal(model.model.layers[1].mlp.experts.down_proj, wanted["model.layers.1.mlp.experts.down_proj"])


def test_dequantize_later_and_copies(made: Any) -> None:
    pack, twin = made("mixtral")
    model = load_exl3(pack.packed, dtype=torch.float32)
    twice = copy.deepcopy(model)
    assert torch.equal(logits(model.dequantize(torch.float32)), twin)
    assert not packed_owners(model) and len(packed_owners(twice)) == 10
    assert torch.allclose(logits(twice), twin, rtol=0, atol=1e-5 * float(twin.abs().max()))


@pytest.mark.parametrize("tie", [True, False])
def test_quantised_head_is_never_the_embedding(tie: bool, tmp_path: Path) -> None:
    """Converters leave ``tie_word_embeddings: true`` in config.json beside their own quantised head."""
    pack = made_packs.pack(made_packs.llama(), tmp_path, with_head)
    pack.edit_config(lambda config: config.update(tie_word_embeddings=tie))
    twin = logits(AutoModelForCausalLM.from_pretrained(pack.dense, dtype=torch.float32))
    for dequantize in (False, True):
        model = load_exl3(pack.packed, dequantize=dequantize, dtype=torch.float32)
        assert torch.allclose(logits(model), twin, rtol=0, atol=1e-5 * float(twin.abs().max()))
        assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
        assert model.config.tie_word_embeddings is False


def test_plain_head_beside_a_tied_flag_stays_its_own(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.llama(), tmp_path, mixed)
    pack.edit_config(lambda config: config.update(tie_word_embeddings=True))
    twin = logits(AutoModelForCausalLM.from_pretrained(pack.dense, dtype=torch.float32))
    assert torch.equal(logits(load_exl3(pack.packed, dequantize=True, dtype=torch.float32)), twin)


def test_tied_head_without_a_tensor_is_the_embedding(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.llama(tied=True), tmp_path, mixed)
    assert "lm_head.weight" not in pack.tensors()
    model = load_exl3(pack.packed, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_wide_mlp_stored_in_slices(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.llama(intermediate=512), tmp_path, slices, split=_sliced)
    names = set(pack.bits)
    assert {"model.layers.0.mlp.up_proj.slice.1", "model.layers.0.mlp.down_proj.slice.0"} <= names
    dense = load_exl3(pack.packed, dequantize=True, dtype=torch.float32).state_dict()
    wanted = _sliced_dense(pack)
    assert all(torch.equal(dense[name], value) for name, value in wanted.items())


def slices(name: str) -> Spec | None:
    return Spec(bits=2 + int(name[-1])) if ".slice." in name else None


def _sliced(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    for leaf, axis in (("up_proj", 0), ("gate_proj", 0), ("down_proj", 1)):
        if key.endswith(f"mlp.{leaf}.weight"):
            parts = tensor.chunk(2, axis)
            return {key.replace(leaf, f"{leaf}.slice.{i}"): part.contiguous() for i, part in enumerate(parts)}
    return {key: tensor}


def _sliced_dense(pack: Pack) -> dict[str, torch.Tensor]:
    from harness.exl3.decode import dense_weight
    from harness.exl3.tensors import Exl3Linear

    tensors = pack.tensors()
    wanted = {}
    for leaf, axis in (("up_proj", 0), ("gate_proj", 0), ("down_proj", 1)):
        parts = []
        for i in range(2):
            name = f"model.layers.0.mlp.{leaf}.slice.{i}"
            own = {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}
            parts.append(dense_weight(Exl3Linear.from_tensors(name, own)))
        wanted[f"model.layers.0.mlp.{leaf}.weight"] = torch.cat(parts, axis)
    return wanted


def test_linear_stored_fused_and_held_apart(tmp_path: Path) -> None:
    """Some packs store one ``qkv_proj`` where the class has three; 64-wide parts do not fall on block borders."""
    pack = made_packs.pack(
        made_packs.llama(), tmp_path, lambda name: Spec(bits=5) if name.endswith("mlp.up_proj") else None
    )
    tensors = pack.tensors()
    wanted = {}
    rng = np.random.default_rng(5)
    for layer in range(2):
        home = f"model.layers.{layer}.self_attn"
        fused = made_packs.random_linear(f"{home}.qkv_proj", 256, 128, Spec(bits=3), rng)
        dense = made_packs.dense_weight(made_packs.Exl3Linear.from_tensors("qkv", fused))
        for part, weight in zip("qkv", dense.split([128, 64, 64]), strict=True):
            del tensors[f"{home}.{part}_proj.weight"]
            wanted[f"{home}.{part}_proj.weight"] = weight
        tensors |= {f"{home}.qkv_proj.{suffix}": part for suffix, part in fused.items()}
    pack.rewrite(tensors)
    packed = load_exl3(pack.packed, dtype=torch.float32)
    dense_model = load_exl3(pack.packed, dequantize=True, dtype=torch.float32)
    for name, weight in wanted.items():
        assert torch.equal(dense_model.state_dict()[name], weight)
        assert torch.equal(packed.get_submodule(name.removesuffix(".weight")).weight, weight)
    assert torch.equal(logits(packed), logits(dense_model))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_prefixes(prefix: str, tmp_path: Path) -> None:
    """Old and new prefixes of a vision-language checkpoint; no causal-LM class knows it, the multimodal one does."""
    pack = made_packs.pack(made_packs.llava(), tmp_path, language_only)
    twin = logits(AutoModelForImageTextToText.from_pretrained(pack.dense, dtype=torch.float32))
    home = next(iter(pack.bits)).partition("layers.")[0]
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."
    pack.rewrite(
        {
            name.replace(home, prefix) if name.startswith(home) else re.sub(r"^.*lm_head\.", head, name): tensor
            for name, tensor in pack.tensors().items()
        }
    )
    assert any(name.startswith(f"{prefix}layers.0.self_attn.q_proj.") for name in pack.tensors())
    for dequantize in (False, True):
        model = load_exl3(pack.packed, dequantize=dequantize, dtype=torch.float32)
        assert torch.allclose(logits(model), twin, rtol=0, atol=1e-5 * float(twin.abs().max()))


def language_only(name: str) -> Spec | None:
    return None if "vision" in name or "projector" in name else mixed(name)


def test_base_model_names_without_prefix(tmp_path: Path) -> None:
    """``layers.0...`` instead of ``model.layers.0...``: transformers adds the prefix, so do the packed parts."""
    pack = made_packs.pack(made_packs.mixtral(), tmp_path, mixed)
    twin = logits(AutoModelForCausalLM.from_pretrained(pack.dense, dtype=torch.float32))
    pack.rewrite({name.removeprefix("model."): tensor for name, tensor in pack.tensors().items()})
    for dequantize in (False, True):
        model = load_exl3(pack.packed, dequantize=dequantize, dtype=torch.float32)
        assert torch.allclose(logits(model), twin, rtol=0, atol=1e-5 * float(twin.abs().max()))


def test_embedding_stored_as_a_row_wise_table(tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.llama(), tmp_path, mixed)
    tensors, rng, bits = pack.tensors(), np.random.default_rng(6), 3
    rings = rng.integers(-32768, 32768, (made_packs.VOCAB, 1 + 16 * bits), dtype=np.int16)
    rings[:, 0] = np.full(made_packs.VOCAB, 0.05, np.float16).view(np.int16)
    signs = rng.choice([-1.0, 1.0], (1, 256)).astype(np.float16)
    del tensors["model.embed_tokens.weight"]
    pack.rewrite(
        tensors
        | {"model.embed_tokens.trellis": torch.from_numpy(rings), "model.embed_tokens.signs": torch.from_numpy(signs)}
    )
    checkpoint = open_checkpoint(pack.packed)
    wanted = decode_embedding(checkpoint.tables["model.embed_tokens"], checkpoint.tensor)[:, :128]
    for dequantize in (False, True):
        embedding = load_exl3(pack.packed, dequantize=dequantize, dtype=torch.float32).model.embed_tokens
        assert torch.equal(embedding.weight, wanted) and not embedding._buffers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama-bias-padded", "mixtral", "glm5-next"])
def test_on_a_gpu(family: str, made: Any) -> None:
    pack, twin = made(family)
    for dequantize in (False, True):
        model = load_exl3(pack.packed, dequantize=dequantize, dtype=torch.float32, device="cuda")
        with torch.no_grad():
            ours = model(input_ids=IDS.cuda(), use_cache=False).logits[0].cpu()
        assert (ours - twin).abs().max() <= 1e-4 * twin.abs().max()


def test_config_object_round_trip() -> None:
    config = Exl3Config(dequantize=True, bits=2.05, codebook="mcg", layer_bits={"24": 3})
    again = Exl3Config.from_dict(json.loads(config.to_json_string()))
    assert again.dequantize and again.bits == 2.05 and again.layer_bits == {"24": 3}


def test_glm5_next_is_a_causal_lm(made: Any) -> None:
    pack, _ = made("glm5-next")
    assert type(AutoConfig.from_pretrained(pack.packed)) in AutoModelForCausalLM._model_mapping
