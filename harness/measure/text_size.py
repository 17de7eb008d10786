"""How much text the scored tokens stand for: what a perplexity per word and bits per byte are divided by.

A token is a unit of one tokenizer; bytes and words are units of the text, so these two numbers may stand beside those
of another tokenizer on the same text. Counted from the tokenizer's files; only the counts are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.panel.tokenizer import Tokenizer, backend
from harness.types import Row

#: The receipt's names of the two counts.
BYTES, WORDS = "text_bytes", "text_words"
#: What a decoder writes for bytes that are no whole character: one for one to four of them.
REPLACEMENT = "\ufffd"
#: SentencePiece's token of a single byte.
BYTE = re.compile("<0x[0-9A-F]{2}>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSize:
    """UTF-8 bytes and whitespace-separated words of the text of all scored tokens."""

    bytes: int
    words: int

    @property
    def counts(self) -> dict[str, int]:
        """As they stand in a receipt."""
        return {BYTES: self.bytes, WORDS: self.words}


def text_size(rows: Sequence[Row], tokenizer: Tokenizer) -> TextSize | None:
    """Size of the text of each row's tokens from the second on: those that are scored.

    Special tokens count as they are spelled. A row that begins or ends within a character has that character's bytes
    that are its own.

    Returns:
        None where the tokenizer's tokens do not add up to the text that it decodes (it normalises while decoding).
    """
    bytes_of = _bytes_of(tokenizer)
    if bytes_of is None:
        return None
    total = words = 0
    for row in rows:
        ids = row.ids_T[1:].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        size = bytes_of(ids)
        if not _adds_up(size, text):
            return None
        total, words = total + size, words + len(text.split())
    return TextSize(bytes=total, words=words) if total and words else None


def per_text(nll_teacher: np.ndarray, nll_candidate: np.ndarray, size: TextSize) -> dict[str, float]:
    """Perplexity per word and bits per byte of both sides, from the NLL of every scored token in nats."""
    out = {}
    with np.errstate(over="ignore"):
        for side, values in (("teacher", nll_teacher), ("candidate", nll_candidate)):
            total = float(np.sum(values, dtype=np.float64))
            out[f"ppl_word_{side}"] = float(np.exp(total / size.words))
            out[f"bits_per_byte_{side}"] = total / (size.bytes * float(np.log(2)))
    return out


def _bytes_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], int] | None:
    """What counts the bytes of tokens, each by itself; None for a kind of tokenizer that is not known."""
    known = json.loads(backend(tokenizer).to_str())
    added = {entry["id"]: len(entry["content"].encode()) for entry in known.get("added_tokens") or []}
    kinds = _kinds(known.get("decoder"))
    if "ByteLevel" in kinds:
        plain: Callable[[str], int] = len  # one character of the byte alphabet stands for one byte
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        plain = _spelled
    else:
        return None

    def count(ids: Sequence[int]) -> int:
        tokens = tokenizer.convert_ids_to_tokens(list(ids))
        return sum(added[i] if i in added else plain(token) for i, token in zip(ids, tokens, strict=True))

    return count


def _adds_up(size: int, text: str) -> bool:
    """Whether so many bytes decode to this text; SentencePiece leaves out one blank in front."""
    cut = text.count(REPLACEMENT)
    whole = len(text.encode()) - cut * len(REPLACEMENT.encode())
    return whole + cut <= size <= whole + 4 * cut + 1


def _spelled(token: str) -> int:
    """Bytes of a SentencePiece token: ``<0xE2>`` is one, and its block for a blank is a blank."""
    return 1 if BYTE.fullmatch(token) else len(token.replace("\u2581", " ").encode())


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of those that it is made of."""
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_kinds(part) for part in decoder.get("decoders", [])))
