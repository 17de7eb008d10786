"""What a shard holds in EXL3: a quantised linear, checked once when it is built, and a row-wise embedding table.

A row-wise table (exllamav3 1.6 and later) has one ring of states a row and group, not the tile format. A group is 256
columns: one fp16 scale, then ``256 K`` bits, least significant first, K for each state's fresh bits. A state is its own
fresh bits and those of the positions before it, each K bits higher; values come from ``mul1``. Hashed n-gram tables
share the coding; no model class of transformers uses them, so they are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from harness.errors import CheckpointError
from harness.exl3.codebook import MARKERS, Codebook, table_fp32
from harness.exl3.headers import TensorHeader
from harness.exl3.layout import TILE, bits_of

#: Tensor name endings of a quantised linear; a ``bias`` may lie beside them.
PARTS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")
#: In and out features are padded to a multiple of this before quantisation.
PADDING = 128
#: Columns of a group of a row-wise table.
GROUP = 256
_ROWS_AT_ONCE = 4096

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


def require_parts(name: str, suffixes: Collection[str], repair: str) -> None:
    """Refuse a linear without its trellis or one of its scales; legacy sign fields stand for scales."""
    for full, legacy in (("trellis", "trellis"), ("suh", "su"), ("svh", "sv")):
        if full not in suffixes and legacy not in suffixes:
            raise CheckpointError(f"{name}: the tensor {name}.{full} is missing", repair)


def _check_names(name: str, parts: Mapping[str, torch.Tensor]) -> None:
    for suffix in parts:
        if suffix not in (*PARTS, "bias"):
            raise CheckpointError(
                f"{name}: unknown part {suffix!r} beside a trellis; known are {', '.join(PARTS)} and bias",
                "update this project if the format has a new part, else ask the maker of the quant",
            )
    require_parts(name, parts.keys(), _REDO)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTable:
    """A row-wise table: ``trellis`` int16 [rows, groups * (1 + 16 K)] and, for an embedding, ``signs``."""

    name: str
    parts: dict[str, TensorHeader]

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts.values())

    @property
    def bits(self) -> int:
        """Bits a weight, from the shapes.

        Raises:
            CheckpointError: a hashed n-gram table, or shapes that do not fit.
        """
        trellis, signs = self.parts["trellis"], self.parts.get("signs")
        if signs is None:
            raise CheckpointError(
                f"{self.name} is a hashed n-gram table, which no transformers model uses",
                "measure a model without n-gram embeddings",
            )
        groups = signs.shape[0] if len(signs.shape) == 2 and signs.shape[1] == GROUP else 0
        bits, rest = divmod(trellis.shape[1] - groups, 16 * groups) if groups else (0, 1)
        if rest or not 1 <= bits <= 8 or trellis.dtype != "I16" or signs.dtype != "F16":
            raise CheckpointError(
                f"{self.name}: impossible row-wise table: trellis {trellis.dtype} {list(trellis.shape)}, signs "
                f"{signs.dtype} {list(signs.shape)}",
                "fetch the file again",
            )
        return bits

    @property
    def weights(self) -> int:
        """Weights coded, padding included."""
        return self.parts["trellis"].shape[0] * self.parts["signs"].shape[0] * GROUP


def decode_embedding(table: RowTable, load: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The dense table: float32 [rows, groups * 256], padding included; ``load`` gives a stored tensor by name."""
    bits = table.bits
    words = load(f"{table.name}.trellis").numpy().view(np.uint16)
    signs = load(f"{table.name}.signs").float().numpy()
    groups = len(signs)
    dense = np.empty((len(words), groups * GROUP), np.float32)
    for start in range(0, len(words), _ROWS_AT_ONCE):
        rings = words[start : start + _ROWS_AT_ONCE].reshape(-1, groups, 1 + 16 * bits)
        scale = np.ascontiguousarray(rings[..., :1]).view(np.float16).astype(np.float32)
        values = table_fp32("mul1")[ring_states(rings[..., 1:], GROUP, bits)] * scale
        dense[start : start + _ROWS_AT_ONCE] = (signs * _hadamard(values) / 16).reshape(len(rings), -1)
    return torch.from_numpy(dense)


def ring_states(words: np.ndarray, length: int, bits: int) -> np.ndarray:
    """States of rings of ``length`` positions: uint16 [..., length * bits / 16] to uint16 [..., length]."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    fresh = stream.reshape(*words.shape[:-1], length, bits) @ (1 << np.arange(bits, dtype=np.uint32))
    states = np.zeros(fresh.shape, np.uint32)
    for back in range(-(-16 // bits)):
        states |= np.roll(fresh, back, axis=-1) << np.uint32(back * bits)
    return (states & 0xFFFF).astype(np.uint16)


def _hadamard(values: np.ndarray) -> np.ndarray:
    """Unscaled 256-point Hadamard transform of the last axis."""
    shape, h = values.shape, 1
    while h < GROUP:
        pairs = values.reshape(-1, GROUP // (2 * h), 2, h)
        values = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
        h *= 2
    return values.reshape(shape)
