"""``fidelity estimators``: exact, lower bound and estimate of one candidate, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def estimators(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Run folders of one candidate.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write; default: under reports/.")] = None,
    tail_range: Annotated[
        float | None,
        typer.Option(help="Upper bounds: assume that ln(p/q) varies by at most so much outside the known tokens."),
    ] = None,
) -> None:
    """Show several measurements of one candidate on one panel, an estimator a column, and what k costs."""
    from rich.console import Console

    from harness.cli.compare import as_rich
    from harness.report.estimators_write import default_folder, write
    from harness.report.estimators_write import estimators as read

    found = read(runs, tail_range=tail_range)
    report = write(out or default_folder(found), found)
    console = Console()
    for table in found.tables:
        console.print(as_rich(table))
    for text in found.sentences:
        console.print(f"note: {text}", highlight=False, markup=False)
    console.print(f"report: {report}", highlight=False)
