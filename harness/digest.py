"""SHA-256 of what a number depends on: token ids, tensors, heads, files. Content, never names or places."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from harness.records import json_digest as json_digest
from harness.types import Head


def ids_digest(ids_T: np.ndarray) -> str:
    """Digest of token ids as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(ids_T, dtype="<i4").tobytes()).hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw little-endian bytes of a tensor, bf16 included, without changing its dtype."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> str:
    """Digest of dtype, shape and raw bytes."""
    digest = hashlib.sha256(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}".encode())
    digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def head_digest(
    weight_VH: torch.Tensor,
    *,
    vocab_size: int,
    bias_V: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> str:
    """Digest of a head: its tensors' contents and the numbers that shape its logits."""
    return json_digest(
        {
            "weight": tensor_digest(weight_VH),
            "bias": None if bias_V is None else tensor_digest(bias_V),
            "vocab_size": vocab_size,
            "softcap": softcap,
            "scale": scale,
        }
    )


def identity_of_head(head: Head) -> str:
    """The digest that ``head.sha256`` must hold."""
    return head_digest(
        head.weight_VH, vocab_size=head.vocab_size, bias_V=head.bias_V, softcap=head.softcap, scale=head.scale
    )
