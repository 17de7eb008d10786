"""What a bench section returns: figures with their targets beside them. A missed target is shown, never an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number. ``least`` and ``most`` are the targets of the project, where it has any."""

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the targets are met; None without a target."""
        if self.least is None and self.most is None:
            return None
        return (self.least is None or self.value >= self.least) and (self.most is None or self.value <= self.most)

    @property
    def target(self) -> str:
        """``>= 9`` and so on."""
        low = "" if self.least is None else f">= {self.least:g}"
        high = "" if self.most is None else f"<= {self.most:g}"
        return " and ".join(part for part in (low, high) if part)

    def plain(self) -> dict[str, Any]:
        """JSON-ready."""
        target = {"least": self.least, "most": self.most, "met": self.met}
        return {"name": self.name, "value": self.value, "unit": self.unit, **target, "note": self.note}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the bench: its figures and how long it took."""

    name: str
    figures: list[Figure]
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "seconds": round(self.seconds, 1),
            "figures": [figure.plain() for figure in self.figures],
        }
