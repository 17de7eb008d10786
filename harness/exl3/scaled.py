"""Dense weights stored as 8-bit codes with scales: FP8 and INT8.

``X`` is the codes (``...weight``, or a stack of experts) and ``X_scale`` or ``X_scale_inv`` what they are multiplied
with, despite the name of the second: one number, one a row, one a group of a row, or one a block, as ModelOpt,
compressed-tensors, FBGEMM and DeepSeek write them. The product is computed in float32, which rounds it once, correctly.
Activations are not rounded here, so a static scale of theirs is left out (`harness.exl3.hf_rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from harness.errors import CheckpointError
from harness.exl3.headers import TensorHeader

CODES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8")
_SCALES = ("_scale", "_scale_inv")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
#: The block of DeepSeek's format where config.json names none.
_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """Codes, their scale, and ``block``: how many rows and columns of the codes one scale covers."""

    codes: TensorHeader
    scale: TensorHeader
    block: tuple[int, int]

    @property
    def kind(self) -> str:
        """``F8_E4M3 in blocks of 128 x 128``."""
        rows, columns = self.codes.shape[-2:]
        if self.block == (rows, columns):
            return f"{self.codes.dtype}, one scale a tensor"
        if self.block == (1, columns):
            return f"{self.codes.dtype}, one scale a row"
        return f"{self.codes.dtype} in blocks of {self.block[0]} x {self.block[1]}"

    def value(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The weights, float32, in the shape of ``codes``."""
        rows, columns = codes.shape[-2:]
        grid = scale.float().reshape(*codes.shape[:-2], -(-rows // self.block[0]), -(-columns // self.block[1]))
        wide = grid.repeat_interleave(self.block[0], -2)[..., :rows, :]
        if self.block[1] == columns:
            return codes.float() * wide
        return codes.float() * wide.repeat_interleave(self.block[1], -1)[..., :columns]


def find_scaled(tensors: Mapping[str, TensorHeader], claims: Mapping[str, Any]) -> dict[str, Scaled]:
    """Every tensor of codes that has a scale, by its name.

    Args:
        claims: the ``quantization_config``, for the size of a block.

    Raises:
        CheckpointError: a scale that does not fit its codes.
    """
    found = {}
    for key, header in tensors.items():
        scales = [tensors[f"{key}{end}"] for end in _SCALES if f"{key}{end}" in tensors]
        if header.dtype in CODES and len(header.shape) >= 2 and scales:
            found[key] = _scaled(header, scales, claims)
    return found


def _scaled(codes: TensorHeader, scales: list[TensorHeader], claims: Mapping[str, Any]) -> Scaled:
    scale = scales[0]
    if len(scales) > 1 or scale.dtype not in _SCALE_DTYPES:
        raise CheckpointError(f"{codes.name} has {len(scales)} scales, {scale.name} is {scale.dtype}", _ASK)
    block = _block(codes, scale, claims)
    if block is None:
        raise CheckpointError(
            f"{codes.name} is {codes.dtype} {list(codes.shape)} and {scale.name} {list(scale.shape)}: no known way to "
            "share scales",
            _ASK,
        )
    return Scaled(codes=codes, scale=scale, block=block)


_ASK = "give the BF16 checkpoint, or report the format"


def _block(codes: TensorHeader, scale: TensorHeader, claims: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns that one scale covers; None where the shapes do not say."""
    *stack, rows, columns = codes.shape
    shape = _grid(tuple(stack), scale.shape, rows)
    if shape is None:
        return None
    if shape == (1, 1):
        return rows, columns
    if shape == (rows, 1):
        return 1, columns
    candidates = dict.fromkeys([*_stated(claims), (_BLOCK, _BLOCK), (-(-rows // shape[0]), -(-columns // shape[1]))])
    fits = [b for b in candidates if (-(-rows // b[0]), -(-columns // b[1])) == shape and b[1] >= 16]
    return fits[0] if fits else None


def _grid(stack: tuple[int, ...], shape: tuple[int, ...], rows: int) -> tuple[int, int] | None:
    """Scales of one matrix by rows and columns, for a stack of matrices as for one."""
    if shape[: len(stack)] != stack:
        return (1, 1) if not stack and shape in ((), (1,)) else None
    own = shape[len(stack) :]
    if own in ((), (1,)):
        return 1, 1
    if len(own) == 1:
        return (rows, 1) if own == (rows,) else None
    return (own[0], own[1]) if len(own) == 2 else None


def _stated(claims: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Block sizes that the quantization_config names: DeepSeek's field, and that of compressed-tensors."""
    groups = claims.get("config_groups")
    named = [claims.get("weight_block_size")]
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        named.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    return [(b[0], b[1]) for b in named if isinstance(b, list) and len(b) == 2 and all(isinstance(n, int) for n in b)]
