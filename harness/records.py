"""Records of ours in JSON and TOML files: strict models, and the one way to read them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.errors import HarnessError, Refused


class Strict(BaseModel):
    """A record that people and tools exchange: every key is known, and nothing changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


Record = TypeVar("Record", bound=BaseModel)


def load_json(file: Path, model: type[Record], repair: str, error: type[HarnessError] = Refused) -> Record:
    """Read a JSON record; whatever is wrong with the file is one line.

    Args:
        file: such as ``RUN/measurement.json``; messages name it with its folder.
        repair: what to do where it is missing or damaged.
        error: what is raised.
    """
    return _load(file, model.model_validate_json, repair, error)


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
