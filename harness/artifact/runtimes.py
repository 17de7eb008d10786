"""Which runtimes can load an artifact: what its tensors ask for, held against a data file for each runtime.

A data file states what a version of a runtime can do, each entry with its source: an address, a commit or version, and
the day it was read. What a file does not mention is unknown, never assumed. Names of tensors are no reason here: a
published refusal once blamed them, wrongly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.errors import UsageError
from harness.exl3.census import Census, take_census
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.ranked import rank_of
from harness.records import Strict, load_toml

FOLDER = Path(__file__).parent / "data"
Verdict = Literal["loads", "refused", "unknown"]


class Entry(Strict):
    """Whether a runtime can do one thing, and who says so; a feature may end with ``*``."""

    feature: str
    can: bool
    why: str = ""
    source: str
    at: str
    read: str


class Runtime(Strict):
    """A data file."""

    name: str
    version: str
    about: str
    entries: list[Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What an artifact asks of a runtime, and what in it does."""

    feature: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A runtime's verdict on one artifact: a line for each need."""

    runtime: str
    verdict: Verdict
    lines: tuple[tuple[Need, Verdict, str], ...]


def known_runtimes() -> list[str]:
    """Names that ``--runtime`` takes."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load_runtime(name: str) -> Runtime:
    """The data file of a runtime, or one that the caller wrote.

    Raises:
        UsageError: no such runtime, or a damaged file.
    """
    file = Path(name) if name.endswith(".toml") else FOLDER / f"{name.replace('==', '-').replace('@', '-')}.toml"
    if not file.is_file():
        raise UsageError(f"there is no runtime {name}", f"choose one of {', '.join(known_runtimes())}, or give a .toml")
    return load_toml(file, Runtime, "see harness/artifact/data for the form", UsageError)


def needs(checkpoint: Checkpoint) -> list[Need]:
    """What the tensors of a checkpoint ask for, each with a tensor that does."""
    return list(_needs(checkpoint, take_census(checkpoint)))


def _needs(checkpoint: Checkpoint, census: Census) -> Iterator[Need]:
    architecture = checkpoint.config.get("architectures")
    if isinstance(architecture, list) and architecture:
        yield Need(feature=f"architecture {architecture[0]}", because="config.json")
    for codebook, count in sorted(census.codebooks.items()):
        where = "routed experts" if _has(census, "routed experts", codebook) else "other linears"
        yield Need(feature=f"codebook {codebook}", because=f"{count:,} linears, {where} among them")
    routed = {group.codebook for group in census.groups if group.kind == "routed experts"}
    for codebook in sorted(routed):
        yield Need(feature=f"routed experts in {codebook}", because="the fused kernel of routed experts")
    if any(group.bits != int(group.bits) for group in census.groups):
        yield Need(feature="fractional K", because="trellises of half a bit")
    sliced = next((name for name in checkpoint.modules if rank_of(name) is not None), None)
    if sliced is not None:
        yield Need(feature="rank-sliced experts", because=sliced)
    if any(module.lent for module in checkpoint.modules.values()):
        yield Need(feature="shared scales", because="experts without scales of their own")
    yield from _outside_experts(census)
    if any(group.section == "mtp" for group in census.groups):
        yield Need(feature="quantised prediction layers", because="EXL3 tensors past the last decoder layer")
    if any(group.section == "vision" for group in census.groups):
        yield Need(feature="quantised vision", because="EXL3 tensors in the vision tower")
    if census.tables:
        yield Need(feature="row-wise tables", because=next(iter(census.tables)))


def _outside_experts(census: Census) -> Iterator[Need]:
    text = [group for group in census.groups if group.section == "text"]
    routed_layers = {group.layer for group in text if group.kind == "routed experts"}
    head = [group for group in text if group.kind == "head"]
    if head:
        yield Need(feature="quantised head", because=f"lm_head at K={head[0].bits:g}")
    others = [group for group in text if group.kind not in ("routed experts", "head")]
    if not others:
        return
    yield Need(feature="EXL3 linears outside the routed experts", because=f"{others[0].kind}, {others[0].leaf}")
    dense = sorted({group.layer for group in others if group.kind == "mlp"} - routed_layers) if routed_layers else []
    if dense:
        yield Need(feature="quantised dense MLP before the experts", because=f"layer {dense[0]} is a dense MLP")


def _has(census: Census, kind: str, codebook: str) -> bool:
    return any(group.kind == kind and group.codebook == codebook for group in census.groups)


def answer(runtime: Runtime, wanted: list[Need]) -> Answer:
    """Hold what an artifact needs against what a runtime can."""
    known = {entry.feature: entry for entry in runtime.entries}
    every = [entry for entry in runtime.entries if entry.feature.endswith("*")]
    lines: list[tuple[Need, Verdict, str]] = []
    for need in wanted:
        alike = (entry for entry in every if need.feature.startswith(entry.feature.removesuffix("*")))
        entry = known.get(need.feature) or next(alike, None)
        if entry is None:
            lines.append((need, "unknown", "the data file does not say"))
        else:
            source = f"{entry.source} at {entry.at}, read {entry.read}"
            lines.append((need, "loads" if entry.can else "refused", f"{entry.why or 'supported'} ({source})"))
    verdicts = {verdict for _, verdict, _ in lines}
    whole: Verdict = "refused" if "refused" in verdicts else "unknown" if "unknown" in verdicts else "loads"
    return Answer(runtime=f"{runtime.name} {runtime.version}", verdict=whole, lines=tuple(lines))
