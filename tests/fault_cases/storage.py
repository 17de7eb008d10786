"""Files: what is whole, what is damaged, what is claimed, and what fits."""

from __future__ import annotations

import errno
import shutil
import zipfile
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from harness.capture import CaptureWriter, open_capture
from harness.capture.rowfile import read_array
from harness.digest import file_digest
from harness.errors import CaptureError, CheckpointError, PanelError, Refused, StorageError
from harness.exl3.headers import read_header
from harness.measure.receipt import load_measurement
from harness.panel import build_panel, load_panel
from harness.panel.packages import read_package
from harness.panel.recipe import PackageSource
from harness.store import require_space, write_json, write_text
from harness.types import Hidden, Row
from tests.fault_cases import made
from tests.fault_cases.entry import Fault
from tests.panel.made_panels import make_panel, make_tokenizer, words

THROUGH = made.head(torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16))


def rows_of(count: int, length: int = 9) -> tuple[list[Row], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [made.row([(i + t) % 40 for t in range(length)], i) for i in range(count)]
    return rows, [torch.randn(length, 16, generator=generator).to(torch.bfloat16) for _ in rows]


def writer_of(folder: Path, rows: list[Row]) -> CaptureWriter:
    return CaptureWriter(folder, made.identity(THROUGH.sha256), made.panel(rows), THROUGH, "hidden", torch.bfloat16)


def store(folder: Path, rows: list[Row], states: list[torch.Tensor]) -> Path:
    with writer_of(folder, rows) as writer:
        for row, values in zip(rows, states, strict=True):
            writer.write_row(row, Hidden(states_TH=values))
        writer.finish()
    return folder


def list_offsets(folder: Path) -> None:
    """Seven rows of 2048 x 154,880 logits pass 2^31 values: fixed width has no offsets, a row is a file of its own."""
    assert 7 * 2048 * 154_880 > 2**31 > 2048 * 154_880
    # 3.1e9 bytes in one column, on a sparse file: fixed-width Arrow columns have no 32-bit offsets to overflow.
    width, positions = 4 * 154_880, 5_000
    with (folder / "sparse").open("wb") as file:
        file.truncate(width * positions)
    mapped = np.memmap(folder / "sparse", dtype=np.uint8, mode="r+")
    mapped[-4:] = [1, 2, 3, 4]
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), positions, [None, pa.py_buffer(mapped)])
    assert mapped.nbytes > 2**31 and column[positions - 1].as_py()[-4:] == bytes([1, 2, 3, 4])
    rows, states = rows_of(7)
    capture = open_capture(store(folder / "c", rows, states))
    found = pq.ParquetFile(folder / "c" / "row-0003.parquet")
    assert found.schema_arrow.field("states").type == pa.binary(16 * 2)
    assert found.metadata.num_row_groups == 1
    for other in (0, 1, 2, 4, 5, 6):
        (folder / "c" / f"row-{other:04d}.parquet").write_bytes(b"nothing to read here")
    assert torch.equal(capture.row(3).states_TH, states[3][:-1])


def half_in_parquet(folder: Path) -> None:
    """bf16 bits are fixed-width bytes with their dtype beside them; another dtype is an error, never a reading."""
    rows, states = rows_of(1)
    with writer_of(folder / "a", rows) as writer:
        with pytest.raises(CaptureError, match=r"states are torch.float16 and this capture holds torch.bfloat16"):
            writer.write_row(rows[0], Hidden(states_TH=states[0].half()))
    store(folder / "b", rows, states)
    assert torch.equal(read_array(folder / "b" / "row-0000.parquet", "states", torch.bfloat16), states[0][:-1])
    for name, values in (("half", pa.array(np.zeros(3, np.float16))), ("list", pa.array([[1.0], [2.0]]))):
        pq.write_table(pa.table({"states": values}), folder / f"{name}.parquet")
        with pytest.raises(CaptureError, match="a stored array is never reinterpreted as another dtype"):
            read_array(folder / f"{name}.parquet", "states", torch.float32)
    with pytest.raises(CaptureError, match="not fixed-size binary of torch.float32"):
        pq.write_table(pa.table({"states": pa.array([b"12", b"34"], pa.binary(2))}), folder / "narrow.parquet")
        read_array(folder / "narrow.parquet", "states", torch.float32)


def interrupted_write(folder: Path) -> None:
    """Killed within a row: the row is absent, no manifest says otherwise, and the rows before it stay."""
    rows, states = rows_of(3)
    writer = writer_of(folder / "c", rows)
    writer.write_row(rows[0], Hidden(states_TH=states[0]))

    def dies(table: pa.Table, where: Path, **options: object) -> None:
        Path(where).write_bytes(b"PAR1 half a row")
        raise KeyboardInterrupt

    with mock.patch("harness.store.pq.write_table", dies), pytest.raises(KeyboardInterrupt):
        writer.write_row(rows[1], Hidden(states_TH=states[1]))
    writer.close()
    assert sorted(path.name for path in (folder / "c").glob("*[!k]")) == ["row-0000.parquet"]
    assert open_capture(folder / "c").label == "partial 1/3"
    written: list[str] = []
    real = Path.replace

    def recorded(self: Path, target: Path) -> Path:
        written.append(target.name)
        return real(self, target)

    with mock.patch.object(Path, "replace", recorded):
        store(folder / "c", rows, states)
    assert written == ["row-0001.parquet", "row-0002.parquet", "manifest.json"]
    store(folder / "whole", rows, states)
    assert file_digest(folder / "c" / "manifest.json") == file_digest(folder / "whole" / "manifest.json")


