"""EXL3 to dense weights in plain torch operations, on any device.

The rotated matrix is bit exact, and the dense weight equals `harness.exl3.decode`'s bit for bit: every fp32
addition, subtraction and product happens in the same order, and none of them is contracted or reduced.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from harness.exl3.codebook import Codebook, table, table_fp32
from harness.exl3.layout import RING, RING_COL, RING_ROW, TILE, windows
from harness.exl3.tensors import PADDING, Exl3Linear

#: Weights decoded at once; bounds the int32 work space to a few times this many elements.
_CHUNK = 1 << 24


def dense_weight(
    linear: Exl3Linear, dtype: torch.dtype = torch.float32, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The layer's weight [out_features, in_features] on its device, evaluated in float32 and cast once.

    Args:
        linear: a packed layer on any device.
        dtype: the dtype of the result.
        out: where to write, of that shape; its dtype then counts.
    """
    device = linear.trellis.device
    if out is None:
        out = torch.empty(linear.out_features, linear.in_features, dtype=dtype, device=device)
    values = _table(linear.codebook, torch.float32, device)
    row_scale, column_scale = linear.suh.float() / PADDING, linear.svh.float()
    rows = linear.padded_shape[0]
    tiles = PADDING // TILE
    step = max(1, _CHUNK // (PADDING * rows)) * tiles
    for b0 in range(0, linear.trellis.shape[1], step):
        rotated = _rotated(linear.trellis[:, b0 : b0 + step], values)
        weight = _butterflies(_butterflies(rotated).T.contiguous())
        c0 = b0 * TILE
        scaled = weight * row_scale * column_scale[c0 : c0 + len(weight), None]
        target = out[c0 : c0 + len(weight)]
        target.copy_(scaled[: len(target), : linear.in_features])
    return out


def states(trellis: torch.Tensor) -> torch.Tensor:
    """States in ring order: int16 [..., width] to int32 [..., 256]."""
    first, second, shift = _windows(trellis.shape[-1], trellis.device)
    words = trellis.to(torch.int32) & 0xFFFF
    # The sign bit of the pair may be set; the arithmetic shift is at most 16, so the low 16 bits are right.
    return (words[..., first] << 16 | words[..., second]) >> shift & 0xFFFF


def _rotated(trellis: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    a, b, _ = trellis.shape
    rings = values[states(trellis)]
    tile = rings[..., _row_major(trellis.device)].reshape(a, b, TILE, TILE)
    return tile.permute(0, 2, 1, 3).reshape(a * TILE, b * TILE)


def _butterflies(values: torch.Tensor) -> torch.Tensor:
    rows, columns = values.shape
    h = 1
    while h < PADDING:
        pairs = values.reshape(rows // (2 * h), 2, h, columns)
        upper, lower = pairs[:, 0], pairs[:, 1]
        values = torch.stack((upper + lower, upper - lower), dim=1).reshape(rows, columns)
        h *= 2
    return values


@lru_cache(maxsize=16)
def _table(codebook: Codebook, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    values = table(codebook) if dtype == torch.float16 else table_fp32(codebook)
    return torch.from_numpy(values.copy()).to(device)


@lru_cache(maxsize=64)
def _windows(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, shift = (torch.from_numpy(part.copy()).to(device) for part in windows(width))
    return first, second, shift.to(torch.int32)


@lru_cache(maxsize=16)
def _row_major(device: torch.device) -> torch.Tensor:
    """Ring position of each element of a tile in row-major order."""
    position = torch.empty(RING, dtype=torch.long)
    position[torch.from_numpy(RING_ROW * TILE + RING_COL)] = torch.arange(RING)
    return position.to(device)
