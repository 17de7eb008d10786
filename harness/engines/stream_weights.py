"""The weights of a model, a layer at a time: read from the shards, EXL3 tensors decoded, in their final place.

The model itself lies on the meta device. A unit is what is filled together (usually one parameter); parameters that
merge many tensors, such as a layer's experts, are written part by part into their final memory, so nothing is held
twice. Reads bypass memory mapping: mapped pages would count as this process's memory. The next layer is filled in a
thread while this one runs, within a memory allowance.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from torch import nn

from harness.errors import CheckpointError, EngineError
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.foreign import foreign_format
from harness.exl3.headers import TensorHeader
from harness.exl3.hf_layout import Plain, plan_layout, wanted_dtype
from harness.exl3.hf_names import Names
from harness.exl3.hf_place import PackedPlace, Place, PlainPart, places, view_of, write_packed
from harness.exl3.hf_plan import fill_bias
from harness.exl3.hf_rules import check_rotary
from harness.exl3.tensors import Exl3Linear, RowTable, decode_embedding

#: Tensors of at least this many bytes get memory pages of their own.
_PAGES_FROM = 1 << 18
#: Called with the number of bytes about to be taken; returns when they may be.
Admit = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Parameters or buffers that are filled together, their bytes, and how."""

    targets: tuple[str, ...]
    bytes: int
    fill: Callable[[Admit], dict[str, torch.Tensor]]


