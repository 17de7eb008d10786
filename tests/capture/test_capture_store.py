"""The capture store: what is written comes back bit for bit, also after a run that was killed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from harness.capture import CaptureWriter, load_head, open_capture, rowfile, save_head
from harness.capture.heads import head_path
from harness.capture.rowfile import page_offset, read_array
from harness.errors import CaptureError
from harness.scoring import TeacherStats
from harness.types import Hidden
from tests.capture.made_captures import ROW, H, T, Tiny, V, files, make_head, make_identity, make_panel


def test_states_come_back_bit_for_bit(tiny: Tiny, tmp_path: Path) -> None:
    capture = open_capture(tiny.write(tmp_path / "a"), panel=tiny.panel, identity=tiny.identity)
    assert capture.label == "" and capture.rows == [0, 1, 2, 3]
    for row in tiny.panel.rows:
        got = capture.row(row.index)
        assert got.states_TH.dtype == torch.bfloat16
        assert torch.equal(got.states_TH.view(torch.int16), tiny.states[row.index][:-1].view(torch.int16))
        assert np.array_equal(got.target, row.ids_T[1:])


def test_an_array_past_the_limit_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parquet counts a page's bytes in 32 bits: more than that is cut into pages, and comes back the same."""
    array, path = torch.randn(50, 37), tmp_path / "row.parquet"
    for limit, mapped in ((50 * 37 * 4, True), (50 * 37 * 4 - 1, False), (1000, False), (37 * 4, False)):
        monkeypatch.setattr(rowfile, "PAGE_BYTES", limit)
        rowfile.write_row_file(path, {"logits": array}, {"nll": np.arange(50.0)}, {"a": 1})
        with pq.ParquetFile(path) as file:
            assert (page_offset(path.read_bytes(), file.metadata, 0, array.nbytes) is not None) == mapped
        got, columns = rowfile.read_row_file(path, {"logits": torch.float32}, ["nll"])
        assert torch.equal(got["logits"], array) and np.array_equal(columns["nll"], np.arange(50.0))


def test_statistics_equal_float64(tiny: Tiny, tmp_path: Path) -> None:
    got = open_capture(tiny.write(tmp_path / "a")).row(1)
    logits = tiny.states[1][:-1].double().numpy() @ tiny.head.weight_VH.double().numpy().T
    lse = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    p = np.exp(logits - lse[:, None])
    np.testing.assert_allclose(got.lse, lse, rtol=1e-6)
    np.testing.assert_allclose(got.nll, lse - logits[np.arange(T - 1), got.target], rtol=1e-5)
    np.testing.assert_allclose(got.entropy, -(p * np.log(p)).sum(1), rtol=1e-4)
    np.testing.assert_allclose(got.p_top1, p.max(1), rtol=1e-5)
    assert np.array_equal(got.top1, logits.argmax(1))


def test_head_comes_back_with_all_that_shapes_its_logits(tmp_path: Path) -> None:
    head = make_head(bias_V=torch.randn(V), softcap=30.0, scale=0.125)
    save_head(tmp_path, head)
    before = head_path(tmp_path, head.sha256).stat().st_mtime_ns
    save_head(tmp_path, replace(head))  # the same head again: nothing is written
    assert head_path(tmp_path, head.sha256).stat().st_mtime_ns == before
    got = load_head(tmp_path, head.sha256)
    assert torch.equal(got.weight_VH, head.weight_VH) and torch.equal(got.bias_V, head.bias_V)
    assert (got.vocab_size, got.softcap, got.scale) == (V, 30.0, 0.125)


def test_head_file_with_other_numbers_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    capture = open_capture(tiny.write(tmp_path / "a"))
    path = head_path(tmp_path, tiny.head.sha256)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CaptureError, match="digest"):
        _ = capture.head
    path.unlink()
    with pytest.raises(CaptureError, match="missing"):
        _ = open_capture(tmp_path / "a").head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_memory_mapped_or_read_to_the_same_bits(tiny: Tiny, tmp_path: Path, dtype: torch.dtype) -> None:
    states = tiny.states[0].to(dtype)
    with CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head, "hidden", dtype) as writer:
        writer.write_row(tiny.panel.rows[0], Hidden(states_TH=states))
        writer.finish()
    got = open_capture(tmp_path / "a").row(0).states_TH
    assert got.dtype == dtype and torch.equal(got, states[:-1])


