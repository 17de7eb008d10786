"""EXL3 weights inside a transformers model: packed tensors are buffers, dense parameters are decoded when used.

A module whose parameter comes from EXL3 tensors (a linear, or a stack of experts) keeps its place and its class's
code; the parameter becomes a property that decodes. So whatever the model class does with ``weight`` or
``gate_up_proj`` works, and nothing dense is kept. `make_dense` turns such a module back into its plain self.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from harness.exl3.hf_place import PackedPlace, write_packed
from harness.exl3.tensors import Exl3Linear


class LentScales(nn.Module):
    """Holds scales that several EXL3 linears share, named as on disk, in the dtypes they are stored in."""

    def __init__(self, parts: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for suffix, tensor in parts.items():
            self.register_buffer(suffix, tensor)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        return _never_cast(self, super()._apply, fn, recurse, tuple(self._buffers))


def _never_cast(
    module: nn.Module, apply: Callable[..., Any], fn: Callable[..., Any], recurse: bool, names: Sequence[str]
) -> Any:
    """Move buffers to a device, but never cast them: in bf16 the float16 scales would be other numbers."""
    before = dict(module._buffers)
    apply(fn, recurse)
    for name in names:
        old, new = before[name], module._buffers[name]
        if old is not None and new is not None and new.dtype != old.dtype:
            module._buffers[name] = old.to(new.device)
    return module


class PackedTensors(nn.Module):
    """Holds the tensors of one EXL3 linear, named as on disk, in the dtypes they are stored in."""

    exl3_name: str
    exl3_parts: tuple[str, ...] = ()
    exl3_sizes: tuple[int, int]
    #: Scales by suffix that lie in a `LentScales` elsewhere in the model.
    exl3_lent: Mapping[str, LentScales] = {}

    def hold(self, name: str, parts: Mapping[str, torch.Tensor], sizes: tuple[int, int]) -> None:
        """Register one buffer a part (meta tensors before loading); ``sizes`` is the model's ``(in, out)``."""
        self.exl3_name, self.exl3_parts, self.exl3_sizes = name, tuple(parts), sizes
        for suffix, tensor in parts.items():
            self.register_buffer(suffix, tensor)

    def packed(self) -> Exl3Linear:
        """The layer's tensors as one checked value; the bias is left out, it is added by the module itself."""
        cached: Exl3Linear | None = self.__dict__.get("_packed")
        if cached is None:
            tensors = {suffix: self._buffers[suffix] for suffix in self.exl3_parts}
            tensors |= {suffix: lender._buffers[suffix] for suffix, lender in self.exl3_lent.items()}
            in_features, out_features = self.exl3_sizes
            cached = Exl3Linear.from_tensors(
                self.exl3_name,
                {suffix: tensor for suffix, tensor in tensors.items() if tensor is not None},
                in_features=in_features,
                out_features=out_features,
            )
            self.__dict__["_packed"] = cached
        return cached

    def release(self) -> None:
        """Forget the packed tensors."""
        self.__dict__.pop("_packed", None)
        for suffix in self.exl3_parts:
            self._buffers.pop(suffix, None)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        self.__dict__.pop("_packed", None)
        return _never_cast(self, super()._apply, fn, recurse, self.exl3_parts)


@dataclass(slots=True, kw_only=True)
class Assembly:
    """A dense parameter, and the packed linears that fill it with their places."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[tuple[PackedTensors, PackedPlace]]

    @torch.no_grad()
    def build(self) -> torch.Tensor:
        """Decode every piece, in float32, cast once to ``dtype``."""
        device = self.pieces[0][0].packed().trellis.device
        target = torch.empty(self.shape, dtype=self.dtype, device=device)
        for source, place in self.pieces:
            write_packed(place, source.packed(), target)
        return target


class PackedOwner(PackedTensors):
    """Mixed in front of a module's own class: its parameters in ``exl3_assemblies`` are decoded when read."""

    exl3_assemblies: dict[str, Assembly]
    exl3_plain_class: type[nn.Module]
    exl3_guests: list[tuple[nn.Module, str]]

    def dense(self, name: str) -> torch.Tensor:
        """The dense parameter ``name``; decoded once within a call of the module, anew outside."""
        kept: dict[str, torch.Tensor] | None = self.__dict__.get("_decoded")
        if kept is None:
            return self.exl3_assemblies[name].build()
        if name not in kept:
            kept[name] = self.exl3_assemblies[name].build()
        return kept[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["_decoded"] = {}
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__.pop("_decoded", None)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        for assembly in self.exl3_assemblies.values():
            assembly.dtype = fn(torch.empty(0, dtype=assembly.dtype)).dtype
        return self


@lru_cache(maxsize=256)
def _owner_class(plain: type[nn.Module], names: tuple[str, ...]) -> type[PackedOwner]:
    def reader(name: str) -> property:
        return property(lambda self: self.dense(name))

    return type(f"Packed{plain.__name__}", (PackedOwner, plain), {name: reader(name) for name in names})


def make_packed(
    module: nn.Module, assemblies: dict[str, Assembly], guests: Sequence[tuple[nn.Module, str]] = ()
) -> PackedOwner:
    """Turn ``module``, in place, into one whose named parameters are decoded when used.

    Args:
        guests: ``(host, child name)`` of every submodule that was added to hold packed tensors for it.
    """
    plain = type(module)
    for name in assemblies:
        del module._parameters[name]
    module.__class__ = _owner_class(plain, tuple(sorted(assemblies)))  # type: ignore[arg-type]
    assert isinstance(module, PackedOwner)
    module.exl3_plain_class, module.exl3_assemblies, module.exl3_guests = plain, assemblies, list(guests)
    # transformers would otherwise draw initial values for the parameters that it does not find.
    module.__dict__["_is_hf_initialized"] = True
    return module


def make_dense(module: PackedOwner, dtype: torch.dtype | None = None) -> None:
    """Decode every parameter of a packed module once and turn it back, in place, into its plain class."""
    for assembly in module.exl3_assemblies.values():
        assembly.dtype = dtype or assembly.dtype
    dense = {name: assembly.build() for name, assembly in module.exl3_assemblies.items()}
    module.release()
    for host, child in module.exl3_guests:
        host._modules.pop(child, None)
    module.__class__ = module.exl3_plain_class  # type: ignore[assignment]
    for attribute in ("exl3_assemblies", "exl3_guests", "exl3_plain_class", "exl3_name", "exl3_parts", "exl3_sizes"):
        module.__dict__.pop(attribute, None)
    for name, weight in dense.items():
        module.register_parameter(name, nn.Parameter(weight))


def check_packed(model: nn.Module) -> None:
    """Check every packed tensor of a loaded model: shapes, markers, finite scales."""
    for module in model.modules():
        if isinstance(module, PackedTensors) and module.exl3_parts:
            module.packed()


def packed_owners(model: nn.Module) -> list[PackedOwner]:
    """Every module of ``model`` whose parameters are decoded when used."""
    return [module for module in model.modules() if isinstance(module, PackedOwner)]
