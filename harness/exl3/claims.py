"""What part of a model each tensor belongs to, by its name, and what config.json claims of it: advice, never trusted.

The tensors are right. The claims come in two dialects: exllamav3 writes ``bits`` as an average that its allocator
spends tensor by tensor, and ``head_bits``; third-party packs of routed experts write ``bits`` as the K of every routed
expert and ``layer_bits`` for layers that differ, and ``non_routed_exl3`` for the rest.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.exl3.checkpoint import Checkpoint, PackedModule

Section = Literal["text", "mtp", "vision"]
Kind = Literal["attention", "mlp", "shared experts", "routed experts", "head", "embedding", "other"]
KINDS: tuple[Kind, ...] = ("attention", "mlp", "shared experts", "routed experts", "head", "embedding", "other")

#: How far the counted average may lie from an average that config.json states.
AVERAGE_TOLERANCE = 0.05
#: Claims that make ``bits`` a claim on each tensor, not on their average.
_PER_TENSOR = ("layer_bits", "scope", "non_routed_dtype_policy", "non_routed_exl3")

#: Multi-token-prediction modules by their name; layers past the model's last are such too.
MTP = re.compile(r"(^|\.)mtp[._]")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_STACKED = re.compile(r"^(?:.*\.)?layers\.\d+\.")
_PREDICTS = re.compile(r"(^|\.)(eh_proj|enorm|hnorm|shared_head)\.")
_VISION = re.compile(r"(^|\.)(visual|vision\w*|image\w*|audio\w*|multi_modal_projector|mm_projector)\.")
_KINDS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("shared experts", re.compile(r"\.shared_experts?(\.|$)")),
    ("routed experts", re.compile(r"\.experts(\.|$)")),
    ("head", re.compile(r"(^|\.)(lm_head|embed_out|output_layer)$")),
    ("embedding", re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings)$|ngram_embedding")),
    ("attention", re.compile(r"\.(self_attn|attn|attention|linear_attn|self_attention|mixer)(\.|$)")),
    ("mlp", re.compile(r"\.(mlp|feed_forward|ffn|block_sparse_moe)(\.|$)")),
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Spot:
    """Where a module lies; ``layer`` is -1 outside of the stack, ``leaf`` its last name (``up_proj``)."""

    section: Section
    layer: int
    kind: Kind
    leaf: str


def spot_of(module: str, layers: int | None) -> Spot:
    """Sort a module by its name; ``layers`` is the model's number of decoder layers, where known.

    A layer at or past that number is the multi-token-prediction layer of GLM and DeepSeek.
    """
    found = _LAYER.search(module)
    layer = int(found[1]) if found else -1
    section: Section = "text"
    if _VISION.search(module):
        section = "vision"
    elif MTP.search(module) or (layers is not None and layer >= layers):
        section = "mtp"
    kind: Kind = next((kind for kind, pattern in _KINDS if pattern.search(module)), "other")
    leaf = re.sub(r"\.(slice\.|rank)\d+$", "", module).rpartition(".")[2]
    return Spot(section=section, layer=layer, kind=kind, leaf=leaf)


def decoder_layers(checkpoint: Checkpoint) -> int | None:
    """First prediction layer: ``num_hidden_layers``, unless a decoder layer lies past it; None if unknown."""
    claimed = _claimed_layers(checkpoint.config)
    if claimed is None:
        return None
    first = prediction_layers(checkpoint.tensors)
    found = {int(layer[1]) for key in checkpoint.tensors if not _VISION.search(key) and (layer := _LAYER.search(key))}
    unproven = {layer for layer in found if layer >= claimed} - {int(prefix.split(".")[-2]) for prefix in first}
    return max(unproven) + 1 if unproven else claimed


def _claimed_layers(config: Mapping[str, Any]) -> int | None:
    text = config.get("text_config")
    for holder in (text, config):
        if isinstance(holder, Mapping) and isinstance(holder.get("num_hidden_layers"), int):
            return int(holder["num_hidden_layers"])
    return None


def prediction_layers(keys: Iterable[str]) -> set[str]:
    """``model.layers.61.`` of each layer that joins last states and next embedding, as no decoder layer does."""
    return {layer[0] for key in keys if _PREDICTS.search(key) and (layer := _STACKED.match(key))}


def _layer_count(checkpoint: Checkpoint) -> list[str]:
    claimed, held = _claimed_layers(checkpoint.config), decoder_layers(checkpoint)
    if claimed == held:
        return []
    return [f"config says num_hidden_layers={claimed}, the shards hold {held} decoder layers"]


# ---- claims held against the tensors ---------------------------------------------------------------------------------


def mismatches(checkpoint: Checkpoint) -> list[str]:
    """One line for every claim that the tensors contradict; empty where they agree or nothing is claimed."""
    layers = decoder_layers(checkpoint)
    placed = [(spot_of(name, layers), module) for name, module in checkpoint.modules.items()]
    claims = checkpoint.quantization
    lines = _average(placed, claims) + _by_tensor(placed, claims) + _head(placed, checkpoint, claims)
    return _layer_count(checkpoint) + lines + _codebooks(checkpoint, claims) + _stored(checkpoint)


def mean_bits(modules: list[PackedModule]) -> float:
    """Average K, weighted by the weights coded; nan of nothing."""
    weights = sum(module.weights for module in modules)
    return sum(module.bits * module.weights for module in modules) / weights if weights else float("nan")


def claimed_bits(claims: Mapping[str, Any]) -> float | None:
    """The average that a block claims: ``bits_mean`` beside a ``bits`` that is an integer, as the Hub wants it."""
    mean = _number(claims.get("bits_mean"))
    return _number(claims.get("bits")) if mean is None else mean


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _body(placed: list[tuple[Spot, PackedModule]]) -> list[PackedModule]:
    return [module for spot, module in placed if spot.section == "text" and spot.kind != "head"]


def _average(placed: list[tuple[Spot, PackedModule]], claims: Mapping[str, Any]) -> list[str]:
    bits, body = claimed_bits(claims), _body(placed)
    if bits is None or not body or any(key in claims for key in _PER_TENSOR):
        return []
    counted = mean_bits(body)
    if abs(counted - bits) <= AVERAGE_TOLERANCE:
        return []
    return [f"config says {bits:g} bits on average, the tensors hold {counted:.3f}"]


def _by_tensor(placed: list[tuple[Spot, PackedModule]], claims: Mapping[str, Any]) -> list[str]:
    """Lines for modules whose own K is claimed, one for every layer, leaf and K."""
    routed = any(spot.kind == "routed experts" for spot, _ in placed)
    missed = not routed and bool(_average(placed, claims))
    found: Counter[tuple[int, str, float, float]] = Counter()
    for spot, module in placed:
        expected = _expected(spot, module.name, claims, routed, missed)
        if expected is not None and expected != module.bits:
            found[spot.layer, spot.leaf, expected, module.bits] += 1
    lines = []
    for (layer, leaf, expected, bits), count in sorted(found.items()):
        where = f"layer {layer} {leaf}" if layer >= 0 else leaf
        tensors = "tensor is" if count == 1 else f"{count} tensors are"
        lines.append(f"{where}: config says K={expected:g}, {tensors} K={bits:g}")
    return lines


def _expected(spot: Spot, name: str, claims: Mapping[str, Any], routed: bool, missed: bool) -> float | None:
    """The K that the config claims for one module; None where it claims only an average, or nothing."""
    if spot.kind == "head" or spot.section == "vision":
        return None
    if routed and spot.kind != "routed experts":
        return _non_routed(spot, name, claims.get("non_routed_exl3"))
    bits = claimed_bits(claims)
    if any(key in claims for key in _PER_TENSOR):
        return _of_layer(claims.get("layer_bits"), spot.layer, bits)
    # An integer average leaves the allocator nothing to spend, so it is a claim on each tensor once it is missed.
    is_claim = bits is not None and bits == int(bits) and spot.section == "text"
    return bits if is_claim and missed else None


def _of_layer(layer_bits: Any, layer: int, default: float | None) -> float | None:
    own = layer_bits.get(str(layer)) if isinstance(layer_bits, Mapping) else None
    return default if _number(own) is None else _number(own)


def _non_routed(spot: Spot, name: str, claims: Any) -> float | None:
    if not isinstance(claims, Mapping):
        return None
    by_prefix = claims.get("layers")
    if isinstance(by_prefix, Mapping):
        prefixes = [prefix for prefix in by_prefix if name == prefix or name.startswith(f"{prefix}.")]
        entry = by_prefix[max(prefixes, key=len)] if prefixes else None
        return _number(entry.get("bits")) if isinstance(entry, Mapping) else None
    return _of_layer(claims.get("layer_bits"), spot.layer, _number(claims.get("bits")))


def _head(placed: list[tuple[Spot, PackedModule]], checkpoint: Checkpoint, claims: Mapping[str, Any]) -> list[str]:
    bits = _number(claims.get("head_bits"))
    heads = [module for spot, module in placed if spot.kind == "head"]
    if bits is None:
        return []
    if heads:
        return [
            f"{head.name}: config says head_bits={bits:g}, tensor is K={head.bits:g}"
            for head in heads
            if head.bits != bits
        ]
    plain = [header for name, header in checkpoint.plain.items() if name.endswith("lm_head.weight")]
    if not plain or bits >= 16:
        return []
    return [f"{plain[0].name}: config says head_bits={bits:g}, tensor is {plain[0].dtype}"]


def _codebooks(checkpoint: Checkpoint, claims: Mapping[str, Any]) -> list[str]:
    claimed = claims.get("codebook")
    others: dict[str, list[str]] = defaultdict(list)
    for name, module in checkpoint.modules.items():
        if isinstance(claimed, str) and module.codebook != claimed:
            others[module.codebook].append(name)
    return [
        f"config says codebook {claimed}, {len(names)} of {len(checkpoint.modules)} modules are {codebook}, "
        f"first {names[0]}"
        for codebook, names in sorted(others.items())
    ]


def _stored(checkpoint: Checkpoint) -> list[str]:
    """quantization_config.json: a dump of the shard headers by module; it may lack MTP and vision modules."""
    lines, lost = [], []
    for name, entry in checkpoint.tensor_storage.items():
        if not isinstance(entry, Mapping) or entry.get("quant_format") != "exl3":
            continue
        module, bits = checkpoint.modules.get(name), _number(entry.get("bits_per_weight"))
        if module is None:
            lost.append(name)
        elif bits is not None and round(bits * 2) / 2 != module.bits:
            lines.append(f"{name}: quantization_config.json says {bits:g} bits, tensor is K={module.bits:g}")
    if lost:
        lines.append(f"quantization_config.json lists {len(lost)} modules that no shard holds, first {lost[0]}")
    return lines
