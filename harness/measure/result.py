"""From the positions of a finished run to its receipt: summary, intervals, rows, counts, identities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from harness.capture import Capture
from harness.capture.manifest import capture_digest
from harness.digest import file_digest
from harness.engines.models import ModelFolder, quantised_as
from harness.engines.open import tokenizer_of
from harness.environment import current_source_digest, environment, source_digest
from harness.errors import Refused, ScoreError
from harness.exl3.files import model_files
from harness.measure import summary
from harness.measure.quantities import IN_RECEIPT, QUANTITIES, interval_of, units_of
from harness.measure.receipt import Interval, Measurement, PanelIdentity, Role, SideIdentity, save_measurement
from harness.measure.rows import drop_row_files, scores_of
from harness.measure.teacher import TeacherModel, Yardstick
from harness.measure.text_size import TextSize, per_text, text_size
from harness.panel.tokenizer import load_tokenizer
from harness.registration import UNREGISTERED, Model, Registration, Standing, is_before, registration_block, standing
from harness.stats import group_totals
from harness.stats.means import UNEQUAL, unequal
from harness.types import SCORE_DTYPES, Check, Engine, EngineIdentity, Estimator, Panel, Row, Scores

#: Probability on padding columns, which no softmax of ours holds, above which a receipt says so.
OUTSIDE = 1e-6
#: No rounding of weights comes that near; only the same weights do, through another engine or another file.
TWIN = 1e-7
SAME_MODEL = "KL is exactly 0 at every position: candidate and teacher are the same model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What an estimator that is not exact adds to a receipt."""

    summary: Mapping[str, Any] = field(default_factory=dict)
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


def build_measurement(
    folder: Path,
    table: pa.Table,
    *,
    yardstick: Yardstick,
    capture: Capture,
    identity: EngineIdentity,
    scoring: Mapping[str, Any],
    key: str,
    checks: list[Check],
    name: str,
    candidate: ModelFolder | None,
    role: Role = "candidate",
    notes: Sequence[str] = (),
    estimator: Estimator = "exact",
    extras: Extras | None = None,
    begun: str | None = None,
) -> Measurement:
    """Make the receipt of a run whose positions are all there, and write it last.

    Args:
        table: the positions of all rows, as `harness.measure.rows.join_rows` wrote them.
        capture: the yardstick's.
        identity: of what ran the candidate.
        scoring: how the two sides were brought together; see `exact_scoring`.
        candidate: where the candidate's files are, to count their bits; None where only a server has them.
        extras: what the estimator says besides the numbers of every measurement.
        begun: when the run began, before its first row was scored (ISO 8601).
    """
    scores, row_N = scores_of(table), table["row"].to_numpy()
    panel, rows = yardstick.panel, yardstick.rows
    extras = text_extras(scores, _text_size(candidate, rows, panel), extras or Extras())
    counts = summary.counts(scores)
    _refuse_unnormalised(counts)
    _refuse_changed_source()
    entries = [capture.entry(row.index) for row in rows]
    measurement = Measurement(
        key=key,
        name=name,
        role=role,
        status=_status(counts, len(rows), len(panel.rows)),
        estimator=estimator,
        lane=identity.lane,
        rows_measured=len(rows),
        rows_planned=len(panel.rows),
        positions=len(scores),
        panel=panel_identity(panel),
        teacher=_side(
            capture.identity,
            capture_sha256=capture_digest(capture.manifest.key, entries),
            quantised=_teachers_format(yardstick.teacher, capture),
        ),
        candidate=_side(identity, **({} if role == "anchor" or candidate is None else census_of(candidate))),
        scoring=dict(scoring),
        summary=summary.summarise(scores, row_N, table["position"].to_numpy(), panel_units(panel, row_N))
        | _finite_only(scores, counts)
        | dict(extras.summary),
        intervals=intervals(scores, row_N, panel) | dict(extras.intervals),
        per_row=[summary.row_summary(panel, row.index, _rows_of(scores, row_N, row.index)) for row in rows],
        counts=counts | dict(extras.counts),
        preflight=checks,
        environment=environment() | {"source_sha256": source_digest()},
        positions_sha256=file_digest(folder / "positions.parquet"),
        differs=(differs := yardstick.differences(candidate)),
        notes=[
            *notes,
            *_left_out(yardstick.teacher, candidate),
            *_differs_note(differs),
            *_padding_notes(scores),
            *_same_model(counts, len(scores), role),
            *unequal_note(name, scores, row_N, panel),
            *(_twin(scores, counts, identity, capture.identity) if role == "candidate" else ()),
        ],
    )
    measurement = with_registration(measurement, yardstick.folder, begun)
    measurement = save_measurement(folder, measurement)
    drop_row_files(folder)
    return measurement


