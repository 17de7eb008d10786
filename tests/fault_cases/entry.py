"""One row of the fault log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Fault:
    """An entry of the fault log: list and number in front of its id, and the check that shows the right behaviour.

    ``check`` gets an empty folder, then the session fixtures named in ``needs``.
    """

    id: str
    title: str
    check: Callable[..., Any]
    needs: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """``A21``."""
        return self.id.split("-")[0]
