"""``fidelity panel build|seal|verify|show``."""

from __future__ import annotations

import typer

app = typer.Typer(help="Build, seal, verify and show panels.", no_args_is_help=True)
