"""estimators.md and its picture: several estimators of one candidate, and what more known tokens buy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.compare.report import as_markdown
from harness.compare.tables import Table
from harness.digest import json_digest
from harness.errors import UsageError
from harness.interop.g4 import slug
from harness.report import style
from harness.report.estimators import Column, columns_of, load_runs, sentences, table
from harness.report.estimators_k import Point, k_figure, k_table, points_of
from harness.report.render import cell
from harness.store import write_text

FILE = "estimators.md"
PICTURE = "known-tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimators:
    """The columns of the table, and the points of the picture (none where no two runs differ in k)."""

    columns: list[Column]
    points: list[Point]
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
    blocks = [f"# Estimators of {cell(m.candidate.model)} against {cell(m.teacher.model)}"]
    blocks += [
        f"Panel {cell(m.panel.name)}, SHA-256 `{m.panel.sha256}`, {m.rows_measured} of {m.rows_planned} rows. "
        f"`{m.direction}`."
    ]
    blocks += [as_markdown(one) for one in found.tables]
    if found.points:
        with style.drawing(style.LIGHT):
            style.save_all(k_figure(found.points), [folder / f"{PICTURE}.png", folder / f"{PICTURE}.svg"])
        blocks += [f"![Known tokens and what they cost]({PICTURE}.png)"]
    blocks += ["\n".join(f"- {text}" for text in found.sentences)]
    write_text(folder / FILE, "\n\n".join(blocks) + "\n")
    return folder / FILE
