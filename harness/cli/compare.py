"""``fidelity compare``: is B better than A? And ``fidelity estimators``: exact, bound and estimate of one candidate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import (
    AnchorsOption,
    DecodeOption,
    FloorOption,
    JsonOption,
    KnownPanelOption,
    OutOption,
    SignOption,
    TailRangeOption,
    sign_receipts,
    written,
)

if TYPE_CHECKING:
    from harness.compare import Comparison
    from harness.compare.task_model import TaskComparisons


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="A B [C ...]", help="Run folders; A is the baseline.", callback=written)
    ],
    out: OutOption = None,
    panel: KnownPanelOption = None,
    tokenizer: DecodeOption = None,
    floor: FloorOption = None,
    anchor: AnchorsOption = None,
    tail_range: TailRangeOption = None,
    teacher_tasks: Annotated[Path | None, typer.Option(help="Task runs alone: the teacher's own task run.")] = None,
    as_json: JsonOption = False,
    sign: SignOption = None,
) -> None:
    """Compare measurements on one panel: paired differences, verdicts, and where the difference lies.

    Task runs of the same weights beside the run folders are compared too; folders of task runs alone as well.
    """
    from harness.compare import compare as run
    from harness.compare.tasks import is_task_run, tasks_of_comparison
    from harness.report.comparison_report import write

    if all(is_task_run(folder) for folder in runs):
        _compare_tasks(runs, teacher_tasks, out, as_json)
        return
    found = run(runs, panel=panel, floor=floor, anchors=anchor or [], tail_range=tail_range)
    if tokenizer or panel:
        found = _decoded(found, tokenizer, panel)
    folder = out or Path("reports") / default_name(found)
    tasks = tasks_of_comparison(found, runs)
    report = write(folder, found, tasks)
    sign_receipts(folder, sign)
    if as_json:
        typer.echo((folder / "comparison.json").read_text(), nl=False)
    else:
        _show(found, report, tasks)
    if any(bar.met is False for bar in [*found.bars, *(bar for made in tasks for bar in made.bars)]):
        raise typer.Exit(1)


def estimators(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN ...", help="Run folders of one candidate.", callback=written)
    ],
    out: OutOption = None,
    tail_range: TailRangeOption = None,
) -> None:
    """Show several measurements of one candidate on one panel, an estimator a column, and what k costs."""
    from rich.console import Console

    from harness.report.estimators import default_folder, write
    from harness.report.estimators import estimators as read

    found = read(runs, tail_range=tail_range)
    report = write(out or default_folder(found), found)
    console = Console()
    for table in found.tables:
        console.print(table.rich)
    for text in found.sentences:
        console.print(f"note: {text}", highlight=False, markup=False)
    console.print(f"report: {report}", highlight=False)


def _compare_tasks(runs: list[Path], teacher: Path | None, out: Path | None, as_json: bool) -> None:
    """Task runs alone: no panel, no KL."""
    from harness.compare.task_model import TASK_COMPARISON_FILE, save_task_comparisons
    from harness.compare.tasks import compare_task_runs
    from harness.report.task_tables import markdown
    from harness.report.words import worded_tasks
    from harness.store import slug, write_text

    found = compare_task_runs(runs, teacher=teacher)
    names = [slug(name)[:40] for name in found.arms]
    folder = out or Path("reports") / f"compare-tasks--{'--'.join(names[1:3])}--vs--{names[0]}"
    write_text(folder / "report.md", markdown([found]))
    save_task_comparisons(folder, [worded_tasks(found)])
    if as_json:
        typer.echo((folder / TASK_COMPARISON_FILE).read_text(), nl=False)
        return
    _show_tasks([found])
    typer.echo(f"report: {folder / 'report.md'}")


def default_name(comparison: Comparison) -> str:
    """``compare--B--vs--A--1a2b3c4d``."""
    from harness.store import slug

    names = [slug(arm.name)[:40] for arm in comparison.arms]
    return f"compare--{'--'.join(names[1:3])}--vs--{names[0]}--{comparison.key[:8]}"


def _decoded(comparison: Comparison, spec: str | None, panel: Path | None) -> Comparison:
    """Worst positions with their text; a recipe's own tokenizer is used when it is the one of the seal."""
    from harness.panel import load_recipe, load_tokenizer, tokenizer_digest
    from harness.report.comparison_report import require_panels_tokenizer, with_texts

    if spec is None and panel is not None:
        spec = load_recipe(panel).tokenizer
    loaded = load_tokenizer(str(spec))
    require_panels_tokenizer(comparison.panel.tokenizer_sha256, tokenizer_digest(loaded))
    return with_texts(comparison, loaded)


def _show_tasks(tasks: list[TaskComparisons]) -> None:
    """Tables of every suite, then what must be read before the numbers."""
    from rich.console import Console

    from harness.report import task_tables
    from harness.report.words import task_warnings

    console = Console()
    for found in tasks:
        for table in task_tables.tables(found):
            console.print(table.rich)
        for text in task_tables.sentences(found):
            console.print(f"[bold]{text}[/bold]", highlight=False)
        for text in found.deviations:
            console.print(f"[yellow]deviation[/yellow]: {text}", highlight=False)
        for text in task_warnings(found):
            console.print(f"note: {text}", highlight=False)


def _show(comparison: Comparison, report: Path, tasks: list[TaskComparisons]) -> None:
    from rich.console import Console

    from harness.report import comparison_tables as tables
    from harness.report.basis import registration_text
    from harness.report.words import pair_headline, primary_name, sentence, warnings

    console = Console()
    for pair in comparison.pairs:
        console.print(tables.summary(comparison, pair).rich)
        if pair.tails:
            console.print(tables.tails_table(pair, pair.tails).rich)
    console.print(tables.arms(comparison).rich)
    if comparison.bars:
        console.print(tables.bars(comparison).rich)
    for pair in comparison.pairs:
        console.print(f"[bold]{pair_headline(comparison, pair)}[/bold]", highlight=False)
        console.print(f"  for a card: {primary_name(comparison, pair)} {sentence(pair.primary)}", highlight=False)
    console.print(registration_text(comparison), highlight=False, markup=False)
    for text in comparison.deviations:
        console.print(f"[yellow]deviation[/yellow]: {text}", highlight=False)
    for text in warnings(comparison):
        console.print(f"note: {text}", highlight=False)
    _show_tasks(tasks)
    console.print(f"report: {report}", highlight=False)
