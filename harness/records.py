"""Records of ours in JSON and TOML files: strict models, the one way to read them, and the seal that shows changes.

A seal is the digest of the rest of a record. It shows that a record was changed after it was written, by accident or by
hand; it is no proof against a forger, who can seal again what he changed: that takes a signature.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import HarnessError, Refused


class Strict(BaseModel):
    """A record that people and tools exchange: every key is known, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Sealed(Strict):
    """A record that carries the digest of all that is in it besides; `harness.store.write_receipt` fills it in."""

    seal: str = ""

    def __eq__(self, other: object) -> bool:
        """Whether both say the same: the seal is of the file, no part of what is said."""
        if not isinstance(other, Sealed) or type(self) is not type(other):
            return NotImplemented
        return self.model_dump(exclude={"seal"}) == other.model_dump(exclude={"seal"})

    __hash__ = None  # type: ignore[assignment]


#: What is said of a record from before there were seals.
NO_SEAL = "carries no seal"
_UNSEALED = "`fidelity verify FOLDER --seal` checks what can be checked and then seals it; or make it again"

Record = TypeVar("Record", bound=BaseModel)


def json_digest(value: Any) -> str:
    """Digest of canonical JSON: sorted keys, no spaces, UTF-8, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def seal_of(document: dict[str, Any]) -> str:
    """The seal of a JSON document: the digest of it with its seal empty."""
    return json_digest(document | {"seal": ""})


def load_json(
    file: Path, model: type[Record], repair: str, error: type[HarnessError] = Refused, *, seal: bool = True
) -> Record:
    """Read a JSON record; whatever is wrong with the file is one line, a seal that does not hold too.

    Args:
        file: such as ``RUN/measurement.json``; messages name it with its folder.
        repair: what to do where it is missing or damaged.
        error: what is raised.
        seal: whether a sealed record's seal is held against it; `fidelity verify` does that itself.
    """
    record = _load(file, model.model_validate_json, repair, error)
    parts = getattr(record, "root", [record])
    if seal and isinstance(parts, list) and any(isinstance(part, Sealed) for part in parts):
        if broken := broken_seal(file):
            raise error(
                f"{file.absolute().parent.name}/{file.name} {broken}", _UNSEALED if broken == NO_SEAL else repair
            )
    return record


def read_format(file: Path) -> str | None:
    """What a JSON record says that it is, such as ``exl3-fidelity/artifact/1``; None where it says nothing."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    said = document.get("format") if isinstance(document, dict) else None
    return said if isinstance(said, str) else None


def broken_seal(file: Path) -> str | None:
    """What is wrong with the seal of a file of sealed records; None where it holds."""
    document = json.loads(file.read_text(encoding="utf-8"))
    for part in document if isinstance(document, list) else [document]:
        if not part.get("seal"):
            return NO_SEAL
        if part["seal"] != seal_of(part):
            return "was changed after it was written: its seal does not hold"
    return None


def load_toml(file: Path, model: type[Record], repair: str, error: type[HarnessError] = Refused) -> Record:
    """The same for a TOML file."""
    return _load(file, lambda text: model.model_validate(tomllib.loads(text)), repair, error)


def _load(file: Path, parse: Callable[[str], Record], repair: str, error: type[HarnessError]) -> Record:
    try:
        return parse(file.read_text(encoding="utf-8"))
    except FileNotFoundError as missing:
        raise error(f"{file.name} is not in {file.absolute().parent.name}", repair) from missing
    except (ValueError, OSError) as damaged:
        where = f"{file.absolute().parent.name}/{file.name}"
        raise error(f"{where} cannot be read: {first_problem(damaged)}", repair) from damaged


def first_problem(error: Exception) -> str:
    """What is wrong in one line: for a record the field, the complaint, and how many more there are."""
    if isinstance(error, tomllib.TOMLDecodeError):
        return f"it is not TOML: {error}"
    if not isinstance(error, ValidationError):
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    problems = error.errors(include_url=False)
    where = ".".join(str(part) for part in problems[0]["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{where}: {problems[0]['msg']}{more}" if where else f"{problems[0]['msg']}{more}"
