"""``fidelity exl3 inspect|quantize|decode``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.quantize import quantize

if TYPE_CHECKING:
    from harness.exl3.checkpoint import Checkpoint

app = typer.Typer(help="Look into EXL3 checkpoints, and make small ones.", no_args_is_help=True)
app.command()(quantize)


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="Checkpoint folder, or Hub id org/name.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything counted as JSON.")] = False,
) -> None:
    """Rates, codebooks, dtypes and bits per weight, counted from the shard headers alone."""
    from harness.exl3.census import take_census

    census = take_census(_open(source, revision))
    if as_json:
        from harness.store import plain

        print(json.dumps(plain(census.as_json()), indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    from harness.exl3.census_table import census_tables

    console = Console()
    for part in census_tables(census):
        console.print(part)


@app.command()
def decode(
    source: Annotated[Path, typer.Argument(help="EXL3 checkpoint folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make.")],
    dtype: Annotated[str, typer.Option(help="float32 (every value kept), bfloat16 or float16.")] = "float32",
) -> None:
    """Write the decoded weights as a plain folder, to serve them with an engine that has no EXL3 kernels."""
    from harness.errors import UsageError
    from harness.exl3.dense import decode_checkpoint

    if dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype {dtype}", "choose float32, bfloat16 or float16")
    print(f"dense weights in {decode_checkpoint(source, out, dtype)}")


def _open(source: str, revision: str | None) -> Checkpoint:
    from harness.errors import UsageError

    folder = Path(source).expanduser()
    if folder.is_dir():
        from harness.exl3.checkpoint import open_checkpoint

        return open_checkpoint(folder)
    if folder.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UsageError(f"{source} is neither a checkpoint folder nor a Hub id", "give a folder or org/name")
    from harness.exl3.hub import open_hub

    return open_hub(source, revision)
