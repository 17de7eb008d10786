"""The receipts of a card: what belongs in one table stands together, what does not gets a table of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.compare import Comparison, compare, load_comparison
from harness.compare.identity import require_comparable
from harness.compare.load import Arm
from harness.compare.model import FILE as COMPARISON_FILE
from harness.errors import IncomparableError, UsageError
from harness.measure.receipt import Measurement, load_measurement
from harness.report.basis import Basis, of_comparison, of_measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Receipts of one table: a comparison, or one measurement; ``runs`` are the run folders behind it.

    ``floor`` and ``anchors`` are run folders too; a comparison holds their numbers already.
    """

    comparison: Comparison | None
    measurement: Measurement | None
    runs: tuple[Path, ...]
    floor: Path | None = None
    anchors: tuple[Path, ...] = ()

    @property
    def names(self) -> list[str]:
        """The arms in order; the last is the subject unless another is asked for."""
        if self.comparison is not None:
            return [arm.name for arm in self.comparison.arms]
        return [self.measurement.name] if self.measurement else []

    @property
    def basis(self) -> Basis:
        """What the numbers rest on."""
        if self.comparison is not None:
            return of_comparison(self.comparison)
        assert self.measurement is not None
        return of_measurement(self.measurement, floor=load_measurement(self.floor) if self.floor else None)


def collect(
    paths: Sequence[Path], *, panel: Path | None = None, floor: Path | None = None, anchors: Sequence[Path] = ()
) -> list[Part]:
    """Read run folders and comparison folders, and put together what belongs in one table."""
    if not paths:
        raise UsageError("a card needs a receipt", "name run folders, or a folder that `fidelity compare` wrote")
    parts = [
        Part(comparison=load_comparison(path), measurement=None, runs=())
        for path in paths
        if (path / COMPARISON_FILE).is_file() or path.name == COMPARISON_FILE
    ]
    runs = [path for path in paths if not ((path / COMPARISON_FILE).is_file() or path.name == COMPARISON_FILE)]
    for group in group_runs(runs):
        beside = {"runs": tuple(group), "floor": floor, "anchors": tuple(anchors)}
        if len(group) == 1:
            _require_beside(group[0], [*([floor] if floor else []), *anchors])
            parts.append(Part(comparison=None, measurement=load_measurement(group[0]), **beside))  # type: ignore[arg-type]
        else:
            made = compare(group, panel=panel, floor=floor, anchors=anchors)
            parts.append(Part(comparison=made, measurement=None, **beside))  # type: ignore[arg-type]
    return parts


def _require_beside(run: Path, references: Sequence[Path]) -> None:
    """Refuse a floor or an anchor of another panel, teacher, lane or estimator."""
    first = _identity(run)
    for reference in references:
        require_comparable([first, _identity(reference)])


def _identity(path: Path) -> Arm:
    """What decides which table a run belongs to; its positions are not needed for that."""
    measurement = load_measurement(path)
    return Arm(name=measurement.name, measurement=measurement, columns=None, started=None)


def group_runs(paths: Sequence[Path]) -> list[list[Path]]:
    """Runs that may stand in one table, in the order in which they were named (FAULTS A 58, B 9, B 10)."""
    groups: list[tuple[Arm, list[Path]]] = []
    for path in paths:
        arm = _identity(path)
        for first, members in groups:
            if _comparable(first, arm):
                members.append(path)
                break
        else:
            groups.append((arm, [path]))
    return [members for _, members in groups]


def _comparable(a: Arm, b: Arm) -> bool:
    try:
        require_comparable([a, b])
    except IncomparableError:
        return False
    return True
