"""One table, shown in the terminal, in Markdown and in HTML, and the Jinja environment of the templates around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jinja2

from harness import numbers

if TYPE_CHECKING:
    from rich.table import Table as RichTable

#: A cell longer than this is read, not compared with its neighbours.
LONG = 26


def cell(text: object) -> str:
    """Text that cannot break a Markdown table or start HTML."""
    flat = " ".join(str(text).split())
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def code(text: object) -> str:
    """Text as inline code inside a Markdown table."""
    flat = " ".join(str(text).split()).replace("`", "'")
    return "`" + flat.replace("|", "\\|") + "`"


@dataclass(frozen=True, slots=True)
class Table:
    """A title, a header and text cells, in which ``**`` marks what is bold in Markdown.

    ``sides`` has a letter for each column, l or r; without it the first column is set from the left, the others from
    the right. ``verbatim`` cells beside the first column are code in Markdown. ``note`` stands above the table in HTML.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""
    sides: str = ""
    verbatim: bool = False

    @property
    def markdown(self) -> str:
        """A GitHub table without its title."""
        rule = "|" + "".join("---|" if side == "l" else "---:|" for side in self._sides)
        head = "|" + "".join(f" {cell(name)} |" if name else " |" for name in self.header)
        lines = ["|" + "".join(f" {text} |" for text in self._escaped(row)) for row in self.rows]
        return "\n".join([head, rule, *lines])

    @property
    def section(self) -> str:
        """A GitHub table under its title."""
        return f"### {cell(self.title)}\n\n{self.markdown}"

    @property
    def rich(self) -> RichTable:
        """The table for the terminal."""
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = RichTable(title=self.title, title_justify="left")
        for name, side in zip(self.header, self._sides, strict=True):
            shown.add_column(Text(name), justify="left" if side == "l" else "right")
        for row in self.rows:
            shown.add_row(*(Text(text) for text in row))
        return shown

    @property
    def text_columns(self) -> set[int]:
        """Columns that hold sentences or names; HTML sets them from the left."""
        return {at for at in range(len(self.header)) if any(len(row[at]) > LONG for row in self.rows)} | {0}

    def under(self, title: str, header: tuple[str, ...] | None = None) -> Table:
        """The same cells under another title, and under other names of the columns where ``header`` gives them."""
        return replace(self, title=title, header=header or self.header)

    def choose(self, *names: str) -> Table:
        """These columns alone."""
        at = [self.header.index(name) for name in names]
        rows = [tuple(row[i] for i in at) for row in self.rows]
        return replace(self, header=names, rows=rows, sides="".join(self._sides[i] for i in at))

    @property
    def _sides(self) -> str:
        return self.sides or "l" + "r" * (len(self.header) - 1)

    def _escaped(self, row: tuple[str, ...]) -> list[str]:
        return [code(text) if self.verbatim and at else cell(text) for at, text in enumerate(row)]


def environment(*, html: bool = False) -> jinja2.Environment:
    """Templates of ``harness/report/templates``; HTML escapes what it is given, Markdown uses ``cell``."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("harness.report", "templates"),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    names = (
        "number",
        "estimate",
        "bracket",
        "ends",
        "with_interval",
        "signed",
        "percent",
        "percent_ends",
        "count",
        "size",
        "digest",
    )
    env.filters |= {name: getattr(numbers, name) for name in names}
    env.filters |= {"cell": cell, "code": code}
    return env


def render(template: str, **context: Any) -> str:
    """Render one template; a name that the context lacks is an error, never an empty cell."""
    return environment(html=template.endswith(".html.j2")).get_template(template).render(**context)
