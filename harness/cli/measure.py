"""``fidelity measure``: the main job. Without a candidate it measures the built-in example."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import (
    EXAMPLE_PANEL,
    BudgetOption,
    ComputeOption,
    ConcurrencyOption,
    DeviceOption,
    FloorOption,
    JsonOption,
    KOption,
    OutOption,
    PackedOption,
    PanelOption,
    RevisionOption,
    RowsOption,
    SamplesOption,
    ServedModelOption,
    SignOption,
    TeacherOption,
    UrlOption,
    refuse_ignored,
    sign_receipts,
)
from harness.errors import UsageError
from harness.names import candidate_source, teacher_source
from harness.progress import console

if TYPE_CHECKING:
    from harness.measure.run import Result
    from harness.served.measure import ServedRequest

#: Engines that answer over HTTP.
SERVERS = ("vllm", "sglang")


#: Options that only one of the two lanes looks at.
ONLY_SERVED = ("served_model", "k", "tail_samples", "concurrency", "floor")
ONLY_HERE = ("compute_dtype", "packed", "memory_budget")


def measure(
    context: typer.Context,
    candidate: Annotated[str | None, typer.Argument(help="EXL3 folder or Hub id; empty: the example.")] = None,
    revision: RevisionOption = None,
    teacher: TeacherOption = None,
    panel: PanelOption = EXAMPLE_PANEL,
    rows: RowsOption = None,
    out: OutOption = None,
    compute_dtype: ComputeOption = "auto",
    device: DeviceOption = None,
    packed: PackedOption = False,
    memory_budget: BudgetOption = None,
    engine: Annotated[
        str,
        typer.Option(help="reference, exllamav3, llamacpp or vllm-local; behind --url: vllm or sglang."),
    ] = "reference",
    url: UrlOption = None,
    served_model: ServedModelOption = None,
    k: KOption = 256,
    tail_samples: SamplesOption = 32,
    concurrency: ConcurrencyOption = 1,
    floor: FloorOption = None,
    as_json: JsonOption = False,
    allow_nonfinite: Annotated[
        bool, typer.Option(help="Print the mean over finite positions, and their share.")
    ] = False,
    sign: SignOption = None,
) -> None:
    """Measure a quant against its teacher over a panel: exactly, or what a server gives of it."""
    _refuse_what_cannot_be(context, candidate, engine)
    of_example = candidate is None and engine == "reference"
    if of_example:
        from harness.measure.example import TEACHER, example_candidate

        candidate, teacher = example_candidate(), teacher or teacher_source(TEACHER)
    common: dict[str, Any] = {"panel": panel, "revision": revision, "teacher": teacher, "rows": rows, "out": out}
    if engine in SERVERS:
        asked = {"k": k, "tail_samples": tail_samples, "concurrency": concurrency, "served_model": served_model}
        served = served_request(engine, url, candidate=candidate, floor=floor, device=device, **asked, **common)
        result = _through_server(served)
    else:
        if url is not None:
            raise UsageError(
                f"--url {_without_secret(url)} and no server named", "say what runs there: --engine vllm or sglang"
            )
        how = {"compute": compute_dtype, "device": device, "packed": packed, "engine": engine}
        result = _in_process(candidate, memory_budget, **how, **common)
    sign_receipts(result.folder, sign)
    show(result, as_json, allow_nonfinite)
    if of_example and not packed and memory_budget is None:
        _known_answer(result)


def _refuse_what_cannot_be(context: typer.Context, candidate: str | None, engine: str) -> None:
    """Refuse, before anything is imported, what needs no look at a model: a wrong path, options without effect."""
    if candidate is not None:
        candidate_source(candidate)
    if engine in SERVERS:
        refuse_ignored(context, ONLY_HERE, f"with --engine {engine}: the server decides it")
    else:
        refuse_ignored(context, ONLY_SERVED, "without a server (--engine vllm or sglang)")


def _known_answer(result: Result) -> None:
    """Say whether the example came out as it has to; a wrong one ends with exit code 1."""
    from harness.cli.known import known_answer

    met, line = known_answer(result.measurement)
    typer.echo(line, err=True)
    if not met:
        raise typer.Exit(1)


def _without_secret(url: str) -> str:
    """An address without its user and password."""
    return re.sub(r"//[^/@]*@", "//", url)


def served_request(engine: str, url: str | None, **settings: Any) -> ServedRequest:
    """The request of a command about a server; ``settings`` are further fields of `ServedRequest`."""
    from harness.served.measure import ServedRequest

    if engine not in SERVERS:
        raise UsageError(f"--engine {engine} is no server", f"choose one of {', '.join(SERVERS)}")
    if url is None:
        raise UsageError(f"--engine {engine} runs in a server", "give its address: --url http://localhost:8000")
    return ServedRequest(server=engine, url=url, **settings)  # type: ignore[arg-type]


def _through_server(request: ServedRequest) -> Result:
    from harness.served.measure import measure_served

    return measure_served(request)


def _in_process(candidate: str | None, memory_budget: str | None, **settings: Any) -> Result:
    from harness.engines.open import ENGINES, memory_budget_of
    from harness.measure.run import Request
    from harness.measure.run import measure as run

    if settings["engine"] not in ENGINES:
        known = ", ".join(("reference", *SERVERS, *ENGINES[1:]))
        raise UsageError(f"there is no engine {settings['engine']}", f"choose one of {known}")
    if candidate is None:
        raise UsageError(f"--engine {settings['engine']} needs a candidate", "name its folder, Hub id or file")
    return run(Request(candidate=candidate, memory_budget=memory_budget_of(memory_budget), **settings))


def show(result: Result, as_json: bool, allow_nonfinite: bool = False) -> None:
    """Write a run's report and print its headline or its receipt; an invalid run ends with exit code 1."""
    from rich.console import Console

    from harness.report.run_report import measurement_table, write_report

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
