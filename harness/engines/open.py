"""From a located model to a running reference engine, with the digests that identify it."""

from __future__ import annotations

from harness.engines.hf import Alter, ComputeDType, TransformersEngine
from harness.engines.models import ModelFolder

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


def open_engine(
    located: ModelFolder,
    *,
    weights_sha256: str,
    tokenizer_sha256: str,
    compute: ComputeDType = "auto",
    device: str | None = None,
    packed: bool = False,
    vocab_size: int | None = None,
    alter: Alter | None = None,
) -> TransformersEngine:
    """A reference engine for a plain or EXL3 folder.

    Args:
        packed: decode EXL3 weights at every use.
        alter: changes the loaded model before it runs, as anchors and floors do.
    """
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
