"""Error bars, small numbers of contexts, ratios of small differences, verdicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.compare import compare
from harness.interop.g4 import NO_DOCUMENTS, import_files
from harness.report import tables
from harness.report.basis import how_measured, of_comparison
from harness.report.card_tables import quality
from harness.report.comparison_report import markdown
from harness.report.run_report import max_line, report_text
from harness.report.words import reason, sentence, warnings
from harness.stats import (
    Totals,
    bootstrap_interval,
    compare_items,
    concentration,
    decide,
    group_totals,
    mean_interval,
    newcombe,
    pooled_ratio,
    row_log_ratio,
    t_interval,
    why_withheld,
    woodruff,
)
from tests.compare.fake_arms import World
from tests.fault_cases.entry import Fault
from tests.fault_cases.state import with_mean
from tests.interop.test_g4 import receipt as g4_receipt
from tests.report.fake_run import make_frame, write_run


def rows(means: np.ndarray) -> Any:
    """Totals of rows of equal length."""
    return Totals(means, np.ones(len(means)))


def items(both: int, a_only: int, b_only: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Outcomes of two models on the same items."""
    counts = (both, a_only, b_only, neither)
    return np.repeat([1, 1, 0, 0], counts), np.repeat([1, 0, 1, 0], counts)


def unpaired_bars(folder: Path) -> None:
    """30 items lost and 20 won of 14,042: -0.07 pp, McNemar p = 0.2026, not "worse"."""
    found = compare_items(*items(8094, 30, 20, 5898))
    assert (found.n, found.a_only, found.b_only) == (14_042, 30, 20)
    assert 100 * found.difference.estimate == pytest.approx(-0.0712, abs=1e-4)
    assert found.p == pytest.approx(0.2026, abs=1e-4)
    assert decide(found.difference, 0.0025, lower_is_better=False).verdict == "equivalent"
    assert decide(found.difference, 0.0005, lower_is_better=False).verdict == "undecided"
    # The unpaired error is the larger one by far: it answers another question.
    low, high = newcombe((8124, 14_042), (8114, 14_042))
    assert found.difference.low is not None and low < 5 * found.difference.low and high > 0.01


def dropped_positions(folder: Path) -> None:
    """Ten NaN positions of B are left out of both arms, counted, and no verdict may come from their absence."""
    world = World(rows=12, length=40)
    base, lower = world.columns(0.3, 2), world.columns(0.2, 3)
    ten = np.argsort(-lower["kl"])[:10]
    broken = lower | {"kl": lower["kl"].copy()}
    broken["kl"][ten] = np.nan
    found = compare([world.run(folder / "a", "A", base), world.run(folder / "b", "B", broken)])
    kept = np.isfinite(broken["kl"])
    first = found.pairs[0].primary
    assert (found.paired_on.excluded_nonfinite, found.paired_on.positions, first.positions) == (10, 470, 470)
    assert first.baseline == pytest.approx(base["kl"][kept].mean()) and first.other == pytest.approx(
        lower["kl"][kept].mean()
    )
    assert first.other < base["kl"].mean() and first.verdict == "undecided"
    assert "the candidate has 10 more positions that are not finite" in reason(found, found.pairs[0], first)
    assert "B: 10 positions are not finite; they are left out of every arm" in warnings(found)
    whole = compare([folder / "a", world.run(folder / "c", "C", lower)])
    assert whole.pairs[0].primary.verdict == "better"


def tokens_independent(folder: Path) -> None:
    """32 rows with row effects of sd 0.5: the clustered error is about five times that of independent positions."""
    random = np.random.default_rng(7)
    effect, heavy = 0.5 * random.standard_normal((32, 1)), 1.8 * random.standard_normal((32, 2047))
    kl = np.exp(effect + heavy - 1.8**2 / 2).ravel()
    group = np.repeat(np.arange(32), 2047)
    independent = kl.std(ddof=1) / np.sqrt(len(kl))
    clustered = t_interval(group_totals(kl, group))
    assert clustered.n == 32 and clustered.standard_error is not None
    assert 3 < clustered.standard_error / independent < 8
    assert clustered.low is not None and clustered.high is not None
    assert clustered.high - clustered.low > 6 * independent


