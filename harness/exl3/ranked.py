"""Linears stored as tensor-parallel slices, ``....down_proj.rank2.trellis``, and scales that experts share.

Each slice is a packed linear of its own: own Hadamard blocks, own scales. So slices are decoded one by one and their
dense weights joined, along the outputs, or along the inputs for the linears that tensor parallelism cuts there;
joining the trellises would be another matrix. Archives with shared scales keep one pair for all experts of a layer
under ``<experts>.shared_h.<linear>``, and the experts have none of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

from harness.errors import CheckpointError
from harness.exl3.headers import TensorHeader

_RANK = re.compile(r"^(?P<linear>.*)\.rank(?P<rank>\d+)$")
_SHARED = re.compile(r"^(?P<stack>.*experts)\.shared_h\.(?P<rest>.+)$")
_EXPERT = re.compile(r"^(?P<stack>.*experts)\.\d+\.(?P<rest>.+)$")
_SCALES = ("suh", "svh")
#: Linears whose inputs are divided among the ranks; of all others it is the outputs.
_IN_SLICED = ("down_proj", "o_proj")
#: Keys of config.json that say how many ranks there are.
_CLAIMS = ("archive_tensor_parallel_size", "rank_stacked_tp")
_ASK = "fetch the missing shard, or ask the maker of the archive"


class Slice(Protocol):
    """What is asked of a packed linear here."""

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> float: ...
    @property
    def codebook(self) -> str: ...
    @property
    def padded_in(self) -> int: ...
    @property
    def padded_out(self) -> int: ...


def rank_of(module: str) -> tuple[str, int] | None:
    """``("....down_proj", 2)`` of ``....down_proj.rank2``; None of a linear that is stored whole."""
    found = _RANK.match(module)
    return (found["linear"], int(found["rank"])) if found else None


def in_sliced(linear: str) -> bool:
    """Whether the ranks of a linear divide its inputs."""
    return linear.rpartition(".")[2] in _IN_SLICED


def lend_scales(groups: Mapping[str, dict[str, TensorHeader]]) -> dict[str, dict[str, TensorHeader]]:
    """The parts of every linear, those of a layer's shared scales put where an expert has none.

    Args:
        groups: parts by suffix, by the name that they lie under.

    Raises:
        CheckpointError: an expert has scales of its own too, or finds none; shared scales that no expert needs.
    """
    shared = {owner: parts for owner, parts in groups.items() if _SHARED.match(owner)}
    if not shared:
        return dict(groups)
    unused, whole = set(shared), {}
    for owner, parts in groups.items():
        if owner in shared:
            continue
        found = _EXPERT.match(owner)
        lender = f"{found['stack']}.shared_h.{found['rest']}" if found else ""
        whole[owner] = parts | _lent(owner, parts, lender, shared)
        unused.discard(lender)
    if unused:
        raise CheckpointError(f"{min(unused)} holds scales that no expert uses", _ASK)
    return whole


def _lent(
    owner: str, parts: Mapping[str, TensorHeader], lender: str, shared: Mapping[str, dict[str, TensorHeader]]
) -> dict[str, TensorHeader]:
    stack = lender.partition(".shared_h.")[0]
    if lender not in shared:
        lacking = [scale for scale in _SCALES if scale not in parts]
        if lacking and any(other.startswith(f"{stack}.shared_h.") for other in shared if stack):
            raise CheckpointError(f"{owner} has no {lacking[0]} of its own, and {lender}.{lacking[0]} is missing", _ASK)
        return {}
    for scale in _SCALES:
        if scale in parts:
            raise CheckpointError(
                f"{owner} has a {scale} of its own beside the shared {lender}.{scale}: which one counts is not known",
                "ask the maker of the archive",
            )
        if scale not in shared[lender]:
            raise CheckpointError(f"{owner} has no {scale} of its own, and {lender}.{scale} is missing", _ASK)
    return shared[lender]


def check_ranks(name: str, modules: Mapping[str, Slice], config: Mapping[str, Any]) -> None:
    """Refuse slices that are no whole linear, or that config.json counts otherwise.

    Raises:
        CheckpointError: a rank is missing, ranks differ in K, codebook or size, or config.json states another number.
    """
    ranks: dict[str, dict[int, Slice]] = defaultdict(dict)
    for module in modules.values():
        if (found := rank_of(module.name)) is not None:
            ranks[found[0]][found[1]] = module
    claimed = _claimed(config) if ranks else {}
    count = max((max(slices) + 1 for slices in ranks.values()), default=0)  # an archive has one number of ranks
    for linear, slices in ranks.items():
        if missing := sorted(set(range(count)) - slices.keys()):
            raise CheckpointError(f"{linear}: rank {missing[0]} of {count} is missing", _ASK)
        _check_alike(linear, [slices[rank] for rank in range(count)])
        for key, said in claimed.items():
            if said != count:
                raise CheckpointError(
                    f"{name}: config.json says {key} {said}, and {linear} has {count} ranks",
                    "fetch the missing shard, or use the config.json that belongs to these shards",
                )


def _check_alike(linear: str, slices: list[Slice]) -> None:
    for what, values in (
        ("K", [f"{part.bits:g}" for part in slices]),
        ("codebook", [part.codebook for part in slices]),
        ("size", [f"{part.padded_out} x {part.padded_in}" for part in slices]),
    ):
        if len(set(values)) > 1:
            raise CheckpointError(
                f"{linear}: its ranks differ in {what}: {', '.join(values)}", "ask the maker of the archive"
            )


def _claimed(config: Mapping[str, Any]) -> dict[str, int]:
    holders = [config, config.get("quantization_config"), (config.get("text_config") or {}).get("quantization_config")]
    found = [holder for holder in holders if isinstance(holder, Mapping)]
    return {key: holder[key] for holder in found for key in _CLAIMS if isinstance(holder.get(key), int)}
