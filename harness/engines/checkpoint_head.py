"""A model's output head read from its checkpoint: dense as it is stored, or EXL3 decoded by this project.

Engines that run a model in their own kernels give the input of the head; with the checkpoint's own head, multiplied in
float32, their outputs are scored exactly and no rounding of theirs to 16-bit logits is part of the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.digest import head_digest
from harness.engines.hf import narrow
from harness.errors import EngineError
from harness.exl3.checkpoint import Checkpoint, open_checkpoint, read_json
from harness.exl3.decode import dense_weight
from harness.types import Head

#: Names of an untied head, and of the embedding it may be tied to, with the prefixes that wrappers put in front.
PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


def text_config(folder: Path) -> dict[str, Any]:
    """config.json with the entries of its ``text_config`` on top, where it has one."""
    config = read_json(folder / "config.json")
    nested = config.get("text_config")
    return config | nested if isinstance(nested, dict) else config


def head_scale(config: dict[str, Any]) -> float:
    """The factor on the logits: Cohere multiplies by ``logit_scale``, Granite divides by ``logits_scaling``."""
    return float(config.get("logit_scale") or 1.0 / float(config.get("logits_scaling") or 1.0))


def head_of_folder(folder: Path, vocab_size: int | None = None) -> Head:
    """The head as config.json shapes it.

    Args:
        vocab_size: columns that are real tokens, where fewer than the config says.

    Raises:
        EngineError: the checkpoint holds no head under a known name.
    """
    config = text_config(folder)
    heads = [f"{prefix}lm_head" for prefix in PREFIXES]
    tied = [f"{prefix}embed_tokens" for prefix in PREFIXES]
    return head_at(
        folder,
        [*heads, *tied],
        width=int(config["hidden_size"]),
        columns=int(config["vocab_size"]),
        vocab_size=vocab_size,
        softcap=config.get("final_logit_softcapping"),
        scale=head_scale(config),
    )


def head_at(
    folder: Path,
    names: Sequence[str],
    *,
    width: int,
    columns: int,
    vocab_size: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Head:
    """The head under the first of ``names`` that the checkpoint has.

    Args:
        width: hidden size.
        columns: the model's vocabulary size; what the checkpoint holds past it is padding.
        vocab_size: columns that are real tokens, where fewer than ``columns``.
    """
    checkpoint = open_checkpoint(folder)
    found = next((name for name in names if name in checkpoint.modules or f"{name}.weight" in checkpoint.plain), None)
    if found is None:
        raise EngineError(
            f"{checkpoint.name} has no output head under {names[0]}, and no embedding it could be tied to",
            "report the architecture; `fidelity exl3 census` lists its tensors",
        )
    weight, bias = _stored(checkpoint, found, width, columns)
    weight = narrow(weight.float()).contiguous()
    support = min(vocab_size or columns, columns, len(weight))
    softcap = softcap or None
    sha256 = head_digest(weight, vocab_size=support, bias_V=bias, softcap=softcap, scale=scale)
    return Head(weight_VH=weight, vocab_size=support, sha256=sha256, bias_V=bias, softcap=softcap, scale=scale)


def _stored(checkpoint: Checkpoint, name: str, width: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[V, H]`` and bias of a linear, packed or plain."""
    if name in checkpoint.modules:
        linear = checkpoint.linear(name, in_features=width, out_features=columns)
        bias = None if linear.bias is None else linear.bias[:columns]
        return dense_weight(linear), bias
    has_bias = f"{name}.bias" in checkpoint.plain
    return checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.bias") if has_bias else None
