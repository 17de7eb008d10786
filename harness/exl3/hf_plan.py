"""Fit a transformers model on the meta device to the packed tensors of an EXL3 checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from harness.errors import CheckpointError
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.headers import TensorHeader
from harness.exl3.hf_layout import Accounting, Layout, plan_layout, wanted_dtype
from harness.exl3.hf_names import Names
from harness.exl3.hf_packed import Assembly, LentScales, PackedTensors, make_packed
from harness.exl3.hf_place import PackedPlace
from harness.exl3.tensors import RowTable, decode_embedding


@torch.no_grad()
def fill_bias(target: torch.Tensor, pieces: Sequence[tuple[PackedPlace, torch.Tensor]]) -> torch.Tensor:
    """Crop padded biases into the places they share in the dense bias ``target``."""
    for place, bias in pieces:
        view = (target if place.expert is None else target[place.expert])[place.rows]
        start = place.taken[0] if place.taken else 0
        view.copy_(bias[start : start + len(view)])
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseBias:
    """A bias of the model that the checkpoint stores padded, or in pieces; `fill` it after loading."""

    owner: nn.Module
    name: str
    shape: tuple[int, ...]
    pieces: list[tuple[PackedPlace, nn.Module]]

    def fill(self) -> None:
        loaded = [(place, holder.get_parameter("bias").detach()) for place, holder in self.pieces]
        target = torch.empty(self.shape, dtype=loaded[0][1].dtype, device=loaded[0][1].device)
        self.owner.register_parameter(self.name, nn.Parameter(fill_bias(target, loaded)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTable:
    """An embedding that the checkpoint stores as a row-wise table; lookups need it dense, so `fill` decodes it."""

    owner: nn.Module
    table: RowTable
    weight: torch.Tensor

    @torch.no_grad()
    def fill(self) -> None:
        stored = {f"{self.table.name}.{part}": self.owner.get_buffer(part) for part in self.table.parts}
        device = stored[f"{self.table.name}.trellis"].device
        for part in self.table.parts:
            del self.owner._buffers[part]
        dense = decode_embedding(self.table, lambda key: stored[key].cpu())
        rows, columns = self.weight.shape
        self.owner.register_parameter("weight", nn.Parameter(dense[:rows, :columns].to(device, self.weight.dtype)))


@dataclass(slots=True)
class Fitted:
    """A fitted model: what to fill after loading, and the accounting."""

    accounting: Accounting
    fills: list[DenseBias | DenseTable] = field(default_factory=list)


def fit(model: Any, checkpoint: Checkpoint) -> Fitted:
    """Give ``model`` (on meta) a packed module for every EXL3 linear of ``checkpoint``; refuse what does not fit.

    Raises:
        CheckpointError: a tensor without a place or a rule, or a parameter that nothing fills.
    """
    names = Names(model)
    layout = plan_layout(names, checkpoint)
    fitting = _Fitting(model, names, layout)
    owners: dict[str, list[str]] = defaultdict(list)
    for param in layout.packed:
        owners[param.rpartition(".")[0]].append(param)
    for path, params in owners.items():
        fitting.pack(path, params)
    for param, table in layout.tables.items():
        fitting.table(param, table)
    _check_reachable(model, layout)
    return fitting.plan


class _Fitting:
    """Replaces the parameters of one module after another by packed ones."""

    def __init__(self, model: Any, names: Names, layout: Layout) -> None:
        self.model, self.names, self.layout = model, names, layout
        self.plan = Fitted(layout.accounting)
        self._guests: dict[str, tuple[PackedTensors, tuple[nn.Module, str]]] = {}
        self._lenders: dict[str, LentScales] = {}
        self._lent_guests: dict[str, list[tuple[nn.Module, str]]] = defaultdict(list)

    def pack(self, path: str, params: Sequence[str]) -> None:
        """Make the module at ``path`` decode its parameters ``params`` when used."""
        owner = self.model.get_submodule(path)
        assemblies, guests, own = {}, [], None
        for param in params:
            meta, pieces = self.names.state[param], []
            for place in self.layout.packed[param]:
                if self._is_own(param, place):
                    # It becomes a PackedTensors below, once all its parameters are known.
                    own, holder = place, cast(PackedTensors, owner)
                else:
                    holder, guest = self._guest(place, path)
                    guests.append(guest)
                pieces.append((holder, place))
            dtype = wanted_dtype(self.model, param, meta)
            assemblies[param.rpartition(".")[2]] = Assembly(shape=tuple(meta.shape), dtype=dtype, pieces=pieces)
        self._biases(path, owner, params)
        packed = make_packed(owner, assemblies, guests + self._lent_guests[path])
        if own is not None:
            packed.hold(own.module.name, own.module.meta_parts(), (own.in_features, own.out_features))

    def table(self, param: str, table: RowTable) -> None:
        """Let an embedding load the parts of a row-wise table."""
        weight, owner = self.names.state[param], self.model.get_submodule(param.removesuffix(".weight"))
        del owner._parameters["weight"]
        for part, header in table.parts.items():
            owner.register_buffer(part, torch.empty(header.shape, dtype=header.torch_dtype, device="meta"))
        owner.__dict__["_is_hf_initialized"] = True
        self.plan.fills.append(DenseTable(owner=owner, table=table, weight=weight))

    def _is_own(self, param: str, place: PackedPlace) -> bool:
        """Whether the tensors carry the very name of the module: then they lie on it, not beside it."""
        return place.whole and self.names.resolve(f"{place.module.name}.weight")[0] == param

    def _guest(self, place: PackedPlace, owner: str) -> tuple[PackedTensors, tuple[nn.Module, str]]:
        """A new submodule for packed tensors, at the path where the loader will look for them."""
        name = place.module.name
        if name not in self._guests:
            path = self.names.path_beside(name, owner)
            holder = PackedTensors()
            holder.hold(name, place.module.meta_parts(), (place.in_features, place.out_features))
            self._guests[name] = holder, _insert(self.model, path, holder)
            holder.exl3_lent = {suffix: self._lender(part, owner) for suffix, part in place.module.lent.items()}
        return self._guests[name]

    def _lender(self, part: TensorHeader, owner: str) -> LentScales:
        """The module that holds a scale which experts share, where the loader will look for it."""
        name, _, suffix = part.name.rpartition(".")
        if name not in self._lenders:
            self._lenders[name] = LentScales({})
            self._lent_guests[owner].append(
                _insert(self.model, self.names.path_beside(name, owner), self._lenders[name])
            )
        lender = self._lenders[name]
        if suffix not in lender._buffers:
            lender.register_buffer(suffix, part.as_meta())
        return lender

    def _biases(self, path: str, owner: nn.Module, params: Sequence[str]) -> None:
        """Let padded or divided biases load beside their packed tensors."""
        for bias, found in self.layout.biases.items():
            if bias.rpartition(".")[0] != path:
                continue
            leaf = bias.rpartition(".")[2]
            meta = self.names.state[bias]
            del owner._parameters[leaf]
            pieces = []
            for place in found:
                holder = owner if place.whole else self._guest(place, path)[0]
                stored = torch.empty(place.module.padded_out, dtype=meta.dtype, device="meta")
                holder.register_parameter("bias", nn.Parameter(stored))
                pieces.append((place, holder))
            self.plan.fills.append(DenseBias(owner=owner, name=leaf, shape=tuple(meta.shape), pieces=pieces))


def _insert(model: nn.Module, path: str, module: nn.Module) -> tuple[nn.Module, str]:
    """Register ``module`` at ``path``, with empty containers on the way; the topmost new child is returned."""
    *containers, leaf = path.split(".")
    host, topmost = model, None
    for name in containers:
        child = host._modules.get(name)
        if child is None:
            child = nn.Module()
            host.add_module(name, child)
            topmost = topmost or (host, name)
        host = child
    host.add_module(leaf, module)
    return topmost or (host, leaf)


def _check_reachable(model: Any, layout: Layout) -> None:
    """The loader renames the packed tensors on its own: make sure that it arrives where they are expected."""
    names = Names(model)
    packed = {place.module.name: place.module for found in layout.packed.values() for place in found}
    for module in packed.values():
        for part in module.parts.values():
            if names.resolve(part.name)[0] not in names.state:
                raise CheckpointError(
                    f"{part.name}: transformers would look for it in another place than {type(model).__name__} has it",
                    "report this architecture",
                )
