"""What may be said of a registration: in advance, time not proven, or exploratory, and why.

"Registered in advance" is earned: the registration names this question's teacher and candidates, and its commit is
older than the first scored row. Both times are those of the clocks that wrote them; nothing here proves that nobody
looked at numbers which were thrown away. One function for report, comparison, card, HTML and JSON.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Literal

from harness.records import Strict
from harness.registration.model import Registration

Status = Literal["registered in advance", "registered, time not proven", "exploratory"]
#: A name that is the beginning of a digest of weights.
DIGEST = re.compile(r"[0-9a-f]{12,64}")


class Standing(Strict):
    """What a run or a comparison may claim, and the reason in words."""

    status: Status
    why: str

    @property
    def sentence(self) -> str:
        """``Exploratory: the panel has no registration ...``."""
        return f"{self.status[0].upper()}{self.status[1:]}: {self.why}"


UNREGISTERED = Standing(status="exploratory", why="the panel has no registration, so nothing was fixed in advance")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A side of a question as a receipt names it."""

    names: tuple[str, ...]
    weights_sha256: str

    def is_named(self, pattern: str) -> bool:
        """Whether a registered name, pattern or beginning of a digest means this model."""
        if DIGEST.fullmatch(pattern):
            return self.weights_sha256.startswith(pattern)
        short = [name.rsplit("/", 1)[-1] for name in self.names]
        return any(fnmatchcase(name, pattern) for name in [*self.names, *short])


def not_the_question(registration: Registration, teacher: Model, candidates: Sequence[Model]) -> str:
    """Why a run is not of the registered question; empty where it is."""
    if not registration.candidates:
        return "the panel's registration names no teacher and no candidates, so it is of no question in particular"
    if not teacher.is_named(registration.teacher):
        return f"not the registered question: its teacher is {registration.teacher}, not {teacher.names[0]}"
    for one in candidates:
        if not any(one.is_named(pattern) for pattern in registration.candidates):
            return f"not the registered question: {one.names[0]} is not among {', '.join(registration.candidates)}"
    return ""


def standing(
    registration: Registration,
    teacher: Model,
    candidates: Sequence[Model],
    *,
    commit: str | None,
    changed: bool,
    before_first_row: bool | None,
) -> Standing:
    """What may be claimed.

    Args:
        commit: the commit that last changed the registration; None where it is in no repository.
        changed: the file is not what was committed.
        before_first_row: the commit is older than the first scored row; None where that is not known.
    """
    if other := not_the_question(registration, teacher, candidates):
        return Standing(status="exploratory", why=other)
    unproven: Status = "registered, time not proven"
    if commit is None:
        return Standing(status=unproven, why="its file is in no commit, so nothing says when it was written")
    if changed:
        return Standing(status=unproven, why="its file was changed since its commit")
    if before_first_row is None:
        return Standing(status=unproven, why="when the first row was scored is not known")
    if not before_first_row:
        return Standing(status="exploratory", why="its commit is younger than the first scored row")
    return Standing(status="registered in advance", why="its commit is older than the first scored row")


def is_before(committed: str | None, started: str | None) -> bool | None:
    """Whether a commit is older than a run (ISO 8601 times); None where either is not known."""
    if committed is None or started is None:
        return None
    return datetime.fromisoformat(committed) <= datetime.fromisoformat(started)


def missing_candidates(registration: Registration, candidates: Sequence[Model]) -> list[str]:
    """Registered candidates, patterns apart, that a comparison leaves out."""
    names = [pattern for pattern in registration.candidates if not re.search(r"[*?\[]", pattern)]
    return [name for name in names if not any(one.is_named(name) for one in candidates)]
