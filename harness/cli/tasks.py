"""``fidelity tasks``: benchmarks through lm-eval, kept item by item without texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import (
    BudgetOption,
    ComputeOption,
    ConcurrencyOption,
    DeviceOption,
    JsonOption,
    OutOption,
    PackedOption,
    RevisionOption,
    ServedModelOption,
    SignOption,
    refuse_ignored,
    sign_receipts,
)
from harness.names import candidate_source, teacher_source

if TYPE_CHECKING:
    from harness.report.table import Table
    from harness.tasks.receipt import TaskReceipt


def tasks(
    context: typer.Context,
    candidate: Annotated[
        str | None,
        typer.Argument(help="EXL3 or plain folder, Hub id, or a teacher's .toml; with --base-url its checkpoint."),
    ] = None,
    suite: Annotated[str, typer.Option(help="Name of a suite in panels/suites, or a .toml file.")] = "quick",
    data: Annotated[Path | None, typer.Option(help="Folder with mmlu/<subject>/... and gpqa_diamond.csv.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many documents of each task; the result says so.")
    ] = None,
    revision: RevisionOption = None,
    out: OutOption = None,
    engine: Annotated[
        str, typer.Option(help="What runs the model here: reference, exllamav3, llamacpp (GGUF) or vllm-local.")
    ] = "reference",
    base_url: Annotated[str | None, typer.Option(help="Ask a server (vLLM, SGLang): http://host:port/v1.")] = None,
    served_model: ServedModelOption = None,
    num_concurrent: ConcurrencyOption = 8,
    compute_dtype: ComputeOption = "auto",
    device: DeviceOption = None,
    packed: PackedOption = False,
    memory_budget: BudgetOption = None,
    seal: Annotated[bool, typer.Option("--seal", help="Seal the suite instead: hash every prompt, no model.")] = False,
    as_json: JsonOption = False,
    sign: SignOption = None,
) -> None:
    """Run a suite of lm-eval tasks (MMLU, GPQA, ...) on a model."""
    from harness.errors import UsageError

    if seal:
        _seal(suite, data)
        return
    if candidate is None:
        raise UsageError("no candidate is named", "give a checkpoint folder or a Hub id (CANDIDATE=...)")
    if base_url is None:
        refuse_ignored(context, ("served_model", "num_concurrent"), "without a server (--base-url)")
    else:
        refuse_ignored(context, ("compute_dtype", "device", "packed", "memory_budget", "engine"), "with --base-url")
    candidate = candidate_source(teacher_source(candidate) if candidate.endswith(".toml") else candidate)
    from harness.tasks.run import Request, run_suite

    result = run_suite(
        Request(
            candidate=candidate,
            suite=suite,
            revision=revision,
            data=data,
            limit=limit,
            out=out,
            compute=compute_dtype,  # type: ignore[arg-type]
            device=device,
            packed=packed,
            memory_budget=memory_budget,
            engine=engine,  # type: ignore[arg-type]
            base_url=base_url,
            served_model=served_model,
            num_concurrent=num_concurrent,
        )
    )
    sign_receipts(result.folder, sign)
    if as_json:
        typer.echo((result.folder / "tasks.json").read_text(encoding="utf-8"), nl=False)
        return
    show(result.receipt)
    typer.echo(
        f"{'nothing has changed: the finished run is' if result.reused else 'receipt:'} {result.folder}/tasks.json"
    )


def _seal(name: str, data: Path | None) -> None:
    from harness.tasks.run import seal

    path, lock = seal(name, data)
    items = sum(task.n for task in lock.tasks.values())
    typer.echo(f"sealed {lock.name}: {items:,} items of {len(lock.tasks)} tasks in {path}")
    for entry in lock.unsealed:
        typer.echo(f"prompts not sealed: {entry}, its documents are not here (see --data)")
    if lock.definitions:
        typer.echo(f"definitions sealed: {len(lock.definitions)} tasks")


def show(receipt: TaskReceipt) -> None:
    """Print the tables of task results, and what must be read before the numbers."""
    from rich.console import Console

    console = Console()
    console.print(_table(receipt).rich)
    for missing in receipt.missing:
        console.print(f"[yellow]missing[/yellow]: {missing.task}: {missing.why}", highlight=False)
    for text in receipt.deviations:
        console.print(f"[yellow]deviation[/yellow]: {text}", highlight=False)
    for text in receipt.notes:
        console.print(f"note: {text}", highlight=False)


def _table(receipt: TaskReceipt) -> Table:
    from harness.report.table import Table
    from harness.tasks.receipt import selection

    header = ("task", "items", "right", "accuracy", "macro", "which items")
    rows = []
    for result in receipt.results:
        if result.kind == "group" or result.name in receipt.suite.entries:
            macro = "" if result.macro is None else f"{result.macro:.4f}"
            which = selection(receipt, result.name) if result.name in receipt.suite.entries else ""
            rows.append((result.name, f"{result.n:,}", f"{result.correct:,}", result.shown, macro, which))
    return Table(f"{receipt.name}, suite {receipt.suite.name}", header, rows, sides="lrrrrl")
