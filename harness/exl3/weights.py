"""The digest that identifies a checkpoint by the contents of its tensors: not by sharding, file names or dates."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from harness.exl3.headers import TensorHeader, read_exact, read_header
from harness.exl3.shards import shard_paths
from harness.progress import Advance, phase

_CHUNK = 1 << 22
#: Below this size a digest takes no time worth showing.
_SHOWN_FROM = 1 << 30


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
