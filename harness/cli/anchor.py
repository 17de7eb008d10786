"""``fidelity anchor`` and ``fidelity floor``: what a candidate's numbers are read against."""

from __future__ import annotations

from typing import Annotated

import typer

from harness.cli.measure import ONLY_SERVED, served_request, show
from harness.cli.options import (
    EXAMPLE_PANEL,
    ConcurrencyOption,
    DeviceOption,
    JsonOption,
    KOption,
    OutOption,
    PanelOption,
    RowsOption,
    SamplesOption,
    ServedModelOption,
    TeacherArgument,
    UrlOption,
    refuse_ignored,
)


def anchor(
    context: typer.Context,
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
    if scheme != "q4-rtn":
        refuse_ignored(context, ("group",), f"by {scheme}, which has one grouping")
    from harness.measure.altered import anchor as run

    show(run(scheme, teacher, panel=panel, rows=rows, out=out, device=device, group=group), as_json)


def floor(
    context: typer.Context,
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
    url: UrlOption = None,
    served_model: ServedModelOption = None,
    k: KOption = 256,
    tail_samples: SamplesOption = 32,
    concurrency: ConcurrencyOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Measure the teacher against itself: once more, in the other precision, with noise, or through a server."""
    if engine is not None:
        refuse_ignored(context, ("kind", "seed"), f"with --engine {engine}")
        from harness.served.measure import floor_request, measure_served

        asked = {"k": k, "tail_samples": tail_samples, "concurrency": concurrency, "served_model": served_model}
        request = served_request(engine, url, panel=panel, teacher=teacher, rows=rows, out=out, device=device, **asked)
        show(measure_served(floor_request(request)), as_json)
        return
    refuse_ignored(context, ("url", *ONLY_SERVED), "without a server (--engine vllm or sglang)")
    if kind != "perturb":
        refuse_ignored(context, ("seed",), f"with --kind {kind}")
    from harness.measure.altered import floor as run

    show(run(teacher, panel=panel, kind=kind, rows=rows, out=out, device=device, seed=seed), as_json)
