"""The worst positions in readable form, where a tokenizer is at hand. Not every panel's text may be published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from harness.compare.model import Comparison, Position
from harness.errors import IncomparableError


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...


def with_texts(comparison: Comparison, tokenizer: Decoder) -> Comparison:
    """The comparison with decoded contexts, targets and top choices of its worst positions."""
    return comparison.model_copy(update={"worst": [_readable(p, tokenizer) for p in comparison.worst]})


def check_is_the_panels(comparison: Comparison, digest: str) -> None:
    """Refuse another tokenizer's words for this panel's ids."""
    wanted = comparison.panel.tokenizer_sha256
    if wanted and digest != wanted:
        raise IncomparableError(
            f"this tokenizer is {digest[:12]}, the panel's is {wanted[:12]}", "name the panel's own tokenizer"
        )


def _readable(position: Position, tokenizer: Decoder) -> Position:
    texts = {
        "context": str(tokenizer.decode(position.context)),
        "target": str(tokenizer.decode([position.target])),
        "teacher": str(tokenizer.decode([position.top1_teacher])),
    }
    texts |= {name: str(tokenizer.decode([token])) for name, token in position.top1.items()}
    return position.model_copy(update={"texts": texts})
