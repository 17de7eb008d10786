"""``fidelity gate``: does a run meet its bars?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.options import JsonOption


def gate(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    bars: Annotated[Path, typer.Option(help="TOML with the bars.")],
    baseline: Annotated[Path | None, typer.Option(help="Run that must not be beaten by more than a margin.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a run against bars; exit code 1 where one is missed, with annotations in hosted CI."""
    import json

    from harness.report.gate import annotation, check_gate, load_bars, write_junit

    held = check_gate(run, load_bars(bars), baseline)
    if junit is not None:
        write_junit(junit, run.name, held)
    if as_json:
        typer.echo(json.dumps([one.model_dump() for one in held], indent=1))
    for one in held if not as_json else ():
        typer.echo(f"{'held  ' if one.held else 'MISSED'} {one.name}: {one.told}")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        for one in held:
            if not one.held:
                typer.echo(annotation(one), err=as_json)
    raise typer.Exit(0 if all(one.held for one in held) else 1)
