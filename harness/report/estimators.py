"""Several measurements of one candidate side by side: one column an estimator, what they share compared.

An exact KL, a lower bound of it and an unbiased estimate of it are three numbers, and each has its own column. NLL and
top-1 choices are exact in all of them, so they say whether the ways agree: the same weights through two engines differ
by the engines' own arithmetic, and by nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from harness.compare.load import Arm, load_arms
from harness.digest import json_digest
from harness.errors import IncomparableError, UsageError
from harness.measure.receipt import Interval, Measurement
from harness.numbers import MISSING, count, number, percent, with_interval
from harness.report import style
from harness.report.basis import floor_text
from harness.report.style import LIGHT, Theme, marker
from harness.report.table import Table, cell
from harness.scoring.bounds import upper_bound_of_range
from harness.store import slug, write_text

Kind = Literal["exact", "lower bound", "estimate"]
ESTIMATORS_FILE, PICTURE = "estimators.md", "known-tokens"
#: A bound above the exact KL by more nats than this at a position is counted.
ABOVE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measurement with what it cost; ``wire_bytes`` and ``seconds`` are None where that is not known."""

    arm: Arm
    wire_bytes: int | None
    seconds: float | None

    @property
    def m(self) -> Measurement:
        return self.arm.measurement

    @property
    def columns(self) -> dict[str, np.ndarray]:
        assert self.arm.columns is not None  # `load_runs` refuses runs without positions
        return self.arm.columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One estimator's number of one run."""

    run: Run
    kind: Kind
    kl: float
    interval: Interval | None

    @property
    def header(self) -> str:
        """``lower bound (served, top-k, k = 64)``."""
        m = self.run.m
        asked = [f"{m.scoring['way']}", f"k = {m.scoring['k']}"] if "way" in m.scoring else []
        return f"{self.kind} ({', '.join([m.lane, m.candidate.engine, *asked])})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimators:
    """The columns of the table, and the points of the picture (none where no two runs differ in k)."""

    columns: list[Column]
    points: list[KnownTokens]
    tail_range: float | None = None

    @property
    def tables(self) -> list[Table]:
        return [table(self.columns, self.tail_range), *([k_table(self.points)] if self.points else [])]

    @property
    def sentences(self) -> list[str]:
        return sentences(self.columns, self.tail_range)


def estimators(runs: Sequence[Path], *, tail_range: float | None = None) -> Estimators:
    """Read runs of one candidate; see `harness.report.estimators.load_runs` for what is refused.

    Args:
        tail_range: assume that ``ln(p/q)`` varies by at most so much outside the known tokens, for upper bounds.
    """
    if tail_range is not None and not (0 <= tail_range < math.inf):
        raise UsageError(f"--tail-range {tail_range} is no range", "give a number of nats, such as 2")
    columns = columns_of(load_runs(runs))
    points = points_of(columns)
    shown = points if len({p.k for p in points}) > 1 else []
    return Estimators(columns=columns, points=shown, tail_range=tail_range)


def default_folder(found: Estimators) -> Path:
    """``reports/estimators--<candidate>--1a2b3c4d``."""
    key = json_digest(sorted({c.run.m.key for c in found.columns}))
    return Path("reports") / f"estimators--{slug(found.columns[0].run.m.name)[:60]}--{key[:8]}"


def write(folder: Path, found: Estimators) -> Path:
    """Write estimators.md and, where runs differ in k, the picture as PNG and SVG; returns the report's path."""
    m = found.columns[0].run.m
    blocks = [f"# Estimators of {cell(m.candidate.model)} against {cell(m.teacher.described)}"]
    blocks += [
        f"Panel {cell(m.panel.name)}, SHA-256 `{m.panel.sha256}`, {m.rows_measured} of {m.rows_planned} rows. "
        f"`{m.direction}`."
    ]
    blocks += [one.section for one in found.tables]
    if found.points:
        with style.drawing(style.LIGHT):
            style.save_all(k_figure(found.points), [folder / f"{PICTURE}.png", folder / f"{PICTURE}.svg"])
        blocks += [f"![Known tokens and what they cost]({PICTURE}.png)"]
    blocks += ["\n".join(f"- {text}" for text in found.sentences)]
    write_text(folder / ESTIMATORS_FILE, "\n\n".join(blocks) + "\n")
    return folder / ESTIMATORS_FILE


# ---- its columns -----------------------------------------------------------------------------------------------------


def load_runs(folders: Sequence[Path]) -> list[Run]:
    """Read run folders of one candidate and refuse what does not belong in one table.

    Raises:
        IncomparableError: another panel, teacher or row, or a receipt without positions.
    """
    runs = [_run(arm, folder) for arm, folder in zip(load_arms(folders), folders, strict=True)]
    for run in runs:
        if run.arm.columns is None:
            raise IncomparableError(f"{run.arm.name} has no positions", "measure it again, or leave it out")
        _require_one_question(runs[0], run)
    return runs


