"""Whether a model fits in memory whole, and how much of it a streamed run may take."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import torch

from harness.errors import UsageError
from harness.exl3.checkpoint import open_checkpoint

#: Share of the memory that is free now which ``auto`` takes.
AUTO_SHARE = 0.8
#: What a whole model needs beside its weights, as a share of them: the activations of one row, the loader.
WHOLE_EXTRA = 0.1
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGT]?)(iB|B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as ``4GiB``, ``512M`` or ``1.5 GB`` (all powers of 1024).

    Raises:
        UsageError: it is no size.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found["number"]) == 0:
        raise UsageError(f"{text!r} is not an amount of memory", "write it like 4GiB, or auto")
    return int(float(found["number"]) * _UNITS[found["unit"].upper()])


def dense_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes of all weights of a checkpoint made dense in ``dtype``, padding included, from the headers alone."""
    checkpoint = open_checkpoint(folder)
    elements = sum(module.weights for module in checkpoint.modules.values())
    elements += sum(table.weights for table in checkpoint.tables.values())
    elements += sum(header.elements for header in checkpoint.plain.values())
    return elements * dtype.itemsize


def free_memory(device: str) -> int:
    """Bytes that can be taken on ``device`` now."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    return int(psutil.virtual_memory().available)


def streaming_budget(folder: Path, dtype: torch.dtype, device: str, asked: str | None) -> int | None:
    """The bytes that a streamed run may take, or None where the whole model can be loaded.

    Args:
        asked: ``--memory-budget``: a size, ``auto`` (most of what is free now), or None for never streaming.

    Raises:
        UsageError: ``asked`` is no size.
    """
    if asked is None:
        return None
    budget = int(free_memory(device) * AUTO_SHARE) if asked.strip().lower() == "auto" else parse_size(asked)
    return None if dense_bytes(folder, dtype) * (1 + WHOLE_EXTRA) <= budget else budget
