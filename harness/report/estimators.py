"""Several measurements of one candidate side by side: one column an estimator, what they share compared.

An exact KL, a lower bound of it and an unbiased estimate of it are three numbers, and each has its own column. NLL and
top-1 choices are exact in all of them, so they say whether the ways agree: the same weights through two engines differ
by the engines' own arithmetic, and by nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.compare.load import Arm, load_arms
from harness.compare.tables import Table
from harness.errors import IncomparableError
from harness.receipt import Interval, Measurement
from harness.report.bound import floor_text
from harness.report.numbers import MISSING, count, number, percent, with_interval
from harness.scoring.bounds import upper_bound_of_range

Kind = Literal["exact", "lower bound", "estimate"]
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
    return f"{m.candidate.model} against {m.teacher.model} on {m.panel.name}: {len(columns)} numbers, a column each"


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
