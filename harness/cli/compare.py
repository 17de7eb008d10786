"""``fidelity compare``: is B better than A?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from harness.compare import Comparison
    from harness.compare.tables import Table


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="A B [C ...]", help="Run folders; A is the baseline.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write; default: under reports/.")] = None,
    panel: Annotated[Path | None, typer.Option(help="Panel folder, for its registration and tokenizer.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Decode the worst positions with this: folder, GGUF, Hub id or package:NAME.")
    ] = None,
    floor: Annotated[Path | None, typer.Option(help="Run folder of the teacher against itself.")] = None,
    anchor: Annotated[list[Path] | None, typer.Option(help="Run folder of an anchor; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print comparison.json instead of tables.")] = False,
) -> None:
    """Compare measurements on one panel: paired differences, verdicts, and where the difference lies."""
    from harness.compare import compare as run
    from harness.compare.report import write

    found = run(runs, panel=panel, floor=floor, anchors=anchor or [])
    if tokenizer or panel:
        found = _decoded(found, tokenizer, panel)
    folder = out or Path("reports") / default_name(found)
    report = write(folder, found)
    if as_json:
        typer.echo((folder / "comparison.json").read_text(), nl=False)
    else:
        _show(found, report)
    if any(bar.met is False for bar in found.bars):
        raise typer.Exit(1)


def default_name(comparison: Comparison) -> str:
    """``compare--B--vs--A--1a2b3c4d``."""
    from harness.interop.g4 import slug

    names = [slug(arm.name)[:40] for arm in comparison.arms]
    return f"compare--{'--'.join(names[1:3])}--vs--{names[0]}--{comparison.key[:8]}"


def _decoded(comparison: Comparison, spec: str | None, panel: Path | None) -> Comparison:
    """Worst positions with their text; a recipe's own tokenizer is used when it is the one of the seal."""
    from harness.compare.texts import check_is_the_panels, with_texts
    from harness.panel import load_recipe, load_tokenizer, tokenizer_digest

    if spec is None and panel is not None:
        spec = load_recipe(panel).tokenizer
    loaded = load_tokenizer(str(spec))
    check_is_the_panels(comparison, tokenizer_digest(loaded))
    return with_texts(comparison, loaded)


def _show(comparison: Comparison, report: Path) -> None:
    from rich.console import Console

    from harness.compare import tables
    from harness.compare.report import status_text
    from harness.compare.words import headline, primary_name

    console = Console()
    for pair in comparison.pairs:
        console.print(_rich(tables.summary(comparison, pair)))
    console.print(_rich(tables.arms(comparison)))
    if comparison.bars:
        console.print(_rich(tables.bars(comparison)))
    for pair in comparison.pairs:
        console.print(f"[bold]{headline(comparison, pair)}[/bold]", highlight=False)
        console.print(f"  for a card: {primary_name(comparison, pair)} {pair.sentence}", highlight=False)
    console.print(status_text(comparison), highlight=False)
    for text in comparison.deviations:
        console.print(f"[yellow]deviation[/yellow]: {text}", highlight=False)
    for text in comparison.warnings:
        console.print(f"note: {text}", highlight=False)
    console.print(f"report: {report}", highlight=False)


def _rich(table: Table) -> RichTable:
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(title=table.title, title_justify="left")
    for number, name in enumerate(table.header):
        shown.add_column(Text(name), justify="right" if number else "left")
    for row in table.rows:
        shown.add_row(*(Text(text) for text in row))
    return shown
