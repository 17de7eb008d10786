"""Manifests: the digest of every file of an artifact, written, and held against a folder or a repository.

Two forms, as publishers ship them: ``sha256-manifest.txt``, a line a file (digest, two spaces, path), and
``EXL3_MANIFEST.json`` with sizes and the bytes of all tensors. Files are hashed side by side; a digest is kept in the
user's cache under size, time of change and inode, so that a killed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from harness.artifact.sources import Folder, Repository, StoredFile, shards_of
from harness.errors import Refused, UsageError
from harness.exl3.census import take_census
from harness.progress import phase
from harness.records import Strict, first_problem
from harness.store import atomic_path, write_json, write_text

TEXT, JSON = "sha256-manifest.txt", "EXL3_MANIFEST.json"
_LINE = re.compile(r"^([0-9a-f]{64}) [ *](.+)$")
_CHUNK = 1 << 22
#: Larger files than this of a repository are compared by the digest that the Hub states.
_FETCHED = 16 << 20

Status = Literal["equal", "differs", "missing", "extra", "not stated"]


class Entry(Strict):
    """A file of a manifest."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    path: str
    sha256: str
    bytes: int | None = None


class Manifest(Strict):
    """``EXL3_MANIFEST.json``; other keys that a publisher adds are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    files: list[Entry]
    physical_tensor_bytes: int | None = None
    retained_tensor_bytes: int | None = None


def digests(folder: Folder, cache: Path | None = None) -> dict[str, str]:
    """SHA-256 of every file but the manifests, with a progress bar."""
    files = [file for path, file in sorted(folder.files.items()) if path not in (TEXT, JSON)]
    known = _Known(cache)
    total = sum(file.bytes for file in files)
    workers = min(8, os.cpu_count() or 1)
    with (
        phase(f"digests of {folder.name}", total=len(files), unit="MB", item="file") as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        found = {}
        for file, digest in zip(files, pool.map(lambda f: known.digest(folder.path / f.path), files), strict=True):
            found[file.path] = digest
            advance(1, file.bytes / 1e6)
    if total:
        known.save()
    return found


class _Known:
    """Digests from earlier runs, by what a file system says of a file."""

    def __init__(self, cache: Path | None) -> None:
        self._file = cache / "file-digests.json" if cache else None
        self._held: dict[str, str] = {}
        if self._file is not None and self._file.is_file():
            try:
                self._held = dict(json.loads(self._file.read_text()))
            except (ValueError, OSError):
                self._held = {}  # a cache that cannot be read is made again

    def digest(self, path: Path) -> str:
        stat = path.stat()
        key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
        if key not in self._held:
            self._held[key] = hash_file(path)
            self.save()
        return self._held[key]

    def save(self) -> None:
        if self._file is None:
            return
        try:
            with atomic_path(self._file) as temporary:
                temporary.write_text(json.dumps(dict(self._held)))
        except OSError:
            self._file = None  # nowhere to keep them: they are computed again next time


def hash_file(path: Path) -> str:
    """SHA-256 of a file, four megabytes at a time."""
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def write_manifests(folder: Folder, cache: Path | None = None) -> Manifest:
    """Write both forms into the folder; they name each other's digest in no way, so the order does not matter."""
    found = digests(folder, cache)
    manifest = Manifest(
        files=[Entry(path=path, sha256=sha, bytes=folder.files[path].bytes) for path, sha in found.items()],
        **_tensor_bytes(folder),
    )
    write_text(folder.path / TEXT, "".join(f"{entry.sha256}  {entry.path}\n" for entry in manifest.files))
    write_json(folder.path / JSON, manifest.model_dump(mode="json"))
    return manifest


def _tensor_bytes(source: Folder | Repository) -> dict[str, int]:
    """Bytes of all tensors, and of those that are no routed experts."""
    if not shards_of(source.files):
        return {}
    census = take_census(source.checkpoint())
    routed = census.routed.bytes if census.routed else 0
    return {"physical_tensor_bytes": census.whole.bytes, "retained_tensor_bytes": census.whole.bytes - routed}


def read_manifest(file: Path) -> Manifest:
    """Either form.

    Raises:
        Refused: it is neither, or names a path outside the artifact, or one twice.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file.name} cannot be read: {first_problem(error)}", "give a manifest file") from error
    if text.lstrip().startswith("{"):
        try:
            manifest = Manifest.model_validate_json(text)
        except ValueError as error:
            raise Refused(f"{file.name} is no manifest: {first_problem(error)}", f"see {JSON} in the docs") from error
    else:
        manifest = Manifest(files=[_entry(file.name, number, line) for number, line in _lines(text)])
    paths = [entry.path for entry in manifest.files]
    for path in paths:
        if path.startswith(("/", "~")) or ".." in path.split("/") or paths.count(path) > 1:
            why = "twice" if paths.count(path) > 1 else "which lies outside the artifact"
            raise Refused(f"{file.name} names {path} {why}", "ask who published it")
    if not paths:
        raise Refused(f"{file.name} names no file", "give a manifest file")
    return manifest


def _lines(text: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]


def _entry(name: str, number: int, line: str) -> Entry:
    found = _LINE.match(line.rstrip("\r"))
    if found is None:
        raise Refused(f"{name} line {number} is no digest and path", "a line is 64 hex digits, two spaces, the path")
    return Entry(path=found[2].removeprefix("./"), sha256=found[1])


def check_manifest(
    source: Folder | Repository, manifest: Manifest, own: str, cache: Path | None = None
) -> list[tuple[str, Status]]:
    """Every file of the manifest or the artifact with what was found of it.

    Args:
        own: name of the manifest's own file, which cannot hold its own digest.
    """
    stated = {entry.path: entry for entry in manifest.files}
    actual = digests(source, cache) if isinstance(source, Folder) else _stated_by_hub(source, stated)
    lines: list[tuple[str, Status]] = []
    for path in sorted(stated.keys() | source.files.keys()):
        if path in (own, TEXT, JSON) and path not in stated:
            continue
        lines.append((path, _status(stated.get(path), source.files.get(path), actual.get(path))))
    return lines


def _status(stated: Entry | None, file: StoredFile | None, actual: str | None) -> Status:
    if stated is None:
        return "extra"
    if file is None:
        return "missing"
    if stated.bytes is not None and stated.bytes != file.bytes:
        return "differs"
    if actual is None:
        return "not stated"
    return "equal" if actual == stated.sha256 else "differs"


def _stated_by_hub(source: Repository, wanted: Mapping[str, Entry]) -> dict[str, str]:
    """Digests that the Hub states for large files; small ones are read and hashed."""
    found: dict[str, str] = {}
    for path, file in source.files.items():
        if file.sha256 is not None:
            found[path] = file.sha256
        elif path in wanted and file.bytes <= _FETCHED:
            found[path] = hashlib.sha256(source.read(path, 0, file.bytes)).hexdigest()
    return found


def manifest_of(path: Path) -> Path:
    """The manifest file that ``--check`` names, or the one in the folder.

    Raises:
        UsageError: there is none.
    """
    if path.is_dir():
        for name in (JSON, TEXT):
            if (path / name).is_file():
                return path / name
        raise UsageError(f"{path.name} holds no manifest", f"write one with --write, or give a {TEXT}")
    return path
