"""The command as a user runs it, in this process: exit code and what it printed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.fault_cases.statements import fidelity

Tensors = dict[str, torch.Tensor]


def measured(folder: Path, candidate: Path, teacher: Path, panel: Path, name: str, *more: str) -> dict[str, Any]:
    """The receipt of a measurement that must succeed."""
    arguments = ["measure", candidate, "--teacher", teacher, "--panel", panel, "--out", name, *more]
    code, said = fidelity(folder, *arguments)
    assert code == 0, said
    receipt: dict[str, Any] = json.loads((folder / name / "measurement.json").read_text())
    return receipt


def refused(folder: Path, candidate: Path, teacher: Path, panel: Path, *more: str) -> str:
    """What a measurement says that must be refused, without a traceback and without a receipt."""
    arguments = ["measure", candidate, "--teacher", teacher, "--panel", panel, "--out", "refused", *more]
    code, said = fidelity(folder, *arguments)
    assert code == 3 and "repair:" in said and "Traceback" not in said, said
    assert not (folder / "refused" / "measurement.json").exists()
    return said


def copy_with(source: Path, target: Path, change: Callable[[Tensors], Tensors] = dict, **config: Any) -> Path:
    """A copy of a checkpoint of one shard with other tensors, and other keys in config.json (None removes one)."""
    shutil.copytree(source, target)
    shard = target / "model.safetensors"
    tensors = change(load_file(shard))
    shard.unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, shard, metadata={"format": "pt"})
    file = target / "config.json"
    values = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return target
