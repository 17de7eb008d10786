"""What a verification found: checked, different, or not checkable here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.store import plain

#: Sums are taken in another order on another machine.
RELATIVE = 1e-9
NOT_HERE = "not in this receipt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as stated."""

    where: str
    stated: str
    found: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What was checked and holds, what differs, and what could not be checked here."""

    name: str
    checked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.findings

    def compare(self, what: str, stated: Any, found: Any, *, relative: float = RELATIVE) -> None:
        """Check one block; every value that differs is a finding of its own."""
        before = len(self.findings)
        self.findings += differences(plain(stated), plain(found), what, relative)
        if len(self.findings) == before:
            self.checked.append(what)

    def join(self, other: Outcome) -> None:
        """Take over what another outcome says, under its name."""
        self.checked += [f"{other.name}: {line}" for line in other.checked]
        self.unchecked += [f"{other.name}: {line}" for line in other.unchecked]
        self.findings += [
            Finding(where=f"{other.name}: {f.where}", stated=f.stated, found=f.found) for f in other.findings
        ]


def differences(stated: Any, found: Any, where: str, relative: float = RELATIVE) -> list[Finding]:
    """Where two JSON values differ; numbers within ``relative`` of each other are equal."""
    if isinstance(stated, dict) and isinstance(found, dict):
        keys = [*stated, *(key for key in found if key not in stated)]
        missing = NOT_HERE
        pairs = ((f"{where}.{key}", stated.get(key, missing), found.get(key, missing)) for key in keys)
        return [finding for place, a, b in pairs for finding in differences(a, b, place, relative)]
    if isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        return [
            finding
            for index, (a, b) in enumerate(zip(stated, found, strict=True))
            for finding in differences(a, b, f"{where}[{index}]", relative)
        ]
    if _same(stated, found, relative):
        return []
    return [Finding(where=where, stated=str(stated), found=str(found))]


def _same(stated: Any, found: Any, relative: float) -> bool:
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (stated, found))
    if numbers and float in (type(stated), type(found)):
        return math.isclose(stated, found, rel_tol=relative, abs_tol=relative * 1e-3)
    return bool(stated == found) and isinstance(stated, bool) == isinstance(found, bool)


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome for scripts."""
    return {
        "name": outcome.name,
        "ok": outcome.ok,
        "checked": outcome.checked,
        "findings": [asdict(finding) for finding in outcome.findings],
        "unchecked": outcome.unchecked,
    }