def test_only_proven_files_are_mapped(tmp_path: Path) -> None:
    """Compression, dictionaries, several row groups or pages: read normally, never viewed in place."""
    values = np.random.default_rng(0).integers(0, 255, (300, 64), dtype=np.uint8)
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(64), 300, [None, pa.py_buffer(values)])
    schema = pa.schema([pa.field("states", pa.binary(64), nullable=False)])
    good = {
        "use_dictionary": False,
        "compression": "none",
        "data_page_size": 1 << 20,
        "write_batch_size": 300,
        "write_statistics": False,
    }
    layouts = {
        "good": {},
        "snappy": {"compression": "snappy"},
        "dictionary": {"use_dictionary": True},
        "groups": {"row_group_size": 100},
        "pages": {"data_page_size": 1024, "write_batch_size": 16},
    }
    for name, change in layouts.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table([column], schema=schema), path, **(good | change))
        offset = page_offset(path.read_bytes(), pq.read_metadata(path), 0, values.nbytes)
        assert (offset is not None) == (name == "good"), name
        assert np.array_equal(read_array(path, "states", torch.bfloat16).view(torch.uint8).numpy(), values), name


def test_mapped_rows_do_not_write_through(tiny: Tiny, tmp_path: Path) -> None:
    capture = open_capture(tiny.write(tmp_path / "a"))
    before = (tmp_path / "a" / ROW).read_bytes()
    capture.row(2).states_TH.zero_()
    assert (tmp_path / "a" / ROW).read_bytes() == before
    assert torch.equal(capture.row(2).states_TH, tiny.states[2][:-1])


def some_stats(positions: int) -> TeacherStats:
    """Statistics of no model: for tests of storage alone."""
    ones = np.ones(positions)
    top1 = np.zeros(positions, np.int32)
    return TeacherStats(lse=ones, nll=ones, entropy=ones, p_top1=ones, top1=top1, nonfinite=top1)


@pytest.mark.parametrize(("width", "length"), [(576, 512), (4096, 2048)])
def test_size_is_at_most_h_x_2_plus_64_bytes_a_position(tmp_path: Path, width: int, length: int) -> None:
    panel, head = make_panel([length]), make_head(width=width)
    states = torch.zeros(length, width, dtype=torch.bfloat16)
    with CaptureWriter(tmp_path / "a", make_identity(head.sha256), panel, head) as writer:
        writer.write_row(panel.rows[0], Hidden(states_TH=states), some_stats(length - 1))
        writer.finish()
    size = (tmp_path / "a" / "row-0000.parquet").stat().st_size
    assert size / (length - 1) <= width * 2 + 64


def test_a_long_row_keeps_one_row_group_and_fixed_width(tmp_path: Path) -> None:
    """No list offsets exist that could pass 2**31, whatever the vocabulary; a row is one row group."""
    panel, head = make_panel([9000]), make_head()
    states = torch.randn(9000, H).to(torch.bfloat16)
    with CaptureWriter(tmp_path / "a", make_identity(head.sha256), panel, head) as writer:
        writer.write_row(panel.rows[0], Hidden(states_TH=states), some_stats(8999))
        writer.finish()
    details = pq.ParquetFile(tmp_path / "a" / "row-0000.parquet")
    assert details.metadata.num_row_groups == 1
    assert details.schema_arrow.field("states").type == pa.binary(H * 2)
    assert torch.equal(open_capture(tmp_path / "a").row(0).states_TH, states[:-1])


