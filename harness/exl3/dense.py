"""An EXL3 checkpoint as a plain dense folder, so that an engine without EXL3 kernels can run the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from harness.errors import CheckpointError, UsageError
from harness.exl3.checkpoint import has_trellis

#: Files that go along unchanged: what turns text into ids and back.
CARRIED = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "*.jinja", "added_tokens.json")


def decode_checkpoint(source: Path, target: Path, dtype: str = "float32") -> Path:
    """Decode every EXL3 tensor once and write safetensors in ``dtype``; the folder appears whole or not at all.

    float32 keeps every decoded value; bfloat16 rounds them, and so is a slightly other model.

    Raises:
        CheckpointError: no EXL3 tensors, or a damaged checkpoint.
        UsageError: the target is there already.
    """
    if target.exists():
        raise UsageError(f"{target.name} is there already", "remove it, or give another --out")
    if not has_trellis(source):
        raise CheckpointError(f"{source.name} holds no EXL3 tensors", "a dense folder can be served as it is")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = _dense_model(source, getattr(torch, dtype))
    model.save_pretrained(partial)
    for pattern in CARRIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, partial / file.name)
    _forget_quantisation(partial / "config.json")
    partial.replace(target)
    return target


def _dense_model(source: Path, dtype: torch.dtype) -> Any:
    """The model with plain parameters that transformers can save."""
    from harness.exl3.hf import load_exl3
    from harness.progress import quiet_transformers

    quiet_transformers()
    model = load_exl3(source, dequantize=True, dtype=dtype)
    model.hf_quantizer = None
    model.config.quantization_config = None
    model.config.dtype = dtype
    return model


def _forget_quantisation(config: Path) -> None:
    """A dense folder must not say that it is quantised: engines would look for a kernel."""
    said = json.loads(config.read_text())
    said.pop("quantization_config", None)
    config.write_text(json.dumps(said, indent=2) + "\n")
