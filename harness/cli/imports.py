"""``fidelity import-g4`` and ``fidelity import-lm-eval``: results made elsewhere, for compare and card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import IntoOption


def import_g4(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="G4 panel receipts (JSON).")],
    out: IntoOption,
    name: Annotated[
        list[str] | None, typer.Option(help="What to call a candidate; once for each FILE, in order.")
    ] = None,
) -> None:
    """Read published G4 panel receipts; their row means and summaries are kept digit for digit."""
    from harness.interop.g4 import import_files
    from harness.measure.receipt import load_measurement

    for folder in import_files(files, out, name or []):
        found = load_measurement(folder)
        typer.echo(
            f"{folder}: {found.name}, {found.rows_measured} rows, top-1 {found.summary['top1_agreement']:.5f}, "
            f"KL lower bound {found.summary['kl_mean']:.5f}, PPL {found.summary['ppl_token_candidate']:.5f}"
        )


def import_lm_eval(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Results of one model: results_*.json.")],
    out: IntoOption,
    name: Annotated[str, typer.Option(help="What to call the model.")],
    metric: Annotated[str, typer.Option(help="The accuracy to read.")] = "acc",
) -> None:
    """Read lm-eval results made elsewhere; samples beside them allow paired comparison."""
    from harness.cli.tasks import show
    from harness.tasks.importing import import_results

    show(import_results(files, out, name, metric=metric))
    typer.echo(f"receipt: {out}/tasks.json")
