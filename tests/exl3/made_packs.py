"""EXL3 folders without an encoder: any trellis bits are valid EXL3, so random ones make a random model.

`pack` turns a tiny random transformers model into an EXL3 folder and a dense twin folder with the same weights
decoded: the independent side of every comparison is plain transformers on plain safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from harness.exl3.codebook import MARKERS
from harness.exl3.decode import dense_weight
from harness.exl3.tensors import Exl3Linear

VOCAB = 320


@dataclass(frozen=True)
class Spec:
    """How to pack one linear."""

    bits: float = 4
    codebook: str = "mcg"
    legacy_signs: bool = False


@dataclass
class Pack:
    """Folders of one random model: packed, and the same weights dense in float32."""

    packed: Path
    dense: Path
    bits: dict[str, float] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {k: v for shard in sorted(self.packed.glob("*.safetensors")) for k, v in load_file(shard).items()}

    def rewrite(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace the packed folder's shards by one with ``tensors``."""
        for old in self.packed.glob("*.safetensors*"):
            old.unlink()
        save_file(dict(tensors), self.packed / "model.safetensors", metadata={"format": "pt"})

    def edit_config(self, change: Callable[[dict[str, Any]], None]) -> None:
        path = self.packed / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))


def random_linear(
    name: str, out_features: int, in_features: int, spec: Spec, rng: np.random.Generator
) -> dict[str, torch.Tensor]:
    """Random EXL3 tensors by suffix whose dense weight has an rms of about ``in_features ** -0.5``."""
    padded_in, padded_out = (-(-size // 128) * 128 for size in (in_features, out_features))
    words = int(16 * spec.bits)
    trellis = rng.integers(-32768, 32768, (padded_in // 16, padded_out // 16, words), dtype=np.int16)
    rms = 1.0 if spec.codebook == "mul1" else 1.244
    parts: dict[str, torch.Tensor] = {"trellis": torch.from_numpy(trellis)}
    if spec.legacy_signs:
        for suffix, size in (("su", padded_in), ("sv", padded_out)):
            parts[suffix] = torch.from_numpy(rng.integers(-32768, 32768, size // 16, dtype=np.int16))
    else:
        for suffix, size, scale in (("suh", padded_in, in_features**-0.5 / rms), ("svh", padded_out, 1.0)):
            values = rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 1.4, size) * scale
            parts[suffix] = torch.from_numpy(values.astype(np.float16))
    if spec.codebook != "3inst":
        marker = np.array(MARKERS[spec.codebook], dtype=np.uint32).view(np.int32)
        parts[spec.codebook] = torch.tensor(int(marker), dtype=torch.int32)
    return parts


def pack(
    model: Any,
    folder: Path,
    choose: Callable[[str], Spec | None],
    *,
    split: Callable[[str, torch.Tensor], dict[str, torch.Tensor]] | None = None,
    quantization: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Pack:
    """Write ``model`` as EXL3 with random weights in the linears that ``choose`` names, and its dense twin.

    Args:
        choose: gets a linear's checkpoint name without ``.weight``; None leaves it as it is.
        split: turns one checkpoint tensor into the several linears that EXL3 stores for it.
    """
    made = Pack(folder / "packed", folder / "dense")
    model.save_pretrained(made.dense)
    source = {k: v for shard in sorted(made.dense.glob("*.safetensors")) for k, v in load_file(shard).items()}
    rng = np.random.default_rng(seed)
    packed: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for key in sorted(source):
        parts = split(key, source[key]) if split else {key: source[key]}
        rows = [_pack_one(part, tensor, source, choose, rng, packed, made.bits) for part, tensor in parts.items()]
        if not key.endswith(".bias") or key.removesuffix(".bias") not in made.bits:
            packed.update({} if all(part.removesuffix(".weight") in made.bits for part in parts) else parts)
        dense[key] = torch.cat(rows) if len(rows) > 1 else rows[0]
    for old in made.dense.glob("*.safetensors*"):
        old.unlink()
    made.packed.mkdir()
    config = json.loads((made.dense / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3", "bits": 4.0, **(quantization or {})}
    (made.packed / "config.json").write_text(json.dumps(config))
    save_file(
        {k: v.contiguous() for k, v in dense.items()}, made.dense / "model.safetensors", metadata={"format": "pt"}
    )
    made.rewrite({k: v.contiguous() for k, v in packed.items()})
    return made


def _pack_one(
    key: str,
    tensor: torch.Tensor,
    source: Mapping[str, torch.Tensor],
    choose: Callable[[str], Spec | None],
    rng: np.random.Generator,
    packed: dict[str, torch.Tensor],
    bits: dict[str, float],
) -> torch.Tensor:
    name = key.removesuffix(".weight")
    spec = choose(name) if key.endswith(".weight") and tensor.ndim == 2 else None
    if spec is None:
        return tensor
    parts = random_linear(name, *tensor.shape, spec, rng)
    linear = Exl3Linear.from_tensors(name, parts, in_features=tensor.shape[1], out_features=tensor.shape[0])
    bits[name] = spec.bits
    packed.update({f"{name}.{suffix}": part for suffix, part in parts.items()})
    bias = source.get(f"{name}.bias")
    if bias is not None:
        padded = torch.from_numpy(rng.normal(size=parts["trellis"].shape[1] * 16).astype(np.float16))
        padded[: len(bias)] = bias.half()
        packed[f"{name}.bias"] = padded
    return dense_weight(linear)


def every_linear(name: str) -> bool:
    """Whether EXL3 would quantise the linear ``name`` of the tiny models below."""
    return bool(re.search(r"(_proj|\.w[123])$", name)) and not re.search(r"kv_b_proj|[fgb]_[ab]_proj|\.b_proj", name)


def _build(config: Any, model_class: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            if name.endswith("bias"):
                parameter.copy_((0.1 * torch.randn_like(parameter)).half())
    return model


def _sizes(hidden: int, layers: int, intermediate: int) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def llama(
    hidden: int = 128, layers: int = 2, intermediate: int = 256, *, tied: bool = False, bias: bool = False
) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _sizes(hidden, layers, intermediate)
    config = LlamaConfig(**sizes, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    return _build(config, LlamaForCausalLM, 1)


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _build(Qwen3Config(**_sizes(128, 2, 256), head_dim=64, tie_word_embeddings=False), Qwen3ForCausalLM, 2)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_sizes(128, 2, 256), head_dim=32, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2
    )
    return _build(config, Qwen3MoeForCausalLM, 3)


def mixtral(intermediate: int = 128, layers: int = 2) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_sizes(128, layers, intermediate), num_local_experts=4, num_experts_per_tok=2)
    return _build(config, MixtralForCausalLM, 4)


def phi3() -> Any:
    from transformers import Phi3Config, Phi3ForCausalLM

    return _build(Phi3Config(**_sizes(128, 2, 256)), Phi3ForCausalLM, 5)


def glm4() -> Any:
    from transformers import Glm4Config, Glm4ForCausalLM

    return _build(Glm4Config(**_sizes(128, 2, 256), head_dim=32, attention_bias=True), Glm4ForCausalLM, 6)


def glm5_next(layers: int = 6, experts: int = 8) -> Any:
    """GLM-5.3-Flash's architecture: KDA and DSA layers, hyper-connections, routed experts, a vision tower."""
    from transformers.models.glm5_next.configuration_glm5_next import (
        Glm5NextConfig,
        Glm5NextTextConfig,
        Glm5NextVisionConfig,
    )
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

    # The last two layers share one top-k selection: what one layer passes to the next matters.
    kinds = ["linear_attention" if i % 3 < 2 and i < layers - 2 else "indexed_attention" for i in range(layers)]
    text = Glm5NextTextConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=experts,
        num_experts_per_tok=2,
        kv_lora_rank=128,
        q_lora_rank=128,
        v_head_dim=32,
        qk_nope_head_dim=32,
        linear_head_dim=32,
        linear_num_heads=4,
        index_head_dim=32,
        index_n_heads=4,
        index_topk=32,
        index_kpool=4,
        hc_mult=2,
        layer_types=kinds,
        indexer_types=["full"] * (layers - 1) + ["shared"],
        mlp_layer_types=["dense"] + ["sparse"] * (layers - 1),
        max_position_embeddings=256,
        initializer_range=0.1,
        pad_token_id=None,
    )
    vision = Glm5NextVisionConfig(
        depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=128, projection_intermediate_size=32
    )
    return _build(Glm5NextConfig(text_config=text, vision_config=vision), Glm5NextForConditionalGeneration, 7)


def llava() -> Any:
    """A vision tower, a projector and a Llama: checkpoints use other prefixes than the model class."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(text_config=LlamaConfig(**_sizes(128, 2, 256)), vision_config=vision, image_token_index=319)
    return _build(config, LlavaForConditionalGeneration, 8)


def split_fused(key: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The separate linears that EXL3 stores for the fused ones of `phi3` and `glm4` above."""
    for fused, sizes in (("qkv_proj", {"q_proj": 128, "k_proj": 64, "v_proj": 64}), ("gate_up_proj", None)):
        if f".{fused}." in key:
            sizes = sizes or dict.fromkeys(("gate_proj", "up_proj"), len(tensor) // 2)
            parts = tensor.split(list(sizes.values()))
            return {key.replace(fused, name): part for name, part in zip(sizes, parts, strict=True)}
    return {key: tensor}
