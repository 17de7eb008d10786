"""Pictures of several candidates: KL against size, paired differences by row, distributions, and slices.

Arrays and comparison.json in, figures out; colours and markers follow the order of the arms in every picture.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from harness.compare.model import Comparison, Pair, RowDifference, Slice
from harness.numbers import number
from harness.report import style
from harness.report.plots import SMALLEST_DRAWN
from harness.report.style import LIGHT, Theme, marker

#: KL axes become logarithmic when the largest value is this many times the smallest.
LOG_FROM = 8.0
#: Names of rows are drawn up to this many rows.
NAMED_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One candidate, anchor or floor: ``size`` in bits per weight or GB (None where it has none)."""

    name: str
    size: float | None
    kl: float
    low: float | None = None
    high: float | None = None
    anchor: bool = False


def wrapped(name: str, width: int = 26) -> str:
    """A long name on several lines, broken where names have their joints."""
    parts = textwrap.wrap(re.sub(r"([-/_])", r"\1 ", name), width, break_long_words=True)
    return "\n".join(re.sub(r"([-/_]) ", r"\1", part) for part in parts)


def kl_label(estimator: str) -> str:
    """The axis label of KL, with its kind where it is a bound."""
    return "KL(teacher‖candidate), nats" + ("" if estimator == "exact" else " (lower bound)")


# ---- KL against size -------------------------------------------------------------------------------------------------


def pareto(points: Sequence[Point]) -> list[Point]:
    """Points that no smaller or equally small point beats, by size; anchors compete like any other."""
    best: list[Point] = []
    sized = sorted((p for p in points if p.size is not None), key=lambda p: (p.size, p.kl))
    for point in sized:
        if not best or point.kl < best[-1].kl:
            best.append(point)
    return best


def kl_against_size(
    points: Sequence[Point],
    *,
    x_label: str,
    estimator: str,
    floor: Point | None = None,
    theme: Theme = LIGHT,
) -> Figure:
    """KL over bits per weight or size: whiskers, floor band, anchors, and the line of what nothing smaller beats."""
    figure = style.new_figure(4.6)
    axes = figure.subplots()
    axes.set_title("KL against size")
    axes.set_xlabel(x_label)
    axes.set_ylabel(kl_label(estimator))
    sized = [point for point in points if point.size is not None and np.isfinite(point.kl)]
    if not sized:
        style.empty(axes, "no candidate has a size", theme)
        return figure
    front = pareto(sized)
    if len(front) > 1:
        x, y = [p.size or 0.0 for p in front], [p.kl for p in front]
        axes.plot(x, y, color=theme.muted, linewidth=1.4, linestyle="--", label="no smaller one is better", zorder=1)
    for index, point in enumerate(points):
        _draw_point(axes, point, index, theme)
    if floor is not None:
        _draw_floor(axes, floor, theme)
    _log_if_wide(axes, [p.kl for p in [*points, *([floor] if floor else [])]])
    _room_on_the_right(axes, [float(p.size) for p in sized if p.size is not None])
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02))
    unsized = [point.name for point in points if point.size is None]
    missing = f" Without a size: {', '.join(unsized)}." if unsized else ""
    style.note(figure, f"Whiskers: interval of the mean.{missing}", theme)
    return figure


def _draw_point(axes: Axes, point: Point, index: int, theme: Theme) -> None:
    label = wrapped(f"{point.name}: {number(point.kl)}")
    if point.size is None:
        axes.axhline(point.kl, color=theme.colour(index), linewidth=1.2, linestyle=":", label=label)
        return
    error = None
    if point.low is not None and point.high is not None:
        error = np.array([[point.kl - point.low], [point.high - point.kl]])
    face = theme.paper if point.anchor else theme.colour(index)
    axes.errorbar(
        [point.size],
        [point.kl],
        error,
        fmt=marker(index),
        color=theme.colour(index),
        markerfacecolor=face,
        markersize=9,
        capsize=4,
        label=label + (" (anchor)" if point.anchor else ""),
        zorder=3,
    )


def _draw_floor(axes: Axes, floor: Point, theme: Theme) -> None:
    low, high = (floor.low, floor.high) if floor.low is not None and floor.high is not None else (floor.kl, floor.kl)
    axes.axhspan(low, high, color=theme.muted, alpha=0.35, linewidth=0)
    axes.axhline(floor.kl, color=theme.muted, linewidth=1.2, label=f"floor: {number(floor.kl)}")


def _room_on_the_right(axes: Axes, sizes: Sequence[float]) -> None:
    span = max(sizes) - min(sizes) or max(abs(sizes[0]), 1.0) * 0.2
    axes.set_xlim(min(sizes) - 0.12 * span, max(sizes) + 0.12 * span)