def _run(arm: Arm, folder: Path) -> Run:
    file = (folder if folder.is_dir() else folder.parent) / "run.json"
    told: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return Run(arm=arm, wire_bytes=told.get("wire_bytes"), seconds=told.get("seconds"))


def _require_one_question(base: Run, other: Run) -> None:
    """One panel, one teacher, the same rows; the engine and what its answers hold is what differs."""
    a, b = base.m, other.m
    facts = [
        ("panel", a.panel.sha256, b.panel.sha256, "measure all on one panel"),
        ("tokenizer", a.panel.tokenizer_sha256, b.panel.tokenizer_sha256, "measure all on one panel"),
        ("direction", a.direction, b.direction, "measure again with this version"),
        ("teacher (weights)", a.teacher.weights_sha256, b.teacher.weights_sha256, "measure all against one teacher"),
        ("teacher (config)", a.teacher.config_sha256, b.teacher.config_sha256, "measure all against one teacher"),
        ("teacher (head)", a.teacher.head_sha256, b.teacher.head_sha256, "measure all against one teacher"),
        ("rows", [r.row for r in a.per_row], [r.row for r in b.per_row], "measure the same rows in all"),
        ("teacher capture", a.teacher.capture_sha256, b.teacher.capture_sha256, "measure all against one capture"),
    ]
    for what, ours, theirs, repair in facts:
        if ours != theirs:
            raise IncomparableError(
                f"{base.arm.name} and {other.arm.name} do not have the same {what}: "
                f"{_short(ours)} and {_short(theirs)}",
                repair,
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:16]}..."


def columns_of(runs: Sequence[Run]) -> list[Column]:
    """One column for each estimator of each run: exact ones first, then bounds, then estimates."""
    found = []
    for run in runs:
        m = run.m
        kind: Kind = "exact" if m.estimator == "exact" else "lower bound"
        found.append(Column(run=run, kind=kind, kl=m.summary["kl_mean"], interval=m.intervals.get("kl_mean")))
        estimate = m.summary.get("kl_tail_estimate_mean")
        if estimate is not None:
            interval = m.intervals.get("kl_tail_estimate_mean")
            found.append(Column(run=run, kind="estimate", kl=estimate, interval=interval))
    order = {"exact": 0, "lower bound": 1, "estimate": 2}
    return sorted(found, key=lambda column: order[column.kind])


def reference(columns: Sequence[Column]) -> Column | None:
    """The exact column that bounds and estimates are held against: one of their own lane where there is one."""
    exact = [column for column in columns if column.kind == "exact"]
    return next((column for column in exact if column.run.m.lane == "served"), exact[0] if exact else None)


# ---- the table -------------------------------------------------------------------------------------------------------


def table(columns: Sequence[Column], log_range: float | None = None) -> Table:
    """All estimators of one candidate, a column each; with ``log_range``, upper bounds under that assumption."""
    against = reference(columns)
    lines: list[tuple[str, list[str]]] = [
        ("KL(teacher‖candidate) mean, nats", [with_interval(c.kl, c.interval) for c in columns]),
        ("standard error of drawing the tokens", [_drawing(c) for c in columns]),
        (f"at most, if ln(p/q) varies by {number(log_range)} outside", [_most(c, log_range) for c in columns]),
        ("captured teacher mass, mean", [_mass(c) for c in columns]),
        ("share of the exact KL", [_share(c, against) for c in columns]),
        ("exact KL less this, nats", [_gap(c, against) for c in columns]),
        ("the same over the mass that is not known", [_tail(c, against) for c in columns]),
        ("positions where the bound exceeds the exact KL", [_above(c, against) for c in columns]),
        ("NLL of the candidate, nats", [number(c.run.m.summary["nll_candidate"], 5) for c in columns]),
        ("largest NLL difference at a position", [_largest_nll(c, against) for c in columns]),
        ("top-1 agreement with the teacher", [percent(c.run.m.summary["top1_agreement"]) for c in columns]),
        ("same top-1 choice", [_same_choice(c, against) for c in columns]),
        ("floor of the lane", [floor_text(c.run.m) or "not measured" for c in columns]),
        ("positions", [count(c.run.m.positions) for c in columns]),
        ("bytes on the wire", [count(c.run.wire_bytes) for c in columns]),
        ("seconds", [number(c.run.seconds) for c in columns]),
    ]
    names = [c.header for c in columns]
    header = (
        "",
        *(f"{n} [{c.run.arm.name}]" if names.count(n) > 1 else n for n, c in zip(names, columns, strict=True)),
    )
    return Table(title_of(columns), header, [(name, *cells) for name, cells in lines if set(cells) != {MISSING}])


