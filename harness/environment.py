"""What a number depends on besides its inputs: versions of the libraries that compute it, and our own source."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from functools import cache
from pathlib import Path

#: The folder of our own source.
HARNESS = Path(__file__).parent
#: Libraries whose version can move a digit.
LIBRARIES = ("torch", "numpy", "numba", "transformers", "scipy", "pyarrow")
#: Our own packages and files that can: a receipt's numbers are made nowhere else (tests/test_environment.py holds it).
SOURCES = (
    "capture",
    "engines",
    "exl3",
    "measure",
    "panel",
    "scoring",
    "served",
    "stats",
    "tasks",
    "digest.py",
    "types.py",
)


def environment() -> dict[str, str]:
    """Versions and machine type; no host, user or path."""
    versions = {name: importlib.metadata.version(name).split("+")[0] for name in LIBRARIES}
    return {"python": platform.python_version(), "machine": platform.machine()} | versions


@cache
def source_digest() -> str:
    """SHA-256 over the files of `SOURCES` as they were when the process first asked."""
    return current_source_digest()


def current_source_digest() -> str:
    """The same, read again: code that is replaced while it runs is found out."""
    digest = hashlib.sha256()
    for path in sorted(file for name in SOURCES for file in _files(HARNESS / name)):
        digest.update(path.relative_to(HARNESS).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))
