"""What an HTML report is made of; plain text and data URIs only."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from matplotlib.figure import Figure

from harness.report import style
from harness.report.basis import Basis
from harness.report.plots import Picture
from harness.report.style import DARK, LIGHT, Theme

#: A cell longer than this is read, not compared with its neighbours.
LONG = 26


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    @property
    def text_columns(self) -> set[int]:
        """Columns that hold sentences or names; they are set from the left."""
        return {at for at in range(len(self.header)) if any(len(row[at]) > LONG for row in self.rows)} | {0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A picture as data URIs, for a light and a dark page."""

    title: str
    caption: str
    light: str
    dark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """One position: its heading, figures, and the text or ids before it."""

    heading: str
    figures: Sequence[tuple[str, str]]
    context: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    title: str
    lead: str
    labels: Sequence[str]
    tables: Sequence[Table]
    pictures: Sequence[Shown]
    details: Sequence[Table]
    worst: Sequence[Expanded]
    how: Sequence[str]
    cannot: Sequence[str]


def data_uri(draw: Callable[[Theme], Figure], theme: Theme) -> str:
    """A picture as a PNG data URI."""
    with style.drawing(theme):
        return "data:image/png;base64," + base64.b64encode(style.rendered(draw(theme), "png")).decode("ascii")


def shown(picture: Picture, draw: Callable[[Theme], Figure]) -> Shown:
    """A picture drawn for both pages."""
    light, dark = data_uri(draw, LIGHT), data_uri(draw, DARK)
    return Shown(title=picture.title, caption=picture.caption, light=light, dark=dark)


def labels_of(basis: Basis, label: str) -> list[str]:
    """The small marks under the title: partial, exploratory, lower bound, lane."""
    exploratory = ["exploratory"] if basis.registration.startswith("Exploratory") else ["registered"]
    bound = ["lower bound"] if basis.estimator == "lower_bound" else []
    return [*([label] if label else []), *exploratory, *bound, f"{basis.lane} lane"]


def context_text(ids: Sequence[int], decoder: Decoder | None) -> str:
    """The text before a position, or its token ids where no tokenizer is at hand."""
    if decoder is None:
        return "token ids before it: " + (" ".join(str(token) for token in ids) or "none")
    return decoder.decode(list(ids))
