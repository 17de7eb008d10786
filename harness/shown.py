"""Text of others as it may be shown: control characters made visible, secrets left out."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator

#: Environment variables whose value is nobody else's business, by the end of their name.
_SECRET_NAMES = ("_KEY", "_TOKEN", "_SECRET", "_PASSWORD")
#: A shorter value would be found in ordinary words.
_LEAST = 8
_PASSWORD = re.compile(r"(?<=//)[^/@\s]*@")
#: Unicode's classes of characters that move the cursor, turn the writing direction or cannot be seen.
_UNSEEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
#: They join letters and emoji in honest names.
_JOINERS = "\u200c\u200d"
HIDDEN = "***"


def visible(text: str) -> str:
    r"""A text for a terminal or a table: each control character is written out as its code, such as ``\x1b``.

    Line feeds and tabs stay.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_visible_character, text))


def _visible_character(one: str) -> str:
    if one in "\n\t" or one in _JOINERS or unicodedata.category(one) not in _UNSEEN:
        return one
    return f"\\x{ord(one):02x}" if ord(one) < 256 else f"\\u{ord(one):04x}"


def without_secrets(text: str) -> str:
    """A text without user and password of addresses, and without keys and tokens of this environment."""
    for secret in _secrets():
        text = text.replace(secret, HIDDEN)
    return _PASSWORD.sub("", text)


def _secrets() -> Iterator[str]:
    """Values of environment variables that name a secret, the longest first."""
    found = {value.strip() for name, value in os.environ.items() if name.upper().endswith(_SECRET_NAMES)}
    yield from sorted((value for value in found if len(value) >= _LEAST), key=len, reverse=True)
