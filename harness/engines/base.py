"""Freed memory, given back to the system."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Let the C library return freed memory now, where it can: it keeps blocks it believes will be wanted again."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library has no such call, and nothing is lost without it
        return
