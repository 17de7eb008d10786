"""What every engine of this process needs: who it is, rows that fit it, optional packages, memory given back."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch

from harness.engines.models import ModelFolder
from harness.errors import EngineError
from harness.exl3.files import config_digest
from harness.types import UNKNOWN, Row


class Model(TypedDict):
    """The part of an `EngineIdentity` that says which model it is, the same in every engine."""

    model: str
    revision: str
    weights_sha256: str
    tokenizer_sha256: str
    config_sha256: str


def model_of(located: ModelFolder, weights_sha256: str, tokenizer_sha256: str) -> Model:
    """Name, revision and digests of a model; its place on this disk is no part of an identity."""
    return Model(
        model=located.name,
        revision=located.revision,
        weights_sha256=weights_sha256,
        tokenizer_sha256=tokenizer_sha256,
        config_sha256=config_digest(located.path),
    )


def stored_dtype(folder: Path) -> str:
    """The dtype that config.json declares for the unquantised weights."""
    config = json.loads((folder / "config.json").read_text())
    for block in (config, config.get("text_config", {})):
        for key in ("dtype", "torch_dtype"):
            if block.get(key):
                return str(block[key])
    return UNKNOWN


def device_name(device: str) -> str:
    """``cpu`` or the accelerator's product name: kernels, and so digits, differ between them."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def device_kind(device: str | None) -> str:
    """What a key says of the device that is asked for: the product, as `device_name` does; None is the default one."""
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return device_name(chosen) if torch.cuda.is_available() else chosen


def refuse_long_rows(located: ModelFolder, rows: Sequence[Row], limit: int) -> None:
    """Refuse rows of more than ``limit`` tokens; 0 is no limit.

    Raises:
        EngineError: rows are too long for the model, or for what the engine was opened for.
    """
    long = [row.index for row in rows if limit and len(row.ids_T) > limit]
    if long:
        raise EngineError(
            f"{located.name} takes {limit} tokens; rows {long[:5]} are longer",
            "choose a panel with shorter rows: nothing is ever truncated",
        )


def version_of(name: str, *packages: str, how: str) -> str:
    """The version of the first of ``packages`` that is installed, without importing it.

    Args:
        name: what messages call it.
        how: how to install it.

    Raises:
        EngineError: none is installed.
    """
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError(f"{name} is not installed", how)


def import_optional(name: str, module: str, how: str) -> Any:
    """Import a package that this project does without where its engine is not asked for.

    Raises:
        EngineError: it is missing, lacks something itself, or cannot be imported on this machine.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise EngineError(f"{name} cannot be imported: {error}", f"pip install {error.name}") from error
        raise EngineError(f"{name} is not installed", how) from error
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(f"{name} cannot be imported here: {first_line(error)}", how) from error


def first_line(error: Exception, located: ModelFolder | None = None) -> str:
    """The first line of a foreign error that says something, with the model's name in place of its path."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0].strip() if located is None else lines[0].strip().replace(str(located.path), located.name)


def give_back() -> None:
    """Let the C library return freed memory now, where it can: it keeps blocks it believes will be wanted again."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library has no such call, and nothing is lost without it
        return
