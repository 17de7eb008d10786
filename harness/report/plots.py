"""The four pictures of one measurement, from positions.parquet and measurement.json alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.measure.receipt import Measurement, RowSummary
from harness.numbers import number
from harness.report import style, tables
from harness.report.style import LIGHT, Theme, marker
from harness.stats import Estimate

KL_LABEL = "KL(teacher‖candidate), nats"
#: Everything below is drawn in the first bin of the log axis at the least: rounding, not signal.
SMALLEST_DRAWN = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One picture of a report: its file beside the report, its title, and what it shows in words."""

    file: str
    title: str
    caption: str


def title_of(text: str, measurement: Measurement) -> str:
    """The picture's title, with ``partial 4/32 rows`` where that is so and the estimator where it is a bound."""
    bound = "lower bound" if measurement.estimator == "lower_bound" else ""
    marks = [mark for mark in (bound, measurement.label) if mark]
    return text + (f"  ({'; '.join(marks)})" if marks else "")


def left_out(frame: pd.DataFrame) -> str:
    """What a picture of KL cannot show, counted; empty when it shows all."""
    kl = frame["kl"].to_numpy()
    parts = [(int(np.isnan(kl).sum()), "NaN"), (int(np.isinf(kl).sum()), "infinite")]
    counted = ", ".join(f"{n:,} {name}" for n, name in parts if n)
    return f"Not drawn: {counted} of {len(kl):,} positions." if counted else ""


# ---- distribution of per-position KL ---------------------------------------------------------------------------------


def kl_distribution(frame: pd.DataFrame, measurement: Measurement, theme: Theme = LIGHT) -> Figure:
    """Shares of positions by KL on a log axis, zeros and negatives apart, and where the mean comes from."""
    figure = style.new_figure(4.4)
    zeros, main = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1, 9]}, sharey=True)
    kl = frame["kl"].to_numpy()
    finite = kl[np.isfinite(kl)]
    figure.suptitle(title_of("Per-position KL", measurement), fontsize=12.5, fontweight="bold", x=0.01, ha="left")
    _zero_bars(zeros, finite, len(kl), theme)
    remark = ""
    if (finite > 0).any():
        remark = _log_histogram(main, finite[finite > 0], len(kl), theme)
        _mark_quantiles(main, finite, theme)
        main.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=5, columnspacing=1.1, handlelength=1.6)
    else:
        style.empty(main, "no position with KL above zero", theme)
    style.note(figure, " ".join(filter(None, [remark, left_out(frame)])), theme)
    return figure


def _zero_bars(axes: Axes, finite: np.ndarray, total: int, theme: Theme) -> None:
    shares = [100 * float((finite == 0).sum()) / total, 100 * float((finite < 0).sum()) / total]
    axes.bar([0, 1], shares, width=0.7, color=[theme.muted, theme.colour(3)])
    axes.set_xticks([0, 1], ["= 0", "< 0"])
    axes.set_xlim(-0.7, 1.7)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("share, %")
    for x, share in enumerate(shares):
        axes.annotate(number(share, 1), (x, share), ha="center", va="bottom", fontsize=9, color=theme.ink)


def _log_histogram(axes: Axes, positive: np.ndarray, total: int, theme: Theme) -> str:
    """Draw both histograms; what lies below the axis goes into its first bin, and the remark returned says so."""
    lowest = 10 ** np.floor(np.log10(max(float(np.quantile(positive, 0.002)), SMALLEST_DRAWN)))
    highest = 10 ** np.ceil(np.log10(max(float(positive.max()), 10 * lowest)))
    drawn = np.maximum(positive, lowest)
    edges = np.logspace(np.log10(lowest), np.log10(highest), round(8 * np.log10(highest / lowest)) + 1).tolist()
    share = np.full(len(drawn), 100 / total)
    axes.hist(drawn, edges, weights=share, color=theme.colour(0), alpha=0.85, label="positions")
    carried = 100 * positive / positive.sum()
    axes.hist(
        drawn, edges, weights=carried, histtype="step", linewidth=2, color=theme.colour(1), label="share of the mean"
    )
    axes.set(xscale="log", xlabel=KL_LABEL, xlim=(edges[0], edges[-1]))
    below = int((positive < lowest).sum())
    return f"The first bin holds {below:,} positions below 1e{round(np.log10(lowest))}." if below else ""


def _mark_quantiles(axes: Axes, finite: np.ndarray, theme: Theme) -> None:
    """Lines at the median, mean and p99 of all finite values; their figures stand in the legend."""
    p50, p99 = np.quantile(finite, [0.5, 0.99], method="inverted_cdf")
    marks = (("p50", p50, ":"), ("mean", finite.mean(), "--"), ("p99", p99, "-."))
    for name, value, line in marks:
        if value > 0:
            axes.axvline(value, color=theme.ink, linewidth=1.3, linestyle=line, label=f"{name} {number(value)}")


