"""``fidelity bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from harness.bench import Figure, Section


def bench(
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="logits, head, accuracy, exl3, store, memory, streaming, bootstrap or tasks; may be repeated."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Tiny sizes: shows that it runs, its figures mean nothing.")] = False,
    out: Annotated[Path, typer.Option(help="Where to write the figures as JSON.")] = Path("reports/bench.json"),
) -> None:
    """Measure kernels, EXL3 decoding, the capture store and memory, with targets beside the values (minutes)."""
    from rich.console import Console

    from harness.bench import FULL, TINY, bench_json, run_bench
    from harness.bench.run import processor, vectors
    from harness.store import write_json

    sizes = TINY if quick else FULL
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    console.print(f"{processor()}: {vectors()}", highlight=False)
    sections: list[Section] = []
    for section in run_bench(sizes, only or ()):
        sections.append(section)
        write_json(out, bench_json(sections, sizes))
        console.print(_table(section))
    figures = [figure for section in sections for figure in section.figures if figure.met is not None]
    met = sum(bool(figure.met) for figure in figures)
    told = "tiny sizes: targets mean nothing" if quick else f"{met} of {len(figures)} targets met"
    console.print(f"{told}; figures in {out}", highlight=False)


def coverage(
    replicates: Annotated[int, typer.Option(min=10, help="Simulated panels of each kind and size.")] = 2000,
    families: Annotated[int, typer.Option(min=10, help="Simulated families of five candidates.")] = 2000,
) -> None:
    """How often intervals cover and families of verdicts err, on simulated documents (minutes)."""
    from harness.bench.coverage import markdown, simulate

    typer.echo(markdown(list(simulate(replicates, families))), nl=False)


def _table(section: Section):  # type: ignore[no-untyped-def]
    from rich.table import Table

    table = Table(title=f"{section.name} ({section.seconds:.0f} s)", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    table.add_column("unit")
    table.add_column("target")
    table.add_column("")
    for figure in section.figures:
        table.add_row(figure.name, f"{figure.value:,.4g}", figure.unit, figure.target, _verdict(figure))
    return table


def _verdict(figure: Figure) -> str:
    marks = {None: "", True: "[green]met[/green]", False: "[red]not met[/red]"}
    return " ".join(part for part in (marks[figure.met], f"[dim]{figure.note}[/dim]" if figure.note else "") if part)