def maximum(folder: Path) -> None:
    """A maximum has a place and N, never an interval or a verdict."""
    found = write_run(folder / "run", make_frame(rows=3, length=40))
    line = max_line(found)
    at = found.summary["kl_max_at"]
    assert line.interval == f"at row {at['row']}, position {at['position']}, of 117 positions; a maximum has none"
    world = World(rows=6, length=40)
    runs = [world.run(folder / n, n, world.columns(level, 2)) for n, level in (("A", 0.3), ("B", 0.2))]
    row = next(r for r in quality(compare(runs), "B").rows if r.name == "KL max")
    assert (row.verdict, row.interval) == ("description", "a maximum of 240 positions has none")


def small_n_bootstrap(folder: Path) -> None:
    """n = 5 lognormal rows, 2,000 times: the default covers 90 % or more, stays above 0, and is no bootstrap."""
    sigma = 0.45
    means = np.exp(sigma * np.random.default_rng(1).standard_normal((2000, 5)))
    truth = np.exp(sigma**2 / 2)
    found = [mean_interval(rows(some), "divergence") for some in means]
    assert {e.method for e in found} == {"t on ln(mean)"}
    covered = np.mean([e.low <= truth <= e.high for e in found])  # type: ignore[operator]
    assert covered >= 0.90 and min(e.low for e in found) > 0  # type: ignore[type-var,operator]
    thin = [bootstrap_interval(rows(some), method="bca", resamples=1000) for some in means[:200]]
    assert np.mean([e.low <= truth <= e.high for e in thin]) < 0.9  # type: ignore[operator]
    assert {e.note for e in thin} == {"few rows: the bootstrap is not to be trusted"}


def unstable_interval(folder: Path) -> None:
    """n = 5, cv 0.47: the upper end stays below 5 means; the studentised bootstrap has none, or a warning."""
    five = np.exp(0.45 * np.random.default_rng(2).standard_normal((200, 5)))
    assert 0.35 < np.mean(five.std(axis=1, ddof=1) / five.mean(axis=1)) < 0.5
    for some in five:
        totals = rows(0.05 * some)
        default = mean_interval(totals, "divergence")
        assert default.high is not None and default.high < 5 * totals.mean
        studentised = bootstrap_interval(totals, method="bootstrap-t", resamples=500)
        assert studentised.high is None or "not to be trusted" in studentised.note


def pseudo_replication(folder: Path) -> None:
    """24 windows of 4 documents: 4 units, p = 0.125, no matter that all 24 windows agree; without documents: said."""
    world = World(rows=24, length=40, documents=4)
    found = compare([world.run(folder / n, n, world.columns(level, 2)) for n, level in (("A", 0.3), ("B", 0.2))])
    first = found.pairs[0].primary
    assert (found.settings.unit, found.settings.units, first.difference.n) == ("document", 4, 4)
    assert first.signs.rows_lower == 24 and first.signs.units_lower == 4
    assert first.signs.p == pytest.approx(0.125)
    assert "over 4 documents" in markdown(found)
    other = g4_receipt()
    for row in other["per_row"]:
        row["kl_lb_mean"] /= 2
    other["summary"]["kl_lower_bound_mean"] /= 2
    files = [folder / "x.json", folder / "y.json"]
    for file, content in zip(files, (g4_receipt(), other), strict=True):
        file.write_text(json.dumps(content))
    unnamed = compare(import_files(files, folder / "g4", ["x", "y"]))
    assert unnamed.settings.unit == "row" and NO_DOCUMENTS in warnings(unnamed)
    assert any("descriptive only" in line for line in how_measured(of_comparison(unnamed)))
    assert not any("descriptive only" in line for line in how_measured(of_comparison(found)))


def ratio_over_floor(folder: Path) -> None:
    """Raw ratio 1.11, 2.52 over a floor: only the raw one is given, with its interval; the floor holds the verdict."""
    floor, b = 0.9276 * 0.01, 0.01
    assert (1.11 * b - floor) / (b - floor) == pytest.approx(2.52, abs=0.01)
    world = World(rows=20, length=40)
    base = world.columns(0.3, 2)
    arms = {"A": with_mean(base, 1.11 * b), "B": with_mean(base, b)}
    runs = [world.run(folder / name, name, columns) for name, columns in arms.items()]
    below = world.run(folder / "floor", "again", with_mean(base, floor))
    found = compare(runs, floor=below)
    first = found.pairs[0].primary
    for ratio in (first.pooled_ratio, first.row_ratio):
        assert ratio is not None and ratio.estimate == pytest.approx(1 / 1.11) and ratio.low is not None
    assert first.verdict == "undecided" and "floor" in reason(found, found.pairs[0], first)
    assert "2.52" not in markdown(found)
    # What subtracting would leave may be 0 or less: no ratio then, and never one without an interval.
    shifted = [rows(np.array([0.001, -0.002, 0.0005])), rows(np.array([0.002, 0.003, 0.004]))]
    for function in (pooled_ratio, row_log_ratio):
        refused = function(*shifted)
        assert not refused.has_interval and "at or below 0 has no ratio" in refused.note