def text_extras(scores: Scores, size: TextSize | None, extras: Extras) -> Extras:
    """``extras``, and perplexity per word and bits per byte where the size of the text is known."""
    if size is None:
        return extras
    per = per_text(scores.nll_teacher, scores.nll_candidate, size)
    return replace(extras, summary=dict(extras.summary) | per, counts=dict(extras.counts) | size.counts)


def _text_size(candidate: ModelFolder | None, rows: Sequence[Row], panel: Panel) -> TextSize | None:
    """Counted with the candidate's tokenizer where its files are here and it is the panel's."""
    if candidate is None or tokenizer_of(candidate) != panel.tokenizer_sha256:
        return None
    return text_size(rows, load_tokenizer(candidate.path))


def panel_identity(panel: Panel) -> PanelIdentity:
    """The panel as a receipt names it."""
    return PanelIdentity(
        name=panel.name,
        sha256=panel.sha256,
        recipe_sha256=panel.recipe_sha256,
        tokenizer_sha256=panel.tokenizer_sha256,
        unit=panel.unit,
        rows=len(panel.rows),
        positions=panel.positions,
        seal_sha256=panel.seal_sha256,
        registration_sha256=panel.registration_sha256,
    )


def panel_units(panel: Panel, row_N: np.ndarray) -> np.ndarray:
    """The panel's unit of each position, as intervals resample it ``[N]``."""
    return units_of(panel.unit, row_N, {row.index: row.document for row in panel.rows})


def intervals(scores: Scores, row_N: np.ndarray, panel: Panel) -> dict[str, Interval]:
    """Intervals of the means over the panel's unit, withheld ones with the reason; none where a KL is not finite."""
    if not np.isfinite(scores.kl).all():
        return {}
    unit_N, columns = panel_units(panel, row_N), {name: getattr(scores, name) for name in SCORE_DTYPES}
    values = {name: QUANTITIES[name].values_N(columns) for name in IN_RECEIPT}
    return {
        name: Interval(**interval_of(name, group_totals(values_N, unit_N), unit=panel.unit).bounds())
        for name, values_N in values.items()
        if np.isfinite(values_N).all()
    }


def _status(counts: dict[str, int], measured: int, planned: int) -> Literal["complete", "partial", "invalid"]:
    if counts["nonfinite_positions"] > counts["infinite_kl"]:
        return "invalid"
    return "complete" if measured == planned else "partial"


def _finite_only(scores: Scores, counts: dict[str, int]) -> dict[str, float]:
    """The mean without non-finite positions and their share: beside the headline, never instead of it."""
    if not counts["nonfinite_positions"]:
        return {}
    finite = np.isfinite(scores.kl)
    mean = float(scores.kl[finite].mean()) if finite.any() else float("nan")
    return {"kl_mean_finite": mean, "finite_share": float(finite.mean())}


def unequal_note(name: str, scores: Scores, row_N: np.ndarray, panel: Panel) -> list[str]:
    """That the interval of the mean KL is optimistic, where the documents are too unequal for it."""
    unit_N, finite = panel_units(panel, row_N), np.isfinite(scores.kl)
    spread = unequal(group_totals(scores.kl[finite], unit_N[finite])) if finite.any() else None
    if spread is None:
        return []
    return [
        f"{name}: the interval of its mean KL is optimistic with {panel.unit}s this unequal: the logs of their means "
        f"have a standard deviation of {spread:.2f}, and from {UNEQUAL:g} on simulated intervals cover less than 93 %"
    ]


