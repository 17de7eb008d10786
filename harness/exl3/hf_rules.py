"""Why a tensor that has no place in the model may be left out; without a reason the checkpoint is refused.

A reason rests on the tensors themselves, never on a number in config.json alone: a layer past the last is a prediction
layer only where it holds what such a layer has and a decoder layer has not. The rules are the same for dense and EXL3
checkpoints, whole or layer by layer, and what they leave out is counted in the receipt.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from harness.errors import CheckpointError
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.claims import MTP, prediction_layers
from harness.exl3.foreign import SIDE_SCALE
from harness.exl3.hf_names import Names

PREDICTION = "multi-token-prediction layer"
ROTARY = "rotary table, computed by the model"
_ROTARY = re.compile(r"(^|\.)rotary\w*\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$")
_POSITIONS = re.compile(r"(^|\.)position_ids$")
_MASK = re.compile(r"(^|\.)(attn|attention|self_attn)\.(bias|masked_bias|causal_mask)$")
_LAYER = re.compile(r"^(?P<stack>(?:.*\.)?layers)\.(?P<index>\d+)\.")
#: Parts of a model for other inputs or outputs than text.
_OTHER = re.compile(
    r"(^|\.)(visual|vision\w*|image\w*|audio\w*|embed_vision|embed_audio|multi_modal_projector|mm_projector|talker|"
    r"token2wav|code2wav)\."
)
_OTHER_CONFIG = re.compile(r"vision|visual|image|audio|talker|token2wav|code2wav")
#: How far a stored table may lie from the model's: tables in bf16 are off by 0.4 %.
_TABLE_TOLERANCE = 0.01


class Rules:
    """The rules for one checkpoint and one model class."""

    def __init__(self, names: Names, checkpoint: Checkpoint) -> None:
        self._names, self._checkpoint = names, checkpoint
        self._predicting = prediction_layers(checkpoint.tensors)

    def excuse(self, key: str) -> str | None:
        """The rule that leaves the tensor ``key`` out, or None where none does."""
        renamed = self._names.resolve(key)[0]
        if _ROTARY.search(key):
            return ROTARY
        if _POSITIONS.search(key):
            return "position ids, computed by the model"
        if _MASK.search(key) and _is_mask(self._checkpoint.tensors[key].shape):
            return "causal mask, computed by the model"
        if MTP.search(key) or MTP.search(renamed):
            return "multi-token-prediction head"
        if self._is_prediction_layer(key, renamed):
            return PREDICTION
        if self._is_other_modality(key, renamed):
            return "part for images or sound, which the text model does not have"
        if self._checkpoint.scaled and SIDE_SCALE.search(key):
            return "scale of activations or of the cache, which are not rounded here"
        return None

    def why_not(self, key: str) -> str:
        """What to do about a tensor that no rule leaves out."""
        found = _past_last_layer(self._names, self._names.resolve(key)[0])
        if found is None:
            return "use the config.json that belongs to these shards; if the class is new, report the architecture"
        return (
            f"layer {found[0]} is a decoder layer and config.json counts {found[1]}: set num_hidden_layers to what the "
            "shards hold"
        )

    def _is_prediction_layer(self, key: str, renamed: str) -> bool:
        layer = _LAYER.match(key)
        proven = layer is not None and layer[0] in self._predicting
        return proven and _past_last_layer(self._names, renamed) is not None

    def _is_other_modality(self, key: str, renamed: str) -> bool:
        """A tower that the config names and the class lacks, or a part of one that the class says it does not use."""
        found = _OTHER.search(key)
        if found is None or not any(_OTHER_CONFIG.search(name) for name in self._checkpoint.config):
            return False
        if not any(f".{found[2]}." in f".{path}." for path in self._names.modules):
            return True
        return any(re.search(unused, renamed) for unused in self._names.model._keys_to_ignore_on_load_unexpected or ())


def _is_mask(shape: tuple[int, ...]) -> bool:
    """A square over positions, or the one number that fills it: no bias of a linear has such a shape."""
    return not shape or (len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3])


def _past_last_layer(names: Names, renamed: str) -> tuple[int, int] | None:
    """Index of the layer and number of the model's, where ``renamed`` lies past the end of a stack."""
    found = _LAYER.match(renamed)
    if found is None:
        return None
    layers = names.model.config.get_text_config().num_hidden_layers
    prefix = names.model.base_model_prefix
    for path in (found["stack"], f"{prefix}.{found['stack']}", found["stack"].removeprefix(f"{prefix}.")):
        stack = names.modules.get(path)
        if isinstance(stack, nn.ModuleList) and len(stack) == layers and int(found["index"]) >= layers:
            return int(found["index"]), layers
    return None


def check_rotary(model: Any, checkpoint: Checkpoint) -> None:
    """Hold stored rotary frequencies against those of the model: a table that is left out must be the same table.

    Raises:
        CheckpointError: they are neither what the model computes nor what its rope_theta gives unscaled.
    """
    for key in checkpoint.plain:
        if not (_ROTARY.search(key) and key.endswith("inv_freq")) or not checkpoint.shards:
            continue
        stored = checkpoint.tensor(key).float().reshape(-1)
        wanted = [*_computed(model, stored.shape), *_unscaled(model, len(stored))]
        if wanted and not any(torch.allclose(stored, one, rtol=_TABLE_TOLERANCE, atol=0) for one in wanted):
            raise CheckpointError(
                f"{checkpoint.name}: {key} is not the rotary table that config.json gives (rope_theta "
                f"{', '.join(f'{theta:g}' for theta in _thetas(model))})",
                "use the config.json that belongs to these shards",
            )


def _computed(model: Any, shape: torch.Size) -> list[torch.Tensor]:
    found = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    return [buffer.float().cpu() for buffer in found if buffer.device.type != "meta" and buffer.shape == shape]


def _unscaled(model: Any, half: int) -> list[torch.Tensor]:
    powers = torch.arange(half, dtype=torch.float32) / half
    return [theta**-powers for theta in _thetas(model)]


def _thetas(model: Any) -> list[float]:
    """Every rope_theta of the text config: one, or one a kind of layer."""
    text = model.config.get_text_config()
    blocks = getattr(text, "rope_parameters", None) or {}
    nested = [block for block in blocks.values() if isinstance(block, dict)]
    return sorted({float(block["rope_theta"]) for block in [blocks, *nested] if block.get("rope_theta")})
