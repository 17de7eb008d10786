"""From a located model to a running reference engine, with the digests that identify it."""

from __future__ import annotations

from harness.engines.hf import ComputeDType, TransformersEngine
from harness.engines.models import ModelFolder

#: What stands in a receipt for a model folder without tokenizer files: ids go in and out, so it can still run.
NO_TOKENIZER = "absent"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def digests_of(located: ModelFolder) -> tuple[str, str]:
    """Content digests of the weights and of the tokenizer (``absent`` where the folder has none)."""
    from harness.exl3.weights import weights_digest
    from harness.panel import tokenizer_digest

    has_tokenizer = any(
        (located.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
    )
    tokenizer = tokenizer_digest(located.folder) if has_tokenizer else NO_TOKENIZER
    return weights_digest(located.folder), tokenizer


def open_engine(
    located: ModelFolder,
    *,
    weights_sha256: str,
    tokenizer_sha256: str,
    compute: ComputeDType = "auto",
    device: str | None = None,
    packed: bool = False,
    vocab_size: int | None = None,
) -> TransformersEngine:
    """A reference engine for a plain or EXL3 folder; ``packed`` decodes EXL3 weights at every use."""
    return TransformersEngine(
        located,
        compute=compute,
        device=device,
        packed=packed,
        vocab_size=vocab_size,
        weights_sha256=weights_sha256,
        tokenizer_sha256=tokenizer_sha256,
    )
