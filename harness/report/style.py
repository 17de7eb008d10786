"""How every picture looks: Okabe-Ito colours, two themes, 900 px wide at double density, the same bytes each time."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from harness.store import write_bytes

WIDTH_INCHES = 9.0
DPI = 200
#: Okabe-Ito; each theme uses first what stands out on its paper. Black or white is the theme's ink.
BLUE, VERMILLION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW = "#E69F00", "#56B4E9", "#F0E442"
#: Beyond the colours, the marker tells domains or candidates apart (and always helps without colour).
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h", "p")


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of one background."""

    name: Literal["light", "dark"]
    paper: str
    ink: str
    muted: str
    grid: str
    colours: tuple[str, ...]

    def colour(self, index: int) -> str:
        """The colour of series ``index``; colours repeat after seven, markers do not."""
        return self.colours[index % len(self.colours)]

    @property
    def rc(self) -> Any:
        """The matplotlib parameters of the theme."""
        return {
            "font.family": "DejaVu Sans",
            "font.size": 10.5,
            "axes.titlesize": 12.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.titlepad": 10,
            "axes.labelsize": 10.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "grid.color": self.grid,
            "grid.linewidth": 0.8,
            "legend.frameon": False,
            "legend.fontsize": 9.5,
            "figure.facecolor": self.paper,
            "axes.facecolor": self.paper,
            "savefig.facecolor": self.paper,
            "text.color": self.ink,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.ink,
            "xtick.color": self.ink,
            "ytick.color": self.ink,
            "xtick.labelsize": 9.5,
            "ytick.labelsize": 9.5,
            "svg.hashsalt": "exl3-fidelity",
            "svg.fonttype": "path",
            "path.simplify": True,
        }


LIGHT = Theme(
    name="light",
    paper="#FFFFFF",
    ink="#1A1A1A",
    muted="#767676",
    grid="#E4E4E4",
    colours=(BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, YELLOW),
)
DARK = Theme(
    name="dark",
    paper="#0D1117",
    ink="#E6EDF3",
    muted="#8B949E",
    grid="#262C36",
    colours=(SKY, ORANGE, GREEN, PURPLE, YELLOW, VERMILLION, BLUE),
)


def marker(index: int) -> str:
    """The marker of series ``index``."""
    return MARKERS[index % len(MARKERS)]


@contextmanager
def drawing(theme: Theme) -> Iterator[None]:
    """Draw with the theme's parameters and nothing that a user's matplotlibrc says."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(theme.rc)
        yield


def new_figure(height: float = 4.2) -> Figure:
    """An empty figure of card width, without pyplot and its global state."""
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def note(figure: Figure, text: str, theme: Theme) -> None:
    """A small line under the axes: what was left out, and how the picture is to be read."""
    if text:
        figure.supxlabel(text, fontsize=9, color=theme.muted, x=0.01, ha="left")


def empty(axes: Axes, text: str, theme: Theme) -> None:
    """Say in the axes why there is nothing to draw."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=theme.muted, fontsize=12)


def rendered(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The figure as PNG or SVG, without dates or versions, so that the same numbers give the same bytes."""
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
    figure.savefig(buffer, format=kind, metadata=metadata)
    return buffer.getvalue()


def save_all(figure: Figure, files: Sequence[Path]) -> None:
    """Write the figure as the suffixes of ``files`` say; it is laid out once, for the first."""
    for file in files:
        write_bytes(file, rendered(figure, "svg" if file.suffix == ".svg" else "png"))
        figure.set_layout_engine("none")
