"""The folder of a run: its name, whether the run is finished in it, and run.json, which says when and how fast.

The same for measurements of both lanes and for suites of tasks. A receipt is written last, so where it stands the run
is whole; run.json is no part of any comparison.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from harness.digest import file_digest
from harness.errors import IncomparableError, Refused
from harness.records import Strict, load_json
from harness.store import write_json

REPORTS = Path("reports")


class Receipt(Protocol):
    """What `finished` reads of any receipt."""

    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...


AnyReceipt = TypeVar("AnyReceipt", bound=Receipt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind(Generic[AnyReceipt]):
    """What a kind of run leaves behind: a receipt, and beside it the table whose digest the receipt holds."""

    noun: str
    receipt_file: str
    table_file: str
    load: Callable[[Path], AnyReceipt]
    table_sha256: Callable[[AnyReceipt], str]
    repair: str


def folder_name(*parts: str, key: str, partial: str = "") -> Path:
    """Where a run goes that is given no --out: ``reports/MODEL--PANEL--KEY``, and how much of it was asked for."""
    return REPORTS / ("--".join([*(part.replace(" ", "-") for part in parts), key[:8]]) + partial)


def finished(folder: Path, key: str, kind: Kind[AnyReceipt]) -> AnyReceipt | None:
    """The receipt of this key where the run is finished and undamaged; None where the folder holds none.

    Raises:
        IncomparableError: the folder holds the answer to another question.
        Refused: its table is gone, or is not the one that the receipt was made from.
    """
    if not (folder / kind.receipt_file).is_file():
        return None
    receipt = kind.load(folder)
    if receipt.key != key:
        raise IncomparableError(
            f"{folder.name} holds the {kind.noun} {receipt.key[:12]} of {receipt.name}, this one is {key[:12]}",
            "give another --out, or remove that folder",
        )
    table = folder / kind.table_file
    if not table.is_file() or file_digest(table) != kind.table_sha256(receipt):
        raise Refused(
            f"{folder.name}/{kind.table_file} is not what its {kind.receipt_file} was made from",
            f"remove {folder.name} and {kind.repair}",
        )
    return receipt


#: When a run that is not finished began; its run.json takes its place.
BEGUN = "begun.json"


class Begun(Strict):
    """When the first leg of a run began; no row of its key was scored before."""

    key: str
    started: str


def begin(folder: Path, key: str) -> str:
    """When this run began (ISO 8601): now, or the time that an earlier leg of it wrote before its first row."""
    file = folder / BEGUN
    if file.is_file():
        begun = load_json(file, Begun, f"remove {folder.name} and run the same command again")
        if begun.key == key:
            return begun.started
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(file, Begun(key=key, started=now).model_dump())
    return now


def write_run(
    folder: Path, leg: float, *, begun: str = "", tokens: int | None = None, **facts: int | float | str
) -> None:
    """Write run.json: when a run began, how long its last leg took, the speed where ``tokens`` were run, and more.

    Args:
        leg: `time.time` when this process began with it.
        begun: when the run's first leg began, where `begin` told.
    """
    seconds = time.time() - leg
    speed = {} if tokens is None else {"tokens": tokens, "tokens_per_second": round(tokens / seconds, 1)}
    when = begun or datetime.fromtimestamp(leg, UTC).isoformat(timespec="seconds")
    write_json(folder / "run.json", {"started": when, "seconds": round(seconds, 1)} | speed | facts)
    (folder / BEGUN).unlink(missing_ok=True)
