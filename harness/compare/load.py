"""Reading the arms of a comparison: the receipt, its positions where there are any, and when it was run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.digest import file_digest
from harness.errors import IncomparableError, Refused
from harness.measure.receipt import Measurement, load_measurement
from harness.types import SCORE_DTYPES

KEYS = ("row", "position", "target")
#: The columns that a comparison reads; the others only have to be there.
USED = (
    "kl",
    "kl_reverse",
    "nll_teacher",
    "nll_candidate",
    "top1_teacher",
    "top1_candidate",
    "agree",
    "p_top1_teacher",
    "tv",
    "top5_overlap",
)
#: What a run through a server has beside them; read where it is there.
OF_BOUNDS = ("captured_teacher_mass", "kl_shortfall")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One measurement; ``columns`` are sorted by row and position, None where only row means exist."""

    name: str
    measurement: Measurement
    columns: dict[str, np.ndarray] | None
    started: str | None


def load_arms(paths: Sequence[Path]) -> list[Arm]:
    """Read run folders in order and give each arm a name of its own."""
    if len(paths) < 2:
        raise Refused("a comparison needs two measurements or more", "name at least two run folders")
    arms = [load_arm(path) for path in paths]
    named: list[Arm] = []
    for arm in arms:
        taken = {other.name for other in named}
        name, number = arm.name, 2
        while name in taken:
            name, number = f"{arm.name} ({number})", number + 1
        named.append(replace(arm, name=name))
    return named


def load_arm(path: Path) -> Arm:
    """Read one run folder.

    Raises:
        Refused: a file is missing or unreadable.
        IncomparableError: positions.parquet is not the one the receipt was made from, or holds a position twice.
    """
    if not path.exists():
        raise Refused(f"there is no {path.name}", "name a run folder that `fidelity measure` wrote")
    measurement = load_measurement(path)
    folder = path if path.is_dir() else path.parent
    if [r.row for r in measurement.per_row] != sorted({r.row for r in measurement.per_row}):
        raise IncomparableError(f"{folder.name}: a row is listed twice, or out of order", "measure again")
    return Arm(
        name=measurement.name,
        measurement=measurement,
        columns=None if measurement.row_level_only else _positions(folder, measurement),
        started=_started(folder),
    )


def _positions(folder: Path, measurement: Measurement) -> dict[str, np.ndarray]:
    file = folder / "positions.parquet"
    if not file.is_file():
        raise Refused(f"{folder.name} has no positions.parquet", "copy it beside measurement.json, or measure again")
    if file_digest(file) != measurement.positions_sha256:
        raise IncomparableError(
            f"{folder.name}/positions.parquet is not what its measurement.json was made from", "measure again"
        )
    try:
        there = pq.read_schema(file).names
        missing = (set(KEYS) | set(SCORE_DTYPES)) - set(there)
        wanted = [*KEYS, *USED, *(name for name in OF_BOUNDS if name in there)]
        table = pq.read_table(file, columns=wanted) if not missing else None
    except (pa.ArrowException, OSError) as error:
        problem = str(error).splitlines()[0]
        raise Refused(f"{folder.name}/positions.parquet cannot be read: {problem}", "measure again") from error
    if table is None:
        raise Refused(f"{folder.name}/positions.parquet lacks {', '.join(sorted(missing))}", "measure again")
    columns = {name: table[name].to_numpy() for name in wanted}
    order = np.lexsort((columns["position"], columns["row"]))
    columns = {name: values[order] for name, values in columns.items()}
    _refuse_doubles(folder.name, columns)
    return columns


def _refuse_doubles(name: str, columns: dict[str, np.ndarray]) -> None:
    same = (np.diff(columns["row"]) == 0) & (np.diff(columns["position"]) == 0)
    if same.any():
        at = int(np.flatnonzero(same)[0])
        raise IncomparableError(
            f"{name}: row {columns['row'][at]}, position {columns['position'][at]} is there twice", "measure again"
        )


def _started(folder: Path) -> str | None:
    """When the run began, from run.json; None where that file is not there or says nothing."""
    file = folder / "run.json"
    if not file.is_file():
        return None
    try:
        started = json.loads(file.read_text(encoding="utf-8")).get("started")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError):
        return None
    return started if isinstance(started, str) else None


def find_runs(folder: Path, runs: Sequence[Path]) -> dict[str, Path]:
    """Run folders by measurement key: those named, those in ``folder``, and those beside it."""
    home = folder if folder.is_dir() else folder.parent
    nearby = [
        file.parent for place in (home, home.resolve().parent) for file in sorted(place.glob("*/measurement.json"))
    ]
    found: dict[str, Path] = {}
    for run in [*runs, *nearby]:
        try:
            measurement = load_measurement(run)
        except Refused:
            if run in runs:
                raise
            continue
        if measurement.row_level_only or (run / "positions.parquet").is_file():
            found.setdefault(measurement.key, run)
    return found
