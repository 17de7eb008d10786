"""What more known tokens buy: captured mass and share of the exact KL against bytes and seconds, for each k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from harness.compare.tables import Table
from harness.report import style
from harness.report.estimators import Column, reference
from harness.report.numbers import count, number, percent
from harness.report.style import LIGHT, Theme, marker


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run of a given ``k``; what is not known is None. ``seconds`` and ``wire_bytes`` are of the whole run."""

    way: str
    k: int
    mass: float
    bound: float
    exact: float | None
    estimate: float | None
    wire_bytes: int | None
    seconds: float | None
    positions: int

    @property
    def share(self) -> float | None:
        """The bound over the exact KL."""
        return self.bound / self.exact if self.exact else None


def points_of(columns: Sequence[Column]) -> list[Point]:
    """The lower bounds that say their k, by way and k."""
    against = reference(columns)
    found = []
    for c in columns:
        m = c.run.m
        mass = m.summary.get("captured_teacher_mass_mean")
        if c.kind != "lower bound" or "k" not in m.scoring or mass is None:
            continue
        point = Point(
            way=str(m.scoring.get("way", "top-k")),
            k=int(m.scoring["k"]),
            mass=mass,
            bound=c.kl,
            exact=against.kl if against else None,
            estimate=m.summary.get("kl_tail_estimate_mean"),
            wire_bytes=c.run.wire_bytes,
            seconds=c.run.seconds,
            positions=m.positions,
        )
        found.append(point)
    return sorted(found, key=lambda p: (p.way, p.k))


def k_table(points: Sequence[Point]) -> Table:
    """One line for each way and k."""
    rows = [
        (
            f"{p.way}, k = {p.k}",
            percent(p.mass),
            number(p.bound, 5),
            percent(p.share),
            number(p.estimate, 5) if p.estimate is not None else "",
            count(p.wire_bytes),
            number(p.wire_bytes / p.positions) if p.wire_bytes is not None else number(None),
            number(p.seconds),
        )
        for p in points
    ]
    header = ("", "teacher mass", "lower bound", "bound / exact", "estimate", "bytes", "bytes a position", "seconds")
    return Table("Known tokens and what they cost", header, rows)


# ---- the picture -----------------------------------------------------------------------------------------------------


def k_figure(points: Sequence[Point], theme: Theme = LIGHT) -> Figure:
    """Left: captured teacher mass and bound / exact over k. Right: bytes a position and seconds over k."""
    figure = style.new_figure(4.4)
    left, bytes_axes, seconds_axes = figure.subplots(1, 3, gridspec_kw={"width_ratios": [5, 3, 3]})
    left.set_title("What is known")
    left.set_ylabel("%")
    ways = sorted({p.way for p in points})
    for index, way in enumerate(ways):
        mine = [p for p in points if p.way == way]
        suffix = f" ({way})" if len(ways) > 1 else ""
        _line(left, mine, [100 * p.mass for p in mine], f"captured teacher mass{suffix}", 2 * index, theme)
        shares = [None if p.share is None else 100 * p.share for p in mine]
        _line(left, mine, shares, f"lower bound / exact KL{suffix}", 2 * index + 1, theme)
        per_position = [None if p.wire_bytes is None else p.wire_bytes / p.positions / 1000 for p in mine]
        _line(bytes_axes, mine, per_position, way, 2 * index, theme)
        _line(seconds_axes, mine, [p.seconds for p in mine], way, 2 * index, theme)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2)
    _cost(bytes_axes, "On the wire", "kB a position", theme)
    _cost(seconds_axes, "Time of the run", "seconds", theme)
    for axes in (left, bytes_axes, seconds_axes):
        _k_axis(axes, sorted({p.k for p in points}))
    without = "" if any(p.exact for p in points) else " No exact KL was given to hold the bounds against."
    style.note(figure, f"k: tokens asked for at each position, log scale.{without}", theme)
    return figure


def _line(
    axes: Axes, points: Sequence[Point], values: Sequence[float | None], label: str, index: int, theme: Theme
) -> None:
    drawn = [(p.k, value) for p, value in zip(points, values, strict=True) if value is not None]
    if drawn:
        x, y = zip(*drawn, strict=True)
        axes.plot(x, y, marker=marker(index), color=theme.colour(index), linewidth=1.6, markersize=7, label=label)


def _cost(axes: Axes, title: str, label: str, theme: Theme) -> None:
    axes.set_title(title)
    if not axes.lines:
        style.empty(axes, "not known", theme)
        return
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    if len(axes.lines) > 1:
        axes.legend(loc="upper left")


def _k_axis(axes: Axes, ks: Sequence[int]) -> None:
    if not axes.lines:
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([float(k) for k in ks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([str(k) for k in ks])
    axes.set_xlabel("k")
