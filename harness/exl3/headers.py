"""Safetensors shards without their weights: what each holds, whether one is missing, the digest of what all hold."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.errors import CheckpointError
from harness.progress import Advance, phase

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
_NUMBERED = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<total>\d{5})\.safetensors$")
_INDEX = "model.safetensors.index.json"
#: Bytes of one read of a digest.
_CHUNK = 1 << 22
#: Below this size a digest takes no time worth showing.
_SHOWN_FROM = 1 << 30
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


# ---- which files make a checkpoint -----------------------------------------------------------------------------------


def shard_paths(folder: Path) -> list[Path]:
    """Every ``*.safetensors`` of a folder in the order of names; a later file overrides an earlier one.

    Raises:
        CheckpointError: there is none.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder.name} is not a folder", "give a checkpoint folder")
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(
            f"{folder.name} is not a checkpoint: it holds no *.safetensors file", "give the folder with the shards"
        )
    return paths


def check_complete(folder: Path, shards: list[Path], tensors: Collection[str]) -> list[str]:
    """Refuse a missing shard; say what is stale in the index file.

    A number that is absent from ``model-00002-of-00005`` names counts as missing unless the index file shows that
    nothing is lost: indices are often stale, so alone they prove nothing.
    """
    indexed = _weight_map(folder / _INDEX)
    lost = sorted(key for key in indexed or () if key not in tensors)
    for stem, total, missing in _gaps([path.name for path in shards]):
        name = f"{stem}-{missing:05d}-of-{total:05d}.safetensors"
        if indexed is None or any(indexed[key] == name for key in lost):
            raise CheckpointError(f"{folder.name}: shard {missing} of {total} is missing ({name})", "fetch it")
    notes = []
    if lost:
        notes.append(f"{_INDEX} is stale: {len(lost)} of its tensors are in no shard, first {lost[0]}")
    if indexed is not None and (extra := sorted(set(tensors) - indexed.keys())):
        notes.append(f"{_INDEX} is stale: it leaves out {len(extra)} tensors, first {extra[0]}")
    return notes


def _weight_map(path: Path) -> dict[str, str] | None:
    if not path.is_file():
        return None
    try:
        mapping = json.loads(path.read_text())["weight_map"]
        return {str(key): str(shard) for key, shard in mapping.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name} is damaged: {error}", "fetch it again, or delete it") from error


def _gaps(names: list[str]) -> list[tuple[str, int, int]]:
    """``(stem, total, first absent index)`` of every numbered series with a gap."""
    series: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if found := _NUMBERED.match(name):
            series.setdefault((found["stem"], int(found["total"])), set()).add(int(found["index"]))
    gaps = []
    for (stem, total), present in series.items():
        if absent := sorted(set(range(1, total + 1)) - present):
            gaps.append((stem, total, absent[0]))
    return gaps


# ---- the digest of a checkpoint's tensors: not of shards, names of files or dates ------------------------------------


def weights_digest(folder: Path) -> str:
    """SHA-256 over name, dtype, shape and SHA-256 of the bytes of every tensor, sorted by name.

    Works for EXL3 and plain safetensors folders. Later files override earlier ones, as everywhere.

    Raises:
        CheckpointError: not a checkpoint, or a damaged shard.
    """
    paths = shard_paths(Path(folder))
    tensors = {name: header for path in paths for name, header in read_header(path).items()}
    total = sum(header.bytes for header in tensors.values())
    if total < _SHOWN_FROM:
        return _digest(paths, tensors.values(), lambda items, units: None)
    with phase(f"digest {Path(folder).name}", total=len(tensors), unit="MB", item="tensor") as advance:
        return _digest(paths, tensors.values(), advance)


def _digest(paths: list[Path], tensors: Iterable[TensorHeader], advance: Advance) -> str:
    whole = hashlib.sha256()
    ordered = sorted(tensors, key=lambda header: header.name)
    with ExitStack() as stack:
        files = {path.name: stack.enter_context(path.open("rb")).fileno() for path in paths}
        pool = stack.enter_context(ThreadPoolExecutor(min(8, os.cpu_count() or 1)))
        batches = list(_batches(ordered))
        for batch, parts in zip(batches, pool.map(lambda batch: _contents(files, batch), batches), strict=True):
            for header, part in zip(batch, parts, strict=True):
                whole.update(f"{header.name} {header.dtype} {list(header.shape)} {part}\n".encode())
            advance(len(batch), sum(header.bytes for header in batch) / 1e6)
    return whole.hexdigest()


def _batches(ordered: list[TensorHeader]) -> Iterator[list[TensorHeader]]:
    """Runs of tensors that are worth a task: a pack of experts has 150,000 tensors, most of them small."""
    batch: list[TensorHeader] = []
    size = 0
    for header in ordered:
        batch.append(header)
        size += header.bytes
        if size >= _CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _contents(files: Mapping[str, int], batch: list[TensorHeader]) -> list[str]:
    return [_content(files[header.shard], header) for header in batch]


def _content(descriptor: int, header: TensorHeader) -> str:
    digest = hashlib.sha256()
    for start in range(0, header.bytes, _CHUNK):
        size = min(_CHUNK, header.bytes - start)
        digest.update(read_exact(descriptor, size, header.start + start, header.shard))
    return digest.hexdigest()
