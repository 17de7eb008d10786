"""measurement.json: what a measurement says, and all that its numbers depend on. No path, host or time in it.

Beside it lie ``positions.parquet`` (columns ``row``, ``position``, ``target`` and those of
`harness.types.SCORE_DTYPES`) and ``run.json`` (when and how fast; never part of a comparison).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from harness.digest import file_digest
from harness.errors import Refused
from harness.records import Sealed, Strict, load_json
from harness.store import write_receipt
from harness.types import UNKNOWN, Check

DIRECTION = "KL(teacher||candidate) = sum_v P(v) * ln(P(v) / Q(v)), P teacher, Q candidate, nats"

#: Every perplexity in a summary begins with one of these.
PERPLEXITIES = ("ppl_token_", "ppl_word_", "ppl_byte_")

#: What was measured against the teacher: a quant, a round-to-nearest version of the teacher, or the teacher itself.
Role = Literal["candidate", "anchor", "floor"]


class PanelIdentity(Strict):
    name: str
    sha256: str
    recipe_sha256: str
    tokenizer_sha256: str
    unit: Literal["document", "row"]
    rows: int
    positions: int
    seal_sha256: str = ""
    registration_sha256: str | None = None


class SideIdentity(Strict):
    """One side: the fields of `harness.types.EngineIdentity`, and what was counted in its files."""

    engine: str
    version: str
    model: str
    revision: str
    weights_sha256: str
    head_sha256: str
    tokenizer_sha256: str
    weights_dtype: str
    compute_dtype: str
    lane: Literal["weights", "served"]
    device: str
    settings: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    config_sha256: str = UNKNOWN
    capture_sha256: str | None = None
    bytes: int | None = None
    bits_per_weight: float | None = None
    quantised: str = ""

    @property
    def described(self) -> str:
        """The model's name, and that it is no BF16 model where its weights were rounded before: for headlines."""
        return f"{self.model} ({self.quantised}, not BF16)" if self.quantised else self.model


def same_model(a: SideIdentity, b: SideIdentity) -> bool:
    """Whether two sides hold the same weights and run them by the same config; what they are called does not matter."""
    configs = {a.config_sha256, b.config_sha256} - {UNKNOWN}
    return a.weights_sha256 == b.weights_sha256 not in ("", UNKNOWN) and len(configs) < 2


class Interval(Strict):
    """``unit`` is what was resampled; ``n`` how many of them. Without ends, ``note`` says why."""

    low: float | None
    high: float | None
    method: str
    confidence: float
    unit: str
    n: int
    note: str = ""


class RowSummary(Strict):
    row: int
    document: str
    domain: str
    positions: int
    kl_mean: float
    kl_max: float | None
    nll_teacher_mean: float
    nll_candidate_mean: float
    top1_agreement: float | None
    nonfinite: int
    kl_reverse_mean: float | None = None
    tv_mean: float | None = None
    top5_overlap: float | None = None


class Measurement(Sealed):
    format: Literal["exl3-fidelity/measurement/1"] = "exl3-fidelity/measurement/1"
    key: str
    name: str
    role: Role = "candidate"
    status: Literal["complete", "partial", "invalid"]
    estimator: Literal["exact", "lower_bound"]
    lane: Literal["weights", "served"]
    direction: str = DIRECTION
    rows_measured: int
    rows_planned: int
    positions: int
    panel: PanelIdentity
    teacher: SideIdentity
    candidate: SideIdentity
    scoring: dict[str, Any]
    summary: dict[str, Any]
    intervals: dict[str, Interval]
    per_row: list[RowSummary]
    counts: dict[str, int]
    preflight: list[Check]
    environment: dict[str, str]
    positions_sha256: str
    #: No positions.parquet exists (a published receipt of row means); positions_sha256 is then empty.
    row_level_only: bool = False
    registration: dict[str, Any] | None = None
    #: Fields of config.json that the forward pass reads and that are not the teacher's: its value, the candidate's.
    differs: dict[str, tuple[Any, Any]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)

    @field_validator("summary")
    @classmethod
    def _perplexity_has_a_unit(cls, summary: dict[str, Any]) -> dict[str, Any]:
        """A perplexity per token, per word or per byte are three numbers: one that does not say which is refused."""
        for name in summary:
            if name.startswith(("ppl", "perplexity")) and not name.startswith(PERPLEXITIES):
                raise ValueError(f"{name} names no unit; use one of {', '.join(PERPLEXITIES)}")
        return summary

    @property
    def failed_checks(self) -> list[str]:
        """Every check that did not hold, with its figure and what it means; all that is made of this run names them."""
        return [": ".join(filter(None, [c.name, c.figure, c.note])) for c in self.preflight if not c.passed]

    @property
    def label(self) -> str:
        """``4/32 rows`` for a partial result, else empty."""
        return "" if self.status == "complete" else f"{self.status} {self.rows_measured}/{self.rows_planned} rows"


def save_measurement(folder: Path, measurement: Measurement) -> Measurement:
    """Write measurement.json, sealed; it comes last, so its existence means that the measurement is whole."""
    written = write_receipt(folder / "measurement.json", measurement.model_dump())
    return measurement.model_copy(update={"seal": written["seal"]})


def load_measurement(path: Path, *, checked: bool = True) -> Measurement:
    """Read measurement.json from a run folder or from the file itself.

    Args:
        checked: whether its seal, and the positions that lie beside it, are held against it.
    """
    file = path / "measurement.json" if path.is_dir() else path
    repair = "name a run folder that `fidelity measure` wrote, or measure again"
    measurement = load_json(file, Measurement, repair, seal=checked)
    positions = file.with_name("positions.parquet")
    if (
        checked
        and positions.is_file()
        and not measurement.row_level_only
        and (file_digest(positions) != measurement.positions_sha256)
    ):
        name = file.absolute().parent.name
        raise Refused(
            f"{name}/positions.parquet is not what its measurement.json was made from",
            f"remove {name} and measure again",
        )
    return measurement
