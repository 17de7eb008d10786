"""Safetensors headers: what a shard holds, without reading its weights; a damaged shard is one clear line."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.errors import CheckpointError

#: Bits of one element and the torch dtype, by the name that safetensors uses; None where torch has none.
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (8, torch.bool),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "I16": (16, torch.int16),
    "U16": (16, torch.uint16),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "I32": (32, torch.int32),
    "U32": (32, torch.uint32),
    "F32": (32, torch.float32),
    "C64": (64, torch.complex64),
    "F64": (64, torch.float64),
    "I64": (64, torch.int64),
    "U64": (64, torch.uint64),
}
#: The format's own limit on a header.
_LONGEST_HEADER = 100_000_000
_AGAIN = "fetch this file again and compare its size with the one the Hub shows"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor of a shard: dtype by its safetensors name, and where its bytes lie in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    bytes: int

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it.

        Raises:
            CheckpointError: torch has no such dtype.
        """
        dtype = DTYPES.get(self.dtype, (0, None))[1]
        if dtype is None:
            raise CheckpointError(f"{self.name} is {self.dtype}, which torch cannot hold", "use another quant")
        return dtype

    def as_meta(self) -> torch.Tensor:
        """An empty tensor of its shape and dtype, on the meta device."""
        return torch.empty(self.shape, dtype=self.torch_dtype, device="meta")


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Every tensor of a safetensors file, checked against the size of the file.

    Raises:
        CheckpointError: the file is truncated, too long, or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= _LONGEST_HEADER:
            raise _not_safetensors(path, start + file.read(120), size)
        if 8 + length > size:
            raise CheckpointError(
                f"{path.name} is truncated: its header alone has {length:,} bytes and the file {size:,}", _AGAIN
            )
        text = file.read(length)
    tensors = parse_header(path.name, text, 8 + length)
    end = max((tensor.start + tensor.bytes for tensor in tensors.values()), default=8 + length)
    if end > size:
        raise CheckpointError(f"{path.name} is truncated: {end:,} bytes by its header, {size:,} on disk", _AGAIN)
    if end < size:
        raise CheckpointError(f"{path.name} has {size - end:,} bytes past its last tensor", _AGAIN)
    return tensors


def parse_header(shard: str, text: bytes, origin: int) -> dict[str, TensorHeader]:
    """The tensors of a header's JSON; ``origin`` is the file offset of the first tensor's bytes."""
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = {name: make_header(name, shard, entry, origin) for name, entry in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{shard} has a damaged header: {error}", _AGAIN) from error
    _check_no_overlap(shard, tensors)
    return tensors


def make_header(name: str, shard: str, entry: dict[str, Any], origin: int) -> TensorHeader:
    """A header entry as safetensors writes it; ValueError where its bytes do not fit its dtype and shape."""
    begin, end = entry["data_offsets"]
    header = TensorHeader(
        name=name,
        dtype=entry["dtype"],
        shape=tuple(int(size) for size in entry["shape"]),
        shard=shard,
        start=origin + begin,
        bytes=end - begin,
    )
    bits = DTYPES.get(header.dtype, (None, None))[0]
    if begin < 0 or min(header.shape, default=0) < 0 or (bits and header.elements * bits != header.bytes * 8):
        raise ValueError(f"{name} is {header.dtype} {list(header.shape)} in {header.bytes} bytes")
    return header


def read_exact(descriptor: int, size: int, start: int, shard: str) -> bytes:
    """``size`` bytes of an open shard from ``start``; refuses a file that became shorter."""
    data = os.pread(descriptor, size, start)
    if len(data) < size:
        more = [data]
        while (missing := size - sum(map(len, more))) > 0:
            part = os.pread(descriptor, missing, start + size - missing)
            if not part:
                raise CheckpointError(f"{shard} ended {missing:,} bytes early while it was read", _AGAIN)
            more.append(part)
        data = b"".join(more)
    return data


def _check_no_overlap(shard: str, tensors: dict[str, TensorHeader]) -> None:
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.bytes)):
        if tensor.start < end:
            raise CheckpointError(f"{shard} has a damaged header: {last} and {tensor.name} overlap", _AGAIN)
        end, last = tensor.start + tensor.bytes, tensor.name


def _not_safetensors(path: Path, start: bytes, size: int) -> CheckpointError:
    if start.startswith(b"version https://git-lfs"):
        return CheckpointError(
            f"{path.name} is a Git LFS pointer, not the file", "run `git lfs pull`, or `hf download` the repository"
        )
    if not size:
        return CheckpointError(f"{path.name} is empty", _AGAIN)
    kind = "a web page" if start.lstrip()[:1] == b"<" else "no safetensors file"
    return CheckpointError(f"{path.name} ({size:,} bytes) is {kind}: its first bytes are {start[:8]!r}", _AGAIN)
