"""A suite: which lm-eval tasks, how many shots and items, which seeds and metric; fixed and sealed before it is run.

A small one::

    name = "quick"
    lm_eval = "0.4.13"
    primary = "mmlu"

    [[tasks]]
    name = "mmlu"
    limit = 20
    margin = 0.01

``<name>.lock.json`` beside it holds the digest of its meaning, that of each task's definition in lm-eval and, where
the data could be had, that of every prompt and target; a run that asks otherwise is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from harness.digest import json_digest
from harness.errors import PanelError, UsageError
from harness.records import Strict, load_json, load_toml
from harness.store import write_json

SUITES = Path("panels/suites")


class Seeds(Strict):
    """lm-eval's four seeds."""

    random: int = 1234
    numpy: int = 1234
    torch: int = 1234
    fewshot: int = 1234


class Entry(Strict):
    """One task or group of lm-eval.

    ``limit`` takes the *first* so many documents of each task; None takes all. ``metric`` and ``filter`` name the
    primary result, which must be an accuracy. ``margin`` is the largest difference that does not matter, as a share.
    ``source`` "wheel" asks the MMLU development questions that the lm_eval package itself carries.
    """

    name: str = Field(min_length=1)
    num_fewshot: int = Field(default=0, ge=0)
    limit: int | None = Field(default=None, ge=1)
    metric: str = "acc"
    filter: str = "none"
    margin: float = Field(default=0.01, ge=0, lt=1)
    source: Literal["hub", "wheel"] = "hub"


class Suite(Strict):
    """A whole suite file. ``primary`` is the entry that a verdict is read from."""

    format: Literal["exl3-fidelity/suite/1"] = "exl3-fidelity/suite/1"
    name: str = Field(min_length=1)
    description: str = ""
    lm_eval: str
    primary: str
    chat_template: bool = False
    seeds: Seeds = Seeds()
    tasks: tuple[Entry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> Suite:
        names = [entry.name for entry in self.tasks]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"task {twice[0]} is named twice")
        if self.primary not in names:
            raise ValueError(f"the primary task {self.primary} is not among the tasks")
        if self.chat_template:
            raise ValueError("log-likelihood tasks take no chat template: their answers would follow other tokens")
        return self

    @property
    def sha256(self) -> str:
        """Digest of the meaning; description and layout of the file do not count."""
        return json_digest(self.model_dump(mode="json", exclude={"description"}))

    def entry(self, name: str) -> Entry:
        """The entry of this name."""
        return next(entry for entry in self.tasks if entry.name == name)


class SealedTask(Strict):
    """One task's items: how many, and the digest of all prompts and targets in order."""

    n: int
    prompts_sha256: str
    config_sha256: str


class SuiteLock(Strict):
    """``tasks``: every leaf whose data was there when the suite was sealed; ``unsealed``: the entries that are left.

    ``definitions``: by leaf of those, the digest of what the task asks and how it is scored.
    """

    format: Literal["exl3-fidelity/suite-lock/1"] = "exl3-fidelity/suite-lock/1"
    name: str
    suite_sha256: str
    lm_eval: str
    tasks: dict[str, SealedTask]
    unsealed: tuple[str, ...] = ()
    definitions: dict[str, str] = Field(default_factory=dict)


def find_suite(name: str) -> Path:
    """The file of a suite: a path, or the name of one in panels/suites."""
    path = Path(name).expanduser()
    if path.suffix == ".toml" and path.is_file():
        return path
    shipped = SUITES / f"{name}.toml"
    if shipped.is_file():
        return shipped
    known = ", ".join(sorted(p.stem for p in SUITES.glob("*.toml"))) or "none here"
    raise UsageError(f"there is no suite {name}", f"give a .toml file, or one of those in {SUITES}: {known}")


def load_suite(path: Path) -> Suite:
    """Read a suite.

    Raises:
        UsageError: it is not TOML, a key is unknown or a value is impossible.
    """
    return load_toml(path, Suite, f"correct it, or use one of {SUITES}", UsageError)


def lock_path(suite: Path) -> Path:
    """``quick.lock.json`` beside ``quick.toml``."""
    return suite.with_suffix(".lock.json")


def load_lock(path: Path, suite: Suite) -> SuiteLock | None:
    """The seal of the suite in ``path``; None where it has none.

    Raises:
        PanelError: the seal is unreadable, or the suite was changed after it was sealed.
    """
    file = lock_path(path)
    if not file.is_file():
        return None
    again = f"restore {path.name} from git, or seal it anew: fidelity tasks --suite {suite.name} --seal"
    lock = load_json(file, SuiteLock, again, PanelError)
    if lock.suite_sha256 != suite.sha256:
        raise PanelError(f"{path.name} is not the suite that was sealed ({lock.suite_sha256[:12]})", again)
    return lock


def save_lock(path: Path, lock: SuiteLock) -> Path:
    """Write the seal beside the suite."""
    write_json(lock_path(path), lock.model_dump())
    return lock_path(path)
