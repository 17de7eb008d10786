"""The pictures of a card: drawn light and dark, as PNG and SVG, from the receipts of one table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from harness.compare.model import ArmResult, Comparison
from harness.report import plots, style
from harness.report.card import FOLDER, Part
from harness.report.comparison_plots import (
    Point,
    distributions,
    domain_heat,
    forest,
    kl_against_size,
    lines_by_slice,
)
from harness.report.plots import Picture
from harness.report.style import DARK, LIGHT, Theme
from harness.report.tables import load_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A picture and how to draw it in a theme; ``draw`` is None where its data are not here but its file may be."""

    picture: Picture
    draw: Callable[[Theme], Figure] | None


def drawings(part: Part, subject: str) -> Iterator[Drawing]:
    """All pictures that the receipts of one table give, in the order of the card."""
    if part.comparison is None:
        yield from _of_run(part)
        return
    c = part.comparison
    pair = next(p for p in c.pairs if p.other == subject)
    points = [_point(arm) for arm in c.arms]
    if sum(point.size is not None for point in points) > 1:
        yield _drawing("kl_against_size", "KL against size", "Mean KL over bits per weight.", lambda t: _size(c, t))
    caption = f"Difference of mean KL on each context, {pair.other} minus {pair.baseline}; left of 0 is better."
    yield _drawing("by_row", "KL difference by row", caption, lambda t: forest(pair, estimator=c.estimator, theme=t))
    if len(pair.domains) > 1:
        yield _drawing(
            "by_domain", "KL by domain", "Mean KL by domain and candidate.", lambda t: domain_heat(c, theme=t)
        )
    yield from _of_positions(part, c)


def _of_positions(part: Part, c: Comparison) -> Iterator[Drawing]:
    if c.paired_on.basis != "positions":
        return
    here = bool(part.runs) and all((run / "positions.parquet").is_file() for run in part.runs)
    kl = {a.name: run for a, run in zip(c.arms, part.runs, strict=True)} if here else {}
    text = "Per-position KL on a log axis; exact zeros and negatives stand apart, dashed lines are the means."
    draw = (lambda t: distributions(_kl(kl), estimator=c.estimator, theme=t)) if here else None
    yield _drawing("distributions", "Distribution of per-position KL", text, draw)
    if c.pairs[0].deciles:
        text = "Mean KL in each tenth of the row."
        yield _drawing("by_position", "KL by position", text, lambda t: lines_by_slice(c, "deciles", theme=t))
    if c.pairs[0].confidence:
        text = "Mean KL by how sure the teacher is."
        draw = lambda t: lines_by_slice(c, "confidence", theme=t)  # noqa: E731
        yield _drawing("by_confidence", "KL by the teacher's confidence", text, draw)


def _kl(runs: dict[str, Path]) -> dict[str, np.ndarray]:
    return {name: load_positions(run)["kl"].to_numpy() for name, run in runs.items()}


def _of_run(part: Part) -> Iterator[Drawing]:
    """The four pictures of a single measurement."""
    m = part.measurement
    assert m is not None
    if m.row_level_only:
        return
    here = bool(part.runs) and (part.runs[0] / "positions.parquet").is_file()
    frame = load_positions(part.runs[0]) if here else None
    for name, draw, title, caption in plots.PICTURES:

        def drawn(theme: Theme, draw: plots.Draw = draw) -> Figure:
            assert frame is not None
            return draw(frame, m, theme)

        yield _drawing(name, title, caption, drawn if here else None)


def _drawing(name: str, title: str, caption: str, draw: Callable[[Theme], Figure] | None) -> Drawing:
    return Drawing(picture=Picture(file=f"{FOLDER}/{name}.png", title=title, caption=caption), draw=draw)


def _point(arm: ArmResult) -> Point:
    kl = arm.metrics["kl_mean"]
    return Point(name=arm.name, size=arm.candidate.bits_per_weight, kl=kl.estimate, low=kl.low, high=kl.high)


def _size(c: Comparison, theme: Theme) -> Figure:
    points = [_point(arm) for arm in c.arms]
    floor = None
    for reference in c.references:
        figure = reference.kl
        point = Point(
            name=reference.name,
            size=None,
            kl=figure.estimate,
            low=figure.low,
            high=figure.high,
            anchor=reference.kind == "anchor",
        )
        if reference.kind == "floor":
            floor = point
        else:
            points.append(point)
    label = "bits per weight, counted in the tensors"
    return kl_against_size(points, x_label=label, estimator=c.estimator, floor=floor, theme=theme)


def shown(part: Part, subject: str, folder: Path) -> list[Picture]:
    """The pictures a card links: those that can be drawn now, and those that lie there already."""
    return [d.picture for d in drawings(part, subject) if d.draw is not None or (folder / d.picture.file).is_file()]


def draw_all(part: Part, subject: str, folder: Path) -> None:
    """Draw every picture of the card under ``folder``: PNG and SVG, light and dark."""
    for drawing in drawings(part, subject):
        if drawing.draw is None:
            continue
        for theme in (LIGHT, DARK):
            stem = (folder / drawing.picture.file).with_suffix("")
            name = stem.name if theme is LIGHT else f"{stem.name}-{theme.name}"
            with style.drawing(theme):
                style.save_all(drawing.draw(theme), [stem.with_name(name + suffix) for suffix in (".png", ".svg")])
