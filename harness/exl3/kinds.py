"""What part of a model a tensor belongs to, by its name: section, layer, kind and leaf."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Section = Literal["text", "mtp", "vision"]
Kind = Literal["attention", "mlp", "shared experts", "routed experts", "head", "embedding", "other"]
KINDS: tuple[Kind, ...] = ("attention", "mlp", "shared experts", "routed experts", "head", "embedding", "other")

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_VISION = re.compile(r"(^|\.)(visual|vision\w*|image\w*|audio\w*|multi_modal_projector|mm_projector)\.")
_MTP = re.compile(r"(^|\.)mtp\.")
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
    elif _MTP.search(module) or (layers is not None and layer >= layers):
        section = "mtp"
    kind: Kind = next((kind for kind, pattern in _KINDS if pattern.search(module)), "other")
    leaf = re.sub(r"\.slice\.\d+$", "", module).rpartition(".")[2]
    return Spot(section=section, layer=layer, kind=kind, leaf=leaf)


def decoder_layers(config: Mapping[str, Any]) -> int | None:
    """``num_hidden_layers`` of the text model; None where the config does not say."""
    text = config.get("text_config")
    for holder in (text, config):
        if isinstance(holder, Mapping) and isinstance(holder.get("num_hidden_layers"), int):
            return int(holder["num_hidden_layers"])
    return None
