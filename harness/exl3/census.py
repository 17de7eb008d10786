"""What a checkpoint holds, counted from the shard headers: rates, codebooks, dtypes, bytes, bits per weight.

Bits per weight are counted, never derived from a config or a formula over layers. Scopes: routed experts, all quantised
modules (head included), each with its prediction (MTP) layers apart, and the whole file. ``mean_k`` weighs K by the
weights coded, padding included; ``bits_per_weight`` is 8 x bytes / weights with every scale and marker of the scope in
the bytes. Packed words of other formats count as the weights they hold, their scales as none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.exl3.checkpoint import Checkpoint, open_checkpoint
from harness.exl3.claims import KINDS, Kind, Section, Spot, decoder_layers, mismatches, spot_of
from harness.exl3.foreign import weights_in
from harness.exl3.ranked import rank_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A scope's size; ``mean_k`` is None where nothing in it is coded."""

    tensors: int
    weights: int
    bytes: int
    mean_k: float | None

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.weights if self.weights else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Packed modules of one layer, leaf, rate and codebook; ``tensors`` counts linears, each stored in ``ranks``."""

    section: Section
    layer: int
    kind: Kind
    leaf: str
    bits: float
    codebook: str
    ranks: int
    tensors: int
    weights: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Native:
    """Tensors kept as they were, by section, kind and dtype."""

    section: Section
    kind: Kind
    dtype: str
    tensors: int
    weights: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    name: str
    shards: int
    groups: list[Group]
    native: list[Native]
    tables: dict[str, Rate]
    claims: dict[str, Any]
    mismatches: list[str]
    notes: list[str]

    @property
    def routed(self) -> Rate | None:
        """Routed experts, those of a prediction layer included; None where there are none."""
        return self._packed(lambda group: group.kind == "routed experts")

    @property
    def quantised(self) -> Rate | None:
        """Every packed linear, the head included; None in a plain checkpoint."""
        return self._packed(lambda group: True)

    @property
    def scopes(self) -> dict[str, Rate]:
        """Routed experts, all quantised and the whole file; the first two also apart where there is an MTP layer."""
        found: dict[str, Rate | None] = {}
        for name, kinds in (("routed experts", ("routed experts",)), ("all quantised", KINDS)):
            mtp = self._packed(lambda group, kinds=kinds: group.kind in kinds and group.section == "mtp")
            if mtp is not None:
                own = self._packed(lambda group, kinds=kinds: group.kind in kinds and group.section != "mtp")
                found |= {f"{name}, without MTP": own, f"{name}, MTP alone": mtp}
            found[name] = self._packed(lambda group, kinds=kinds: group.kind in kinds)
        return {name: rate for name, rate in (found | {"whole file": self.whole}).items() if rate is not None}

    @property
    def whole(self) -> Rate:
        """Every tensor of the files."""
        parts: list[Group | Native | Rate] = [*self.groups, *self.native, *self.tables.values()]
        return _total(parts, self.quantised.mean_k if self.quantised else None)

    @property
    def codebooks(self) -> dict[str, int]:
        """Number of modules of each codebook."""
        counts: dict[str, int] = defaultdict(int)
        for group in self.groups:
            counts[group.codebook] += group.tensors
        return dict(counts)

    def counts(self, kind: Kind) -> dict[float, int]:
        """Number of packed modules of a kind by K."""
        counts: dict[float, int] = defaultdict(int)
        for group in self.groups:
            if group.kind == kind:
                counts[group.bits] += group.tensors
        return dict(sorted(counts.items()))

    @property
    def head(self) -> str:
        """The head's rate or dtype: ``K=6``, ``BF16``, or ``tied``."""
        packed = {group.bits for group in self.groups if group.kind == "head"}
        if packed:
            return ", ".join(f"K={bits:g}" for bits in sorted(packed))
        return ", ".join(sorted({n.dtype for n in self.native if n.kind == "head"})) or "tied"

    def as_json(self) -> dict[str, Any]:
        """Everything, for scripts."""
        scopes = {"routed_experts": self.routed, "quantised": self.quantised, "whole_file": self.whole}
        return {
            "name": self.name,
            "shards": self.shards,
            "scopes": {name: _rate_json(rate) for name, rate in scopes.items()},
            "scopes_apart": {name: _rate_json(rate) for name, rate in self.scopes.items() if "MTP" in name},
            "codebooks": self.codebooks,
            "head": self.head,
            "groups": [asdict(group) for group in self.groups],
            "native": [asdict(native) for native in self.native],
            "row_wise_tables": {name: _rate_json(rate) for name, rate in self.tables.items()},
            "config_claims": self.claims,
            "mismatches": self.mismatches,
            "notes": self.notes,
        }

    def _packed(self, wanted: Callable[..., bool]) -> Rate | None:
        groups = [group for group in self.groups if wanted(group)]
        weights = sum(group.weights for group in groups)
        return _total(groups, sum(g.bits * g.weights for g in groups) / weights) if groups else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a receipt keeps of a census: the whole file's bytes and bits per weight, and those of its scopes."""

    bytes: int
    bits_per_weight: float
    quantised_bits_per_weight: float | None
    routed_bits_per_weight: float | None


