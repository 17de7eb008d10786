"""Rows, columns and expert of every packed linear inside the dense parameter it belongs to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from harness.errors import CheckpointError
from harness.exl3 import decode, decode_torch
from harness.exl3.checkpoint import PackedModule
from harness.exl3.hf_names import FUSED, Landing
from harness.exl3.layout import TILE
from harness.exl3.ranked import in_sliced, rank_of
from harness.exl3.tensors import PADDING, Exl3Linear

_WRONG_MODEL = "use the config.json that belongs to these shards, or fetch the missing shard"
#: dtypes that both decoders write directly; any other is decoded in float32 and cast.
_DECODED = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPart:
    """A plain tensor [out, in] that is one part of a larger parameter."""

    name: str
    padded_in: int
    padded_out: int


P = TypeVar("P", bound=PackedModule | PlainPart)


Experts = dict[int | None, list[tuple[Landing, P]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Generic[P]):
    """One stored linear with the sizes the model gives it, and where it lands: ``target[expert][rows, columns]``.

    ``taken``: the rows of the packed linear that land there, when it is shared by several parameters.
    """

    module: P
    in_features: int
    out_features: int
    rows: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))
    expert: int | None = None
    transposed: bool = False
    taken: tuple[int, int] | None = None

    @property
    def whole(self) -> bool:
        """Whether the packed linear fills its parameter alone."""
        everything = slice(None)
        return self.expert is None and self.taken is None and (self.rows, self.columns) == (everything, everything)


PackedPlace = Place[PackedModule]


def places(
    param: str, landed: Sequence[tuple[Landing, P]], owner: nn.Module, state: Mapping[str, torch.Tensor], config: Any
) -> list[Place[P]]:
    """Divide the parameter ``param`` among the packed linears that landed on it.

    Raises:
        CheckpointError: an expert or a part is missing or double, or sizes that padding cannot explain.
    """
    shape = tuple(state[param].shape)
    if landed[0][0].taken:
        return [_part_of_fused(param, landing, module, state) for landing, module in landed]
    experts = _by_expert(param, landed, shape)
    transposed = _is_transposed(owner, shape, experts)
    rows, columns = shape[-2:] if not transposed else shape[:-3:-1]
    found = []
    for expert, slots in experts.items():
        first = slots[0][0]
        if first.whole:
            module = slots[0][1]
            found.append(Place(module=module, in_features=columns, out_features=rows, transposed=transposed))
            continue
        parts = [[module for _, module in group] for _, group in groupby(slots, key=lambda entry: entry[0].slot)]
        across = columns if first.columns else rows
        sizes = _sizes(param, across, [_padded_size(part)[not first.columns] for part in parts], config)
        strided = expert is not None and len(parts) > 1 and getattr(owner, "is_concatenated", True) is False
        for part, size, cut in zip(parts, sizes, _cuts(sizes, strided), strict=True):
            place = Place(
                module=part[0],
                in_features=size if first.columns else columns,
                out_features=rows if first.columns else size,
                rows=slice(None) if first.columns else cut,
                columns=cut if first.columns else slice(None),
                expert=expert,
                transposed=transposed,
            )
            found += [place] if len(part) == 1 else _among_ranks(param, place, part, config)
    return found


def _padded_size(ranks: Sequence[P]) -> tuple[int, int]:
    """``(in, out)`` as stored, of a linear whose ranks are these."""
    first, count = ranks[0], len(ranks)
    if rank_of(first.name) is not None and in_sliced(_linear(first.name)):
        return first.padded_in * count, first.padded_out
    return first.padded_in, first.padded_out * count


def _linear(module: str) -> str:
    found = rank_of(module)
    return found[0] if found else module


def _among_ranks(param: str, whole: Place[P], ranks: Sequence[P], config: Any) -> Iterator[Place[P]]:
    """The place of a linear divided among the ranks that store it."""
    along_in = in_sliced(_linear(whole.module.name))
    total = whole.in_features if along_in else whole.out_features
    sizes = _sizes(param, total, [rank.padded_in if along_in else rank.padded_out for rank in ranks], config)
    for rank, size, cut in zip(ranks, sizes, _cuts(sizes, False), strict=True):
        yield replace(
            whole,
            module=rank,
            in_features=size if along_in else whole.in_features,
            out_features=whole.out_features if along_in else size,
            rows=whole.rows if along_in else _within(whole.rows, cut),
            columns=_within(whole.columns, cut) if along_in else whole.columns,
        )


def _within(outer: slice, inner: slice) -> slice:
    """The rows ``inner`` of the rows ``outer``."""
    start, step = outer.start or 0, outer.step or 1
    return slice(start + inner.start * step, start + inner.stop * step, outer.step)


def _by_expert(param: str, landed: Sequence[tuple[Landing, P]], shape: tuple[int, ...]) -> Experts[P]:
    experts: Experts[P] = defaultdict(list)
    for landing, module in landed:
        experts[landing.expert].append((landing, module))
    wanted: list[int | None] = [None] if len(shape) == 2 else list(range(shape[0]))
    missing = [expert for expert in wanted if expert not in experts]
    surplus = [expert for expert in experts if expert not in wanted]
    if missing or surplus:
        what = f"experts {missing[:5]} are missing" if missing else f"the model has no expert {surplus[0]}"
        raise CheckpointError(f"{param}: {what} of {len(wanted)}", _WRONG_MODEL)
    for expert, group in experts.items():
        group.sort(key=lambda entry: (entry[0].slot, entry[0].rank))
        found = [(landing.slot, landing.rank) for landing, _ in group]
        ranks = {landing.slot: landing.ranks for landing, _ in group}
        if found != [(slot, rank) for slot in range(group[0][0].slots) for rank in range(ranks.get(slot, 1))]:
            where = param if expert is None else f"{param}, expert {expert}"
            raise CheckpointError(
                f"{where}: needs {group[0][0].slots} parts and has {len(ranks)}: "
                + ", ".join(module.name for _, module in group),
                _WRONG_MODEL,
            )
    return dict(experts)


def _is_transposed(
    owner: nn.Module, shape: tuple[int, ...], experts: Mapping[int | None, list[tuple[Landing, P]]]
) -> bool:
    """Whether a stack holds ``[in, out]``: the model class says so, else the padded sizes do."""
    if len(shape) == 2:
        return False
    declared = getattr(owner, "is_transposed", None)
    if declared is not None:
        return bool(declared)
    slots = next(iter(experts.values()))
    padded_in, _ = _padded_size([module for landing, module in slots if landing.slot == slots[0][0].slot])
    return _padded(shape[-1]) != padded_in and _padded(shape[-2]) == padded_in


def _padded(size: int) -> int:
    return -(-size // PADDING) * PADDING


def _sizes(param: str, total: int, padded: list[int], config: Any) -> list[int]:
    """The model's own sizes of parts that are stored padded and together make ``total``."""
    count = len(padded)
    if sum(padded) == total:
        return padded
    even = [total // count] * count
    for sizes in (even, _attention_sizes(config)):
        if sum(sizes) == total and [_padded(size) for size in sizes] == padded:
            return sizes
    raise CheckpointError(
        f"{param}: the model has {total} rows or columns there and the packed parts are padded to {padded}",
        _WRONG_MODEL,
    )


def _attention_sizes(config: Any) -> list[int]:
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0) or 0
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    kv = getattr(text, "num_key_value_heads", None) or heads
    return [heads * head_dim, kv * head_dim, kv * head_dim]