# ---- KL by row -------------------------------------------------------------------------------------------------------


def kl_by_row(
    frame: pd.DataFrame, measurement: Measurement, theme: Theme = LIGHT, order: Literal["kl", "panel"] = "kl"
) -> Figure:
    """Mean KL of each row, coloured by domain; sorted by KL, or in the order of the panel."""
    figure = style.new_figure(4.4)
    axes = figure.subplots()
    rows = list(measurement.per_row)
    if order == "kl":
        rows.sort(key=lambda row: (-np.nan_to_num(row.kl_mean, nan=np.inf), row.row))
    shown = [(x, row) for x, row in enumerate(rows) if np.isfinite(row.kl_mean)]
    axes.set_title(title_of("KL by row" + (", highest first" if order == "kl" else ""), measurement))
    if shown:
        _row_dots(axes, shown, theme)
        _row_axis(axes, rows, shown)
    else:
        style.empty(axes, "no row has a finite mean", theme)
    missing = len(rows) - len(shown)
    style.note(figure, f"Not drawn: {missing} of {len(rows)} rows, whose mean is not finite." if missing else "", theme)
    return figure


def _row_dots(axes: Axes, shown: list[tuple[int, RowSummary]], theme: Theme) -> None:
    domains = sorted({row.domain for _, row in shown})
    for index, domain in enumerate(domains):
        mine = [(x, row.kl_mean) for x, row in shown if row.domain == domain]
        x, y = np.array(mine).T
        axes.vlines(x, 0, y, color=theme.colour(index), linewidth=1.4, alpha=0.55)
        axes.plot(x, y, marker(index), color=theme.colour(index), markersize=7, label=domain)
    mean = float(np.average([row.kl_mean for _, row in shown], weights=[row.positions for _, row in shown]))
    axes.axhline(mean, color=theme.ink, linewidth=1, linestyle="--", label=f"mean {number(mean)}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), ncols=1 + len(domains) // 14)


def _row_axis(axes: Axes, rows: list[RowSummary], shown: list[tuple[int, RowSummary]]) -> None:
    if len(rows) <= 40:
        axes.set_xticks(range(len(rows)), [str(row.row) for row in rows], fontsize=9 if len(rows) <= 24 else 7.5)
        axes.set_xlabel("row of the panel")
    else:
        axes.set_xlabel(f"{len(rows)} rows of the panel")
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-0.8, len(rows) - 0.2)
    axes.set_ylabel(KL_LABEL)
    values = [row.kl_mean for _, row in shown]
    lowest = min(values, default=0.0)
    axes.set_ylim(bottom=0 if lowest >= 0 else None)
    if not any(values):
        axes.set_ylim(0, 1)


# ---- KL by position --------------------------------------------------------------------------------------------------


def kl_by_position(frame: pd.DataFrame, measurement: Measurement, theme: Theme = LIGHT) -> Figure:
    """Mean KL of each tenth of the row with its interval over units, and the median beside it."""
    figure = style.new_figure(4.0)
    axes = figure.subplots()
    axes.set_title(title_of("KL by position in the row", measurement))
    finite = np.isfinite(frame["kl"].to_numpy())
    part = frame[finite]
    if len(part) == 0:
        style.empty(axes, "no finite KL", theme)
        return figure
    buckets = tables.by_position(part, tables.units_of(frame, measurement)[finite], measurement.panel.unit)
    x = np.array([(bucket.start + bucket.stop - 1) / 2 for bucket in buckets])
    mean = np.array([bucket.kl.estimate for bucket in buckets])
    _interval_line(axes, x, mean, [bucket.kl for bucket in buckets], theme)
    inside = [part["position"].between(bucket.start, bucket.stop - 1) for bucket in buckets]
    median = [float(part.loc[mask, "kl"].median()) for mask in inside]
    axes.plot(x, median, marker(1), color=theme.colour(1), markersize=6, linestyle="--", label="median")
    axes.set_xlabel("position in the row (tokens of context before the prediction)")
    axes.set_ylabel(KL_LABEL)
    axes.set_ylim(bottom=min(0.0, min(median), float(mean.min())))
    if not mean.any():
        axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(*(reversed(part) for part in axes.get_legend_handles_labels()), loc="best")
    style.note(
        figure,
        " ".join([_whisker_note([bucket.kl for bucket in buckets], measurement), left_out(frame)]).strip(),
        theme,
    )
    return figure


def _interval_line(
    axes: Axes, x: np.ndarray, y: np.ndarray, estimates: list[Estimate], theme: Theme, scale: float = 1.0
) -> None:
    low = np.array([np.nan if e.low is None else scale * e.low for e in estimates])
    high = np.array([np.nan if e.high is None else scale * e.high for e in estimates])
    error = np.abs(np.vstack([y - low, high - y]))
    whiskers = error if np.isfinite(error).any() else None
    style_of_line = marker(0) + "-"
    axes.errorbar(x, y, whiskers, fmt=style_of_line, color=theme.colour(0), markersize=7, capsize=3, label="mean")


