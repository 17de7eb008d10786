"""``fidelity anchor`` and ``fidelity floor``: what a candidate's numbers are read against."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.measure import EXAMPLE_PANEL, SERVERS, require_url, show

if TYPE_CHECKING:
    from harness.measure import Result

TeacherArgument = Annotated[str, typer.Argument(help="teachers/NAME.toml or a model: its weights are needed.")]
PanelOption = Annotated[Path, typer.Option(help="Panel folder.")]
RowsOption = Annotated[int | None, typer.Option(help="Only the first so many rows; the result says partial.")]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; default: reports/<name>.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the receipt instead of tables.")]


def anchor(
    scheme: Annotated[str, typer.Argument(metavar="int8|fp8|nf4|q4-rtn", help="Format to round to.")],
    teacher: TeacherArgument,
    panel: PanelOption = EXAMPLE_PANEL,
    rows: RowsOption = None,
    group: Annotated[int | None, typer.Option(help="Weights that share a scale in q4-rtn: 64 or 128.")] = None,
    out: OutOption = None,
    device: DeviceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure the teacher rounded to nearest in a well-known format, as a row beside candidates."""
    from harness.anchor import anchor as run

    show(run(scheme, teacher, panel=panel, rows=rows, out=out, device=device, group=group), as_json)


def floor(
    teacher: TeacherArgument,
    panel: PanelOption = EXAMPLE_PANEL,
    kind: Annotated[str, typer.Option(help="repeat, bf16 or perturb.")] = "repeat",
    rows: RowsOption = None,
    seed: Annotated[int, typer.Option(help="Of the noise of perturb.")] = 1234,
    out: OutOption = None,
    device: DeviceOption = None,
    engine: Annotated[
        str | None, typer.Option(help="vllm or sglang: the floor of a server that serves these weights.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Address of that server.")] = None,
    served_model: Annotated[str | None, typer.Option(help="Model name on the server, where it has several.")] = None,
    k: Annotated[int, typer.Option("--k", help="As in the measurement that the floor is for.")] = 256,
    tail_samples: Annotated[int, typer.Option(help="As in that measurement.")] = 32,
    concurrency: Annotated[int, typer.Option(help="As in that measurement.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure the teacher against itself: once more, in the other precision, with noise, or through a server."""
    if engine is not None:
        show(_served(engine, url, teacher, panel, rows, out, served_model, k, tail_samples, concurrency), as_json)
        return
    from harness.floor import floor as run

    show(run(teacher, panel=panel, kind=kind, rows=rows, out=out, device=device, seed=seed), as_json)


def _served(
    engine: str,
    url: str | None,
    teacher: str,
    panel: Path,
    rows: int | None,
    out: Path | None,
    served_model: str | None,
    k: int,
    tail_samples: int,
    concurrency: int,
) -> Result:
    """The teacher through a server against the teacher in the reference engine."""
    from harness.errors import UsageError
    from harness.served.measure import ServedRequest, floor_request, measure_served

    if engine not in SERVERS:
        raise UsageError(f"--engine {engine} is no server", f"choose one of {', '.join(SERVERS)}")
    request = ServedRequest(
        server=engine,  # type: ignore[arg-type]
        url=require_url(engine, url),
        panel=panel,
        teacher=teacher,
        served_model=served_model,
        k=k,
        tail_samples=tail_samples,
        rows=rows,
        out=out,
        concurrency=concurrency,
    )
    return measure_served(floor_request(request))
