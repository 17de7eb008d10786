"""``fidelity import-g4``: other people's receipts become run folders that compare, card and verify can read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_g4(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="G4 panel receipts (JSON).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder that gets one run folder a receipt.")],
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
