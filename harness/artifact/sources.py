"""Where an artifact lies: a folder, or a Hub repository of which only the bytes that are asked for travel."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from harness.errors import CheckpointError, UsageError
from harness.exl3.checkpoint import Checkpoint, open_checkpoint
from harness.exl3.files import INDEX, chosen_files, require_inside, weight_map
from harness.exl3.headers import TensorHeader, parse_header, read_exact
from harness.exl3.hub import hub_in_one_line

COMMIT = re.compile(r"^[0-9a-f]{40}$")
_LONGEST_HEADER = 100_000_000
#: Seconds without a byte from the Hub before a request is given up.
_PATIENCE = 60.0
#: What tools leave beside a model: no part of what is published.
_NOT_PUBLISHED = re.compile(r"(^|/)\.(git|cache|lock)(/|$)|\.partial$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of an artifact; ``sha256`` as the Hub states it for large files, None where nobody has."""

    path: str
    bytes: int
    sha256: str | None = None


class Source(Protocol):
    """A folder or a repository."""

    @property
    def name(self) -> str: ...
    @property
    def commit(self) -> str | None: ...
    @property
    def files(self) -> Mapping[str, StoredFile]: ...
    def read(self, path: str, start: int, size: int) -> bytes: ...
    def checkpoint(self) -> Checkpoint: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """A folder on this machine."""

    path: Path
    files: Mapping[str, StoredFile]
    commit: str | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def read(self, path: str, start: int, size: int) -> bytes:
        """``size`` bytes of a file from ``start``."""
        with (self.path / path).open("rb") as file:
            return read_exact(file.fileno(), size, start, path)

    def checkpoint(self) -> Checkpoint:
        """The headers of its tensors."""
        return open_checkpoint(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A Hub repository at one commit; ``asked`` counts the bytes that were read of each file."""

    name: str
    commit: str | None
    files: Mapping[str, StoredFile]
    asked: dict[str, int] = field(default_factory=dict)

    def read(self, path: str, start: int, size: int) -> bytes:
        """``size`` bytes of a file from ``start``, by one ranged request."""
        if not size:
            return b""
        found = _get(self.name, self.commit, path, start, size)
        self.asked[path] = self.asked.get(path, 0) + len(found)
        return found

    def checkpoint(self) -> Checkpoint:
        """The headers of its tensors: kilobytes of each shard."""
        tensors: dict[str, TensorHeader] = {}
        index = self.files.get(INDEX)
        mapping = None if index is None else weight_map(self.read(INDEX, 0, index.bytes))
        chosen, stale = chosen_files(Path(self.name), shards_of(self.files), mapping)
        for path in chosen:
            tensors |= self._header(path)
        return Checkpoint(name=self.name, tensors=tensors, config=self._config(), notes=stale)

    def _header(self, path: str) -> dict[str, TensorHeader]:
        length = int.from_bytes(self.read(path, 0, 8), "little")
        if not 2 <= length <= _LONGEST_HEADER or 8 + length > self.files[path].bytes:
            raise CheckpointError(f"{self.name}: {path} is no safetensors file", "ask who published it")
        return parse_header(path, self.read(path, 8, length), 8 + length)

    def _config(self) -> dict[str, Any]:
        import json

        if "config.json" not in self.files:
            return {}
        try:
            value = json.loads(self.read("config.json", 0, self.files["config.json"].bytes))
        except ValueError as error:
            raise CheckpointError(f"{self.name}: config.json is not JSON: {error}", "ask who published it") from error
        return value if isinstance(value, dict) else {}


def shards_of(files: Mapping[str, StoredFile]) -> list[str]:
    """The safetensors files at the top of an artifact."""
    return sorted(path for path in files if path.endswith(".safetensors") and "/" not in path)


def open_source(text: str, revision: str | None = None) -> Folder | Repository:
    """A folder here, else a Hub id; a branch is resolved to its commit.

    Raises:
        UsageError: neither, or a revision with a folder.
        CheckpointError: no such repository, or no connection.
    """
    folder = Path(text).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UsageError("--revision belongs to a Hub id, and a folder was given", "leave --revision out")
        return Folder(path=folder, files=_files_of(folder))
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise UsageError(f"{text} is neither a folder nor a Hub id", "give a folder or org/name")
    return _open_repository(text, revision)


def _files_of(folder: Path) -> dict[str, StoredFile]:
    found = {}
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(root) / name
            relative = path.relative_to(folder).as_posix()
            if _NOT_PUBLISHED.search(relative):
                continue
            require_inside(folder, path)
            found[relative] = StoredFile(path=relative, bytes=path.stat().st_size)
    return found


def _open_repository(name: str, revision: str | None) -> Repository:
    from huggingface_hub import HfApi

    with hub_in_one_line(name):
        info = HfApi().model_info(name, revision=revision, timeout=20, files_metadata=True)
    files = {
        file.rfilename: StoredFile(
            path=file.rfilename,
            bytes=file.size or 0,
            sha256=file.lfs.sha256 if file.lfs is not None else None,
        )
        for file in info.siblings or ()
    }
    return Repository(name=name, commit=info.sha, files=files)


def _get(name: str, commit: str | None, path: str, start: int, size: int) -> bytes:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = f"{HfApi().endpoint}/{name}/resolve/{quote(commit or 'main', safe='')}/{quote(path)}"
    headers = {**build_hf_headers(), "range": f"bytes={start}-{start + size - 1}"}
    with hub_in_one_line(name):
        answer = get_session().get(url, headers=headers, timeout=_PATIENCE, follow_redirects=True)
        hf_raise_for_status(answer)
    content: bytes = answer.content
    if answer.status_code == 200 and len(content) > size:  # a server that knows no ranges sent all of it
        content = content[start : start + size]
    if len(content) != size:
        raise CheckpointError(
            f"{name}: {path} gave {len(content):,} of {size:,} bytes from {start:,}", "run the same command again"
        )
    return content