def test_resume_ends_bit_identical(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path / "a")
    tiny.write(tmp_path / "b", [2])
    with CaptureWriter(tmp_path / "b", tiny.identity, tiny.panel, tiny.head) as writer:
        assert writer.missing_rows() == [0, 1, 3]
    tiny.write(tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_killed_mid_row_leaves_no_half_file(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is absent, no manifest exists, finished rows stay and can be read."""

    def dies(table: pa.Table, where: Path, **options: object) -> None:
        Path(where).write_bytes(b"PAR1 half")
        raise KeyboardInterrupt

    writer = CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head)
    writer.write_row(tiny.panel.rows[0], Hidden(states_TH=tiny.states[0]))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("harness.store.pq.write_table", dies)
        writer.write_row(tiny.panel.rows[1], Hidden(states_TH=tiny.states[1]))
    writer.close()
    assert set(files(tmp_path / "a")) == {"row-0000.parquet"}
    capture = open_capture(tmp_path / "a")
    assert capture.label == "partial 1/4"
    assert torch.equal(capture.row(0).states_TH, tiny.states[0][:-1])


WRITE_FOREVER = """
import sys, torch
from pathlib import Path
from harness.capture import CaptureWriter
from harness.types import Hidden
from tests.capture.made_captures import make_head, make_identity, make_panel
from tests.capture.test_capture_store import KILL_ROWS, some_stats, wide_states
panel, head = make_panel([257] * KILL_ROWS), make_head(width=1024)
with CaptureWriter(Path(sys.argv[1]), make_identity(head.sha256), panel, head) as writer:
    for index in writer.missing_rows():
        writer.write_row(panel.rows[index], Hidden(states_TH=wide_states(index)), some_stats(256))
    writer.finish()
"""
KILL_ROWS = 300


def wide_states(index: int) -> torch.Tensor:
    return torch.randn(257, 1024, generator=torch.Generator().manual_seed(index)).to(torch.bfloat16)


def test_a_killed_run_leaves_whole_rows_and_goes_on(tmp_path: Path) -> None:
    """SIGKILL while rows are being written; every row file is whole, and the rest is added."""
    folder = tmp_path / "a"
    process = subprocess.Popen([sys.executable, "-c", WRITE_FOREVER, str(folder)])
    deadline = time.monotonic() + 600
    while not list(folder.glob("row-0003.parquet")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.002)
    process.kill()
    process.wait()
    found = sorted(folder.glob("row-*.parquet"))
    assert 4 <= len(found) < KILL_ROWS and not (folder / "manifest.json").exists()
    capture = open_capture(folder)
    for index in capture.rows:
        assert torch.equal(capture.row(index).states_TH, wide_states(index)[:-1])
    (folder / ".row-0299.parquet.1.partial").write_bytes(b"PAR1")
    panel, head = make_panel([257] * KILL_ROWS), make_head(width=1024)
    with CaptureWriter(folder, make_identity(head.sha256), panel, head) as writer:
        assert writer.missing_rows() == list(range(len(found), KILL_ROWS))
        next_row = writer.missing_rows()[0]
        writer.write_row(panel.rows[next_row], Hidden(states_TH=wide_states(next_row)), some_stats(256))
        assert writer.finish().rows_present == len(found) + 1
    assert not list(folder.glob(".row-*.partial"))


def test_a_manifest_that_claims_more_than_the_files_hold(tiny: Tiny, tmp_path: Path) -> None:
    """Manifest of 10 records, 1 file -> "partial 1/10", never n = 10."""
    panel = make_panel([T] * 10)
    tiny = replace_panel(tiny, panel)
    tiny.write(tmp_path / "a")
    for index in range(1, 10):
        (tmp_path / "a" / f"row-{index:04d}.parquet").unlink()
    capture = open_capture(tmp_path / "a")
    assert capture.label == "partial 1/10" and capture.manifest.rows_present == 1
    assert capture.manifest.positions_present == T - 1
    with pytest.raises(CaptureError, match="row 3 is not in a"):
        capture.row(3)
    shutil.rmtree(tmp_path / "a")
    tiny.write(tmp_path / "a", [0])
    assert open_capture(tmp_path / "a").sha256 == capture.sha256


def replace_panel(tiny: Tiny, panel: object) -> Tiny:
    states = {row.index: tiny.states[row.index % 4] for row in panel.rows}
    return Tiny(panel=panel, head=tiny.head, identity=tiny.identity, states=states)


def test_rows_that_came_after_the_manifest_count(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path / "a", [0])
    writer = CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head)
    writer.write_row(tiny.panel.rows[3], Hidden(states_TH=tiny.states[3]))
    writer.close()
    assert open_capture(tmp_path / "a").rows == [0, 3]


def test_digest_does_not_depend_on_the_place(tiny: Tiny, tmp_path: Path) -> None:
    first = open_capture(tiny.write(tmp_path / "here" / "a"))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    (tmp_path / "there" / "a").rename(tmp_path / "there" / "other")
    assert open_capture(tmp_path / "there" / "other").sha256 == first.sha256
    other = Tiny(tiny.panel, tiny.head, replace(tiny.identity, weights_sha256="x" * 64), tiny.states)
    assert open_capture(other.write(tmp_path / "b")).sha256 != first.sha256
