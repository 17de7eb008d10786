"""Which measurements belong in one comparison: same panel, teacher, lane, estimator and scoring, or a refusal with both
values. Differences of the candidates themselves are what is compared; those of their engines are said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.compare.load import Arm
from harness.compare.model import Unlike
from harness.errors import IncomparableError
from harness.measure.receipt import Measurement

#: Scoring facts that may differ between candidates: they describe the candidate, not the score.
OF_THE_CANDIDATE = {"heads_equal", "floor"}
#: Facts of an estimate beside a bound: the bounds compare whatever they are.
OF_THE_ESTIMATE = {"tail_samples", "seed"}
#: What decides which part of the vocabulary a bound knows.
OF_THE_BOUND = ("way", "k")
#: Logits that an engine gives are its own head's: one policy, named after the form that the outputs came in.
OWN_HEADS = ("own head on each side", "logits")
#: Fields of a candidate's engine that can move a number without being the quant itself.
ENGINE_FIELDS = ("engine", "version", "compute_dtype", "device")


def require_comparable(arms: Sequence[Arm]) -> None:
    """Refuse the first arm that does not belong beside the first.

    Raises:
        IncomparableError: with the name and both values of what differs, and the repair.
    """
    base = arms[0]
    for arm in arms[1:]:
        for what, ours, theirs, repair in _facts(base.measurement, arm.measurement):
            if ours != theirs:
                raise IncomparableError(
                    f"{base.name} and {arm.name} do not have the same {what}: {_shown(ours)} and {_shown(theirs)}",
                    repair,
                )


def _facts(a: Measurement, b: Measurement) -> list[tuple[str, Any, Any, str]]:
    """What must be equal, in the order in which a user wants to hear of it."""
    panel = "measure both on one panel"
    teacher = "measure both against one capture of one teacher"
    facts: list[tuple[str, Any, Any, str]] = [
        ("panel", a.panel.sha256, b.panel.sha256, panel),
        ("tokenizer", a.panel.tokenizer_sha256, b.panel.tokenizer_sha256, panel),
        ("unit of resampling", a.panel.unit, b.panel.unit, panel),
        ("estimator", a.estimator, b.estimator, "a lower bound and an exact value never stand in one table"),
        ("lane", a.lane, b.lane, "measure both through the same kind of engine"),
        ("direction", a.direction, b.direction, "measure again with this version"),
    ]
    for field in (
        "weights_sha256",
        "config_sha256",
        "head_sha256",
        "tokenizer_sha256",
        "weights_dtype",
        "compute_dtype",
        "engine",
    ):
        facts.append((f"teacher ({field})", getattr(a.teacher, field), getattr(b.teacher, field), teacher))
    if [r.row for r in a.per_row] == [r.row for r in b.per_row]:
        # A capture's digest covers the rows measured, so it says nothing about runs over different rows.
        facts.append(("teacher capture", a.teacher.capture_sha256, b.teacher.capture_sha256, teacher))
    same = "measure both with the same settings"
    bound = "two bounds lack different parts of the KL: measure both with the same --k through servers alike"
    names = set(a.scoring) | set(b.scoring)
    others = sorted(names - OF_THE_CANDIDATE - OF_THE_ESTIMATE - set(OF_THE_BOUND))
    facts += [(f"scoring ({n})", a.scoring.get(n), b.scoring.get(n), bound) for n in OF_THE_BOUND if n in names]
    facts += [(f"scoring ({n})", _policy(a.scoring.get(n)), _policy(b.scoring.get(n)), same) for n in others]
    return facts


def _policy(value: Any) -> Any:
    """A scoring fact, the two names of one head policy made one."""
    return OWN_HEADS[0] if value in OWN_HEADS else value


def _shown(value: object) -> str:
    """A digest cut to what tells two apart; other values whole."""
    text = str(value)
    return text[:16] if len(text) == 64 and all(c in "0123456789abcdef" for c in text) else repr(value)


def unlike(arms: Sequence[Arm]) -> list[Unlike]:
    """What differs between the baseline and each other arm; arms that differ in nothing are left out."""
    found = [_unlike(arms[0].measurement, arm) for arm in arms[1:]]
    same = Unlike(other="", engine={}, settings={}, versions=[], teacher_revision=None, same_measurement=False)
    return [one for one in found if one != same.model_copy(update={"other": one.other})]


def _unlike(a: Measurement, arm: Arm) -> Unlike:
    b = arm.measurement
    packages = sorted(set(a.environment) | set(b.environment))
    names = sorted(set(a.candidate.settings) | set(b.candidate.settings))
    engine = {name: (getattr(a.candidate, name), getattr(b.candidate, name)) for name in ENGINE_FIELDS}
    settings = {name: (a.candidate.settings.get(name), b.candidate.settings.get(name)) for name in names}
    revisions = (a.teacher.revision, b.teacher.revision)
    return Unlike(
        other=arm.name,
        engine={name: both for name, both in engine.items() if both[0] != both[1]},
        settings={name: both for name, both in settings.items() if both[0] != both[1]},
        versions=[name for name in packages if a.environment.get(name) != b.environment.get(name)],
        teacher_revision=revisions if revisions[0] != revisions[1] else None,
        same_measurement=a.key == b.key,
    )