def coverage_claim(folder: Path) -> None:
    """A manifest of 10 records beside 1 file is partial 1/10, never n = 10."""
    rows, states = rows_of(10)
    whole = store(folder / "c", rows, states)
    assert open_capture(whole).label == ""
    for index in range(1, 10):
        (whole / f"row-{index:04d}.parquet").unlink()
    found = open_capture(whole)
    assert (found.label, found.rows) == ("partial 1/10", [0])
    assert found.manifest.positions_present == 8 and found.manifest.positions_planned == 80
    with pytest.raises(CaptureError, match=r"row 3 is not in c \(1 of 10 rows are\)"):
        found.row(3)


def disk_full(folder: Path) -> None:
    """rows x positions x bytes against the free space before the start; a full disk leaves nothing half-written."""
    usage = shutil.disk_usage(folder)
    rows, states = rows_of(4, length=1001)
    with mock.patch("harness.store.shutil.disk_usage", lambda path: usage._replace(free=4 * 1000 * 16 * 2)):
        with writer_of(folder / "c", rows) as writer, pytest.raises(StorageError, match="the capture of 4 rows needs"):
            writer.write_row(rows[0], Hidden(states_TH=states[0]))
        assert not list((folder / "c").glob("row-*"))
        logits = 32 * 2048 * 154_880 * 4
        with pytest.raises(StorageError, match=r"31 rows of logits needs 40.60 GB and the disk has 0.00 GB free"):
            require_space(folder, logits, "31 rows of logits")

    def full(self: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(Path, "write_bytes", full):
        with pytest.raises(StorageError, match="the disk is full: a.json .*\n.*run the same command again"):
            write_json(folder / "a.json", {"x": 1})
    assert not list(folder.glob("*a.json*"))


def transport(folder: Path) -> None:
    """The right name and wrong bytes: refused everywhere; a fetched archive is fetched once more, then used."""
    rows, states = rows_of(1)
    path = store(folder / "c", rows, states) / "row-0000.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CaptureError, match="delete row-0000.parquet and run capture again"):
        open_capture(folder / "c").row(0)
    tokenizer = make_tokenizer(folder / "t")
    panel = make_panel(folder / "p", files={"0.txt": words(60, 0)}, tokenizer=str(tokenizer))
    build_panel(panel)
    (panel / "rows.parquet").write_bytes((panel / "rows.parquet").read_bytes()[:-9])
    with pytest.raises(PanelError, match="rows.parquet is not a readable Parquet file"):
        load_panel(panel)
    for name, data in (("empty", b""), ("page", bytes(4096)), ("html", b"<!DOCTYPE html>")):
        (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError, match=f"{name} .*(is empty|is no safetensors file|is a web page)"):
            read_header(folder / name)
    write_text(folder / "measurement.json", '{"key": "k", "na')
    with pytest.raises(Refused, match="measurement.json cannot be read"):
        load_measurement(folder / "measurement.json")
    refetched(folder)


def refetched(folder: Path) -> None:
    """A damaged archive in the cache is fetched again, exactly once."""
    good = folder / "tiny_text-1.0.zip"
    with zipfile.ZipFile(good, "w") as archive:
        archive.writestr("t.txt", "amber")
    fetched: list[str] = []

    def fetch(source: PackageSource, where: Path) -> Path:
        fetched.append(source.name)
        return Path(shutil.copy(good, where / good.name))

    source = PackageSource.model_validate(
        {
            "kind": "package",
            "name": "surely-not-installed",
            "version": "1.0",
            "domain": "a",
            "rows": 1,
            "license": "none",
            "archive": good.name,
            "archive_sha256": file_digest(good),
            "files": {"t.txt": "0" * 64},
        }
    )
    kept = folder / "cache" / file_digest(good) / good.name
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"half a file")
    with mock.patch("harness.panel.packages.cache_folder", lambda: folder / "cache"):
        with mock.patch("harness.panel.packages._download", fetch):
            assert read_package(source) == read_package(source) == {"t.txt": b"amber"}
    assert fetched == ["surely-not-installed"] and file_digest(kept) == file_digest(good)


ROWS = [
    Fault(id="A55-list-offsets", title="32-bit list offsets", check=list_offsets),
    Fault(id="A56-half-in-parquet", title="float16 and bf16 in Parquet", check=half_in_parquet),
    Fault(id="A57-interrupted-write", title="a write that was interrupted", check=interrupted_write),
    Fault(id="B2-coverage-claim", title="a manifest that claims more than its files", check=coverage_claim),
    Fault(id="B39-disk-full", title="a full disk", check=disk_full),
    Fault(id="B40-transport", title="right name, wrong bytes", check=transport),
]