def _log_if_wide(axes: Axes, values: Sequence[float]) -> None:
    positive = [value for value in values if np.isfinite(value) and value > 0]
    if len(positive) == len(values) and max(positive) > LOG_FROM * min(positive):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)


# ---- paired differences by row ---------------------------------------------------------------------------------------


def forest(pair: Pair, *, estimator: str, theme: Theme = LIGHT) -> Figure:
    """KL difference of each row with its own interval, sorted, and the mean of all rows under them."""
    rows = sorted(pair.rows, key=lambda row: row.difference)
    named = len(rows) <= NAMED_ROWS
    figure = style.new_figure(2.4 + (0.165 * len(rows) if named else 4.2))
    axes = figure.subplots()
    axes.set_title(f"{pair.other} minus {pair.baseline}, by row")
    y = np.arange(len(rows), 0, -1, dtype=float)
    for index, domain in enumerate(sorted({row.domain for row in rows})):
        mine = np.array([row.domain == domain for row in rows])
        part = [row for row in rows if row.domain == domain]
        _row_whiskers(axes, y[mine], part, index, theme, label=domain)
    mean = pair.primary.difference if pair.primary.metric == "kl_mean" else None
    if mean is not None:
        error = None
        if mean.low is not None and mean.high is not None:
            error = np.array([[mean.estimate - mean.low], [mean.high - mean.estimate]])
        label = f"mean {number(mean.estimate)}"
        x = [mean.estimate]
        axes.errorbar(x, [-1.0], xerr=error, fmt="D", color=theme.ink, markersize=9, capsize=5, label=label)
    axes.axvline(0, color=theme.ink, linewidth=1)
    ticks = [*y, -1.0] if named else [-1.0]
    names = [*(f"row {row.row}" for row in rows), "mean"] if named else ["mean"]
    axes.set_yticks(ticks, names, fontsize=8.5)
    axes.grid(visible=False, axis="y")
    axes.set_ylim(-2.2, len(rows) + 1)
    bound = "" if estimator == "exact" else " of the lower bound"
    axes.set_xlabel(f"difference of KL{bound}, nats (left of 0: {pair.other} is closer to the teacher)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    style.note(figure, _forest_note(pair), theme)
    return figure


def _row_whiskers(
    axes: Axes, y: np.ndarray, rows: Sequence[RowDifference], index: int, theme: Theme, label: str
) -> None:
    x = np.array([row.difference for row in rows])
    low = np.array([np.nan if row.low is None else row.low for row in rows])
    high = np.array([np.nan if row.high is None else row.high for row in rows])
    error = np.abs(np.vstack([x - low, high - x]))
    whiskers = error if np.isfinite(error).any() else None
    axes.errorbar(
        x, y, xerr=whiskers, fmt=marker(index), color=theme.colour(index), markersize=5, capsize=2, label=label
    )


def _forest_note(pair: Pair) -> str:
    if any(row.low is not None for row in pair.rows):
        return "Whiskers of a row: its own text only (blocks of its positions). Whiskers of the mean: over contexts."
    return "Rows have no whiskers: only their means are known."


# ---- distributions ---------------------------------------------------------------------------------------------------


def distributions(kl_by_arm: Mapping[str, np.ndarray], *, estimator: str, theme: Theme = LIGHT) -> Figure:
    """Per-position KL of several candidates on one log axis; exact zeros and negatives stand apart."""
    figure = style.new_figure(4.6)
    zeros, main = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1, 8]})
    figure.suptitle("Per-position KL", fontsize=12.5, fontweight="bold", x=0.01, ha="left")
    finite = {name: kl[np.isfinite(kl)] for name, kl in kl_by_arm.items()}
    positive = np.concatenate([kl[kl > 0] for kl in finite.values()] or [np.array([])])
    if len(positive) == 0:
        style.empty(main, "no position with KL above zero", theme)
    else:
        _steps(main, finite, positive, estimator, theme)
    _zero_shares(zeros, finite, theme)
    dropped = sum(len(kl_by_arm[name]) - len(finite[name]) for name in finite)
    style.note(figure, f"Not drawn: {dropped:,} positions that are not finite." if dropped else "", theme)
    return figure