def skeleton(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """The model of ``folder`` on the meta device; only what it computes itself (rotary tables) lies on ``device``.

    Raises:
        CheckpointError: transformers does not know the architecture, or config.json is not what it takes.
    """
    from transformers import AutoConfig

    from harness.exl3.hf import auto_class

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{folder.name} cannot be loaded: {lines[0]}", "check its config.json") from error
    for holder in (config, config.get_text_config()):
        holder.__dict__.pop("quantization_config", None)
    with torch.device("meta"):
        model = auto_class(config).from_config(config, dtype=dtype)
    # As from_pretrained does it once all weights are there: buffers that no checkpoint holds are computed.
    model._move_missing_keys_from_meta_to_device(set(), {"": torch.device(device)}, None, None)
    model._initialize_missing_keys(False)
    return model.eval()


def decoder_layers(model: Any) -> tuple[str, list[nn.Module]]:
    """Path and modules of the stack of decoder layers.

    Raises:
        EngineError: the model class has no such stack.
    """
    count = model.config.get_text_config().num_hidden_layers
    decoder = model.get_decoder()
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and any(m is module for m in decoder.children()):
            return path, list(module)
    raise EngineError(
        f"{type(model).__name__} has no stack of {count} decoder layers to stream through",
        "run the whole model: leave out --memory-budget",
    )


class Weights:
    """Fills parts of a model on meta from the shards of its folder, EXL3 or plain, and empties them again."""

    def __init__(self, model: Any, folder: Path, device: str) -> None:
        self._model, self._device = model, torch.device(device)
        self._files: dict[str, int] = {}
        self._checkpoint = open_checkpoint(folder)
        if (foreign := foreign_format(self._checkpoint)) is not None:
            raise CheckpointError(
                f"{folder.name} is {foreign.name}: packed weights that are not read layer by layer",
                "leave out --memory-budget, or give the BF16 checkpoint",
            )
        check_rotary(model, self._checkpoint)
        self._names = Names(model)
        self._meta = dict(self._names.state)
        self._dtypes = {name: wanted_dtype(model, name, meta) for name, meta in self._meta.items()}
        self._files |= {path.name: os.open(path, os.O_RDONLY) for path in self._checkpoint.shards}
        self._units = self._sorted_units()

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def fill(self) -> None:
        """Fill the whole model; parameters that are one tensor in the class stay one."""
        shared = self._model.all_tied_weights_keys
        filled = {target for units in self._units.values() for unit in units for target in unit.targets}
        tied = {name: source for name, source in shared.items() if name in filled and source in filled}
        for units in self._units.values():
            for unit in units:
                if unit.targets[0] not in tied:
                    self.install(unit.fill(lambda size: None))
        for name, source in tied.items():
            owner, leaf = self._owner(name)
            owner._parameters[leaf] = self._model.get_parameter(source)

    def under(self, path: str) -> list[Unit]:
        """The units of every parameter and buffer below the module ``path``."""
        return [unit for owner, units in self._units.items() if f"{owner}.".startswith(f"{path}.") for unit in units]

    def of(self, path: str) -> list[Unit]:
        """The units of the module ``path`` alone."""
        return self._units.get(path, [])

    def owners(self) -> list[str]:
        """Paths of all modules that hold parameters or buffers of their own."""
        return list(self._units)

    def install(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put filled tensors into the model."""
        for name, tensor in tensors.items():
            owner, leaf = self._owner(name)
            if leaf in owner._parameters:
                owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            else:
                owner._buffers[leaf] = tensor

    def empty(self, names: Iterable[str]) -> None:
        """Put the meta tensors of ``names`` back."""
        self.install({name: self._meta[name] for name in names})

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        path, _, leaf = name.rpartition(".")
        return self._model.get_submodule(path), leaf

    def _sorted_units(self) -> dict[str, list[Unit]]:
        layout = plan_layout(self._names, self._checkpoint)
        self._model.accounting = layout.accounting
        units: dict[str, list[Unit]] = defaultdict(list)

        def add(targets: tuple[str, ...], fill: Callable[[Admit], dict[str, torch.Tensor]]) -> None:
            unit = Unit(targets=targets, bytes=sum(map(self._bytes, targets)), fill=fill)
            units[targets[0].rpartition(".")[0]].append(unit)

        for param, found in layout.packed.items():
            add((param,), partial(self._packed, param, found))
        for bias, found in layout.biases.items():
            add((bias,), partial(self._bias, bias, found))
        for param, table in layout.tables.items():
            add((param,), partial(self._table, param, table))
        for group in layout.plain.values():
            add(tuple(group.targets), self._plain(group))
        self._tie(units)
        return dict(units)

    def _tie(self, units: dict[str, list[Unit]]) -> None:
        """Parameters that are another's tensor are filled like that one."""
        by_target = {target: unit for found in units.values() for unit in found for target in unit.targets}
        for pair in self._model.all_tied_weights_keys.items():
            for tied, source in (pair, pair[::-1]):
                if tied in by_target or source not in by_target:
                    continue
                unit = by_target[source]

                def fill(admit: Admit, u: Unit = unit, t: str = tied, s: str = source) -> dict[str, torch.Tensor]:
                    return {t: u.fill(admit)[s]}

                units[tied.rpartition(".")[0]].append(Unit(targets=(tied,), bytes=self._bytes(tied), fill=fill))

    def _bytes(self, name: str) -> int:
        return self._meta[name].numel() * self._dtypes[name].itemsize

    def _new(self, name: str) -> torch.Tensor:
        shape, dtype = self._meta[name].shape, self._dtypes[name]
        if self._device.type == "cpu":
            return _own_pages(self._bytes(name)).view(dtype).reshape(shape)
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _admit_whole(self, name: str, admit: Admit) -> Admit:
        """A CPU hands out memory as it is written, a GPU all at once."""
        if self._device.type == "cpu":
            return admit
        admit(self._bytes(name))
        return lambda size: None

    def _read(self, header: TensorHeader) -> torch.Tensor:
        raw = _own_pages(header.bytes)
        view, done = raw.numpy().data, 0
        while done < header.bytes:
            read = os.preadv(self._files[header.shard], [view[done:]], header.start + done)
            if not read:
                raise CheckpointError(f"{header.shard} ended early while it was read", "fetch this file again")
            done += read
        return raw.view(header.torch_dtype).reshape(header.shape)

    def _value(self, key: str) -> torch.Tensor:
        """A plain tensor as the numbers that it stands for."""
        stored, scaled = self._read(self._checkpoint.tensors[key]), self._checkpoint.scaled.get(key)
        return stored if scaled is None else scaled.value(stored, self._read(scaled.scale))

    def _linear(self, place: PackedPlace) -> Exl3Linear:
        linear = Exl3Linear.from_tensors(
            place.module.name,
            {suffix: self._read(part) for suffix, part in place.module.parts.items()},
            in_features=place.in_features,
            out_features=place.out_features,
        )
        if self._device.type == "cpu":
            return linear
        return replace(
            linear,
            trellis=linear.trellis.to(self._device),
            suh=linear.suh.to(self._device),
            svh=linear.svh.to(self._device),
        )

    @torch.no_grad()
    def _packed(self, param: str, found: list[PackedPlace], admit: Admit) -> dict[str, torch.Tensor]:
        target = self._new(param)
        admit = self._admit_whole(param, admit)
        for place in found:
            admit(view_of(place, target).numel() * target.element_size())
            write_packed(place, self._linear(place), target)
        return {param: target}

    def _bias(self, bias: str, found: list[PackedPlace], admit: Admit) -> dict[str, torch.Tensor]:
        admit(self._bytes(bias))
        pieces = [(place, self._read(place.module.parts["bias"])) for place in found]
        return {bias: fill_bias(self._new(bias), pieces)}

    def _table(self, param: str, table: RowTable, admit: Admit) -> dict[str, torch.Tensor]:
        admit(self._bytes(param))
        target = self._new(param)
        dense = decode_embedding(table, lambda key: self._read(self._checkpoint.tensors[key]))
        return {param: target.copy_(dense[: target.shape[0], : target.shape[1]])}

    def _plain(self, group: Plain) -> Callable[[Admit], dict[str, torch.Tensor]]:
        target = group.targets[0]
        if group.converter is None:
            return partial(self._alone, target, group.sources[0][0])
        merged = self._merged(group)
        return partial(self._converted, group) if merged is None else partial(self._parts, target, merged)

    def _alone(self, target: str, key: str, admit: Admit) -> dict[str, torch.Tensor]:
        admit(self._bytes(target))
        stored = self._value(key)
        fits = self._device.type == "cpu" and stored.dtype == self._dtypes[target]
        return {target: stored if fits else self._new(target).copy_(stored)}

    def _merged(self, group: Plain) -> list[Place[PlainPart]] | None:
        """Places of plain tensors that are stacked or joined; None where transformers does something else."""
        operations = {type(operation).__name__ for operation in group.converter.operations}
        headers = [self._checkpoint.tensors[key] for key, _ in group.sources]
        target = group.targets[0]
        joined = operations <= {"MergeModulelist", "Concatenate"} and all(len(h.shape) == 2 for h in headers)
        if not joined or len(group.targets) > 1:
            return None
        landed = [
            (
                self._names.converted(key, target, group.converter, pattern),
                PlainPart(name=key, padded_in=header.shape[1], padded_out=header.shape[0]),
            )
            for (key, pattern), header in zip(group.sources, headers, strict=True)
        ]
        return places(target, landed, self._owner(target)[0], self._meta, self._model.config)

    @torch.no_grad()
    def _parts(self, target: str, found: list[Place[PlainPart]], admit: Admit) -> dict[str, torch.Tensor]:
        whole = self._new(target)
        admit = self._admit_whole(target, admit)
        for place in found:
            view = view_of(place, whole)
            admit(view.numel() * whole.element_size())
            view.copy_(self._value(place.module.name))
        return {target: whole}

    def _converted(self, group: Plain, admit: Admit) -> dict[str, torch.Tensor]:
        """What transformers' own converter makes of its tensors."""
        target = group.targets[0]
        admit(sum(map(self._bytes, group.targets)))
        converter = deepcopy(group.converter)
        for key, pattern in group.sources:
            tensor = self._value(key).to(self._device, self._dtypes[target])
            converter.add_tensor(target, key, pattern, tensor)
        made = converter.convert(target, model=self._model, config=self._model.config)
        tensors = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
        for name, tensor in tensors.items():
            if tensor.shape != self._meta[name].shape:
                raise CheckpointError(
                    f"{name}: its tensors make {list(tensor.shape)}, the model wants {list(self._meta[name].shape)}",
                    "fetch the missing shard, or use the config.json that belongs to these shards",
                )
        return tensors


def _own_pages(size: int) -> torch.Tensor:
    """``size`` bytes that go back to the system when they are freed; an allocator would keep them."""
    if size < _PAGES_FROM:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)


# ---- when it is called -----------------------------------------------------------------------------------------------


class OnDemand:
    """Modules outside the decoder layers (embeddings, final norm): filled when they are first called.

    What is never called, such as a vision tower, is never read.
    """

    def __init__(self, model: Any, weights: Weights, apart: list[str]) -> None:
        self._weights, self._present = weights, dict[str, list[Unit]]()
        self._embeddings = {path for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
        for path in weights.owners():
            if not any(f"{path}.".startswith(f"{other}.") for other in apart):
                model.get_submodule(path).register_forward_pre_hook(partial(self._ensure, path))

    @property
    def bytes(self) -> int:
        """Bytes of what is there now."""
        return sum(unit.bytes for units in self._present.values() for unit in units)

    def forget(self, *, embeddings_only: bool = False) -> None:
        """Empty the modules again."""
        for path in set(self._present) & (self._embeddings if embeddings_only else self._present.keys()):
            for unit in self._present.pop(path):
                self._weights.empty(unit.targets)

    def _ensure(self, path: str, _module: nn.Module, _inputs: Any) -> None:
        if path in self._present:
            return
        self._present[path] = self._weights.of(path)
        for unit in self._present[path]:
            self._weights.install(unit.fill(lambda size: None))


# ---- ahead of time ---------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    pass


class Filling:
    """Fills ``units`` in a thread; past ``early`` bytes it waits until `release` says that the memory is there."""

    def __init__(self, pool: ThreadPoolExecutor, stage: int, units: Sequence[Unit], early: float) -> None:
        self.stage, self.taken = stage, 0
        self._early, self._free, self._stopped = early, False, False
        self._changed = Condition()
        self._future = pool.submit(self._fill, units)

    def release(self) -> None:
        """The layer in use is gone: take all the memory that is needed."""
        with self._changed:
            self._free = True
            self._changed.notify()

    def stop(self) -> None:
        """Give up, and wait until the thread has done so; nothing happens after the end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._future.exception()

    def result(self) -> dict[str, torch.Tensor]:
        """Every filled tensor by name; waits for the last."""
        return self._future.result()

    def _admit(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._free or self.taken + size <= self._early)
            if self._stopped:
                raise _Stopped
            self.taken += size

    def _fill(self, units: Sequence[Unit]) -> dict[str, torch.Tensor]:
        filled: dict[str, torch.Tensor] = {}
        for unit in units:
            filled |= unit.fill(self._admit)
        return filled