def _whisker_note(estimates: list[Estimate], measurement: Measurement) -> str:
    unit = measurement.panel.unit
    if not any(estimate.has_interval for estimate in estimates):
        return f"No whiskers: {', '.join(sorted({estimate.note for estimate in estimates}))}."
    return f"Whiskers: 95 % interval over {unit}s."


# ---- agreement by teacher confidence ---------------------------------------------------------------------------------


def agreement_by_confidence(frame: pd.DataFrame, measurement: Measurement, theme: Theme = LIGHT) -> Figure:
    """Top-1 agreement in buckets of the teacher's top-1 probability, with the number of positions under each."""
    figure = style.new_figure(4.8)
    upper, lower = figure.subplots(2, 1, gridspec_kw={"height_ratios": [3, 1]}, sharex=True)
    upper.set_title(title_of("Top-1 agreement by the teacher's confidence", measurement))
    buckets = tables.by_confidence(frame, tables.units_of(frame, measurement), measurement.panel.unit)
    if not buckets:
        style.empty(upper, "the teacher's confidence is nowhere finite", theme)
        lower.set_visible(False)
        return figure
    x = np.arange(len(buckets), dtype=float)
    known = [(at, bucket.agreement) for at, bucket in zip(x, buckets, strict=True) if bucket.agreed is not None]
    agreement = np.array([100 * found.estimate for _, found in known])
    drawn = np.array([at for at, _ in known])
    _interval_line(upper, drawn, agreement, [found for _, found in known], theme, scale=100)
    _label_points(upper, drawn, agreement, theme)
    upper.set_ylabel("agreement, %")
    upper.set_ylim(min(agreement.min(initial=102.0) - 12, 90), 102)
    upper.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    counts = [bucket.positions for bucket in buckets]
    lower.bar(x, counts, width=0.7, color=theme.muted)
    lower.set_ylim(0, max(counts) * 1.35)
    for at, value in zip(x, counts, strict=True):
        lower.annotate(f"{value:,}", (at, value), ha="center", va="bottom", fontsize=9, color=theme.ink)
    lower.set_ylabel("positions")
    lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    lower.yaxis.set_major_locator(MaxNLocator(2, integer=True))
    lower.set_xticks(x, [bucket.label for bucket in buckets])
    lower.set_xlabel("teacher's probability of its own top-1 token")
    unknown = len(buckets) - len(known)
    missing = f" Not drawn: {unknown} buckets in which the candidate's choice is not known everywhere."
    note = _whisker_note([found for _, found in known], measurement) if known else ""
    style.note(figure, (note + (missing if unknown else "")).strip(), theme)
    return figure


def _label_points(axes: Axes, x: np.ndarray, y: np.ndarray, theme: Theme) -> None:
    for at, value in zip(x, y, strict=True):
        axes.annotate(
            number(float(value), 1),
            (at, value),
            xytext=(8, -15),
            textcoords="offset points",
            fontsize=9,
            color=theme.ink,
        )


# ---- all of them -----------------------------------------------------------------------------------------------------

Draw = Callable[[pd.DataFrame, Measurement, Theme], Figure]

PICTURES: tuple[tuple[str, Draw, str, str], ...] = (
    (
        "kl_distribution",
        kl_distribution,
        "Distribution of per-position KL",
        "Blue: share of positions by KL, log axis; zeros and negatives stand apart on the left. "
        "Orange line: share of the mean that those positions carry.",
    ),
    ("kl_by_row", kl_by_row, "KL by row", "Mean KL of each row, coloured by domain."),
    (
        "kl_by_position",
        kl_by_position,
        "KL by position",
        "Mean and median KL in each tenth of the row.",
    ),
    (
        "agreement_by_confidence",
        agreement_by_confidence,
        "Agreement by the teacher's confidence",
        "How often both choose the same token, by how sure the teacher is; below, how many positions that is.",
    ),
)


def write_pictures(
    folder: Path,
    frame: pd.DataFrame,
    measurement: Measurement,
    *,
    theme: Theme = LIGHT,
    kinds: tuple[Literal["png", "svg"], ...] = ("png",),
) -> list[Picture]:
    """Draw all pictures into ``folder/pictures``; the first of ``kinds`` is the one that reports show."""
    suffix = "" if theme is LIGHT else f"-{theme.name}"
    for name, draw, _, _ in PICTURES:
        with style.drawing(theme):
            files = [folder / "pictures" / f"{name}{suffix}.{kind}" for kind in kinds]
            style.save_all(draw(frame, measurement, theme), files)
    return pictures_of(suffix=f"{suffix}.{kinds[0]}")


def pictures_of(*, suffix: str = ".png") -> list[Picture]:
    """The pictures that a report links, whether they are drawn yet or not."""
    return [Picture(file=f"pictures/{name}{suffix}", title=title, caption=text) for name, _, title, text in PICTURES]