def sizes(folder: Path) -> Sizes:
    """Sizes of an EXL3 or plain checkpoint folder, from its headers."""
    census = take_census(open_checkpoint(folder))
    quantised, routed = census.quantised, census.routed
    return Sizes(
        bytes=census.whole.bytes,
        bits_per_weight=census.whole.bits_per_weight,
        quantised_bits_per_weight=quantised.bits_per_weight if quantised else None,
        routed_bits_per_weight=routed.bits_per_weight if routed else None,
    )


def take_census(checkpoint: Checkpoint) -> Census:
    """Count a checkpoint; reads no weight."""
    claims = {key: value for key, value in checkpoint.quantization.items() if key != "tensor_storage"}
    return Census(
        name=checkpoint.name,
        shards=len({header.shard for header in checkpoint.tensors.values()}),
        groups=_groups(checkpoint),
        native=_native(checkpoint),
        tables=_tables(checkpoint),
        claims=claims,
        mismatches=mismatches(checkpoint),
        notes=list(checkpoint.notes),
    )


def _groups(checkpoint: Checkpoint) -> list[Group]:
    layers = decoder_layers(checkpoint)
    ranks = Counter(found[0] for name in checkpoint.modules if (found := rank_of(name)) is not None)
    sums: dict[tuple[Spot, float, str, int], list[int]] = defaultdict(lambda: [0, 0, 0])
    lent: set[str] = set()
    for name, module in checkpoint.modules.items():
        linear, rank = rank_of(name) or (name, 0)
        new = {part.name: part.bytes for part in module.lent.values() if part.name not in lent}
        lent |= new.keys()
        total = sums[spot_of(name, layers), module.bits, module.codebook, ranks.get(linear, 1)]
        for index, value in enumerate((rank == 0, module.weights, module.bytes + sum(new.values()))):
            total[index] += value
    return [
        Group(
            **_spot(spot), bits=bits, codebook=codebook, ranks=count, tensors=total[0], weights=total[1], bytes=total[2]
        )
        for (spot, bits, codebook, count), total in sorted(sums.items())
    ]


def _spot(spot: Spot) -> dict[str, Any]:
    return {"section": spot.section, "layer": spot.layer, "kind": spot.kind, "leaf": spot.leaf}


def _native(checkpoint: Checkpoint) -> list[Native]:
    layers = decoder_layers(checkpoint)
    sums: dict[tuple[Section, Kind, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, header in checkpoint.plain.items():
        spot = spot_of(name.rpartition(".")[0], layers)
        total = sums[spot.section, spot.kind, header.dtype]
        for index, value in enumerate((1, weights_in(checkpoint, header), header.bytes)):
            total[index] += value
    for name, scaled in checkpoint.scaled.items():
        spot = spot_of(name.rpartition(".")[0], layers)
        sums[spot.section, spot.kind, checkpoint.plain[name].dtype][2] += scaled.scale.bytes
    return [
        Native(section=section, kind=kind, dtype=dtype, tensors=total[0], weights=total[1], bytes=total[2])
        for (section, kind, dtype), total in sorted(sums.items())
    ]


def _tables(checkpoint: Checkpoint) -> dict[str, Rate]:
    """Row-wise tables; a hashed n-gram table has no signs to tell its width, so its weights come from its ring."""
    rates = {}
    for name, table in checkpoint.tables.items():
        rows, width = table.parts["trellis"].shape
        bits = table.bits if "signs" in table.parts else (width - 1) / 10
        weights = table.weights if "signs" in table.parts else rows * 160
        rates[name] = Rate(tensors=1, weights=weights, bytes=table.bytes, mean_k=bits)
    return rates


def _total(parts: Iterable[Group | Native | Rate], mean_k: float | None) -> Rate:
    parts = list(parts)
    return Rate(
        tensors=sum(part.tensors for part in parts),
        weights=sum(part.weights for part in parts),
        bytes=sum(part.bytes for part in parts),
        mean_k=mean_k,
    )


def _rate_json(rate: Rate | None) -> dict[str, Any] | None:
    return None if rate is None else {**asdict(rate), "bits_per_weight": rate.bits_per_weight}