def _cuts(sizes: Sequence[int], strided: bool) -> Iterator[slice]:
    start = 0
    for index, size in enumerate(sizes):
        yield slice(index, None, len(sizes)) if strided else slice(start, start + size)
        start += size


def _part_of_fused(param: str, landing: Landing, module: P, state: Mapping[str, torch.Tensor]) -> Place[P]:
    """``param`` is the part ``landing.slot`` of a linear that EXL3 stores fused."""
    parent, leaf = param.removesuffix(".weight").rpartition(".")[::2]
    parts = FUSED[module.name.rpartition(".")[2]]
    sizes = [state[f"{parent}.{part}.weight"].shape[0] for part in parts]
    if leaf != parts[landing.slot]:
        raise ValueError(f"{param} is not part {landing.slot} of {module.name}")
    start = sum(sizes[: landing.slot])
    return Place(
        module=module,
        in_features=state[param].shape[1],
        out_features=sum(sizes),
        taken=(start, start + sizes[landing.slot]),
    )


def view_of(place: Place[Any], target: torch.Tensor) -> torch.Tensor:
    """The part of the dense parameter ``target`` that ``place`` fills, as [out, in]."""
    view = target if place.expert is None else target[place.expert]
    return (view.T if place.transposed else view)[place.rows, place.columns]


def write_packed(place: Place[Any], linear: Exl3Linear, target: torch.Tensor) -> None:
    """Decode ``linear``, in float32, into its place of the dense parameter ``target``, cast once to its dtype."""
    view = view_of(place, target)
    decoder = decode if view.device.type == "cpu" else decode_torch
    if place.taken is not None and place.taken[0] % PADDING:
        view.copy_(decoder.dense_weight(linear, torch.float32)[slice(*place.taken)])
        return
    if place.taken is not None:
        linear = _columns(linear, *place.taken)
    if view.dtype in _DECODED and view.stride(-1) == 1:
        decoder.dense_weight(linear, view.dtype, out=view)
    else:
        view.copy_(decoder.dense_weight(linear, torch.float32))


def _columns(linear: Exl3Linear, start: int, stop: int) -> Exl3Linear:
    """Output columns of a packed linear from a block border on: Hadamard blocks decode on their own."""
    padded = -(-stop // PADDING) * PADDING
    return Exl3Linear(
        name=linear.name,
        trellis=linear.trellis[:, start // TILE : padded // TILE].contiguous(),
        suh=linear.suh,
        svh=linear.svh[start:padded],
        codebook=linear.codebook,
        bias=None,
        in_features=linear.in_features,
        out_features=stop - start,
    )
