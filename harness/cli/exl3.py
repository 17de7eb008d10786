"""``fidelity exl3 inspect|quantize|decode``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import IntoOption, JsonOption, RevisionOption
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.exl3.checkpoint import Checkpoint


app = typer.Typer(help="Look into EXL3 checkpoints, and make small ones.", no_args_is_help=True)


@app.command()
def quantize(
    src: Annotated[Path, typer.Argument(help="Checkpoint folder in BF16, FP16 or FP32 (config.json, *.safetensors).")],
    dst: Annotated[Path, typer.Argument(help="New folder for the EXL3 checkpoint; a killed run goes on there.")],
    bits: Annotated[float, typer.Option(help="Bits a weight: 1 to 8; with mul1 also 1.5, 2.5 and 3.5.")] = 3,
    modules: Annotated[str, typer.Option(help="all (attention, MLP, experts), mlp, or routed-experts.")] = "all",
    layers: Annotated[str | None, typer.Option(help="Only these layers, such as 8-21 or 0,3,10-12.")] = None,
    layer_bits: Annotated[str | None, typer.Option(help="Other bits for some layers, such as 24=3,27=3.")] = None,
    head_bits: Annotated[
        int | None, typer.Option(help="Bits of lm_head; 16 leaves it alone. Default 6 with --modules all, else 16.")
    ] = None,
    codebook: Annotated[str, typer.Option(help="mcg, mul1 or 3inst.")] = "mcg",
    seed: Annotated[int, typer.Option(help="Of the random signs; the same seed gives the same bytes.")] = 0,
    calibration: Annotated[
        Path | None, typer.Option(help="Text, or .npy token ids, for LDLQ instead of rounding to nearest.")
    ] = None,
    calibration_rows: Annotated[int, typer.Option(help="Rows of 512 tokens to calibrate on.")] = 32,
    threads: Annotated[int | None, typer.Option(help="All cores unless given; the result is the same.")] = None,
) -> None:
    """Make an EXL3 checkpoint for examples, tests and studies; not for production quants.

    Weights are rounded to the nearest path in rotated space, by exact search. --calibration adds LDLQ with Hessians
    of the unquantised model, all layers measured at once (not experts in a stack). The format's own converter
    measures each layer behind quantised ones and shares out bits; its quants are better at the same rate.
    """
    from harness.exl3.calibrate import calibration_ids
    from harness.exl3.quantize import quantize_checkpoint
    from harness.exl3.quantize_plan import QuantizeSettings

    settings = QuantizeSettings(
        bits=bits,
        codebook=codebook,  # type: ignore[arg-type]
        modules=modules,  # type: ignore[arg-type]
        layers=None if layers is None else parse_layers(layers),
        layer_bits={} if layer_bits is None else parse_layer_bits(layer_bits),
        head_bits=head_bits if head_bits is not None else 6 if modules == "all" else 16,
        seed=seed,
    )
    ids = None if calibration is None else calibration_ids(calibration, src, rows=calibration_rows)
    result = quantize_checkpoint(src, dst, settings, calibration_RT=ids, threads=threads)
    if result.was_complete:
        typer.echo(f"{result.folder.name} is complete already; nothing was done")
        return
    resumed = f" ({result.resumed} of them from an earlier run)" if result.resumed else ""
    typer.echo(
        f"{result.folder.name}: {result.linears} linears{resumed}, {result.weights / 1e6:.1f} M weights at "
        f"{result.bits:.3f} bits on average, head_bits {settings.head_bits}, {settings.codebook}"
    )


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="Checkpoint folder, or Hub id org/name.")],
    revision: RevisionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rates, codebooks, dtypes and bits per weight, counted from the shard headers alone."""
    from harness.exl3.census import take_census

    census = take_census(_open(source, revision))
    if as_json:
        from harness.store import plain

        print(json.dumps(plain(census.as_json()), indent=1, ensure_ascii=False))
        return
    from rich.console import Console

    from harness.report.census import census_tables

    console = Console()
    for part in census_tables(census):
        console.print(part)


@app.command()
def decode(
    source: Annotated[Path, typer.Argument(help="EXL3 checkpoint folder.")],
    out: IntoOption,
    dtype: Annotated[str, typer.Option(help="float32 (every value kept), bfloat16 or float16.")] = "float32",
) -> None:
    """Write the decoded weights as a plain folder, to serve them with an engine that has no EXL3 kernels."""
    from harness.exl3.package import decode_checkpoint

    if dtype not in ("float32", "bfloat16", "float16"):
        raise UsageError(f"--dtype {dtype}", "choose float32, bfloat16 or float16")
    print(f"dense weights in {decode_checkpoint(source, out, dtype)}")


def parse_layers(text: str) -> tuple[int, ...]:
    """``0,3,10-12`` as layer numbers."""
    layers: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise UsageError(f"--layers {text}: {part!r} is no layer or range", "write it like 8-21 or 0,3,10-12")
        layers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(layers))


def parse_layer_bits(text: str) -> dict[int, float]:
    """``24=3,27=2.5`` as bits by layer."""
    bits: dict[int, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)=(\d+(?:\.5)?)\s*", part)
        if not found:
            raise UsageError(f"--layer-bits {text}: {part!r} is not layer=bits", "write it like 24=3,27=3")
        bits[int(found[1])] = float(found[2])
    return bits


def _open(source: str, revision: str | None) -> Checkpoint:
    folder = Path(source).expanduser()
    if folder.is_dir():
        from harness.engines.models import refuse_revision
        from harness.exl3.checkpoint import open_checkpoint

        refuse_revision(source, revision)
        return open_checkpoint(folder)
    if folder.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UsageError(f"{source} is neither a checkpoint folder nor a Hub id", "give a folder or org/name")
    from harness.exl3.hub import open_hub

    return open_hub(source, revision)
