"""Files that are whole or absent: written beside their target, synced and renamed; one writer to a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import Refused, StorageError
from harness.records import seal_of


@contextmanager
def atomic_path(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``target``; on success sync and rename it, on any failure remove it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent).free
            raise StorageError(
                f"the disk is full: {target.name} could not be written ({free / 1e6:.0f} MB free)",
                "free some space and run the same command again; finished rows are kept",
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def slug(name: str) -> str:
    """A name as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.") or "candidate"


def write_bytes(target: Path, data: bytes) -> None:
    """Write ``data`` whole or not at all."""
    with atomic_path(target) as temporary:
        temporary.write_bytes(data)


def write_text(target: Path, text: str) -> None:
    """Write UTF-8 text with LF endings, whole or not at all."""
    write_bytes(target, text.encode())


def write_table(target: Path, table: pa.Table, **options: Any) -> None:
    """Write a Parquet file whole or not at all; ``options`` go to ``pyarrow.parquet.write_table``."""
    with atomic_path(target) as temporary:
        pq.write_table(table, temporary, **options)


def plain(value: Any) -> Any:
    """JSON-ready copy of ``value``; non-finite floats become "inf", "-inf" and "nan", never null or 0."""
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "tolist"):
        return [plain(v) for v in (value.tolist() if hasattr(value, "tolist") else value)]
    return value


def refuse_paths(what: str, text: str) -> None:
    """Refuse text for others that names this machine's home or working folder, or anybody's home.

    Raises:
        Refused: with the beginning of the path and where it stands.
    """
    here = {str(Path.home()), str(Path.cwd())} - {"/"}
    pattern = "|".join([*(re.escape(folder) for folder in sorted(here)), "/home", "/Users", r"[A-Za-z]:\\\\?Users"])
    found = re.search(rf"(?<![\w.])(?:{pattern})(?:[/\\]+[\w.-]+)+", text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise Refused(
            f"{what} would tell the path {found.group()[:60]} of this machine (line {line})",
            "give models and tasks names without folders; nothing was written",
        )


def write_receipt(target: Path, value: Any) -> Any:
    """`write_json` of a file that is made to be published: sealed, and a path of this machine in it is refused.

    Returns:
        The document as it was written.
    """
    document = plain(value)
    for part in document if isinstance(document, list) else [document]:
        if "seal" in part:
            part["seal"] = seal_of(part)
    refuse_paths(target.name, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))
    write_json(target, document)
    return document


def write_json(target: Path, value: Any) -> None:
    """Write indented JSON; the same value gives the same bytes."""
    write_text(target, json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder for one writer; a second one is refused at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StorageError(
                f"another run is writing to {folder.name}",
                "wait until it ends, or give this run a folder of its own with --out",
            ) from error
        yield


def require_space(folder: Path, needed: int, what: str) -> None:
    """Refuse before the start when ``needed`` bytes (plus 5 %) do not fit on the disk of ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed * 1.05:
        raise StorageError(
            f"{what} needs {needed / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free",
            "free some space, measure fewer rows with --rows, or put the output on another disk",
        )
