"""The checks before scoring on an engine alone: a measurement makes them in one pass with its rows."""

from __future__ import annotations

from harness.measure.preflight import check_probes, probes_of
from harness.types import Check, Engine, Row


def check_engine(engine: Engine, row: Row) -> list[Check]:
    """Run the beginning of a row, a row that begins like it, and it again, and look at what comes back."""
    probes = probes_of(row)
    return check_probes(engine, probes, iter(engine.run(probes, "hidden")))[0]
