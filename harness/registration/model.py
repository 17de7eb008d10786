"""registration.toml: what will be asked of a panel, fixed before anything is measured. Every key is known, or an error.

A small one::

    question = "Does keeping twelve layers at 3 bits lower the KL of the 2-bit quant?"
    teacher = "org/model"
    candidates = ["model-2bit", "model-2bit-12at3"]

    [primary]
    metric = "kl_mean"
    margin = 0.10
    margin_kind = "relative"

    [[secondary]]
    metric = "top1_agreement"
    margin = 0.0025

    [[bars]]
    name = "PPL not above the base"
    metric = "ppl_token_candidate"
    relation = "<="
    reference = "baseline"
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from harness.digest import json_digest
from harness.errors import UsageError
from harness.records import Strict, load_toml
from harness.stats import RESAMPLES, SEED

FILE = "registration.toml"

#: Metrics that have a paired difference, by the name they have in measurement.json.
PairedName = Literal[
    "kl_mean",
    "nll_candidate",
    "top1_agreement",
    "top5_overlap",
    "tv_mean",
    "kl_reverse_mean",
    "delta_p_abs",
    "tail_rate_0.1",
    "tail_rate_1",
]
MarginKind = Literal["absolute", "relative"]
Interval = Literal["t", "percentile", "expanded percentile", "basic", "bca", "bootstrap-t"]


class Endpoint(Strict):
    """One metric and its margin: the largest difference that does not matter.

    A ``relative`` margin is a share of the baseline's value; an ``absolute`` one has the metric's own unit.
    """

    metric: PairedName
    margin: float = Field(gt=0)
    margin_kind: MarginKind = "absolute"


class Bar(Strict):
    """A condition that a candidate must meet, such as "PPL not above the base" or "at least 16 samples".

    ``metric`` is a key of measurement.json's summary, or ``tasks.<name>``. Exactly one of ``value`` (a number) and
    ``reference`` (the baseline's value of the same metric) is given.
    """

    name: str = Field(min_length=1)
    metric: str = Field(min_length=1)
    relation: Literal["<=", "<", ">=", ">"]
    value: float | None = None
    reference: Literal["baseline"] | None = None

    @model_validator(mode="after")
    def _one_threshold(self) -> Bar:
        if (self.value is None) == (self.reference is None):
            raise ValueError("a bar needs either value or reference")
        return self


class Task(Strict):
    """A planned task suite; ``limit`` is the number of items a task, all of them where it is absent."""

    name: str = Field(min_length=1)
    limit: int | None = Field(default=None, ge=1)


class Exclusion(Strict):
    """A row that is left out of every result, and why."""

    row: int = Field(ge=0)
    reason: str = Field(min_length=1)


class Registration(Strict):
    """A whole registration.toml. ``interval`` names the method of paired differences; ``rows`` are those planned.

    ``teacher`` and ``candidates`` say whose question it is: each a name, a pattern of names (``mine-*``), or the first
    twelve characters or more of the SHA-256 of a model's weights. Without them it fixes an analysis, and claims
    nothing.
    """

    format: Literal["exl3-fidelity/registration/1"] = "exl3-fidelity/registration/1"
    question: str = ""
    teacher: str = ""
    candidates: tuple[str, ...] = ()
    primary: Endpoint
    secondary: tuple[Endpoint, ...] = ()
    unit: Literal["document", "row"] | None = None
    interval: Interval = "t"
    confidence: float = Field(default=0.95, gt=0.5, lt=1.0)
    resamples: int = Field(default=RESAMPLES, ge=100)
    seed: int = Field(default=SEED, ge=0)
    rows: int | None = Field(default=None, ge=1)
    bars: tuple[Bar, ...] = ()
    tasks: tuple[Task, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()

    @model_validator(mode="after")
    def _each_once(self) -> Registration:
        metrics: list[str] = [endpoint.metric for endpoint in self.endpoints]
        for what, names in (
            ("metric", metrics),
            ("bar", [bar.name for bar in self.bars]),
            ("task", [task.name for task in self.tasks]),
            ("excluded row", [str(e.row) for e in self.exclusions]),
            ("candidate", list(self.candidates)),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]} is registered twice")
        return self

    @model_validator(mode="after")
    def _whose_question(self) -> Registration:
        if bool(self.teacher) != bool(self.candidates):
            raise ValueError("a question has a teacher and candidates: name both, or neither")
        vague = [name for name in (self.teacher, *self.candidates) if name and not re.search(r"\w", name)]
        if vague or not all(self.candidates):
            raise ValueError("a teacher or candidate that is a pattern alone names nothing")
        return self

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The primary metric, then the secondary ones."""
        return (self.primary, *self.secondary)

    @property
    def sha256(self) -> str:
        """Digest of the meaning; comments and layout of the file do not count, nor names that are not given."""
        nameless = set() if self.candidates else {"teacher", "candidates"}
        return json_digest(self.model_dump(mode="json", exclude=nameless))


def load_registration(folder: Path) -> Registration | None:
    """Read ``folder/registration.toml``; None where there is none.

    Raises:
        UsageError: it is not TOML, a key is unknown or a value is impossible.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    return load_toml(file, Registration, "correct it; panels/README.md shows one", UsageError)
