"""``fidelity doctor --engine URL``: the checks before a served measurement, alone, all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from harness.served.preflight import Finding
    from harness.types import EngineIdentity

KINDS = ("vllm", "sglang")


def check_engine(
    url: str, *, kind: str | None, served_model: str | None, k: int, panel: Path | None, as_json: bool
) -> None:
    """Check the server at ``url``, print every check with its figure, and end with 0, or 3 where one is refused."""
    from harness.cli.measure import EXAMPLE_PANEL
    from harness.errors import Refused
    from harness.progress import phase
    from harness.served.address import find_server
    from harness.served.connect import connect
    from harness.served.preflight import examine
    from harness.served.preflight_rows import rows_for
    from harness.served.preflight_server import load_of

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
    if found not in KINDS:
        told = f"--kind {kind}" if kind else f"the server says it is {software}"
        raise UsageError(
            f"{told}: only {' and '.join(KINDS)} give log-probabilities of a prompt", "name it with --kind"
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
