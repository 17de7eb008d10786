"""Which source each tensor of an artifact comes from, by its bytes: a mosaic of two releases, or a faithful copy.

A tensor is equal to a source's where dtype, shape and SHA-256 of its bytes are. Sources on the Hub are read by range:
the bytes of the tensors looked at, nothing else. A sample says how likely it misses changes. Sizes are explained to
the byte: what swapped tensors must add, what was added, and the rest by the lengths of the headers.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.artifact.sources import Folder, Repository, shards_of
from harness.errors import CheckpointError, UsageError
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.claims import decoder_layers, spot_of
from harness.exl3.headers import TensorHeader
from harness.progress import phase
from harness.records import Sealed, Strict, json_digest, load_json

FORMAT: Literal["exl3-fidelity/equality/1"] = "exl3-fidelity/equality/1"
Origin = Literal["A", "B", "both", "neither"]
#: Tensors named of each kind of finding.
_NAMED = 20
_CHUNK = 1 << 22
_PARALLEL = 8


class Plan(Strict):
    """Which routed experts come from source B: all the rest comes from A."""

    layers: list[int]
    proj: list[str] = ["gate_proj", "up_proj", "down_proj"]
    source: Literal["B"] = "B"


class SourceIdentity(Strict):
    """A source as far as it was read: its name, commit, and the digest of its list of files."""

    name: str
    commit: str | None
    files_sha256: str


class Shard(Strict):
    """A file of the candidate beside source A's of the same name."""

    file: str
    a_bytes: int | None
    out_bytes: int
    delta: int | None
    header_delta: int | None


class Equality(Sealed):
    """The receipt ``equality.json``."""

    format: Literal["exl3-fidelity/equality/1"] = FORMAT
    candidate: SourceIdentity
    sources: list[SourceIdentity]
    tensors: int
    looked_at: int
    seed: int | None
    counts: dict[str, int]
    only_in_candidate: list[str]
    only_in_sources: list[str]
    neither: list[str]
    plan_sha256: str | None
    plan_mismatches: list[str]
    expected_delta_bytes: int | None
    measured_delta_bytes: int | None
    drift_bytes: int | None
    header_delta_bytes: int | None
    per_shard: list[Shard]

    @property
    def faithful(self) -> bool:
        """Nothing that was looked at is foreign, and the plan is kept."""
        whole = not (self.neither or self.plan_mismatches or self.only_in_candidate or self.counts.get("neither"))
        return whole and self.drift_bytes == self.header_delta_bytes


def load_plan(file: Path) -> Plan:
    """A plan file.

    Raises:
        UsageError: it is no plan.
    """
    return load_json(file, Plan, 'a plan is {"layers": [3, 4], "proj": ["gate_proj"], "source": "B"}', UsageError)


@dataclass(frozen=True, slots=True)
class _Side:
    """A source with its headers."""

    source: Folder | Repository
    checkpoint: Checkpoint

    def digest(self, header: TensorHeader) -> str:
        whole = hashlib.sha256()
        for start in range(0, header.bytes, _CHUNK):
            size = min(_CHUNK, header.bytes - start)
            whole.update(self.source.read(header.shard, header.start + start, size))
        return whole.hexdigest()


def compare_sources(
    candidate: Folder | Repository,
    sources: Sequence[Folder | Repository],
    *,
    plan: Plan | None = None,
    sample: int | None = None,
    seed: int = 0,
) -> Equality:
    """Find the origin of every tensor of ``candidate``, or of ``sample`` of them drawn by ``seed``.

    Raises:
        UsageError: no source or more than two, or a plan without a source B.
        CheckpointError: an artifact without shards, or a damaged one.
    """
    if not 1 <= len(sources) <= 2:
        raise UsageError(f"{len(sources)} sources", "give --sources once or twice")
    if plan is not None and len(sources) < 2:
        raise UsageError("a plan needs a source B", "give --sources a second time")
    own = _side(candidate)
    sides = [_side(source) for source in sources]
    names = sorted(own.checkpoint.tensors)
    if sample is not None and not 1 <= sample <= len(names):
        raise UsageError(f"--sample {sample} of {len(names)} tensors", "give a number in that range, or all")
    looked = names if sample is None else sorted(random.Random(seed).sample(names, sample))
    origins = _origins(own, sides, looked)
    return _receipt(own, sides, names, origins, plan, seed if sample is not None else None)


def _side(source: Folder | Repository) -> _Side:
    if not shards_of(source.files):
        raise CheckpointError(f"{source.name} holds no *.safetensors file", "give a checkpoint")
    return _Side(source, source.checkpoint())


