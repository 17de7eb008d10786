"""comparison.json: two or more measurements on one panel, paired. No path, host or time of its own in it.

The first arm is the baseline; every difference is *other minus baseline*. What follows from the other fields in words
(sentences, warnings, where a margin is from, why a verdict was held back) is written into the file for its readers by
`harness.report.words`, which makes it again wherever a comparison is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from harness.measure.receipt import PanelIdentity, SideIdentity
from harness.records import Sealed, Strict, load_json
from harness.registration import Endpoint, Status
from harness.stats import Estimate, Verdict
from harness.store import write_receipt

COMPARISON_FILE = "comparison.json"

#: Why no verdict was given where the statistics alone would give one, or have none to give.
Held = Literal["no direction", "not finite", "at the floor", "below the floor", "tails", "Holm"]


class Estimated(Strict):
    """The record of an estimate: a number with its interval; both ends are None where none exists, `note` says why."""

    estimate: float
    low: float | None
    high: float | None
    method: str
    confidence: float
    unit: str
    n: int
    note: str = ""

    @classmethod
    def of(cls, estimate: Estimate) -> Estimated:
        """The record of an estimate."""
        return cls(**{name: getattr(estimate, name) for name in cls.model_fields})

    def scaled(self, factor: float) -> Estimated:
        """The same in another unit."""
        ends = {name: None if (v := getattr(self, name)) is None else factor * v for name in ("low", "high")}
        return self.model_copy(update={"estimate": factor * self.estimate, **ends})


class Largest(Strict):
    """The largest KL and where it is. A maximum has no interval and grows with ``positions``."""

    value: float
    positions: int
    row: int | None = None
    position: int | None = None
    token: int | None = None


class Share(Strict):
    """How much the heaviest row decides: its share of the sum, and the mean when any one row is left out."""

    row: int
    share: float
    leave_one_out_low: float
    leave_one_out_high: float
    driven_by_one: bool


class Trend(Strict):
    """Mean KL of the last tenth of the positions against the first; ``rising`` flags a fault that grows with length."""

    first: float
    last: float
    difference: Estimated
    rising: bool


class Flips(Strict):
    """Positions at which the teacher's most likely token is the true one, and what the candidate makes of them."""

    teacher_right: int
    candidate_right: int
    right_to_wrong: int
    wrong_to_right: int


class ArmResult(Strict):
    """One measurement on the common positions. ``published`` holds values known only from its own summary.

    ``withheld`` says of a quantile that is not in ``quantiles`` why.
    """

    name: str
    key: str
    label: str
    candidate: SideIdentity
    positions_sha256: str
    metrics: dict[str, Estimated]
    ppl_token: Estimated
    quantiles: dict[str, Estimated]
    largest: Largest | None
    share: Share | None
    trend: Trend | None
    flips: Flips | None
    nonfinite: int
    infinite: int
    at_floor: bool | None
    published: dict[str, float]
    notes: list[str]
    withheld: dict[str, str] = Field(default_factory=dict)
    #: Of a lower bound: mean share of the teacher's distribution that its known tokens hold.
    captured_mass: float | None = None
    #: Checks of its run that did not hold, as its receipt has them.
    failed_checks: list[str] = Field(default_factory=list)


class Reference(Strict):
    """A floor or an anchor: a measured row beside the arms, never ranked."""

    kind: Literal["floor", "anchor"]
    name: str
    key: str
    kl: Estimated
    top1_agreement: float
    nll_candidate: float
    failed_checks: list[str] = Field(default_factory=list)


class Signs(Strict):
    """On how many contexts the difference points which way; the exact interval and p are over units that are not tied.

    It describes typical contexts, never the mean.
    """

    rows_lower: int
    rows_higher: int
    rows_tied: int
    units_lower: int
    units_higher: int
    units_tied: int
    share_lower_low: float | None
    share_lower_high: float | None
    p: float

    @property
    def rows(self) -> int:
        """All rows."""
        return self.rows_lower + self.rows_higher + self.rows_tied


class Resolution(Strict):
    """What this panel could show: the smallest difference with 80 % power, and units for a tenth of the baseline."""

    deviation: float | None
    detectable: float | None
    detectable_relative: float | None
    units_for_a_tenth: int | None


class Difference(Strict):
    """One metric, other minus baseline, on the same positions of both.

    ``reason`` is that of `harness.stats.decide`; where the verdict was held back, ``held`` says by what.
    """

    metric: str
    label: str
    unit: str
    role: Literal["primary", "secondary", "other"]
    lower_is_better: bool | None
    baseline: float
    other: float
    positions: int
    excluded: int
    difference: Estimated
    bootstrap: Estimated
    band: Estimated | None
    pooled_ratio: Estimated | None
    row_ratio: Estimated | None
    margin: float | None
    #: The margin as it was stated, in its own kind; ``margin`` is it in the metric's unit.
    margin_stated: Endpoint | None = None
    margin_registered: bool = False
    margin_source: str = ""
    verdict: Verdict
    held: Held | None = None
    reason: str = ""
    p: float | None
    p_holm: float | None
    p_equivalence: float | None
    non_inferior: bool | None
    signs: Signs
    share: Share | None
    resolution: Resolution


class RowDifference(Strict):
    """One row; ``low`` and ``high`` speak of this context's text only (moving blocks of its positions)."""

    row: int
    document: str
    domain: str
    positions: int
    baseline: float
    other: float
    difference: float
    low: float | None
    high: float | None
    top1_difference: float
    nll_difference: float


