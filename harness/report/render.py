"""The Jinja environment of all templates: strict about missing names, with the number filters of this package."""

from __future__ import annotations

from typing import Any

import jinja2

from harness import numbers
from harness.report.table import cell, code


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
