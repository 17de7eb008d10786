"""``fidelity teacher capture|verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import EXAMPLE_PANEL, BudgetOption, DeviceOption, PanelOption, RowsOption, TeacherArgument

app = typer.Typer(help="Capture a teacher's outputs over a panel, and verify captures.", no_args_is_help=True)


@app.command()
def capture(
    teacher: TeacherArgument,
    panel: PanelOption = EXAMPLE_PANEL,
    rows: RowsOption = None,
    device: DeviceOption = None,
    memory_budget: BudgetOption = None,
) -> None:
    """Run the teacher over a panel and store what scoring needs; goes on where an earlier run stopped."""
    from harness.engines.open import memory_budget_of
    from harness.errors import UsageError
    from harness.measure.teacher import ensure_capture, find_teacher, load_teacher
    from harness.panel import ensure_built

    sealed = ensure_built(panel)
    spec = load_teacher(teacher, None)
    if isinstance(spec, Path):
        raise UsageError(f"{spec.name} is a capture already", "use `fidelity teacher verify` on it")
    model = find_teacher(spec, sealed)
    budget = memory_budget_of(memory_budget)
    made, again = ensure_capture(model, sealed, sealed.rows[:rows], device=device, memory_budget=budget)
    if again:
        print(f"the teacher reproduces its capture: {again.line()}")
    print(f"{model.folder(sealed)}: {len(made.rows)} of {len(sealed.rows)} rows, capture {made.sha256[:16]}")


@app.command()
def verify(folder: Annotated[Path, typer.Argument(help="Capture folder.")]) -> None:
    """Re-check every digest of a capture, and that decoding gives back the stored NLL; exit code 1 when one fails."""
    from harness.capture import open_capture, verify_capture

    checks = verify_capture(open_capture(folder))
    for check in checks:
        typer.echo(f"{'ok' if check.passed else 'FAILED':6}  {check.name}: {check.figure}")
        if check.note:
            typer.echo(f"        {check.note}")
    if not all(check.passed for check in checks):
        raise typer.Exit(1)
