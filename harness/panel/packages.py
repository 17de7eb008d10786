"""Files inside pinned packages: taken from the installed environment, else from an archive fetched by hash.

An archive is read, never installed and never built: whatever it holds, nothing of it runs.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from io import BytesIO
from pathlib import Path

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from harness.digest import file_digest
from harness.errors import PanelError, UsageError
from harness.panel.recipe import PackageSource
from harness.store import atomic_path

#: Most bytes of one file of a package.
LARGEST = 1 << 28


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
    if source.index == "pypi" and not str(source.archive).endswith(".whl"):
        raise UsageError(
            f"{source.archive} is no wheel, and pip runs code of what it has to build",
            f"put the file at {source.archive_sha256}/{source.archive} in the package cache ({cache_folder().name})",
        )
    if source.index == "npm":
        return ["npm", "pack", "--silent", "--ignore-scripts", f"{source.name}@{source.version}"]
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{source.name}=={source.version} --hash=sha256:{source.archive_sha256}\n")
    kind = ["--only-binary", ":all:", *_tags(str(source.archive))]
    options = ["--no-deps", "--require-hashes", *kind, "-r", requirement.name, "-d", str(folder)]
    return [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", *options]


def _tags(wheel: str) -> list[str]:
    """pip options that ask for exactly this wheel, whatever machine and Python it was built for."""
    try:
        tag = sorted(parse_wheel_filename(wheel)[3], key=str)[0]
    except InvalidWheelFilename as error:
        raise UsageError(f"{wheel} is no name of a wheel", "correct the recipe's archive") from error
    if tag.platform == "any":
        return []
    version = tag.interpreter.removeprefix("cp")
    return ["--platform", tag.platform, "--implementation", "cp", "--python-version", version, "--abi", tag.abi]


def _from_archive(archive: Path, source: PackageSource) -> dict[str, bytes]:
    """Read the wanted files in place: wheel or zip, tar of any compression, .deb."""
    try:
        if archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as file:
                return {path: _zipped(file, path) for path in source.files}
        with tarfile.open(fileobj=BytesIO(_tar_of(archive))) as tar:
            return {path: _member(tar, path) for path in source.files}
    except KeyError as error:
        raise PanelError(f"{archive.name} lacks a file that the recipe names: {error}", "correct the recipe") from error
    except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError, NotImplementedError) as error:
        raise PanelError(f"{archive.name} cannot be unpacked: {error}", "correct the recipe's archive") from error


def _tar_of(archive: Path) -> bytes:
    if archive.suffix != ".deb":
        return archive.read_bytes()
    try:
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UsageError(f"{archive.name} could not be opened: {error}", "install dpkg") from error
    return done.stdout


def _zipped(archive: zipfile.ZipFile, path: str) -> bytes:
    _refuse_large(path, archive.getinfo(path).file_size)
    return archive.read(path)


def _refuse_large(path: str, size: int) -> None:
    """A text of a panel is no gigabyte; what unpacks to one is a bomb."""
    if size > LARGEST:
        raise PanelError(f"{path} unpacks to {size:,} bytes", "name a text file in the recipe")


def _member(tar: tarfile.TarFile, path: str) -> bytes:
    """One regular file; Debian's tars name theirs ``./usr/...``."""
    held = set(tar.getnames())
    for name in (path, f"./{path}"):
        if name in held and tar.getmember(name).isreg():
            _refuse_large(path, tar.getmember(name).size)
            file = tar.extractfile(name)
            assert file is not None
            return file.read()
    raise KeyError(path)
