"""Tables by position, confidence and domain against slow, separate computations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats

from harness.errors import Refused
from harness.report import tables
from harness.report.basis import of_measurement
from harness.store import write_table
from tests.report.fake_run import make_frame, write_run


def test_position_deciles_equal_a_slow_computation(frame: pd.DataFrame) -> None:
    units = frame["row"].to_numpy()
    buckets = tables.by_position(frame, units, "row")
    assert len(buckets) == 10
    assert sum(b.positions for b in buckets) == len(frame)
    for bucket in buckets:
        inside = [k for p, k in zip(frame["position"], frame["kl"], strict=True) if bucket.start <= p < bucket.stop]
        assert bucket.kl.estimate == pytest.approx(sum(inside) / len(inside), rel=1e-12)
    inside = frame[frame["position"].between(buckets[3].start, buckets[3].stop - 1)]
    means = inside.groupby("row")["kl"].mean().to_numpy()
    drawn_BG = np.random.default_rng(1).choice(means, (20_000, len(means)))
    t_B = (drawn_BG.mean(axis=1) - means.mean()) / scipy_stats.sem(drawn_BG, axis=1)
    ends = means.mean() - scipy_stats.sem(means) * np.quantile(t_B, [0.975, 0.025])
    assert (buckets[3].kl.low, buckets[3].kl.high) == pytest.approx(tuple(ends), rel=0.03)
    eight = frame[frame["row"] < 8]
    few = tables.by_position(eight, eight["row"].to_numpy(), "row")[3]
    means = eight[eight["position"].between(few.start, few.stop - 1)].groupby("row")["kl"].mean().to_numpy()
    half = scipy_stats.t.ppf(0.975, len(means) - 1) * scipy_stats.sem(means) / means.mean()
    ends = means.mean() * np.exp([-half, half])
    assert (few.kl.low, few.kl.high) == pytest.approx(tuple(ends), rel=1e-9)


def test_confidence_buckets_hold_every_position_once(frame: pd.DataFrame) -> None:
    buckets = tables.by_confidence(frame, frame["row"].to_numpy(), "row")
    assert sum(b.positions for b in buckets) == len(frame)
    for bucket in buckets:
        p = frame["p_top1_teacher"]
        inside = frame[(p >= bucket.start) & ((p < bucket.stop) | (bucket.stop == 1.0))]
        assert bucket.positions == len(inside)
        assert bucket.agreement.estimate == pytest.approx(inside["agree"].mean(), rel=1e-12)


def test_kl_that_grows_along_the_row_is_called_out() -> None:
    """An arm whose KL grows with position gives deciles and a flagged slope."""
    frame = make_frame(rows=8, length=257, ramp=2.0)
    found = tables.slope(frame, frame["row"].to_numpy(), "row")
    assert found is not None and found.rising and found.ratio > 1.5
    expected = [np.polyfit(p["position"], p["kl"], 1)[0] * 1000 for _, p in frame.groupby("row")]
    assert found.estimate.estimate == pytest.approx(np.mean(expected), rel=1e-9)


def test_kl_that_stays_level_is_not_called_out(frame: pd.DataFrame) -> None:
    found = tables.slope(frame, frame["row"].to_numpy(), "row")
    assert found is not None and not found.rising


def test_one_row_has_a_slope_and_no_flag() -> None:
    frame = make_frame(rows=1, ramp=3.0)
    found = tables.slope(frame, frame["row"].to_numpy(), "row")
    assert found is not None and not found.rising and not found.estimate.has_interval


def test_p999_of_2047_positions_is_withheld() -> None:
    """Too few positions lie beyond it."""
    frame = make_frame(rows=1, length=2048)
    found = tables.quantiles(frame, frame["row"].to_numpy(), "row")
    assert not found["p99.9"].has_interval
    assert found["p50"].estimate == sorted(frame["kl"])[1023]


def test_nonfinite_positions_stay_in_the_mean_and_take_its_interval() -> None:
    """Never null, never 0, never dropped."""
    frame = make_frame(rows=4)
    frame.loc[3, "kl"] = np.inf
    domain_rows = frame["row"].to_numpy()
    first = tables.by_position(frame, domain_rows, "row")[0]
    assert first.kl.estimate == np.inf and not first.kl.has_interval
    frame.loc[4, "kl"] = np.nan
    assert np.isnan(tables.by_position(frame, domain_rows, "row")[0].kl.estimate)
    rates = tables.tail_rates(frame, domain_rows, "row")
    assert rates[0][1].estimate == pytest.approx(np.mean([not k <= 0.1 for k in frame["kl"]]))
    worst = tables.worst_positions(frame, 3)
    assert list(worst["position"])[:2] == [3, 4]


def test_documents_are_the_unit_where_the_panel_says_so(frame: pd.DataFrame, tmp_path: Path) -> None:
    measurement = write_run(tmp_path, frame)
    shared = [row.model_copy(update={"document": f"d{row.row // 4}"}) for row in measurement.per_row]
    units = tables.units_of(frame, measurement.model_copy(update={"per_row": shared}))
    assert len(np.unique(units)) == 4
    by_row = measurement.panel.model_copy(update={"unit": "row"})
    assert len(np.unique(tables.units_of(frame, measurement.model_copy(update={"panel": by_row})))) == 16


def test_top_row_share(frame: pd.DataFrame, tmp_path: Path) -> None:
    """A row without which the mean falls by more than a fifth is named with its share, equal rows never are."""
    measurement = write_run(tmp_path, frame)
    assert of_measurement(measurement).driven_by == []
    heavy = frame.copy()
    heavy.loc[heavy["row"] == 5, "kl"] *= 20
    sums = heavy.groupby("row")["kl"].sum()
    (told,) = of_measurement(write_run(tmp_path, heavy)).driven_by
    assert told == f"row 5 alone carries {100 * sums.max() / sums.sum():.1f} % of the summed KL"
    assert of_measurement(write_run(tmp_path, frame.assign(kl=0.0))).driven_by == []
    equal = [row.model_copy(update={"kl_mean": 0.1}) for row in measurement.per_row[:4]]
    assert of_measurement(measurement.model_copy(update={"per_row": equal})).driven_by == []


def test_a_file_without_a_column_is_refused(tmp_path: Path, frame: pd.DataFrame) -> None:
    import pyarrow as pa

    with pytest.raises(Refused, match="no positions.parquet"):
        tables.load_positions(tmp_path)
    write_table(tmp_path / "positions.parquet", pa.Table.from_pandas(frame.drop(columns="tv"), preserve_index=False))
    with pytest.raises(Refused, match="tv"):
        tables.load_positions(tmp_path)
