"""Where one side's logits come from: a matrix that is there, or hidden states sent through a head strip by strip.

A strip is a range of vocabulary columns. Through a head it is filled tile by tile: a tile of the weight is multiplied
with all hidden states of the block of positions, and given bias, scale and soft-cap in place. A library's product needs
the tile widened to fp32 first. Tiles have the same columns whatever the strip, the number of threads or the number of
positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch

from harness.scoring import rows
from harness.scoring.blas import Blas, Multiply
from harness.scoring.packed import Packed, aligned
from harness.types import Head

#: fp32 bytes of a tile of the weight that is widened, one per thread.
TILE_BYTES = 8 << 20
MOST_TILE = 2048
#: Columns of a tile for the project's own product: the logits of so many stay in the cache.
OWN_TILE = 512

#: Runs a function over items, in parallel or not; returns when all are done.
Run = Callable[[Callable[[int], None], Iterable[int]], None]


@dataclass(frozen=True, slots=True)
class Part:
    """A side's array for `rows.score_rows`; ``start`` is where the wanted columns begin."""

    array: np.ndarray
    start: int
    is_bf16: bool


def tile_width(hidden: int, blas: Blas) -> int:
    """Columns of a tile; widened, a power of two up to ``MOST_TILE`` that keeps it under ``TILE_BYTES``."""
    if blas.multiply is None:
        return OWN_TILE
    width = MOST_TILE
    while width > 16 and 4 * width * hidden > TILE_BYTES:
        width //= 2
    return width


def patterns(matrix: torch.Tensor) -> np.ndarray:
    """A contiguous CPU view: fp32 values, or the uint16 patterns of bf16 and fp16."""
    whole = matrix.detach().cpu().contiguous()
    return whole.numpy() if whole.dtype == torch.float32 else whole.view(torch.uint16).numpy()


def whole_or_nan(states_TH: torch.Tensor) -> torch.Tensor:
    """Inputs of the head's product: a row with a non-finite value is all NaN.

    Such a row has no logits worth the name, and a soft-cap would turn its infinities into ordinary numbers.
    """
    states = states_TH.detach()
    return torch.where(torch.isfinite(states).all(-1, keepdim=True), states, torch.nan)


def stack(parts: list[np.ndarray], group: int) -> tuple[np.ndarray, list[slice]]:
    """Put the parts under each other, each starting at a multiple of ``group``, zeros between; and their rows."""
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + -(-len(part) // group) * group)
    out = np.zeros((starts[-1], parts[0].shape[1]), np.float32)
    places = [slice(start, start + len(part)) for start, part in zip(starts, parts, strict=False)]
    for part, place in zip(parts, places, strict=True):
        out[place] = part
    return out, places


class HeadStrip:
    """Logits ``[n, width]`` of hidden states of one or two sides, filled for one range of columns at a time."""

    def __init__(self, parts: list[np.ndarray], head: Head, width: int, blas: Blas, threads: int) -> None:
        states_RH, self.places = stack(parts, blas.group)
        self.head, self.blas = head, blas
        self.weight, self.is_bf16 = patterns(head.weight_VH), head.weight_VH.dtype == torch.bfloat16
        self.bias = None if head.bias_V is None else head.bias_V.detach().cpu().float().numpy()
        self.tile = tile_width(states_RH.shape[1], blas)
        self.logits = aligned(len(states_RH), width)
        self.product: Packed | _Widened
        if blas.multiply is None:
            self.product = Packed(states_RH)
        else:
            # One product for all sides, where the library gives equal rows equal digits; else one a side, of equal
            # shape.
            starts = [0] if blas.stacks else [place.start for place in self.places]
            self.product = _Widened(states_RH, starts, blas.multiply, self.tile, threads)

    def side(self, index: int) -> Part:
        """The logits of one side's positions."""
        return Part(self.logits[self.places[index]], 0, True)

    def fill(self, first: int, end: int, run: Run) -> None:
        """Compute the columns ``first ... end``; ``first`` is a multiple of the tile."""
        run(lambda low: self._fill_tile(low, min(low + self.tile, end), first), range(first, end, self.tile))

    def _fill_tile(self, low: int, high: int, first: int) -> None:
        out = self.logits[:, low - first : high - first]
        self.product.multiply(self.weight[low:high], self.is_bf16, out)
        if self.bias is not None:
            out += self.bias[low:high]
        if self.head.scale != 1.0:
            out *= np.float32(self.head.scale)
        if self.head.softcap is not None:
            torch.from_numpy(out).div_(self.head.softcap).tanh_().mul_(self.head.softcap)


class _Widened:
    """Hidden states ``[R, H]`` for a library's products, which need a tile of the weight in fp32."""

    def __init__(self, states_RH: np.ndarray, starts: list[int], multiply: Multiply, tile: int, threads: int) -> None:
        self.states_RH, self._multiply = states_RH, multiply
        self.rows = [slice(low, high) for low, high in zip(starts, [*starts[1:], len(states_RH)], strict=True)]
        self.tile, self.spare = tile, SimpleQueue[np.ndarray | None]()
        for _ in range(threads):
            self.spare.put(None)

    def multiply(self, weight_WH: np.ndarray, is_bf16: bool, out_RW: np.ndarray) -> None:
        """As `Packed.multiply`."""
        if weight_WH.dtype == np.float32:
            self._products(weight_WH, out_RW)
            return
        tile = self.spare.get()
        if tile is None:
            tile = np.empty((self.tile, self.states_RH.shape[1]), np.float32)
        rows.widen(weight_WH, is_bf16, tile)
        self._products(tile[: len(weight_WH)], out_RW)
        self.spare.put(tile)

    def _products(self, tile: np.ndarray, out_RW: np.ndarray) -> None:
        for some in self.rows:
            self._multiply(self.states_RH[some], tile, out_RW[some])
