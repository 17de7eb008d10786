"""The floor of a served lane: a model against itself, once in the reference engine and once through the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import IncomparableError, Refused
from harness.measure.receipt import Measurement, SideIdentity, load_measurement
from harness.types import EngineIdentity

#: What must be equal, in the identity of the server and in how it was asked.
_ENGINE = ("engine", "version", "compute_dtype", "lane")
_ASKED = ("way", "k", "concurrency", "tail_samples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What a floor must have in common with the run that it is for.

    ``teacher_sha256`` is the teacher's weights digest; ``scoring`` holds how the server was asked.
    """

    panel_sha256: str
    rows: int
    identity: EngineIdentity
    teacher_sha256: str
    scoring: Mapping[str, Any]


def floor_of(named: Path | None, folder: Path, lane: Lane) -> dict[str, Any] | None:
    """What a receipt says of its floor: the one that is named, else one that lies beside the run and fits.

    Args:
        named: a floor's run folder.
        folder: of the run that the floor is for.

    Raises:
        IncomparableError: the named floor belongs to another lane; the message says where they differ.
    """
    if named is not None:
        floor = load_measurement(named)
        if wrong := _mismatch(floor, lane):
            raise IncomparableError(
                f"{named.name} is no floor of this run: {wrong}",
                "measure the floor with the same server, panel, --k and --rows: fidelity floor --engine ...",
            )
        return _as_told(floor, named.name)
    for other in _neighbours(folder):
        floor = load_measurement(other)
        if not _mismatch(floor, lane):
            return _as_told(floor, other.name)
    return None


def _as_told(floor: Measurement, run: str) -> dict[str, Any]:
    same = floor.teacher.weights_sha256 == floor.candidate.weights_sha256
    return {
        "run": run,
        "kind": f"{floor.teacher.model} against itself" if same else "other digests",
        "kl_mean": floor.summary["kl_mean"],
        "top1_agreement": floor.summary["top1_agreement"],
        "measurement_key": floor.key,
    }


def _neighbours(folder: Path) -> Iterator[Path]:
    """Floors among the finished runs beside this one, in the order of their names."""
    for file in sorted(folder.resolve().parent.glob("*/measurement.json")):
        if '"role": "floor"' in file.read_text() and file.parent.name != folder.name:
            yield file.parent


def _mismatch(floor: Measurement, lane: Lane) -> str:
    """Why a measurement is no floor of this run, or nothing.

    Its model may be this run's teacher, or this run's own weights made dense: never another lane's.
    """
    if floor.role != "floor":
        return "it is the measurement of a candidate"
    pairs = [("panel", floor.panel.sha256, lane.panel_sha256), ("rows", floor.rows_measured, lane.rows)]
    pairs += [(name, getattr(floor.candidate, name), getattr(lane.identity, name)) for name in _ENGINE]
    pairs += [(name, floor.scoring.get(name), lane.scoring.get(name)) for name in _ASKED]
    pairs += [(f"setting {name}", *both) for name, both in _settings(floor.candidate, lane.identity).items()]
    models = (lane.teacher_sha256, lane.identity.weights_sha256)
    if floor.teacher.weights_sha256 not in models:
        pairs.append(("model", floor.teacher.weights_sha256[:12], " or ".join(text[:12] for text in models)))
    return "; ".join(f"{name} {theirs}, here {ours}" for name, theirs, ours in pairs if theirs != ours)


def _settings(side: SideIdentity, identity: EngineIdentity) -> dict[str, tuple[Any, Any]]:
    names = sorted({*side.settings, *identity.settings})
    return {name: (side.settings.get(name), identity.settings.get(name)) for name in names}


def require_same_weights(model: str, teacher_sha256: str, candidate_sha256: str) -> None:
    """A floor is a model against itself."""
    if teacher_sha256 != candidate_sha256:
        raise Refused(
            f"the floor of {model}: the capture is of {teacher_sha256[:12]}, what is served of {candidate_sha256[:12]}",
            "name the same model for both, or measure it as a candidate",
        )