def _same_model(counts: dict[str, int], positions: int, role: Role) -> list[str]:
    return [SAME_MODEL] if role != "floor" and counts["zero_kl"] == positions else []


def _twin(scores: Scores, counts: dict[str, int], identity: EngineIdentity, teacher: EngineIdentity) -> list[str]:
    """A KL as small as that of one model with itself, where the digests say that there are two."""
    kl = scores.kl[np.isfinite(scores.kl)]
    other = identity.weights_sha256 != teacher.weights_sha256
    said = counts["zero_kl"] == len(scores) and identity.lane != "served"
    if not len(kl) or said or not other or float(kl.mean()) >= TWIN:
        return []
    return [
        f"KL {float(kl.mean()):.1e} is that of a model with itself, and {identity.model} has other weights than the "
        "teacher by their digests: see that the server does not serve the teacher"
        if identity.lane == "served"
        else f"KL {float(kl.mean()):.1e} is that of a model with itself: {identity.model} stores the teacher's numbers"
    ]


def _left_out(teacher: TeacherModel | Capture, candidate: ModelFolder | None) -> list[str]:
    """Weight files that lie beside a model and are no part of it, and shards of which the index leaves tensors out."""
    sides = [candidate, teacher.located if isinstance(teacher, TeacherModel) else None]
    folders = dict.fromkeys(side.path for side in sides if side and side.path.is_dir())
    found = {path: model_files(path) for path in folders}
    return [
        f"{path.name} holds {name} beside the model: left out" for path in found for name in found[path].left_out
    ] + [
        f"{path.name}/{name} holds {count} tensors that the index takes from another file"
        for path in found
        for name, count in found[path].superseded.items()
    ]


def _short(value: Any) -> str:
    """``1e6`` for 1000000.0, ``absent`` for None; other values as they are."""
    if value is None or not isinstance(value, int | float) or isinstance(value, bool):
        return "absent" if value is None else str(value)
    power = f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return power if float(power) == value and not 1e-3 <= abs(value) < 1e4 else f"{value:g}"


