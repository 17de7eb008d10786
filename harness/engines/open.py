"""From a located model to a running reference engine, with the digests that identify it."""

from __future__ import annotations

import re
from typing import Literal

from harness.engines.hf import Alter, ComputeDType, TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.streaming import StreamingEngine
from harness.errors import UsageError

#: Bytes for weights and activations of a run layer by layer; ``auto`` is what one layer needs; None runs it whole.
MemoryBudget = int | Literal["auto"] | None

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?:(?P<unit>[KMGT])(?P<binary>i?))?B?", re.IGNORECASE)

#: What stands in a receipt for a model folder without tokenizer files: ids go in and out, so it can still run.
NO_TOKENIZER = "absent"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def digests_of(located: ModelFolder) -> tuple[str, str]:
    """Content digests of the weights and of the tokenizer (``absent`` where the folder has none)."""
    from harness.exl3.weights import weights_digest

    return weights_digest(located.folder), tokenizer_of(located)


def tokenizer_of(located: ModelFolder) -> str:
    """Content digest of the tokenizer, or ``absent``."""
    from harness.panel import tokenizer_digest

    has_tokenizer = any((located.folder / name).is_file() for name in TOKENIZER_FILES)
    return tokenizer_digest(located.folder) if has_tokenizer else NO_TOKENIZER


def memory_budget_of(text: str | None) -> MemoryBudget:
    """Read ``auto`` or a size: ``4GiB`` and ``512M`` in powers of 1024 and 1000, or a number of bytes.

    Raises:
        UsageError: it is no size.
    """
    if text is None:
        return None
    if text.strip().lower() == "auto":
        return "auto"
    found = _SIZE.fullmatch(text.strip())
    number = float(found["number"]) if found else 0.0
    if found is None or not number:
        raise UsageError(f"--memory-budget {text!r} is not an amount of memory", "write it as 4GiB, 500MB or auto")
    power = " KMGT".index((found["unit"] or " ").upper())
    return int(number * (1024 if found["binary"] else 1000) ** power)


def open_engine(
    located: ModelFolder,
    *,
    weights_sha256: str,
    tokenizer_sha256: str,
    compute: ComputeDType = "auto",
    device: str | None = None,
    packed: bool = False,
    memory_budget: MemoryBudget = None,
    vocab_size: int | None = None,
    alter: Alter | None = None,
) -> TransformersEngine | StreamingEngine:
    """A reference engine for a plain or EXL3 folder.

    Args:
        packed: decode EXL3 weights at every use.
        memory_budget: run layer by layer within so many bytes, or within what one layer needs (``auto``).
        alter: changes the loaded model before it runs, as anchors and floors do.
    """
    if memory_budget is not None:
        if packed or alter is not None:
            raise UsageError("--memory-budget decodes each layer once", "leave out --packed, and measure anchors whole")
        return StreamingEngine(
            located,
            compute=compute,
            device=device,
            memory_budget=None if memory_budget == "auto" else memory_budget,
            vocab_size=vocab_size,
            weights_sha256=weights_sha256,
            tokenizer_sha256=tokenizer_sha256,
        )
    return TransformersEngine(
        located,
        compute=compute,
        device=device,
        packed=packed,
        vocab_size=vocab_size,
        alter=alter,
        weights_sha256=weights_sha256,
        tokenizer_sha256=tokenizer_sha256,
    )
