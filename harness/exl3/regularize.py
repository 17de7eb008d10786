"""A weight matrix turned into nearly Gaussian numbers of one size, which is what the trellis codes well.

``W = diag(suh) . B_in . W^ . B_out . diag(svh)`` with random signs and scales in suh and svh. The scales are rounded
to fp16 before the matrix is divided by them, so their rounding costs nothing.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from harness.errors import CheckpointError
from harness.exl3.codebook import Codebook, table
from harness.exl3.tensors import PADDING

#: Rms of the rotated matrix relative to the rms of the codebook with the least distortion, K = 1..8: a scan in
#: steps of 0.04 over 65,536 Gaussian weights with this project's search. High rates lose more at the codebook's ends.
_BEST_RMS: dict[Codebook, tuple[float, ...]] = {
    "3inst": (1.13, 1.00, 0.94, 0.90, 0.86, 0.80, 0.72, 0.66),
    "mcg": (1.15, 1.00, 0.94, 0.91, 0.88, 0.80, 0.74, 0.66),
    "mul1": (1.12, 0.99, 0.94, 0.91, 0.88, 0.82, 0.76, 0.70),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Regularized:
    """``rotated`` float32 [in, out] (padded), suh float16 [in] and svh float16 [out], zero where the matrix is."""

    rotated: np.ndarray
    suh: np.ndarray
    svh: np.ndarray


def random_signs(count: int, seed: int, name: str) -> np.ndarray:
    """``count`` signs, float32, fixed by the seed and a name; tensors that give the same name share them."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:16], "little"))
    return 1 - 2 * generator.integers(0, 2, count).astype(np.float32)


def best_rms(bits: float, codebook: Codebook) -> float:
    """Rms that the rotated matrix should have, in units of the codebook's values."""
    values = table(codebook).astype(np.float64)
    relative = np.interp(bits, np.arange(1, 9), _BEST_RMS[codebook])
    return float(relative * np.sqrt(np.mean(values**2)))


def padded(size: int) -> int:
    """The next multiple of 128."""
    return -(-size // PADDING) * PADDING


def blockwise(values: np.ndarray, axis: int) -> np.ndarray:
    """The orthonormal 128-point Hadamard transform of every block of 128 along an axis of a matrix.

    Only sums and differences of pairs in a fixed order: a matrix product would sum in an order that the processor's
    BLAS chooses, and a last digit can move a path of the trellis.
    """
    inner, turned = 1 if axis else values.shape[1], np.ascontiguousarray(values)
    half = inner
    while half < PADDING * inner:
        first, second = np.moveaxis(turned.reshape(-1, 2, half), 1, 0)
        turned = np.stack([first + second, first - second], axis=1)
        half *= 2
    return turned.reshape(values.shape) * values.dtype.type(PADDING**-0.5)


def regularize(name: str, weight: np.ndarray, signs: tuple[np.ndarray, np.ndarray], rms: float) -> Regularized:
    """Scale and rotate one matrix.

    Args:
        name: of the tensor, for errors.
        weight: float32 [in, out], padded.
        signs: of the input and of the output side, +-1, [in] and [out].
        rms: what the rotated matrix is to have, block by block where padding makes blocks sparse.

    Raises:
        CheckpointError: values that are not finite, or scales that fp16 cannot hold.
    """
    if not np.isfinite(weight).all():
        raise CheckpointError(f"{name} holds values that are not finite", "check the source checkpoint")
    columns = _rms(weight, axis=0)
    columns /= columns[columns > 0].mean() if columns.any() else 1
    turned = blockwise(_divided(weight, columns, axis=1), axis=1)
    filled = _block_rms(turned, axis=1)
    columns *= filled / filled.max()
    turned = _divided(turned, filled, axis=1)
    rows = _rms(turned, axis=1)
    rows *= _block_rms(blockwise(_divided(turned, rows, axis=0), axis=0), axis=0) * (filled.max() / rms)
    # The minus is a convention of the format's own converter.
    suh, svh = _fp16(name, -signs[0] * rows), _fp16(name, signs[1] * columns)
    scaled = _divided(_divided(weight, svh.astype(np.float32), axis=1), suh.astype(np.float32), axis=0)
    return Regularized(rotated=blockwise(blockwise(scaled, axis=1), axis=0), suh=suh, svh=svh)


def _rms(weight: np.ndarray, axis: int) -> np.ndarray:
    """Rms along an axis, float32; zero for a row or column of zeros."""
    return np.sqrt(np.mean(np.square(weight, dtype=np.float64), axis=axis)).astype(np.float32)


def _block_rms(turned: np.ndarray, axis: int) -> np.ndarray:
    """Rms of each block of 128, for every entry of the axis; 1 for an empty block.

    All are equal unless padding, or rows or columns of zeros, leave a block with less than the others.
    """
    blocks = np.moveaxis(turned, axis, 0).reshape(turned.shape[axis] // PADDING, -1)
    rms = np.sqrt(np.mean(np.square(blocks, dtype=np.float64), axis=1))
    return np.repeat(np.where(rms > 0, rms, 1), PADDING).astype(np.float32)


def _divided(weight: np.ndarray, scales: np.ndarray, axis: int) -> np.ndarray:
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    return weight * (inverse[:, None] if axis == 0 else inverse[None, :])


def _fp16(name: str, scales: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        rounded = scales.astype(np.float16)
    if not np.isfinite(rounded).all() or ((rounded == 0) & (scales != 0)).any():
        raise CheckpointError(
            f"{name}: rows or columns of rms {np.abs(scales[scales != 0]).min():.1e} to {np.abs(scales).max():.1e} "
            "do not fit in the format's fp16 scales",
            "check the source checkpoint: such weights are too small or too large for fp16",
        )
    return rounded
