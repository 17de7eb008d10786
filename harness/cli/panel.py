"""``fidelity panel build|seal|verify|register|show``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from harness.cli.options import JsonOption, ResealOption, SealOption, TokenizerOption
from harness.names import panel_folder

if TYPE_CHECKING:
    from harness.panel.seal import Lock
    from harness.registration import Registration
    from harness.types import Panel

app = typer.Typer(help="Build, seal, verify and show panels.", no_args_is_help=True)


def _panel_argument(given: Path) -> Path:
    return panel_folder(Path(given), "fidelity panel show {}")


PanelArgument = Annotated[
    Path,
    typer.Argument(metavar="PANEL", help="A panel's folder, or a shipped one's name.", callback=_panel_argument),
]


@app.command()
def build(
    panel: PanelArgument,
    tokenizer: TokenizerOption = None,
    out: Annotated[Path | None, typer.Option(help="Write rows and lock there instead.")] = None,
    reseal: ResealOption = False,
    as_json: JsonOption = False,
) -> None:
    """Build the rows of PANEL and seal them; an existing seal must come out again exactly."""
    from harness.panel import build_panel

    _said(build_panel(panel, tokenizer=tokenizer, out=out, reseal=reseal), as_json)


@app.command()
def seal(
    panel: PanelArgument,
    tokenizer: Annotated[str, typer.Option(help="Folder, GGUF file, Hub id (or id@revision) or package:NAME.")],
    reseal: ResealOption = False,
    as_json: JsonOption = False,
) -> None:
    """Seal PANEL for another tokenizer, under its folder seals/."""
    from harness.panel import build_panel

    _said(build_panel(panel, tokenizer=tokenizer, reseal=reseal), as_json)


@app.command()
def verify(
    panel: PanelArgument,
    tokenizer: SealOption = None,
    as_json: JsonOption = False,
) -> None:
    """Recompute every row's SHA-256 and the whole, and compare with the seal."""
    from harness.panel import load_panel

    _said(load_panel(panel, tokenizer=tokenizer), as_json)


@app.command()
def register(
    panel: PanelArgument,
    metric: Annotated[str | None, typer.Option(help="Primary metric, such as kl_mean.")] = None,
    margin: Annotated[str | None, typer.Option(help="Difference that does not matter: 10% or 0.0025.")] = None,
    secondary: Annotated[list[str] | None, typer.Option(help="METRIC=MARGIN; may be repeated.")] = None,
    teacher: Annotated[str | None, typer.Option(help="Name or weights SHA-256, or a model's folder.")] = None,
    candidate: Annotated[
        list[str] | None, typer.Option(help="Name, pattern (mine-*), weights SHA-256 or folder; may be repeated.")
    ] = None,
    rows: Annotated[int | None, typer.Option(help="Rows that will be measured; all if left out.")] = None,
    question: Annotated[str, typer.Option(help="The question in words.")] = "",
    replace: Annotated[bool, typer.Option(help="Over another registration that is there or sealed.")] = False,
) -> None:
    """Seal PANEL/registration.toml, written from flags where any are given: what is asked, fixed before measuring."""
    from harness.registration import provenance, write_registration
    from harness.registration import register as seal_registration

    if metric or margin or secondary or teacher or candidate or rows or question:
        fields: dict[str, Any] = {"question": question, "teacher": _named(teacher) if teacher else "", "rows": rows}
        fields |= {"candidates": [_named(name) for name in candidate or []]}
        made = _registration(fields, f"{metric}={margin}", secondary or [])
        write_registration(panel, made, replace=replace)
    registration = seal_registration(panel, replace=replace)
    known = provenance(panel)
    typer.echo(f"panel {panel.name}: registered {registration.sha256}")
    if not registration.candidates:
        typer.echo("  it names no teacher and no candidates (--teacher, --candidate): results stay exploratory")
    if known is None or known.changed:
        typer.echo("  commit registration.toml and panel.lock.json before measuring: git then shows what came first")
    else:
        typer.echo(f"  committed {known.committed} as {known.commit[:12]}")


def _registration(fields: dict[str, Any], primary: str, secondary: list[str]) -> Registration:
    """A registration of flags; what is wrong with them is one line."""
    from pydantic import ValidationError

    from harness.errors import UsageError
    from harness.records import first_problem
    from harness.registration import Registration

    endpoints = [_endpoint(text) for text in (primary, *secondary)]
    try:
        return Registration.model_validate(fields | {"primary": endpoints[0], "secondary": endpoints[1:]})
    except ValidationError as error:
        raise UsageError(
            f"this cannot be registered: {first_problem(error)}",
            "such as --metric kl_mean --margin 10% --teacher org/model --candidate 'mine-*'",
        ) from error


def _endpoint(text: str) -> dict[str, Any]:
    """``kl_mean=10%`` or ``top1_agreement=0.0025``."""
    metric, _, margin = text.partition("=")
    relative = margin.endswith("%")
    try:
        size = float(margin.removesuffix("%")) / (100 if relative else 1)
    except ValueError:
        size = -1.0
    return {"metric": metric, "margin": size, "margin_kind": "relative" if relative else "absolute"}


def _named(spec: str) -> str:
    """The SHA-256 of the weights of a folder that is here; any other name as it stands."""
    from harness.engines.models import locate
    from harness.engines.open import digests_of

    folder = Path(spec).expanduser()
    return digests_of(locate(str(folder), None, cache=folder))[0] if folder.is_dir() else spec


