"""``fidelity measure``: the main job. Without a candidate it measures the built-in example."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.progress import console

#: Engines that answer over HTTP.
SERVERS = ("vllm", "sglang")

#: The panel of the built-in example, and the default.
EXAMPLE_PANEL = Path("panels/example")


def measure(
    candidate: Annotated[str | None, typer.Argument(help="EXL3 folder or Hub id; empty: the example.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the candidate on the Hub.")] = None,
    teacher: Annotated[
        str | None,
        typer.Option(help="NAME.toml, a model, or a capture folder; else what the candidate's card says."),
    ] = None,
    panel: Annotated[Path, typer.Option(help="Panel folder.")] = EXAMPLE_PANEL,
    rows: Annotated[int | None, typer.Option(help="Only the first so many rows; the result says partial.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; default: reports/<name>.")] = None,
    compute_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    packed: Annotated[bool, typer.Option(help="Decode EXL3 weights at every use: less memory, slower.")] = False,
    memory_budget: Annotated[
        str | None, typer.Option(help="Run layer by layer within this much memory: 4GiB, 500MB, auto.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="reference; served: vllm or sglang with --url, exllamav3, llamacpp or vllm-local.")
    ] = "reference",
    url: Annotated[str | None, typer.Option(help="Address of the server, such as http://localhost:8000.")] = None,
    served_model: Annotated[str | None, typer.Option(help="Model name on the server, where it has several.")] = None,
    k: Annotated[int, typer.Option("--k", help="Top tokens a position to ask a server for.")] = 256,
    tail_samples: Annotated[
        int, typer.Option(help="Ids drawn from the teacher's tail, where a server scores ids of our choice.")
    ] = 32,
    concurrency: Annotated[int, typer.Option(help="Requests in flight; more than 1 may move a server's digits.")] = 1,
    floor: Annotated[
        Path | None, typer.Option(help="Floor of this server: a run of `fidelity floor --engine`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the receipt instead of tables.")] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option(help="Print the mean over finite positions, and their share.")
    ] = False,
) -> None:
    """Measure a quant against its teacher over a panel: exactly, or what a server gives of it."""
    from harness.engines.open import memory_budget_of
    from harness.measure import Request
    from harness.measure import measure as run

    if candidate is None and engine == "reference":
        from harness.example import example_candidate

        candidate, teacher = example_candidate(), teacher or "teachers/smollm2-135m.toml"
    if engine in SERVERS:
        from harness.served.measure import ServedRequest, measure_served

        served = ServedRequest(
            server=engine,  # type: ignore[arg-type]
            url=require_url(engine, url),
            panel=panel,
            candidate=candidate,
            revision=revision,
            served_model=served_model,
            teacher=teacher,
            k=k,
            tail_samples=tail_samples,
            rows=rows,
            out=out,
            concurrency=concurrency,
            floor=floor,
            device=device,
        )
        show(measure_served(served), as_json, allow_nonfinite)
        return
    if candidate is None:
        from harness.errors import UsageError

        raise UsageError(f"--engine {engine} needs a candidate", "name its folder, Hub id or file")
    result = run(
        Request(
            candidate=candidate,
            revision=revision,
            teacher=teacher,
            panel=panel,
            rows=rows,
            out=out,
            compute=compute_dtype,  # type: ignore[arg-type]
            device=device,
            packed=packed,
            memory_budget=memory_budget_of(memory_budget),
            engine=engine,  # type: ignore[arg-type]
        )
    )
    show(result, as_json, allow_nonfinite)


def require_url(engine: str, url: str | None) -> str:
    """The address of a server, or a usage error."""
    from harness.errors import UsageError

    if url is None:
        raise UsageError(f"--engine {engine} runs in a server", "give its address: --url http://localhost:8000")
    return url


def show(result: Any, as_json: bool, allow_nonfinite: bool = False) -> None:
    """Write a run's report and print its headline or its receipt; an invalid run ends with exit code 1."""
    from rich.console import Console

    from harness.report.run_report import write_report
    from harness.report.terminal import measurement_table

    report = result.folder / "report.md"
    if not (result.reused and report.is_file()):
        write_report(result.folder)
    if as_json:
        print((result.folder / "measurement.json").read_text(), end="")
    else:
        if result.reused:
            console.print("nothing has changed: this is the finished measurement")
        Console().print(measurement_table(result.measurement))
        Console().print(f"report: {report}")
    if result.measurement.status == "invalid":
        found = result.measurement
        finite = found.summary.get("kl_mean_finite")
        share = found.summary.get("finite_share")
        shown = f"; mean over the {share:.4%} that are finite: {finite:.6g}" if allow_nonfinite else ""
        console.print(f"invalid: {found.counts['nonfinite_positions']} positions have no KL (NaN logits){shown}")
        raise typer.Exit(1)
