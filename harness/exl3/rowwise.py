"""Row-wise embedding tables (exllamav3 1.6 and later): one ring of states a row and group, not the tile format.

A group is 256 columns: one fp16 scale, then ``256 K`` bits, least significant first, K for each state's fresh bits.
A state is its own fresh bits and those of the positions before it, each K bits higher; values come from ``mul1``.
Hashed n-gram tables share the coding; no model class of transformers uses them, so they are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from harness.errors import CheckpointError
from harness.exl3.codebook import table_fp32
from harness.exl3.headers import TensorHeader

GROUP = 256
_ROWS_AT_ONCE = 4096


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