def _origins(own: _Side, sides: Sequence[_Side], names: Sequence[str]) -> dict[str, Origin]:
    def origin(name: str) -> Origin:
        header = own.checkpoint.tensors[name]
        alike = [_alike(header, side.checkpoint.tensors.get(name)) for side in sides]
        if not any(alike):
            return "neither"
        content = own.digest(header)
        same = [
            fits and side.digest(side.checkpoint.tensors[name]) == content
            for fits, side in zip(alike, sides, strict=True)
        ]
        return "both" if len(same) == 2 and all(same) else "A" if same[0] else "B" if any(same) else "neither"

    found: dict[str, Origin] = {}
    with (
        phase(f"tensors of {own.source.name}", total=len(names), unit="MB", item="tensor") as advance,
        ThreadPoolExecutor(_PARALLEL) as pool,
    ):
        for name, where in zip(names, pool.map(origin, names), strict=True):
            found[name] = where
            advance(1, own.checkpoint.tensors[name].bytes / 1e6)
    return found


def _alike(one: TensorHeader, other: TensorHeader | None) -> bool:
    return other is not None and (one.dtype, one.shape) == (other.dtype, other.shape)


def _receipt(
    own: _Side,
    sides: Sequence[_Side],
    names: list[str],
    origins: dict[str, Origin],
    plan: Plan | None,
    seed: int | None,
) -> Equality:
    everywhere = set().union(*(side.checkpoint.tensors for side in sides))
    shards = _per_shard(own, sides[0])
    known = all(shard.delta is not None for shard in shards)
    measured = sum(shard.delta or 0 for shard in shards) if known else None
    swapped = set() if plan is None else planned(own.checkpoint, plan)
    expected = _tensor_delta(own, sides[0], names if plan is None else sorted(swapped))
    return Equality(
        candidate=identity_of(own.source),
        sources=[identity_of(side.source) for side in sides],
        tensors=len(names),
        looked_at=len(origins),
        seed=seed,
        counts=dict(sorted(Counter(origins.values()).items())),
        only_in_candidate=sorted(set(names) - everywhere)[:_NAMED],
        only_in_sources=sorted(set(sides[0].checkpoint.tensors) - set(names))[:_NAMED],
        neither=[name for name, origin in origins.items() if origin == "neither"][:_NAMED],
        plan_sha256=None if plan is None else json_digest(plan.model_dump(mode="json")),
        plan_mismatches=[] if plan is None else _mismatches(origins, swapped),
        expected_delta_bytes=expected,
        measured_delta_bytes=measured,
        drift_bytes=None if measured is None else measured - expected,
        header_delta_bytes=sum(shard.header_delta or 0 for shard in shards) if known else None,
        per_shard=shards,
    )


def _tensor_delta(own: _Side, first: _Side, names: Sequence[str]) -> int:
    """Bytes that the tensors ``names`` take more than in source A."""
    there = first.checkpoint.tensors
    return sum(own.checkpoint.tensors[name].bytes - (there[name].bytes if name in there else 0) for name in names)


def _per_shard(own: _Side, first: _Side) -> list[Shard]:
    held, held_there = _tensor_bytes(own), _tensor_bytes(first)
    found = []
    for path in shards_of(own.source.files):
        size, other = own.source.files[path].bytes, first.source.files.get(path)
        delta = None if other is None else size - other.bytes
        found.append(
            Shard(
                file=path,
                a_bytes=None if other is None else other.bytes,
                out_bytes=size,
                delta=delta,
                header_delta=None if delta is None else delta - (held[path] - held_there[path]),
            )
        )
    return found


def _tensor_bytes(side: _Side) -> Counter[str]:
    """Bytes of tensors by shard; the rest of a file is its header."""
    held: Counter[str] = Counter()
    for header in side.checkpoint.tensors.values():
        held[header.shard] += header.bytes
    return held


def planned(checkpoint: Checkpoint, plan: Plan) -> set[str]:
    """The tensors that a plan takes from source B."""
    layers, found = decoder_layers(checkpoint), set()
    for name in checkpoint.tensors:
        spot = spot_of(name.rpartition(".")[0], layers)
        if spot.kind == "routed experts" and spot.layer in plan.layers and spot.leaf in plan.proj:
            found.add(name)
    return found


def _mismatches(origins: Mapping[str, Origin], swapped: set[str]) -> list[str]:
    lines = []
    for name, origin in origins.items():
        wanted = "B" if name in swapped else "A"
        if origin not in (wanted, "both"):
            lines.append(f"{name}: the plan says {wanted}, it is {_words(origin)}")
    return lines


def _words(origin: Origin) -> str:
    return {"neither": "neither's"}.get(origin, f"{origin}'s")


def identity_of(source: Folder | Repository) -> SourceIdentity:
    """Name, commit, and the digest of paths, sizes and stated digests."""
    listing = [[file.path, file.bytes, file.sha256] for _, file in sorted(source.files.items())]
    return SourceIdentity(name=source.name, commit=source.commit, files_sha256=json_digest(listing))


def risk(tensors: int, looked_at: int, changed: int) -> float:
    """Chance that a sample without replacement of ``looked_at`` of ``tensors`` meets none of ``changed`` ones."""
    if changed > tensors - looked_at:
        return 0.0
    return math.exp(sum(math.log(tensors - looked_at - i) - math.log(tensors - i) for i in range(changed)))