def _steps(axes: Axes, finite: Mapping[str, np.ndarray], positive: np.ndarray, estimator: str, theme: Theme) -> None:
    lowest = 10 ** np.floor(np.log10(max(float(np.quantile(positive, 0.002)), SMALLEST_DRAWN)))
    highest = 10 ** np.ceil(np.log10(max(float(positive.max()), 10 * lowest)))
    edges = np.logspace(np.log10(lowest), np.log10(highest), round(8 * np.log10(highest / lowest)) + 1).tolist()
    for index, (name, kl) in enumerate(finite.items()):
        drawn = np.maximum(kl[kl > 0], lowest)
        share = np.full(len(drawn), 100 / max(len(kl), 1))
        label = f"{name}: mean {number(float(kl.mean()))}"
        axes.hist(drawn, edges, weights=share, histtype="step", linewidth=2, color=theme.colour(index), label=label)
        axes.axvline(max(float(kl.mean()), lowest), color=theme.colour(index), linewidth=1.3, linestyle="--")
    axes.set(xscale="log", xlabel=kl_label(estimator), xlim=(edges[0], edges[-1]))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=min(3, len(finite)), columnspacing=1.2)


def _zero_shares(axes: Axes, finite: Mapping[str, np.ndarray], theme: Theme) -> None:
    for index, kl in enumerate(finite.values()):
        share = 100 * float((kl <= 0).sum()) / max(len(kl), 1)
        axes.bar([index], [share], color=theme.colour(index))
        axes.annotate(number(share, 1), (index, share), ha="center", va="bottom", fontsize=8, color=theme.ink)
    axes.set_xticks([(len(finite) - 1) / 2], ["≤ 0"])
    axes.grid(visible=False, axis="x")
    axes.set_ylabel("share of positions, %")
    if axes.get_ylim()[1] < 1:
        axes.set_ylim(0, 1)


# ---- slices ----------------------------------------------------------------------------------------------------------


def slices_of(comparison: Comparison, which: str) -> tuple[list[str], dict[str, list[Slice]]]:
    """Labels and, for every pair, its slices ``domains``, ``deciles`` or ``confidence`` by the other arm's name."""
    by_arm = {pair.other: list(getattr(pair, which)) for pair in comparison.pairs}
    first = next(iter(by_arm.values()), [])
    return [part.label for part in first], by_arm


def lines_by_slice(comparison: Comparison, which: str, *, theme: Theme = LIGHT) -> Figure:
    """KL of every arm by tenth of the row (``deciles``) or by the teacher's confidence (``confidence``)."""
    titles = {"deciles": "KL by position in the row", "confidence": "KL by the teacher's confidence"}
    figure = style.new_figure(4.2)
    axes = figure.subplots()
    axes.set_title(titles[which])
    labels, by_arm = slices_of(comparison, which)
    if not labels:
        style.empty(axes, "only row means are known", theme)
        return figure
    first = next(iter(by_arm.values()))
    series = {comparison.arms[0].name: [part.baseline for part in first]}
    series |= {name: [part.other for part in parts] for name, parts in by_arm.items()}
    x = np.arange(len(labels))
    for index, (name, values) in enumerate(series.items()):
        axes.plot(x, values, marker(index) + "-", color=theme.colour(index), markersize=7, label=wrapped(name))
    _log_if_wide(axes, [value for values in series.values() for value in values])
    axes.set_xticks(x, labels, fontsize=8.5)
    axes.set_xlabel("positions of the row" if which == "deciles" else "teacher's probability of its own top-1 token")
    axes.set_ylabel(kl_label(comparison.estimator))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02))
    return figure


def domain_heat(comparison: Comparison, *, theme: Theme = LIGHT) -> Figure:
    """KL by domain and candidate, every cell with its number."""
    labels, by_arm = slices_of(comparison, "domains")
    names = [arm.name for arm in comparison.arms]
    figure = style.new_figure(1.8 + 0.42 * max(len(labels), 1))
    axes = figure.subplots()
    axes.set_title(f"{kl_label(comparison.estimator)}, by domain")
    if len(labels) < 2:
        style.empty(axes, "one domain only", theme)
        return figure
    first = next(iter(by_arm.values()))
    columns = [[part.baseline for part in first], *([part.other for part in parts] for parts in by_arm.values())]
    values = np.array(columns).T
    shown = np.log10(np.maximum(values, SMALLEST_DRAWN)) if values.max() > LOG_FROM * values.min() else values
    axes.imshow(shown, aspect="auto", cmap="cividis")
    axes.set_xticks(range(len(names)), [wrapped(name, 22) for name in names])
    axes.set_yticks(range(len(labels)), labels)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    middle = (float(shown.min()) + float(shown.max())) / 2
    for (row, column), value in np.ndenumerate(values):
        ink = "#000000" if shown[row, column] > middle else "#FFFFFF"
        axes.text(column, row, number(float(value)), ha="center", va="center", color=ink, fontsize=10)
    return figure
