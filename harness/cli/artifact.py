"""``fidelity artifact``: what a checkpoint holds, where each tensor comes from, what a card states, who can load it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import JsonOption, RevisionOption
from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.artifact.sources import Folder, Repository
    from harness.records import Strict

app = typer.Typer(
    help="What a checkpoint holds, where it comes from, what its card states, who can load it.", no_args_is_help=True
)

SourceArgument = Annotated[str, typer.Argument(help="Checkpoint folder, or Hub id org/name.")]
FolderArgument = Annotated[Path, typer.Argument(help="Checkpoint folder.")]
ReceiptOption = Annotated[Path | None, typer.Option("--out", "-o", help="Write the receipt to this file.")]


@app.command()
def show(
    source: SourceArgument, revision: RevisionOption = None, out: ReceiptOption = None, as_json: JsonOption = False
) -> None:
    """Sizes by kind, bits, layers by K, codebooks and ranks, counted from the headers."""
    from harness.artifact.summary import summarise

    receipt = summarise(_open(source, revision))
    _write(receipt, out)
    if as_json:
        return _json(receipt)
    for name, scope in receipt.scopes.items():
        mean = "" if scope.mean_k is None else f", mean K {scope.mean_k:.5f}"
        typer.echo(f"{name:32} {scope.bytes:>18,} bytes {scope.bits_per_weight:9.5f} bits per weight{mean}")
    for kind, size in receipt.bytes_by_kind.items():
        typer.echo(f"  {kind:30} {size:>18,} bytes")
    for layer in receipt.routed_layers:
        typer.echo(f"routed experts at K={layer.k:g}: {layer.main} layers of the main stack, {layer.mtp} after it")
    codebooks = ", ".join(f"{name} {count:,}" for name, count in receipt.codebooks.items())
    typer.echo(f"codebooks: {codebooks or 'none'}; head: {receipt.head}; ranks: {receipt.ranks}")
    for line in receipt.mismatches:
        typer.echo(f"note: {line}")


@app.command()
def manifest(
    source: SourceArgument,
    revision: RevisionOption = None,
    write: Annotated[bool, typer.Option("--write", help="Write sha256-manifest.txt and EXL3_MANIFEST.json.")] = False,
    check: Annotated[Path | None, typer.Option(help="Manifest to hold against the artifact.")] = None,
) -> None:
    """Digests of all files, written, or held against a folder or a Hub repository without downloading it."""
    from harness.artifact.manifest import check_manifest, manifest_of, read_manifest, write_manifests
    from harness.artifact.sources import Folder

    found = _open(source, revision)
    if write:
        if not isinstance(found, Folder):
            raise UsageError(f"{source} is no folder", "a manifest is written into a folder")
        made = write_manifests(found, _cache())
        typer.echo(f"{found.name}: {len(made.files)} files in sha256-manifest.txt and EXL3_MANIFEST.json")
        return
    file = check or (manifest_of(found.path) if isinstance(found, Folder) else None)
    if file is None:
        raise UsageError("a repository is held against a manifest", "give it with --check FILE")
    lines = check_manifest(found, read_manifest(file), file.name, _cache())
    wrong = [(path, status) for path, status in lines if status not in ("equal", "extra")]
    for path, status in lines:
        if status != "equal":
            typer.echo(f"{status:10} {path}")
    equal = sum(status == "equal" for _, status in lines)
    typer.echo(f"{found.name}{_at(found)}: {equal} of {len(lines)} files equal")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def equality(
    candidate: SourceArgument,
    sources: Annotated[
        list[str], typer.Option(help="Source A, and again for source B: folders or Hub ids (id@commit).")
    ],
    plan: Annotated[Path | None, typer.Option(help="JSON: layers and projections that come from source B.")] = None,
    sample: Annotated[str, typer.Option(help="all, or how many tensors to draw.")] = "all",
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    revision: RevisionOption = None,
    out: ReceiptOption = None,
    as_json: JsonOption = False,
) -> None:
    """Which source every tensor equals by its bytes, against the plan, with the change in size explained."""
    from harness.artifact.equality import compare_sources, load_plan, risk

    if sample != "all" and not sample.isdigit():
        raise UsageError(f"--sample {sample}", "give a number of tensors, or all")
    own, others = _open(candidate, revision), [_open(*_with_commit(text)) for text in sources]
    receipt = compare_sources(
        own,
        others,
        plan=None if plan is None else load_plan(plan),
        sample=None if sample == "all" else int(sample),
        seed=seed,
    )
    _write(receipt, out)
    if as_json:
        _json(receipt)
        raise typer.Exit(0 if receipt.faithful else 1)
    for letter, source in zip("AB", others, strict=False):
        typer.echo(f"{letter}: {source.name}{_at(source)}")
    counts = ", ".join(f"{name} {count:,}" for name, count in receipt.counts.items())
    typer.echo(f"{own.name}: {receipt.looked_at:,} of {receipt.tensors:,} tensors looked at: {counts}")
    if receipt.looked_at < receipt.tensors:
        for changed in (1, 10, 100):
            chance = risk(receipt.tensors, receipt.looked_at, changed)
            typer.echo(f"  {changed} changed tensors would have been missed with probability {chance:.3g}")
    _lines("in no source", receipt.neither or receipt.only_in_candidate)
    _lines("only in the sources", receipt.only_in_sources)
    _lines("not as planned", receipt.plan_mismatches)
    if receipt.measured_delta_bytes is not None and receipt.expected_delta_bytes is not None:
        told = (
            "headers explain it" if receipt.drift_bytes == receipt.header_delta_bytes else "headers do not explain it"
        )
        typer.echo(
            f"size beside A: {receipt.expected_delta_bytes:+,} bytes of tensors expected, "
            f"{receipt.measured_delta_bytes:+,} measured, {receipt.drift_bytes:+,} more ({told})"
        )
    typer.echo(f"{own.name} is {'what its sources make' if receipt.faithful else 'NOT what its sources make'}")
    raise typer.Exit(0 if receipt.faithful else 1)


@app.command()
def provenance(
    folder: FolderArgument,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Default: PROVENANCE.json in the folder.")] = None,
    equality: Annotated[Path | None, typer.Option(help="Receipt of `fidelity artifact equality`.")] = None,
    run: Annotated[list[Path] | None, typer.Option(help="Run folder of a measurement; may be repeated.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Derive it again and name what differs.")] = False,
) -> None:
    """Where the artifact comes from: each field stated, counted or verified, with the evidence."""
    from harness.artifact.provenance import FILE, Provenance, derive, differences
    from harness.artifact.sources import Folder
    from harness.records import load_json
    from harness.store import write_receipt

    source = _open(str(folder), None)
    assert isinstance(source, Folder)
    file = out or folder / FILE
    derived = derive(source, _front_matter_of(folder), equality=equality, runs=run or [])
    if check:
        lines = differences(load_json(file, Provenance, "make it without --check"), derived)
        _lines("DIFFERS", lines)
        typer.echo(f"{file.name}: {'stale' if lines else 'as derived now'}")
        raise typer.Exit(1 if lines else 0)
    write_receipt(file, derived.model_dump(mode="json"))
    typer.echo(f"wrote {file.name}")


@app.command()
def check(
    source: SourceArgument,
    card: Annotated[Path | None, typer.Option(help="README to read; default: the artifact's own.")] = None,
    revision: RevisionOption = None,
) -> None:
    """Numbers that a card states, beside the counted ones."""
    from harness.artifact.stated import statements
    from harness.artifact.summary import summarise

    found = _open(source, revision)
    text = _readme(found) if card is None else _read(card)
    lines = statements(text, summarise(found))
    for line in lines:
        formula = f"; it is {line.formula}" if line.formula else ""
        typer.echo(f"line {line.line}: {line.stated}: {line.status}: {line.counted}{formula}")
    wrong = sum(line.status == "contradicts" for line in lines)
    typer.echo(f"{len(lines)} numbers that can be counted, {wrong} contradicted")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def lint(source: SourceArgument, revision: RevisionOption = None) -> None:
    """What the Hub and loaders trip over."""
    from harness.artifact.lint import lint as look
    from harness.report.frontmatter import parse, split_readme

    def front_matter(text: str) -> dict[str, Any] | None:
        front, _ = split_readme(text)
        try:
            return parse(front) if front else None
        except UsageError:
            return None

    findings = look(_open(source, revision), front_matter)
    for finding in findings:
        typer.echo(f"{finding.level}: {finding.what}\n  repair: {finding.repair}")
    errors = sum(finding.level == "error" for finding in findings)
    typer.echo(f"{errors} errors, {len(findings) - errors} warnings")
    raise typer.Exit(1 if errors else 0)


@app.command()
def compat(
    source: SourceArgument,
    runtime: Annotated[
        list[str] | None, typer.Option(help="Name of a data file, or a .toml; default: all known.")
    ] = None,
    load_check: Annotated[
        bool, typer.Option("--load-check", help="Place every tensor in the model class, without weights.")
    ] = False,
    revision: RevisionOption = None,
) -> None:
    """Which runtimes can load it, and what stops those that cannot."""
    from harness.artifact.runtimes import answer, known_runtimes, load_runtime, needs

    found = _open(source, revision)
    wanted = needs(found.checkpoint())
    refused = False
    for name in runtime or known_runtimes():
        given = answer(load_runtime(name), wanted)
        refused |= given.verdict == "refused"
        typer.echo(f"{given.runtime}: {given.verdict}")
        for need, verdict, why in given.lines:
            if verdict != "loads":
                typer.echo(f"  {verdict}: {need.feature} ({need.because}): {why}")
    if load_check:
        typer.echo(_load_check(found))
    raise typer.Exit(1 if refused and runtime else 0)


@app.command()
def fits(
    folder: FolderArgument,
    gpu_gib: Annotated[float, typer.Option(help="Memory of the GPU, GiB.")],
    context: Annotated[int, typer.Option(help="Tokens of one context.")],
    kv: Annotated[str, typer.Option(help="Cache type, or keys,values: fp16, fp8, q8, q6, q4, q8_0, ...")] = "fp16",
    slots: Annotated[int, typer.Option(help="Contexts at once.")] = 1,
) -> None:
    """Whether weights, KV cache and overhead fit, with the arithmetic."""
    from harness.artifact.fits import GIB, OVERHEAD_GIB, budget
    from harness.artifact.summary import summarise
    from harness.exl3.files import read_json

    source = _open(str(folder), None)
    weights = summarise(source).scopes["whole file"].bytes
    made = budget(weights, read_json(folder / "config.json"), gpu_gib=gpu_gib, context=context, kv=kv, slots=slots)
    typer.echo(f"weights   {made.weights / GIB:9.3f} GiB")
    typer.echo(f"KV cache  {made.cache / GIB:9.3f} GiB ({kv}, {slots} x {context:,} tokens)")
    for part in made.parts:
        typer.echo(f"            {part.layers} layers, {part.kind}: {part.arithmetic}")
    typer.echo(f"overhead  {OVERHEAD_GIB:9.3f} GiB (assumed, not measured)")
    typer.echo(f"together  {made.total / GIB:9.3f} GiB of {gpu_gib:g}: {'fits' if made.fits else 'does NOT fit'}")
    raise typer.Exit(0 if made.fits else 1)


# ---- shared ----------------------------------------------------------------------------------------------------------


def _open(text: str, revision: str | None) -> Folder | Repository:
    from harness.artifact.sources import open_source

    return open_source(text, revision)


def _with_commit(text: str) -> tuple[str, str | None]:
    name, at, commit = text.partition("@")
    return (name, commit) if at and not Path(text).is_dir() else (text, None)


def _at(source: Folder | Repository) -> str:
    return f" at {source.commit}" if source.commit else ""


def _cache() -> Path:
    import os

    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "exl3-fidelity"


def _write(receipt: Strict, out: Path | None) -> None:
    from harness.store import write_receipt

    if out is not None:
        write_receipt(out, receipt.model_dump(mode="json"))
        typer.echo(f"wrote {out.name}", err=True)


def _json(receipt: Strict) -> None:
    import json

    typer.echo(json.dumps(receipt.model_dump(mode="json"), indent=1, ensure_ascii=False))


def _lines(what: str, names: Iterable[str]) -> None:
    for name in names:
        typer.echo(f"  {what}: {name}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file.name} cannot be read", "give a README.md") from error


def _readme(source: Folder | Repository) -> str:
    file = source.files.get("README.md")
    if file is None:
        raise UsageError(f"{source.name} has no README.md", "give one with --card")
    return source.read(file.path, 0, file.bytes).decode("utf-8", "replace")


def _front_matter_of(folder: Path) -> dict[str, Any]:
    from harness.report.frontmatter import parse, split_readme

    file = folder / "README.md"
    front = split_readme(_read(file))[0] if file.is_file() else ""
    return parse(front) if front else {}


def _load_check(source: Folder | Repository) -> str:
    """Every tensor placed once in the model class, on the meta device."""
    from harness.artifact.sources import Folder
    from harness.engines.stream_weights import skeleton
    from harness.exl3.claims import mismatches
    from harness.exl3.hf_layout import plan_layout
    from harness.exl3.hf_names import Names

    if not isinstance(source, Folder):
        raise UsageError("--load-check needs the folder", "download it, or leave --load-check out")
    import torch

    model, checkpoint = skeleton(source.path, torch.bfloat16, "cpu"), source.checkpoint()
    layout = plan_layout(Names(model), checkpoint)
    skipped = ", ".join(f"{count:,} {rule}" for rule, count in layout.accounting.summary().items())
    used = len(layout.accounting.used)
    lines = [
        f"load check: {used:,} tensors have one place each in {type(model).__name__}; left out: {skipped or 'none'}"
    ]
    lines += [f"load shape mismatch: {line}; a trellis is [in/16, out/16, 16 K]" for line in mismatches(checkpoint)]
    return "\n".join(lines)