def _differs_note(differs: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """One line where the candidate's config departs from the teacher's in what a quant has no reason to change."""
    changes = [f"{name} {_short(teacher)} -> {_short(candidate)}" for name, (teacher, candidate) in differs.items()]
    return [f"differs from the teacher in: {', '.join(changes)}"] if changes else []


def _padding_notes(scores: Scores) -> list[str]:
    """A side that puts probability where no softmax of ours looks: how much, at most and on average."""
    sides = {"teacher": scores.outside_teacher, "candidate": scores.outside_candidate}
    return [
        f"the {side} puts probability on padding columns, at most {np.nanmax(values):.3g}, on average "
        f"{np.nanmean(values):.3g}; both sides are normalised without them"
        for side, values in sides.items()
        if (values > OUTSIDE).any()
    ]


def _rows_of(scores: Scores, row_N: np.ndarray, row: int) -> Scores:
    mask = row_N == row
    return Scores(**{name: getattr(scores, name)[mask] for name in scores.__dataclass_fields__})


def _teachers_format(teacher: TeacherModel | Capture, capture: Capture) -> str:
    """What the teacher's weights were rounded to: by its files where they are here, else as its capture says."""
    return quantised_as(teacher.located) if isinstance(teacher, TeacherModel) else capture.identity.quantised


def _side(identity: EngineIdentity, **extra: object) -> SideIdentity:
    return SideIdentity.model_validate(asdict(identity) | {"settings": dict(identity.settings)} | extra)


def census_of(candidate: ModelFolder) -> dict[str, object]:
    """Bytes of a model's files and, where its tensors can be counted, bits per weight: as in a receipt."""
    if candidate.path.is_file():
        from harness.engines.gguf_files import gguf_parts

        return {"bytes": sum(part.stat().st_size for part in gguf_parts(candidate.path))}
    from harness.exl3.census import sizes

    counted = sizes(candidate.path)
    return {"bytes": counted.bytes, "bits_per_weight": counted.bits_per_weight}


def exact_scoring(capture: Capture, engine: Engine) -> dict[str, Any]:
    """How two full distributions are brought together: which heads, over how many tokens."""
    candidate, teacher = engine.head, capture.head
    policy = "logits" if candidate is None or teacher is None else "own head on each side"
    equal = bool(candidate and teacher and candidate.sha256 == teacher.sha256)
    return {"head_policy": policy, "heads_equal": equal, "support": teacher.vocab_size if teacher else None}


def _refuse_unnormalised(counts: dict[str, int]) -> None:
    bad = counts["negative_kl_beyond_rounding"]
    if bad:
        raise ScoreError(
            f"KL is below -{summary.NEGATIVE_ROUNDING:g} at {bad} positions: one side is not normalised",
            "the teacher's store is too coarse or damaged: run `fidelity teacher verify`",
        )


def _refuse_changed_source() -> None:
    if current_source_digest() != source_digest():
        raise Refused("the harness's own code was changed while it ran", "run the same command again")


def with_registration(measurement: Measurement, folder: Path, begun: str | None) -> Measurement:
    """The measurement with what its panel's sealed registration says, how it departs from it, and what it may claim."""
    block = registration_block(folder)
    if block is None:
        return measurement
    departed = deviations(Registration.model_validate(block["content"]), measurement)
    block |= {"deviations": departed, "before_first_row": is_before(block["committed"], begun)}
    registered = measurement.model_copy(update={"registration": block})
    claimed = {"status": standing_of(registered).status}
    return registered.model_copy(update={"registration": block | claimed})


def standing_of(measurement: Measurement) -> Standing:
    """What one measurement may claim of its panel's registration, from its receipt alone."""
    sealed, block = measurement.panel.registration_sha256, measurement.registration
    if sealed is None and block is None:
        return UNREGISTERED
    if block is None or "content" not in block:
        return Standing(status="exploratory", why=f"what was registered ({str(sealed)[:12]}) is not in the receipt")
    return standing(
        Registration.model_validate(block["content"]),
        teacher_model(measurement),
        [candidate_model(measurement)],
        commit=block.get("commit"),
        changed=bool(block.get("changed_since_commit")),
        before_first_row=block.get("before_first_row"),
    )


def teacher_model(measurement: Measurement) -> Model:
    return Model(names=(measurement.teacher.model,), weights_sha256=measurement.teacher.weights_sha256)


def candidate_model(measurement: Measurement) -> Model:
    side = measurement.candidate
    return Model(names=(measurement.name, side.model), weights_sha256=side.weights_sha256)


def deviations(registration: Registration, measurement: Measurement) -> list[str]:
    """How one measurement departs from the registration; empty when it does not."""
    departed = _digest_deviation(registration, measurement)
    planned = registration.rows or measurement.rows_planned
    expected = planned - len({e.row for e in registration.exclusions if e.row < planned})
    measured = {row.row for row in measurement.per_row}
    if measurement.rows_measured < expected:
        departed.append(f"{measurement.rows_measured} rows measured, {expected} registered")
    excluded = sorted(measured & {e.row for e in registration.exclusions})
    if excluded:
        departed.append(f"rows {', '.join(map(str, excluded))} were registered as excluded, and are in the summary")
    if registration.unit and registration.unit != measurement.panel.unit:
        departed.append(f"intervals resample {measurement.panel.unit}s, registered is {registration.unit}s")
    return departed


def _digest_deviation(registration: Registration, measurement: Measurement) -> list[str]:
    carried = measurement.panel.registration_sha256
    if carried == registration.sha256:
        return []
    said = f"registration {carried[:12]}" if carried else "no registration"
    return [f"measured under {said}, not under {registration.sha256[:12]}"]
