"""Which files make a checkpoint, and whether one of them is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path

from harness.errors import CheckpointError

_NUMBERED = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<total>\d{5})\.safetensors$")
_INDEX = "model.safetensors.index.json"


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
