"""``fidelity exl3 inspect|quantize``."""

from __future__ import annotations

import typer

app = typer.Typer(help="Look into EXL3 checkpoints, and make small ones.", no_args_is_help=True)
