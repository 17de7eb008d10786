"""The receipt of what an artifact holds, counted from its headers: sizes by kind, bits, layers by K."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from harness.artifact.equality import SourceIdentity, identity_of
from harness.artifact.sources import Folder, Repository
from harness.exl3.census import Census, take_census
from harness.exl3.claims import decoder_layers
from harness.records import Sealed, Strict

FORMAT: Literal["exl3-fidelity/artifact/1"] = "exl3-fidelity/artifact/1"
FILE = "artifact.json"


class Scope(Strict):
    """A part of the artifact: its modules or tensors, weights, bytes, and the mean K of what is coded."""

    tensors: int
    weights: int
    bytes: int
    mean_k: float | None
    bits_per_weight: float


class Layers(Strict):
    """How many layers hold routed experts at this K; a layer of several rates is listed under each."""

    k: float
    all: int
    main: int
    mtp: int


class Artifact(Sealed):
    """The receipt ``artifact.json``."""

    format: Literal["exl3-fidelity/artifact/1"] = FORMAT
    source: SourceIdentity
    file_bytes: int
    index_total_bytes: int | None
    scopes: dict[str, Scope]
    bytes_by_kind: dict[str, int]
    codebooks: dict[str, int]
    head: str
    ranks: int
    decoder_layers: int | None
    routed_layers: list[Layers]
    mismatches: list[str]


def summarise(source: Folder | Repository) -> Artifact:
    """Count an artifact; reads headers alone.

    Raises:
        CheckpointError: no checkpoint, or a damaged one.
    """
    checkpoint = source.checkpoint()
    census = take_census(checkpoint)
    return Artifact(
        source=identity_of(source),
        file_bytes=sum(file.bytes for file in source.files.values()),
        index_total_bytes=index_total(source),
        scopes={
            name: Scope(
                tensors=rate.tensors,
                weights=rate.weights,
                bytes=rate.bytes,
                mean_k=rate.mean_k,
                bits_per_weight=rate.bits_per_weight,
            )
            for name, rate in census.scopes.items()
        },
        bytes_by_kind=_by_kind(census),
        codebooks=census.codebooks,
        head=census.head,
        ranks=max((group.ranks for group in census.groups), default=1),
        decoder_layers=decoder_layers(checkpoint),
        routed_layers=routed_layers(census),
        mismatches=[*census.mismatches, *_stale_index(source, census)],
    )


def _by_kind(census: Census) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    coded = [(g.section, g.kind, f"EXL3 K={g.bits:g}", g.bytes) for g in census.groups]
    kept = [(n.section, n.kind, n.dtype, n.bytes) for n in census.native]
    for section, kind, how, size in (*coded, *kept):
        sums[f"{'' if section == 'text' else f'{section}, '}{kind}, {how}"] += size
    for name, table in census.tables.items():
        sums[f"{name}, row-wise table"] += table.bytes
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def routed_layers(census: Census) -> list[Layers]:
    """Layers with routed experts by K, those of the main stack and the prediction layers apart."""
    found: dict[float, dict[str, set[int]]] = defaultdict(lambda: {"text": set(), "mtp": set()})
    for group in census.groups:
        if group.kind == "routed experts" and group.section in ("text", "mtp"):
            found[group.bits][group.section].add(group.layer)
    return [
        Layers(k=k, all=len(by["text"]) + len(by["mtp"]), main=len(by["text"]), mtp=len(by["mtp"]))
        for k, by in sorted(found.items())
    ]


def index_total(source: Folder | Repository) -> int | None:
    """``metadata.total_size`` of the index file; None where there is none."""
    import json

    file = source.files.get("model.safetensors.index.json")
    if file is None:
        return None
    try:
        total = json.loads(source.read(file.path, 0, file.bytes))["metadata"]["total_size"]
    except (ValueError, KeyError, TypeError):
        return None
    return total if isinstance(total, int) else None


def _stale_index(source: Folder | Repository, census: Census) -> list[str]:
    total = index_total(source)
    if total is None or total == census.whole.bytes:
        return []
    return [f"the index file says total_size {total:,}, the tensors hold {census.whole.bytes:,} bytes: it is stale"]