class Slice(Strict):
    """Mean KL of both arms on a part of the positions."""

    label: str
    positions: int
    units: int
    baseline: float
    other: float
    difference: Estimated
    p: float | None
    p_holm: float | None
    top1_difference: float


class TopFlips(Strict):
    """Agreement with the teacher's most likely token, position by position."""

    both: int
    baseline_only: int
    other_only: int
    neither: int


class Tails(Strict):
    """How far the part outside the known tokens could move a difference of two lower bounds; nats unless a share.

    ``uncovered_*``: mean teacher mass outside the known tokens of each arm. ``overturning``: by how much the
    divergences of the tails would have to differ to undo the difference. ``shortfall_*``: a guess of what each bound
    lacks. ``could_move``: the most that the tails can hold if ``ln(p/q)`` varies there by at most ``log_range``.
    """

    difference: float
    uncovered_baseline: float
    uncovered_other: float
    overturning: float | None
    shortfall_baseline: float | None
    shortfall_other: float | None
    log_range: float | None
    could_move: float | None


class Pair(Strict):
    """One candidate against the baseline. ``sentence`` is for a card; ``differences`` begins with the primary one."""

    baseline: str
    other: str
    sentence: str = ""
    differences: list[Difference]
    ppl_ratio: Estimated
    rows: list[RowDifference]
    domains: list[Slice]
    deciles: list[Slice]
    confidence: list[Slice]
    flips: TopFlips | None
    #: Lower bounds only; comparisons of exact values do not name it.
    tails: Tails | None = None

    @model_serializer(mode="wrap")
    def _without_absent_tails(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        out: dict[str, Any] = handler(self)
        if out["tails"] is None:
            del out["tails"]
        return out

    @property
    def primary(self) -> Difference:
        """The primary metric's difference."""
        return self.differences[0]


class Position(Strict):
    """One position with a large KL. ``context`` holds the ids before the target; texts need a tokenizer."""

    row: int
    position: int
    document: str
    domain: str
    kl: dict[str, float]
    nll: dict[str, float]
    nll_teacher: float
    p_top1_teacher: float
    target: int
    top1_teacher: int
    top1: dict[str, int]
    context: list[int]
    texts: dict[str, str] | None = None


class Settings(Strict):
    """How intervals were made; fixed by the registration where there is one."""

    unit: str
    units: int
    interval: str
    confidence: float
    resamples: int
    seed: int


class PairedOn(Strict):
    """What both sides have in common, and what was left out of both."""

    basis: Literal["positions", "rows"]
    rows: list[int]
    positions: int
    excluded_nonfinite: int
    rows_left_out: list[int]
    rows_excluded_by_registration: list[int]
    #: Largest difference between the runs' own NLLs of the teacher, nats.
    teacher_difference: float = 0.0


class Unlike(Strict):
    """What an arm does not share with the baseline beside the quant itself, and may have moved a number.

    ``engine`` and ``settings`` hold both values by name, the baseline's first; ``versions`` are names of packages.
    """

    other: str
    engine: dict[str, tuple[Any, Any]]
    settings: dict[str, tuple[Any, Any]]
    versions: list[str]
    teacher_revision: tuple[str | None, str | None] | None
    same_measurement: bool


class Registered(Strict):
    sha256: str
    commit: str | None
    committed: str | None
    lead_time: str | None
    changed_since_commit: bool = False


class BarOutcome(Strict):
    arm: str
    name: str
    statement: str
    value: float | None
    threshold: float | None
    met: bool | None


class Comparison(Sealed):
    format: Literal["exl3-fidelity/comparison/1"] = "exl3-fidelity/comparison/1"
    key: str
    status: Status
    #: Why it has this status, in words.
    status_why: str = ""
    registration: Registered | None
    #: Digests of registrations that the panel names and nothing here holds.
    unread_registrations: list[str] = Field(default_factory=list)
    estimator: Literal["exact", "lower_bound"]
    lane: Literal["weights", "served"]
    direction: str
    panel: PanelIdentity
    teacher: SideIdentity
    scoring: dict[str, Any]
    settings: Settings
    paired_on: PairedOn
    arms: list[ArmResult]
    references: list[Reference]
    pairs: list[Pair]
    worst: list[Position]
    bars: list[BarOutcome]
    deviations: list[str]
    unlike: list[Unlike] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)

    @property
    def kl(self) -> str:
        """``KL``, or ``KL lower bound``: an estimate is never shown without its kind."""
        return "KL" if self.estimator == "exact" else "KL lower bound"

    @property
    def failed_checks(self) -> list[str]:
        """Checks that did not hold in a run behind this comparison, each with the run's name."""
        arms = [f"{arm.name}: {check}" for arm in self.arms for check in arm.failed_checks]
        return arms + [f"{r.name}: {check}" for r in self.references for check in r.failed_checks]

    def reference(self, kind: Literal["floor", "anchor"]) -> Reference | None:
        """The first floor or anchor."""
        return next((r for r in self.references if r.kind == kind), None)


def save_comparison(folder: Path, comparison: Comparison) -> None:
    """Write comparison.json."""
    write_receipt(folder / COMPARISON_FILE, comparison.model_dump())


def load_comparison(path: Path, *, checked: bool = True) -> Comparison:
    """Read comparison.json from its folder or from the file itself."""
    file = path if path.is_file() else path / COMPARISON_FILE
    return load_json(file, Comparison, "name a folder that `fidelity compare` wrote, or compare again", seal=checked)
