"""The command ``fidelity``: parses, calls, prints. Heavy imports happen inside the commands."""

from __future__ import annotations

from typing import Annotated

import typer

import harness
from harness.cli import artifact, exl3, panel, teacher
from harness.cli.anchor import anchor, floor
from harness.cli.bench import bench, coverage
from harness.cli.boundary import guarded
from harness.cli.card import card, report, verify
from harness.cli.compare import compare, estimators
from harness.cli.doctor import doctor
from harness.cli.gate import gate
from harness.cli.imports import import_g4, import_lm_eval
from harness.cli.measure import measure
from harness.cli.tasks import tasks

app = typer.Typer(
    name="fidelity",
    help="How far is an EXL3 quant from its BF16 teacher, and is it really better than that other one?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fidelity {harness.__version__}")
        raise typer.Exit()


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version this is.")
    ] = False,
) -> None:
    """How far is an EXL3 quant from its BF16 teacher, and is it really better than that other one?"""


app.add_typer(panel.app, name="panel")
app.add_typer(exl3.app, name="exl3")
app.add_typer(artifact.app, name="artifact")
app.add_typer(teacher.app, name="teacher")
app.command()(measure)
app.command()(doctor)
app.command()(bench)
app.command()(coverage)
app.command()(anchor)
app.command()(floor)
app.command()(compare)
app.command()(estimators)
app.command()(card)
app.command()(verify)
app.command()(report)
app.command()(gate)
app.command()(tasks)
app.command("import-g4")(import_g4)
app.command("import-lm-eval")(import_lm_eval)


def main() -> None:
    """Parse and run; exit codes 0 ok, 1 a bar not met, 2 usage, 3 refused, 130 interrupted."""
    guarded(app)
