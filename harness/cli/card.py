"""``fidelity card``, ``fidelity verify`` and ``fidelity report``: what may be said, and does it still hold?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import (
    AnchorsOption,
    DecodeOption,
    FloorOption,
    JsonOption,
    KnownPanelOption,
    RunsOption,
    SignOption,
    sign_receipts,
    written,
)

if TYPE_CHECKING:
    from harness.verify import Outcome


def card(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Run folders (the baseline first, the card's subject last) or comparisons."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The card's folder; its README.md is made or merged into.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 when the card is stale.")] = False,
    subject: Annotated[str | None, typer.Option(help="Name of the measurement that the card is about.")] = None,
    decimals: Annotated[
        int | None, typer.Option(min=0, max=12, help="Decimals of means; else as intervals allow.")
    ] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the teacher, where the receipts have none.")] = None,
    repo: Annotated[str | None, typer.Option(help="Hub id of the quant itself.")] = None,
    panel: KnownPanelOption = None,
    tasks: Annotated[list[Path] | None, typer.Option(help="Folder of `fidelity tasks`; may be repeated.")] = None,
    artifact: Annotated[
        list[Path] | None,
        typer.Option(help="Receipt of `fidelity artifact show|equality|provenance`; may be repeated."),
    ] = None,
    floor: FloorOption = None,
    anchor: AnchorsOption = None,
    positions: Annotated[
        bool,
        typer.Option("--positions/--no-positions", help="Copy positions.parquet too: strangers can verify."),
    ] = False,
    pictures: Annotated[bool, typer.Option("--pictures/--no-pictures", help="Draw pictures, or tables only.")] = True,
    sign: SignOption = None,
) -> None:
    """Write a model card from receipts: tables, pictures, front matter."""
    from harness.report.card import Options, collect
    from harness.report.card_write import check_card, write_card

    parts = collect(runs, panel=panel, floor=floor, anchors=anchor or [])
    options = Options(
        subject=subject,
        decimals=decimals,
        base_model=base_model,
        repo=repo,
        pictures=pictures,
        positions=positions,
    )
    if check:
        stale = check_card(parts, options, out, tasks=tasks or [])
        for line in stale:
            typer.echo(line)
        typer.echo(f"{out.name}: stale, {len(stale)} lines differ" if stale else f"{out.name}: up to date")
        raise typer.Exit(1 if stale else 0)
    made = write_card(parts, options, out, tasks=tasks or [], artifact=artifact or [])
    for warning in made.warnings:
        typer.echo(f"note: {warning}", err=True)
    typer.echo(f"wrote {out.name}/README.md")
    sign_receipts(out, sign)


def verify(
    path: Annotated[
        Path, typer.Argument(help="A run folder, a comparison folder, or a card's folder.", callback=written)
    ],
    run: RunsOption = None,
    panel: KnownPanelOption = None,
    signers: Annotated[
        Path | None, typer.Option(help="File of allowed signers: each receipt must be signed by one of them.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="The quant's folder: a card's Artifact section is counted again from it.")
    ] = None,
    seal: Annotated[
        bool,
        typer.Option("--seal", help="Seal records that are older than seals, where all that can be checked holds."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compute again all that a receipt or a card states, without weights; names whatever differs."""
    from harness.verify import as_json as record
    from harness.verify import seal_unsealed
    from harness.verify import verify as check

    outcome = check(path, runs=run or [], panel=panel, checkpoint=checkpoint)
    if seal:
        for name in seal_unsealed(path, outcome):
            typer.echo(f"sealed      {name}")
        outcome = check(path, runs=run or [], panel=panel, checkpoint=checkpoint)
    if as_json:
        typer.echo(json.dumps(record(outcome), indent=1, ensure_ascii=False))
    else:
        _show(outcome)
    signed = True if signers is None else _signatures(path, signers)
    raise typer.Exit(0 if outcome.ok and signed else 1)


def _signatures(path: Path, signers: Path) -> bool:
    from harness.verify.signature import check_signatures

    found = check_signatures(path if path.is_dir() else path.parent, signers)
    for one in found:
        typer.echo(f"signed      {one.file} by {one.signer}" if one.signer else f"NOT SIGNED  {one.file} {one.problem}")
    return all(one.signer for one in found)


def report(
    path: Annotated[Path, typer.Argument(help="A run folder or a comparison folder.", callback=written)],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: report.html inside.")] = None,
    run: RunsOption = None,
    tokenizer: DecodeOption = None,
) -> None:
    """Write one self-contained HTML file: sortable tables, pictures, the worst positions one by one."""
    from harness.report.html import write_html

    written = write_html(path, out, runs=run or [], tokenizer=tokenizer)
    typer.echo(f"wrote {written.name} ({written.stat().st_size / 1e6:.1f} MB)")


#: Findings shown in the terminal; all of them are in --json.
SHOWN = 25


def _show(outcome: Outcome) -> None:
    for line in outcome.checked:
        typer.echo(f"same        {line}")
    for line in [*outcome.unchecked_numbers, *outcome.unchecked]:
        typer.echo(f"NOT CHECKED {line}")
    for finding in outcome.findings[:SHOWN]:
        typer.echo(f"DIFFERS     {finding.where}: stated {finding.stated}, found {finding.found}")
    if len(outcome.findings) > SHOWN:
        typer.echo(f"DIFFERS     and {len(outcome.findings) - SHOWN} more (--json shows all)")
    typer.echo(f"{outcome.name}: {outcome.verdict}")