@app.command()
def show(
    panel: PanelArgument,
    tokenizer: SealOption = None,
    text: Annotated[bool, typer.Option(help="Print the beginning of each row's text too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print what PANEL is made of: rows, domains, documents, digests; no text unless asked."""
    from harness.panel import load_panel, load_recipe
    from harness.panel.seal import find_seal

    recipe = load_recipe(panel)
    folder, lock = find_seal(panel, tokenizer)
    built = (folder / "rows.parquet").exists()
    loaded = load_panel(panel, tokenizer=lock.tokenizer.sha256) if built else None
    if as_json:
        typer.echo(json.dumps({**lock.model_dump(), "built": built}, ensure_ascii=False, indent=1))
        return
    beginnings = _beginnings(loaded, recipe.tokenizer) if text and loaded else None
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(f"[bold]{lock.name}[/bold]  {recipe.description.strip()}", highlight=False)
    console.print(_facts(lock, recipe.license, built), highlight=False)
    console.print(_table(lock, loaded, beginnings))


@app.command()
def contamination(
    panel: PanelArgument,
    texts: Annotated[list[Path], typer.Argument(metavar="FILE...", help="UTF-8 text, such as calibration data.")],
    tokenizer: TokenizerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Name the rows of PANEL that share 13 words in a row with FILE; exit code 1 when there are any."""
    from harness.panel import load_panel, load_recipe, load_tokenizer, tokenizer_digest
    from harness.panel.contamination import quoted_rows

    loaded = load_tokenizer(tokenizer or load_recipe(panel).tokenizer)
    sealed = load_panel(panel, tokenizer=tokenizer_digest(loaded))
    quoted = quoted_rows(sealed, loaded, (_read(file) for file in texts))
    clean = [row.index for row in sealed.rows if row.index not in quoted]
    if as_json:
        typer.echo(json.dumps({"panel": sealed.sha256, "quoted": quoted, "clean": clean}))
    else:
        for index, count in quoted.items():
            typer.echo(f"row {index} ({sealed.rows[index].document}): {count} runs of 13 words in common")
        typer.echo(f"{len(clean)} of {len(sealed.rows)} rows are clean")
    if quoted:
        raise typer.Exit(1)


def _read(file: Path) -> str:
    from harness.errors import UsageError

    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read as UTF-8 text: {error}", "name a text file") from error


def _said(panel: Panel, as_json: bool) -> None:
    facts: dict[str, Any] = {
        "name": panel.name,
        "sha256": panel.sha256,
        "rows": len(panel.rows),
        "positions": panel.positions,
        "documents": len({row.document for row in panel.rows}),
        "tokenizer": panel.tokenizer_name,
        "tokenizer_sha256": panel.tokenizer_sha256,
    }
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    typer.echo(
        f"panel {panel.name}: {facts['rows']} rows, {facts['positions']:,} positions, {facts['documents']} documents, "
        f"every SHA-256 right\n  whole      {panel.sha256}\n"
        f"  tokenizer  {panel.tokenizer_sha256} ({panel.tokenizer_name})"
    )


def _facts(lock: Lock, license_note: str, built: bool) -> Table:
    counts = lock.counts
    table = Table(show_header=False, box=None, pad_edge=False)
    domains = ", ".join(f"{name} {rows}" for name, rows in counts.domains.items())
    for name, value in (
        ("rows", f"{counts.rows} x {lock.length} tokens, {counts.positions:,} positions ({domains})"),
        ("documents", f"{counts.documents} used of {counts.read} read ({counts.short} too short); unit: {lock.unit}"),
        ("overlap", f"{lock.largest_overlap:.1%} of token 8-grams between the two most alike rows"),
        ("BOS", f"{lock.bos} (tokenizer adds one: {'yes' if lock.tokenizer.add_bos else 'no'})"),
        ("tokenizer", f"{lock.tokenizer.name}  {lock.tokenizer.sha256}"),
        ("whole", lock.sha256),
        ("registered", lock.registration_sha256 or "no"),
        ("licence", license_note),
        ("rows here", "yes" if built else "no: run `fidelity panel build`"),
    ):
        table.add_row(name, value)
    return table


def _table(lock: Lock, panel: Panel | None, beginnings: list[str] | None) -> Table:
    table = Table("row", "domain", Column("document", overflow="fold"), "start", "SHA-256")
    if panel:
        table.add_column("first tokens")
    if beginnings:
        table.add_column("text")
    for index, row in enumerate(lock.rows):
        cells = [str(row.row), row.domain, row.document, str(row.start), row.sha256[:12]]
        cells += [" ".join(str(token) for token in panel.rows[index].ids_T[:6])] if panel else []
        cells += [beginnings[index]] if beginnings else []
        table.add_row(*cells)
    return table


def _beginnings(panel: Panel, spec: str) -> list[str]:
    """The decoded first tokens of each row, when the recipe's tokenizer is the one of this seal."""
    from harness.panel import check_tokenizer, load_tokenizer

    tokenizer = load_tokenizer(spec)
    check_tokenizer(panel, tokenizer)
    return [tokenizer.decode(row.ids_T[:24]).replace("\n", " ") for row in panel.rows]
