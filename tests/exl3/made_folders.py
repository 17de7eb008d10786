"""Small checkpoint folders made of random tensors, for the reader's tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.exl3.made_packs import Spec, random_linear


def packed(name: str, rows: int = 128, columns: int = 128, **spec: Any) -> dict[str, torch.Tensor]:
    """The tensors of one random packed linear by full name."""
    rng = np.random.default_rng(len(name))
    parts = random_linear(name, columns, rows, Spec(**spec), rng)
    return {f"{name}.{suffix}": tensor for suffix, tensor in parts.items()}


def write(
    folder: Path, *shards: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None = None, index: bool = False
) -> Path:
    """Write shards ``model-0000i-of-0000n`` (or ``model``), config.json, and the index file if asked."""
    folder.mkdir(parents=True, exist_ok=True)
    count = len(shards)
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "config.json").write_text(json.dumps(config or {}))
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
