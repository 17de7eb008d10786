"""The simulation behind the statistics page, small: it runs, repeats itself, and the intervals hold."""

from __future__ import annotations

from harness.bench.coverage import DOCUMENTS, Line, markdown, simulate
from harness.stats import Totals
from harness.stats.means import unequal


def test_a_small_table_holds_and_repeats_itself() -> None:
    """Bounds are nominal levels and three standard errors of 200 cases; the page has 2,000."""
    lines = list(simulate(replicates=200, families=200))
    assert markdown(lines) == markdown(list(simulate(replicates=200, families=200)))
    slack = 3 * (0.05 * 0.95 / 200) ** 0.5
    for line in lines:
        if "errs" in line.what:
            assert max(line.now.values()) <= 0.055 + slack, line.what
            assert sum(line.before.values()) > 2 * sum(line.now.values())
        elif "0.3" in line.what or "share" in line.what:
            assert min(line.now.values()) >= 0.93 - slack, line.what


def test_reports_say_where_documents_are_too_unequal() -> None:
    """Where coverage falls below 93 % most reports say so; where it does not, few do."""
    lines = {line.what: line for line in simulate(replicates=200, families=10)}
    told = {name: one(lines, name) for name in ("lognormal 0.3", "lognormal 1.0")}
    assert max(told["lognormal 0.3"].values()) < 0.05 and min(told["lognormal 1.0"].values()) > 0.6


def one(lines: dict[str, Line], name: str) -> dict[int, float]:
    flagged = lines[f"mean KL of one arm, {name}"].flagged
    assert flagged is not None and set(flagged) == set(DOCUMENTS)
    return flagged


def test_the_mark_is_the_spread_of_logs() -> None:
    import numpy as np

    means = np.array([0.01, 0.02, 0.08])
    spread = float(np.std(np.log(means), ddof=1))
    assert unequal(Totals(means * 10, np.full(3, 10.0))) == spread
    assert unequal(Totals(np.array([0.01, 0.011]), np.ones(2))) is None
    assert unequal(Totals(np.array([0.0, 0.011]), np.ones(2))) is None
