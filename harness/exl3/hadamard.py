"""The blockwise 128-point Hadamard transform of the format, orthonormal: ``H @ H = I``."""

from __future__ import annotations

import torch

from harness.exl3.decode_torch import hadamard_rows
from harness.exl3.tensors import PADDING


def transform(values: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """``B @ values`` along ``axis`` of a matrix, in float32; the axis is a multiple of 128.

    The transform is symmetric, so the same call with ``axis=1`` is ``values @ B``.
    """
    if values.shape[axis] % PADDING:
        raise ValueError(f"axis {axis} has {values.shape[axis]} entries, not a multiple of {PADDING}")
    turned = values if axis == 0 else values.T
    result = hadamard_rows(turned) * PADDING**-0.5
    return result if axis == 0 else result.T