def title_of(columns: Sequence[Column]) -> str:
    """``One candidate, 3 estimators``, with the panel."""
    m = columns[0].run.m
    return f"{m.candidate.model} against {m.teacher.described} on {m.panel.name}: {len(columns)} numbers, a column each"


def _drawing(c: Column) -> str:
    return number(c.run.m.summary["kl_tail_estimate_se"]) if c.kind == "estimate" else MISSING


def _most(c: Column, log_range: float | None) -> str:
    """The upper bound of the whole KL under an assumed range of ln(p/q) outside the known tokens."""
    mass = c.run.m.summary.get("captured_teacher_mass_mean")
    if log_range is None or c.kind != "lower bound" or mass is None:
        return MISSING
    return number(float(upper_bound_of_range(np.array(c.kl), np.array(1.0 - mass), log_range)))


def _mass(c: Column) -> str:
    return percent(c.run.m.summary.get("captured_teacher_mass_mean")) if c.kind == "lower bound" else MISSING


def _share(c: Column, against: Column | None) -> str:
    return MISSING if against is None or c.kind == "exact" or not against.kl else percent(c.kl / against.kl)


def _gap(c: Column, against: Column | None) -> str:
    return MISSING if against is None or c is against else number(against.kl - c.kl)


def _tail(c: Column, against: Column | None) -> str:
    """The divergence of the tails that the gap stands for, nats: gap = uncovered mass times it."""
    mass = c.run.m.summary.get("captured_teacher_mass_mean")
    if against is None or c.kind != "lower bound" or mass is None or mass >= 1:
        return MISSING
    return number((against.kl - c.kl) / (1 - mass))


def _above(c: Column, against: Column | None) -> str:
    if against is None or c.kind != "lower bound":
        return MISSING
    return count(int((c.run.columns["kl"] > against.run.columns["kl"] + ABOVE).sum()))


def _largest_nll(c: Column, against: Column | None) -> str:
    if against is None or c.run is against.run:
        return MISSING
    difference = np.abs(c.run.columns["nll_candidate"] - against.run.columns["nll_candidate"])
    return number(float(difference.max()))


def _same_choice(c: Column, against: Column | None) -> str:
    """The share of positions with one choice, of those where both are known."""
    if against is None or c.run is against.run:
        return MISSING
    ours, theirs = c.run.columns["top1_candidate"], against.run.columns["top1_candidate"]
    known = (ours >= 0) & (theirs >= 0)
    shown = percent(float((ours == theirs)[known].mean())) if known.any() else MISSING
    return shown if known.all() else f"{shown} of {count(int(known.sum()))}"


def sentences(columns: Sequence[Column], log_range: float | None = None) -> list[str]:
    """What must be read beside the table."""
    against, kinds = reference(columns), {c.kind for c in columns}
    out = ["An exact KL, a lower bound of it and an estimate of it are different numbers: none is ranked by another's."]
    if against and "lower bound" in kinds:
        out.append(
            f"Bounds are held against `{against.header}`. A bound lies below the exact KL of the same engine; "
            "another engine's arithmetic may put it on either side."
        )
    if log_range is None and "lower bound" in kinds:
        out.append("No upper bound follows from known tokens alone: an unseen token may have next to no probability.")
    elif "lower bound" in kinds:
        out.append(
            f"The upper bounds hold only if ln(p/q) varies by at most {number(log_range)} over the tokens that are not "
            "known: an assumption of the reader, not a measurement."
        )
    digests = {c.run.m.candidate.weights_sha256 for c in columns}
    if len(digests) > 1:
        shown = ", ".join(f"`{digest[:12]}`" for digest in sorted(digests))
        out.append(
            f"The files behind these numbers differ ({shown}): one is to be the other's weights in another form."
        )
    if any(c.run.m.lane == "served" and floor_text(c.run.m) is None for c in columns):
        out.append("The floor of the served lane was not measured: some of its KL may be the engine's own arithmetic.")
    return out


# ---- what more known tokens buy: captured mass and share of the exact KL against bytes and seconds, for each k -------


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTokens:
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


def points_of(columns: Sequence[Column]) -> list[KnownTokens]:
    """The lower bounds that say their k, by way and k."""
    against = reference(columns)
    found = []
    for c in columns:
        m = c.run.m
        mass = m.summary.get("captured_teacher_mass_mean")
        if c.kind != "lower bound" or "k" not in m.scoring or mass is None:
            continue
        point = KnownTokens(
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


def k_table(points: Sequence[KnownTokens]) -> Table:
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


def k_figure(points: Sequence[KnownTokens], theme: Theme = LIGHT) -> Figure:
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
    axes: Axes, points: Sequence[KnownTokens], values: Sequence[float | None], label: str, index: int, theme: Theme
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
