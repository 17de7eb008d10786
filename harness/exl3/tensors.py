"""One quantised linear layer as it lies on disk, checked once when it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from harness.errors import CheckpointError
from harness.exl3.codebook import MARKERS, Codebook
from harness.exl3.layout import TILE, bits_of

#: Tensor name endings that may belong to a quantised linear.
SUFFIXES = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1", "bias")
#: In and out features are padded to a multiple of this before quantisation.
PADDING = 128

Tensor = torch.Tensor | np.ndarray
_REDO = "fetch this file again, or ask the maker of the quant"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exl3Linear:
    """A packed linear ``y = x @ W + bias``; ``in`` and ``out`` are padded sizes, ``*_features`` the model's own.

    trellis: int16 [in/16, out/16, 16 * bits]; suh: float16 [in]; svh: float16 [out] (legacy sign fields are
    widened to +-1); bias: float16 [out] or None. All on one device.
    """

    name: str
    trellis: torch.Tensor
    suh: torch.Tensor
    svh: torch.Tensor
    codebook: Codebook
    bias: torch.Tensor | None
    in_features: int
    out_features: int

    @property
    def bits(self) -> float:
        """Bits a weight: 1..8, 1.5, 2.5 or 3.5."""
        return bits_of(self.trellis.shape[-1])

    @property
    def padded_shape(self) -> tuple[int, int]:
        """``(in, out)`` as stored."""
        return self.trellis.shape[0] * TILE, self.trellis.shape[1] * TILE

    @property
    def stored_bytes(self) -> int:
        """Bytes of trellis, scales and bias."""
        parts = (self.trellis, self.suh, self.svh) + (() if self.bias is None else (self.bias,))
        return sum(part.numel() * part.element_size() for part in parts)

    def cropped(self, in_features: int, out_features: int) -> Exl3Linear:
        """The same layer with the model's own sizes; refuses sizes that padding cannot explain."""
        return Exl3Linear(
            name=self.name,
            trellis=self.trellis,
            suh=self.suh,
            svh=self.svh,
            codebook=self.codebook,
            bias=self.bias,
            **_logical(self.name, self.padded_shape, in_features, out_features),
        )

    @classmethod
    def from_tensors(
        cls,
        name: str,
        tensors: Mapping[str, Tensor],
        *,
        in_features: int | None = None,
        out_features: int | None = None,
    ) -> Exl3Linear:
        """Build from the module's tensors by suffix (``trellis``, ``suh``, ``svh``, ``mcg``, ...).

        Raises:
            CheckpointError: a part is missing, unknown, or of a wrong shape, type or value.
        """
        parts = {suffix: _as_torch(tensor) for suffix, tensor in tensors.items()}
        _check_names(name, parts)
        trellis = parts["trellis"]
        codebook = codebook_of(name, {k: int(v.reshape(-1)[0]) for k, v in parts.items() if k in MARKERS and v.numel()})
        check_trellis(name, str(trellis.dtype).removeprefix("torch."), tuple(trellis.shape), codebook)
        padded = trellis.shape[0] * TILE, trellis.shape[1] * TILE
        return cls(
            name=name,
            trellis=trellis.contiguous(),
            suh=_scales(name, parts, "suh", padded[0]),
            svh=_scales(name, parts, "svh", padded[1]),
            codebook=codebook,
            bias=_bias(name, parts.get("bias"), padded[1]),
            **_logical(name, padded, in_features, out_features),
        )


def check_trellis(name: str, dtype: str, shape: tuple[int, ...], codebook: Codebook) -> None:
    """Refuse a trellis whose type or shape the format cannot have; needs only the shard header."""
    if dtype != "int16":
        raise CheckpointError(f"{name}: trellis is {dtype}, the format says int16", _REDO)
    if len(shape) != 3 or 0 in shape or shape[0] * TILE % PADDING or shape[1] * TILE % PADDING:
        raise CheckpointError(
            f"{name}: impossible trellis shape {list(shape)}; it is [in/16, out/16, 16K] with in and out multiples "
            f"of {PADDING}",
            _REDO,
        )
    try:
        bits = bits_of(shape[-1])
    except ValueError as error:
        raise CheckpointError(f"{name}: impossible trellis shape {list(shape)}: {error}", _REDO) from error
    if bits != int(bits) and codebook != "mul1":
        raise CheckpointError(f"{name}: {bits} bits need the mul1 codebook, this tensor is {codebook}", _REDO)


