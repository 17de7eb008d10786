"""Fit a transformers model on the meta device to the packed tensors of an EXL3 checkpoint, and account for all of it.

Shapes and markers in the shard headers decide; config.json is never asked for bits or codebooks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from transformers.core_model_loading import dot_natural_key

from harness.errors import CheckpointError
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.hf_names import Names
from harness.exl3.hf_packed import Assembly, PackedTensors, Piece, make_packed
from harness.exl3.hf_place import Landed, Place, places
from harness.exl3.rowwise import GROUP, RowTable, decode_embedding

_WRONG_MODEL = "use the config.json that belongs to these shards, or fetch the missing shard"


@dataclass(slots=True)
class Accounting:
    """What became of every tensor of the checkpoint: ``used`` names, and ``skipped`` name -> rule."""

    used: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, int]:
        """Number of tensors skipped by each rule."""
        return dict(Counter(self.skipped.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseBias:
    """A bias of the model that the checkpoint stores padded, or in pieces; `fill` it after loading."""

    owner: nn.Module
    name: str
    shape: tuple[int, ...]
    pieces: list[tuple[nn.Module, Place]]

    @torch.no_grad()
    def fill(self) -> None:
        loaded = [holder.get_parameter("bias").detach() for holder, _ in self.pieces]
        target = torch.empty(self.shape, dtype=loaded[0].dtype, device=loaded[0].device)
        for (_, place), bias in zip(self.pieces, loaded, strict=True):
            view = (target if place.expert is None else target[place.expert])[place.rows]
            start = place.taken[0] if place.taken else 0
            view.copy_(bias[start : start + len(view)])
        self.owner.register_parameter(self.name, nn.Parameter(target))


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
class Plan:
    """A fitted model: what to fill after loading, and the accounting."""

    accounting: Accounting = field(default_factory=Accounting)
    fills: list[DenseBias | DenseTable] = field(default_factory=list)


def fit(model: Any, checkpoint: Checkpoint) -> Plan:
    """Give ``model`` (on meta) a packed module for every EXL3 linear of ``checkpoint``; refuse what does not fit.

    Raises:
        CheckpointError: a tensor without a place or a rule, or a parameter that nothing fills.
    """
    names = Names(model)
    untie_head(model, names, checkpoint)
    fitting = _Fitting(model, names)
    for owner, parameters in _by_owner(names, checkpoint).items():
        fitting.pack(owner, parameters)
    for table in checkpoint.tables.values():
        fitting.table(table)
    _account(model, checkpoint, fitting.plan.accounting)
    checkpoint.account(fitting.plan.accounting.used, fitting.plan.accounting.skipped)
    return fitting.plan


def untie_head(model: Any, names: Names, checkpoint: Checkpoint) -> None:
    """A head that the checkpoint stores is not the embedding, whatever ``tie_word_embeddings`` says."""
    tied = model.all_tied_weights_keys
    leaves = {target.rsplit(".", 2)[-2] for target in tied if target.endswith(".weight")}
    modules = [*checkpoint.modules, *checkpoint.tables, *(key.removesuffix(".weight") for key in checkpoint.plain)]
    stored = [module for module in modules if module.rpartition(".")[2] in leaves]
    own = {target for module in stored for target in names.filled_by(f"{module}.weight")[0] if target in tied}
    for target in own:
        tied.pop(target)
    if own:
        for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            config.tie_word_embeddings = False


def _by_owner(names: Names, checkpoint: Checkpoint) -> dict[str, dict[str, list[Landed]]]:
    """Packed linears by the module and the parameter they belong to."""
    slices = Counter(name.rpartition(".slice.")[0] for name in checkpoint.modules if ".slice." in name)
    owners: dict[str, dict[str, list[Landed]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(checkpoint.modules, key=dot_natural_key):
        module = checkpoint.modules[name]
        landings = names.landings(name, slices)
        if not landings and names.skip_rule(f"{name}.trellis") is None:
            raise CheckpointError(
                f"{name} is quantised, and {type(names.model).__name__} has no such weight", _WRONG_MODEL
            )
        for landing in landings:
            owner, _, leaf = landing.param.rpartition(".")
            owners[owner][leaf].append((landing, module))
    return owners


class _Fitting:
    """Replaces the parameters of one model after another by packed ones."""

    def __init__(self, model: Any, names: Names) -> None:
        self.model, self.names, self.plan = model, names, Plan()
        self._guests: dict[str, tuple[PackedTensors, tuple[nn.Module, str]]] = {}

    def pack(self, path: str, parameters: Mapping[str, Sequence[Landed]]) -> None:
        """Make the module at ``path`` decode ``parameters`` (leaf name -> what landed there) when used."""
        owner = self.model.get_submodule(path)
        assemblies, guests, own = {}, [], None
        for leaf, landed in parameters.items():
            param = self.names.state[f"{path}.{leaf}"]
            found = places(f"{path}.{leaf}", landed, owner, self.names.state, self.model.config)
            pieces, holders = [], []
            for place in found:
                if self._is_own(path, leaf, landed):
                    # It becomes a PackedTensors below, once all its parameters are known.
                    own, holder = place, cast(PackedTensors, owner)
                else:
                    holder, guest = self._guest(place, path)
                    guests.append(guest)
                holders.append((holder, place))
                pieces.append(_piece(holder, place))
            assemblies[leaf] = Assembly(shape=tuple(param.shape), dtype=param.dtype, pieces=pieces)
            self._bias(path, leaf, owner, holders)
        packed = make_packed(owner, assemblies, guests)
        if own is not None:
            packed.hold(own.module.name, own.module.meta_parts(), (own.in_features, own.out_features))

    def table(self, table: RowTable) -> None:
        """Let the embedding load the parts of a row-wise table."""
        param = self.names.resolve(f"{table.name}.weight")[0]
        if param not in self.names.state:
            if self.names.skip_rule(f"{table.name}.trellis") is None:
                raise CheckpointError(f"{table.name} is a row-wise table that the model does not have", _WRONG_MODEL)
            return
        weight, owner = self.names.state[param], self.model.get_submodule(param.removesuffix(".weight"))
        trellis, signs, bits = table.parts["trellis"], table.parts["signs"], table.bits
        if trellis.shape[0] < len(weight) or not 0 <= signs.shape[0] * GROUP - weight.shape[1] < GROUP:
            raise CheckpointError(
                f"{table.name}: a {bits}-bit table of {trellis.shape[0]} rows of {signs.shape[0] * GROUP} does not "
                f"hold {list(weight.shape)}",
                _WRONG_MODEL,
            )
        if param in self.model.all_tied_weights_keys.values():
            raise CheckpointError(f"{table.name} is a row-wise table and the head has no tensor", _WRONG_MODEL)
        del owner._parameters["weight"]
        for part, header in table.parts.items():
            owner.register_buffer(part, torch.empty(header.shape, dtype=header.torch_dtype, device="meta"))
        owner.__dict__["_is_hf_initialized"] = True
        self.plan.fills.append(DenseTable(owner=owner, table=table, weight=weight))

    def _is_own(self, path: str, leaf: str, landed: Sequence[Landed]) -> bool:
        """Whether the tensors carry the very name of the module: then they lie on it, not beside it."""
        landing, module = landed[0]
        return landing.whole and leaf == "weight" and self.names.resolve(f"{module.name}.weight")[0] == f"{path}.weight"

    def _guest(self, place: Place, owner: str) -> tuple[PackedTensors, tuple[nn.Module, str]]:
        """A new submodule for packed tensors, at the path where the loader will look for them."""
        name = place.module.name
        if name not in self._guests:
            path = self.names.path_beside(name, owner)
            holder = PackedTensors()
            holder.hold(name, place.module.meta_parts(), (place.in_features, place.out_features))
            self._guests[name] = holder, _insert(self.model, path, holder)
        return self._guests[name]

    def _bias(self, path: str, leaf: str, owner: nn.Module, holders: Sequence[tuple[nn.Module, Place]]) -> None:
        biased = [(holder, place) for holder, place in holders if place.module.has_bias]
        if not biased:
            return
        name = "bias" if leaf == "weight" else f"{leaf}_bias"
        bias = owner._parameters.get(name)
        first = biased[0][1]
        if bias is None or len(biased) != len(holders) or first.columns != slice(None):
            raise CheckpointError(f"{first.module.name} has a bias, and the model has no place for it", _WRONG_MODEL)
        self.plan.fills.append(DenseBias(owner=owner, name=name, shape=tuple(bias.shape), pieces=biased))
        del owner._parameters[name]
        for holder, place in biased:
            stored = torch.empty(place.module.padded_out, dtype=bias.dtype, device="meta")
            holder.register_parameter("bias", nn.Parameter(stored))


def _piece(holder: PackedTensors, place: Place) -> Piece:
    return Piece(
        source=holder,
        rows=place.rows,
        columns=place.columns,
        expert=place.expert,
        transposed=place.transposed,
        taken=place.taken,
    )


def _insert(model: nn.Module, path: str, module: nn.Module) -> tuple[nn.Module, str]:
    """Register ``module`` at ``path``, with empty containers on the way; the topmost new child is returned."""
    host, *rest = model, *path.split(".")
    topmost: tuple[nn.Module, str] | None = None
    for name in rest[:-1]:
        child = host._modules.get(name)
        if child is None:
            child = nn.Module()
            host.add_module(name, child)
            topmost = topmost or (host, name)
        host = child
    host.add_module(rest[-1], module)
    return topmost or (host, rest[-1])


def _account(model: Any, checkpoint: Checkpoint, accounting: Accounting) -> None:
    """Follow every tensor name the way the loader will; refuse what it would drop, or leave at random values."""
    names = Names(model)
    filled: dict[str, str] = {}
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        targets, alone = names.filled_by(key)
        if not targets:
            accounting.skipped[key] = _rule(names, key)
            continue
        accounting.used.append(key)
        if alone:
            _check_alone(key, checkpoint.tensors[key].shape, targets[0], names, filled)
        filled.update(dict.fromkeys(targets, key))
    unfilled = sorted(set(names.state) - set(filled) - _tied_to(model, filled))
    if unfilled:
        raise CheckpointError(
            f"{len(unfilled)} parameters of {type(model).__name__} are not in the checkpoint, first {unfilled[0]}",
            "they would be random numbers; fetch the missing shard or the right revision",
        )


def _rule(names: Names, key: str) -> str:
    rule = names.skip_rule(key)
    if rule is None:
        raise CheckpointError(
            f"{key}: {type(names.model).__name__} has no place for this tensor and no rule to skip it",
            _WRONG_MODEL + "; if it is a new part of the format, report it",
        )
    return rule


def _check_alone(key: str, shape: Sequence[int], target: str, names: Names, filled: Mapping[str, str]) -> None:
    """A tensor that fills one parameter by itself has its shape, and no rival."""
    wanted = tuple(names.state[target].shape)
    if tuple(shape) != wanted:
        raise CheckpointError(f"{key} is {list(shape)}, the model wants {list(wanted)}", _WRONG_MODEL)
    if target in filled:
        raise CheckpointError(f"{key} and {filled[target]} are both {target}", "ask the maker which one counts")


def _tied_to(model: Any, filled: Mapping[str, str]) -> set[str]:
    """Parameters that are the same tensor as one that the checkpoint fills."""
    pairs = model.all_tied_weights_keys.items()
    return {a for pair in pairs for a, b in (pair, pair[::-1]) if b in filled}
