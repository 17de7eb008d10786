"""The pictures on hard data: they draw, they label, they leave nothing out silently."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from harness.measure.receipt import Measurement
from harness.report import plots, style
from harness.report.style import DARK, LIGHT
from tests.report.fake_run import make_frame, write_run


def texts(figure: Figure) -> str:
    """All that a reader can read in a figure."""
    parts = [text.get_text() for text in figure.findobj(lambda artist: hasattr(artist, "get_text"))]
    return "\n".join(parts)


def draw_all(frame: pd.DataFrame, measurement: Measurement) -> dict[str, Figure]:
    with style.drawing(LIGHT):
        return {name: draw(frame, measurement, LIGHT) for name, draw, _, _ in plots.PICTURES}


def test_partial_and_unfinite_are_written_in_the_picture(tmp_path: Path) -> None:
    frame = make_frame(rows=2)
    frame.loc[3, "kl"], frame.loc[5, "kl"] = np.nan, np.inf
    figures = draw_all(frame, write_run(tmp_path, frame, status="partial", rows_planned=9))
    assert all("(partial 2/9 rows)" in texts(figure) for figure in figures.values())
    assert "Not drawn: 1 NaN, 1 infinite of 256 positions." in texts(figures["kl_distribution"])
    assert "Not drawn: 1 of 2 rows" in texts(figures["kl_by_row"])


def test_a_lower_bound_is_named_in_the_title(tmp_path: Path, frame: pd.DataFrame) -> None:
    figures = draw_all(frame, write_run(tmp_path, frame, estimator="lower_bound"))
    assert all("(lower bound)" in texts(figure) for figure in figures.values())


def test_all_zero_kl_draws_and_says_so(tmp_path: Path) -> None:
    frame = make_frame(rows=3, noise=0.0)
    figures = draw_all(frame, write_run(tmp_path, frame))
    assert "no position with KL above zero" in texts(figures["kl_distribution"])


def test_the_histogram_holds_every_position(tmp_path: Path, frame: pd.DataFrame) -> None:
    """Zeros, negatives and what lies below the axis are drawn too: the bars add up to 100 %."""
    frame = frame.copy()
    frame.loc[:9, "kl"], frame.loc[10:14, "kl"], frame.loc[15:20, "kl"] = 0.0, -1e-8, 1e-14
    with style.drawing(LIGHT):
        figure = plots.kl_distribution(frame, write_run(tmp_path, frame))
    zeros, main = figure.axes
    bars = [patch.get_height() for axes in (zeros, main) for patch in axes.patches if hasattr(patch, "get_height")]
    assert sum(bars) == pytest.approx(100)
    assert zeros.patches[0].get_height() == pytest.approx(100 * 10 / len(frame))
    assert "The first bin holds" in texts(figure)


def test_one_row_has_no_whiskers(tmp_path: Path) -> None:
    frame = make_frame(rows=1)
    figures = draw_all(frame, write_run(tmp_path, frame))
    assert "No whiskers: fewer than 4 documents." in texts(figures["kl_by_position"])


def test_rows_can_stay_in_panel_order(tmp_path: Path, frame: pd.DataFrame) -> None:
    measurement = write_run(tmp_path, frame)
    with style.drawing(LIGHT):
        by_kl = plots.kl_by_row(frame, measurement)
        in_order = plots.kl_by_row(frame, measurement, order="panel")
    labels = [[tick.get_text() for tick in figure.axes[0].get_xticklabels()] for figure in (by_kl, in_order)]
    worst = max(measurement.per_row, key=lambda row: row.kl_mean)
    assert labels[0][0] == str(worst.row) and labels[1] == [str(row) for row in range(16)]


def test_svg_has_no_date_and_the_same_bytes(tmp_path: Path, frame: pd.DataFrame) -> None:
    measurement, bytes_ = write_run(tmp_path, frame), []
    for _ in range(2):
        with style.drawing(DARK):
            bytes_.append(style.rendered(plots.kl_by_position(frame, measurement, DARK), "svg"))
    assert bytes_[0] == bytes_[1] and b"<dc:date>" not in bytes_[0] and b"matplotlib.org" not in bytes_[0][:400]


def contrast(first: str, second: str) -> float:
    """WCAG contrast ratio of two #RRGGBB colours."""
    levels = []
    for text in (first, second):
        rgb = np.array([int(text[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        levels.append(float(linear @ [0.2126, 0.7152, 0.0722]))
    return (max(levels) + 0.05) / (min(levels) + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_text_and_first_colours_stand_out_on_their_paper(theme: style.Theme) -> None:
    assert contrast(theme.ink, theme.paper) > 7
    assert contrast(theme.muted, theme.paper) > 4.5
    assert all(contrast(theme.colour(index), theme.paper) >= 3 for index in range(3))
