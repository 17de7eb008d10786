"""A comparison against the runs it was made from: compared again, value by value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.compare import Comparison, compare, load_comparison
from harness.errors import Refused
from harness.receipt import load_measurement
from harness.verify.outcome import Outcome
from harness.verify.run import verify_run

FILE = "comparison.json"
#: What a tokenizer adds for the reader; it takes no part in any number.
DECODED = "texts"


def verify_comparison(folder: Path, *, runs: Sequence[Path] = (), panel: Path | None = None) -> Outcome:
    """Check a comparison; its runs are found by their keys in ``runs``, in the folder, and beside it."""
    c = load_comparison(folder)
    outcome = Outcome(name=" against ".join(arm.name for arm in reversed(c.arms)))
    found = find_runs(folder, runs)
    keys = [arm.key for arm in c.arms] + [r.key for r in c.references]
    missing = [name for name, key in zip(_names(c), keys, strict=True) if key not in found]
    if missing:
        outcome.unchecked.append(f"the numbers: the runs of {', '.join(missing)} are not here (name them with --run)")
        return outcome
    for key in dict.fromkeys(keys):
        outcome.join(verify_run(found[key], panel=panel))
    outcome.compare("comparison", _plain(c), _plain(_again(c, found, panel)))
    return outcome


def _names(c: Comparison) -> list[str]:
    return [arm.name for arm in c.arms] + [r.name for r in c.references]


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


def _again(c: Comparison, found: dict[str, Path], panel: Path | None) -> Comparison:
    floor = next((found[r.key] for r in c.references if r.kind == "floor"), None)
    anchors = [found[r.key] for r in c.references if r.kind == "anchor"]
    return compare([found[arm.key] for arm in c.arms], panel=panel, floor=floor, anchors=anchors)


def _plain(c: Comparison) -> dict[str, object]:
    """comparison.json without what depends on when and with which tokenizer it was written."""
    record = c.model_dump()
    for position in record["worst"]:
        position.pop(DECODED)
    if record["registration"]:
        record["registration"].pop("lead_time")
    return record
