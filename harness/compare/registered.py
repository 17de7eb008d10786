"""The registration behind a comparison: found in the measurements or in the panel's folder, and kept to or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.compare.load import Arm
from harness.compare.model import ArmResult, BarOutcome, Registered, Settings
from harness.errors import IncomparableError, Refused
from harness.measure.result import candidate_model, deviations, teacher_model
from harness.panel.seal import list_seals
from harness.registration import (
    UNREGISTERED,
    Analysis,
    Registration,
    Standing,
    analysis_deviations,
    check_bars,
    is_before,
    lead_time,
    missing_candidates,
    registration_block,
    standing,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRegistration:
    """A registration with what git says of it; ``unread`` are digests of those whose content is missing."""

    registration: Registration | None
    record: Registered | None
    unread: tuple[str, ...] = ()
    standing: Standing = UNREGISTERED

    @property
    def claimed(self) -> bool:
        """Whether this comparison may call what it does registered."""
        return self.standing.status != "exploratory"


def find_registration(arms: Sequence[Arm], panel: Path | None) -> FoundRegistration:
    """The registration in the panel's folder where one is named, else the one that a measurement carries.

    Raises:
        IncomparableError: ``panel`` is not the panel that was measured.
    """
    block = _from_panel(arms, panel) if panel else _carried(arms)
    if block is None:
        named = {sha for arm in arms if (sha := arm.measurement.panel.registration_sha256)}
        missing = f"what was registered ({', '.join(sha[:12] for sha in sorted(named))}) is not here"
        why = Standing(status="exploratory", why=missing) if named else UNREGISTERED
        return FoundRegistration(registration=None, record=None, unread=tuple(sorted(named)), standing=why)
    committed = block.get("committed")
    started = min((arm.started for arm in arms if arm.started), default=None)
    record = Registered(
        sha256=block["sha256"],
        commit=block.get("commit"),
        committed=committed,
        lead_time=lead_time(committed, started) if committed and started else None,
        changed_since_commit=bool(block.get("changed_since_commit")),
    )
    registration = Registration.model_validate(block["content"])
    return FoundRegistration(registration=registration, record=record, standing=_standing(registration, block, arms))


def _standing(registration: Registration, block: dict[str, Any], arms: Sequence[Arm]) -> Standing:
    """What all arms together may claim: each is of the question, and none was begun before the commit."""
    before = [_before(arm, block) for arm in arms]
    return standing(
        registration,
        teacher_model(arms[0].measurement),
        [candidate_model(arm.measurement) for arm in arms],
        commit=block.get("commit"),
        changed=bool(block.get("changed_since_commit")),
        before_first_row=False if False in before else (None if None in before else True),
    )


def _before(arm: Arm, block: dict[str, Any]) -> bool | None:
    """Whether the commit is older than an arm's first row: as its receipt says, else by its run.json."""
    own = arm.measurement.registration or {}
    if own.get("commit") == block.get("commit") and own.get("before_first_row") is not None:
        return bool(own["before_first_row"])
    return is_before(block.get("committed"), arm.started)


def _from_panel(arms: Sequence[Arm], panel: Path) -> dict[str, Any] | None:
    measured = arms[0].measurement.panel
    seals = [lock.sha256 for _, lock in list_seals(panel)]
    if measured.sha256 not in seals:
        found = seals[0][:12] if seals else "not sealed"
        raise IncomparableError(
            f"panel {panel.name} is {found}, the measurements are on {measured.name} {measured.sha256[:12]}",
            "name the panel that was measured",
        )
    return registration_block(panel)


def _carried(arms: Sequence[Arm]) -> dict[str, Any] | None:
    for arm in arms:
        block = arm.measurement.registration
        if block and "content" in block:
            try:
                content = Registration.model_validate(block["content"])
            except ValidationError as error:
                problem = str(error).splitlines()[0]
                raise Refused(f"{arm.name}: its registration cannot be read: {problem}", "measure again") from error
            if content.sha256 != block.get("sha256"):
                raise Refused(f"{arm.name} carries a registration that is not its own digest", "measure again")
            return block
    return None


def all_deviations(registration: Registration, arms: Sequence[Arm], settings: Settings, primary: str) -> list[str]:
    """What departs from the registration in any measurement, and in the analysis itself."""
    found = [f"{arm.name}: {text}" for arm in arms for text in deviations(registration, arm.measurement)]
    made = Analysis(
        primary=primary,
        unit=settings.unit,
        interval=settings.interval,
        confidence=settings.confidence,
        resamples=settings.resamples,
        seed=settings.seed,
    )
    left_out = missing_candidates(registration, [candidate_model(arm.measurement) for arm in arms])
    found += [f"{name} is a registered candidate and not in this comparison" for name in left_out]
    return found + analysis_deviations(registration, made)


def bar_outcomes(registration: Registration, arms: Sequence[Arm], results: Sequence[ArmResult]) -> list[BarOutcome]:
    """Every registered bar of every candidate; the first arm is the baseline."""
    values = [_numbers(arm) | _figures(result) for arm, result in zip(arms, results, strict=True)]
    return [
        BarOutcome(
            arm=arm.name,
            name=bar.name,
            statement=bar.statement,
            value=bar.value,
            threshold=bar.threshold,
            met=bar.met,
        )
        for arm, own in zip(arms[1:], values[1:], strict=True)
        for bar in check_bars(registration, own, values[0])
    ]


def _numbers(arm: Arm) -> dict[str, float]:
    summary = arm.measurement.summary
    return {k: float(v) for k, v in summary.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _figures(result: ArmResult) -> dict[str, float]:
    """Values on the common positions come before those of each measurement's own summary."""
    return {name: figure.estimate for name, figure in result.metrics.items()} | {
        "ppl_token_candidate": result.ppl_token.estimate
    }