def one_window(folder: Path) -> None:
    """0.0182 against 0.0168 on a single row says nothing about other rows."""
    world = World(rows=11, length=40)
    base = world.columns(0.3, 2)
    first = base["kl"][world.row_N == 0].mean()
    runs = [
        world.run(folder / name, name, base | {"kl": base["kl"] * mean / first}, rows=[0])
        for name, mean in (("six", 0.0168), ("eight", 0.0182))
    ]
    found = compare(runs).pairs[0]
    assert found.primary.baseline == pytest.approx(0.0168) and found.primary.other == pytest.approx(0.0182)
    assert {d.verdict for d in found.differences} == {"no verdict"}
    assert found.primary.difference.low is None and "one document gives no interval" in sentence(found.primary)


def heavy_tail(folder: Path) -> None:
    """Pareto-ish KL: the interval leans upwards, and a mean that one context makes is called that."""
    random = np.random.default_rng(4)
    world = World(rows=32, length=40)
    columns = world.columns(0.3, 2)
    heavy = columns | {"kl": 0.01 * random.pareto(1.1, len(columns["kl"]))}
    totals = group_totals(heavy["kl"], world.row_N)
    found = mean_interval(totals, "divergence")
    assert found.method.startswith("bootstrap-t") and found.low is not None and found.high is not None
    assert found.high - found.estimate > 2 * (found.estimate - found.low)
    assert concentration(totals).driven_by_one
    told = compare([world.run(folder / "a", "A", columns), world.run(folder / "b", "B", heavy)])
    assert any(w.startswith("B: its mean KL is driven by one context: row ") for w in warnings(told))
    assert not any(w.startswith("A: its mean KL is driven") for w in warnings(told))
    frame = tables.load_positions(folder / "b")
    top = np.sort(heavy["kl"])[::-1][:13].sum() / heavy["kl"].sum()  # 13 of 1,280 positions
    assert tables.top_positions_share(frame) == pytest.approx(top) and top > 0.3
    assert told.arms[1].share is not None and told.arms[1].share.share > 0.2


def unsupported_quantile(folder: Path) -> None:
    """2,047 positions support no p99.9; 50,000 do."""
    frame = make_frame(rows=23, length=90)
    assert len(frame) == 2047
    found = write_run(folder, frame)
    assert found.summary["kl_p999"] is None and found.summary["kl_p99"] > 0
    many = np.random.default_rng(5).random(50_000)
    assert not why_withheld(many, np.arange(50_000) % 23, 0.999)
    assert "come from 1 contexts" in why_withheld(many, np.zeros(50_000), 0.999)
    estimate = woodruff(frame["kl"].to_numpy(), frame["row"].to_numpy(), 0.999)
    assert not estimate.has_interval and estimate.note == "2 positions lie beyond it, 50 are needed"
    text = report_text(found, tables.load_positions(folder), [])
    assert "p99.9, nats | withheld | none: 2 positions lie beyond it" in text


ROWS = [
    Fault(id="A28-dropped-positions", title="non-finite positions dropped from one arm", check=dropped_positions),
    Fault(id="A64-unpaired-bars", title="unpaired error bars for a paired question", check=unpaired_bars),
    Fault(id="A65-tokens-independent", title="tokens treated as independent", check=tokens_independent),
    Fault(id="A67-maximum", title="a maximum as a metric", check=maximum),
    Fault(id="B15-small-n-bootstrap", title="95 % intervals that cover 81 %", check=small_n_bootstrap),
    Fault(id="B16-unstable-interval", title="a studentised upper end of 18 means", check=unstable_interval),
    Fault(id="B18-pseudo-replication", title="windows of four documents", check=pseudo_replication),
    Fault(id="B19-ratio-over-floor", title="a ratio of small differences", check=ratio_over_floor),
    Fault(id="B21-one-window", title="a verdict from one window", check=one_window),
    Fault(id="B23-heavy-tail", title="heavy tails and z intervals", check=heavy_tail),
    Fault(id="B25-unsupported-quantile", title="p99.9 of 2,047 positions", check=unsupported_quantile),
]