def codebook_of(name: str, markers: Mapping[str, int]) -> Codebook:
    """The codebook that the marker scalars of one module name; no marker means ``3inst``."""
    if len(markers) > 1:
        raise CheckpointError(f"{name}: both an mcg and a mul1 marker; at most one codebook can apply", _REDO)
    for codebook, value in markers.items():
        if value & 0xFFFFFFFF != MARKERS[codebook]:
            raise CheckpointError(
                f"{name}: unknown codebook marker {codebook} = {value & 0xFFFFFFFF:#010x}, known is "
                f"{MARKERS[codebook]:#010x}",
                "update this project if the format has a new codebook, else fetch the file again",
            )
    return "mcg" if "mcg" in markers else "mul1" if "mul1" in markers else "3inst"


def _check_names(name: str, parts: Mapping[str, torch.Tensor]) -> None:
    for suffix in parts:
        if suffix not in SUFFIXES:
            raise CheckpointError(
                f"{name}: unknown part {suffix!r} beside a trellis; known are {', '.join(SUFFIXES)}",
                "update this project if the format has a new part, else ask the maker of the quant",
            )
    for full, legacy in (("trellis", "trellis"), ("suh", "su"), ("svh", "sv")):
        if full not in parts and legacy not in parts:
            raise CheckpointError(f"{name}: the tensor {name}.{full} is missing", _REDO)
    for marker in MARKERS:
        if marker in parts and parts[marker].numel() != 1:
            raise CheckpointError(f"{name}: marker {marker} has shape {list(parts[marker].shape)}, not []", _REDO)


def _as_torch(tensor: Tensor) -> torch.Tensor:
    if isinstance(tensor, torch.Tensor):
        return tensor
    return torch.from_numpy(tensor if tensor.flags.writeable else tensor.copy())


def _scales(name: str, parts: Mapping[str, torch.Tensor], suffix: str, length: int) -> torch.Tensor:
    if suffix not in parts:
        return _widened_signs(name, parts[suffix[:2]], suffix[:2], length)
    scales = parts[suffix]
    if scales.dtype != torch.float16 or tuple(scales.shape) != (length,):
        raise CheckpointError(
            f"{name}: {suffix} is {scales.dtype} {list(scales.shape)}; the trellis asks for float16 [{length}]", _REDO
        )
    if not bool(torch.isfinite(scales).all()):
        raise CheckpointError(f"{name}: {suffix} holds values that are not finite", _REDO)
    return scales.contiguous()


def _widened_signs(name: str, fields: torch.Tensor, suffix: str, length: int) -> torch.Tensor:
    """Legacy bit fields: element ``16 w + b`` is negative where bit ``b`` of word ``w`` is set."""
    if fields.dtype != torch.int16 or tuple(fields.shape) != (length // 16,):
        raise CheckpointError(
            f"{name}: {suffix} is {fields.dtype} {list(fields.shape)}; the trellis asks for int16 [{length // 16}]",
            _REDO,
        )
    bit = torch.arange(16, device=fields.device, dtype=torch.int32)
    negative = (fields.to(torch.int32).unsqueeze(1) >> bit) & 1
    return (1 - 2 * negative).reshape(-1).to(torch.float16)


def _bias(name: str, bias: torch.Tensor | None, length: int) -> torch.Tensor | None:
    if bias is None:
        return None
    if not bias.is_floating_point() or tuple(bias.shape) != (length,):
        raise CheckpointError(f"{name}: bias is {bias.dtype} {list(bias.shape)}, not float16 [{length}]", _REDO)
    return bias.to(torch.float16).contiguous()


def _logical(name: str, padded: tuple[int, int], in_features: int | None, out_features: int | None) -> dict[str, int]:
    given = {"in_features": in_features, "out_features": out_features}
    sizes = {axis: full if size is None else size for (axis, size), full in zip(given.items(), padded, strict=True)}
    for (axis, size), full in zip(sizes.items(), padded, strict=True):
        if not full - PADDING < size <= full:
            raise CheckpointError(
                f"{name}: the model has {axis}={size} and the trellis is padded to {full}, not to the next multiple "
                f"of {PADDING}",
                "use the config.json that belongs to these shards",
            )
    return sizes
