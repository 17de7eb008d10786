"""What the Hub and loaders trip over: front matter, config.json, the index file, names and sizes of files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from harness.artifact.sources import Folder, Repository, shards_of
from harness.artifact.summary import index_total

_LARGEST = 50 * 10**9
_TAG = "exl3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that is broken, what breaks it, and what to do."""

    level: Literal["error", "warning"]
    rule: str
    what: str
    repair: str


def lint(source: Folder | Repository, front_matter: Callable[[str], dict[str, Any] | None]) -> list[Finding]:
    """Everything that is wrong with an artifact as it would be published.

    Args:
        front_matter: reads the YAML at the top of a README; None where there is none.
    """
    return [*_readme(source, front_matter), *_config(source), *_index(source), *_files(source)]


def _error(rule: str, what: str, repair: str) -> Finding:
    return Finding(level="error", rule=rule, what=what, repair=repair)


def _warning(rule: str, what: str, repair: str) -> Finding:
    return Finding(level="warning", rule=rule, what=what, repair=repair)


def _text(source: Folder | Repository, path: str) -> str | None:
    file = source.files.get(path)
    return None if file is None else source.read(path, 0, file.bytes).decode("utf-8", "replace")


def _readme(source: Folder | Repository, front_matter: Callable[[str], dict[str, Any] | None]) -> Iterator[Finding]:
    text = _text(source, "README.md")
    if text is None:
        yield _error("card", "there is no README.md", "write one with `fidelity card`")
        return
    keys = front_matter(text)
    if keys is None:
        yield _error("card", "README.md has no front matter that parses", "begin it with --- lines around YAML")
        return
    for key, repair in (
        ("license", "name the licence of the base model"),
        ("base_model", "name the model that was quantised"),
        ("pipeline_tag", "such as text-generation"),
    ):
        if not keys.get(key):
            yield _warning("card", f"README.md has no {key}", repair)
    if keys.get("base_model") and keys.get("base_model_relation") != "quantized":
        yield _warning("card", "base_model_relation is not quantized", "set base_model_relation: quantized")
    if _TAG not in (keys.get("tags") or []):
        yield _warning("card", f"the tag {_TAG} is missing", f"add it under tags: [{_TAG}]")


def _config(source: Folder | Repository) -> Iterator[Finding]:
    text = _text(source, "config.json")
    if text is None:
        yield _error("config", "there is no config.json", "copy it from the base model")
        return
    try:
        config = json.loads(text)
    except ValueError as error:
        yield _error("config", f"config.json is not JSON: {error}", "write it again")
        return
    block = config.get("quantization_config") if isinstance(config, dict) else None
    if not isinstance(block, dict):
        yield _error("config", "config.json has no quantization_config", "loaders look there for quant_method: exl3")
        return
    if block.get("quant_method") != _TAG:
        yield _error("config", f"quant_method is {block.get('quant_method')!r}", "set it to exl3")
    bits = block.get("bits")
    if not isinstance(bits, int) or isinstance(bits, bool):
        yield _warning(
            "config",
            f"quantization_config.bits is {bits!r}: the Hub takes only an integer",
            "write the integer to bits, and the mean to bits_mean",
        )


def _index(source: Folder | Repository) -> Iterator[Finding]:
    shards = shards_of(source.files)
    text = _text(source, "model.safetensors.index.json")
    if not shards:
        yield _error("index", "there are no *.safetensors files", "upload the shards")
    if text is None:
        if len(shards) > 1:
            yield _warning("index", f"{len(shards)} shards and no index file", "write model.safetensors.index.json")
        return
    try:
        named = set(json.loads(text)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        yield _error("index", "model.safetensors.index.json is damaged", "write it again")
        return
    for name in sorted(named - set(shards)):
        yield _error("index", f"the index names {name}, which is not there", "upload it, or write the index again")
    for name in sorted(set(shards) - named):
        yield _warning("index", f"the index leaves out {name}", "write the index again, or remove the file")
    held = sum(header.bytes for header in source.checkpoint().tensors.values()) if named <= set(shards) else None
    total = index_total(source)
    if held is not None and total is not None and total != held:
        yield _warning("index", f"total_size is {total:,}, the tensors hold {held:,}", "write the index again")


def _files(source: Folder | Repository) -> Iterator[Finding]:
    for path, file in sorted(source.files.items()):
        if file.bytes > _LARGEST:
            yield _error("files", f"{path} has {file.bytes:,} bytes: the Hub takes 50 GB a file", "split the shard")
    if isinstance(source, Folder):
        for left in sorted(source.path.rglob("*.partial")):
            yield _warning("files", f"{left.name} is an unfinished file", "remove it before you upload")
    if not any(path.upper().startswith("LICENSE") for path in source.files):
        yield _warning("files", "there is no LICENSE file", "copy the base model's")
