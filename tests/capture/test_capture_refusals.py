"""What cannot be trusted is refused: captures of something else, damaged files, edited notes, wrong states."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from harness.capture import CaptureWriter, open_capture, verify_capture
from harness.capture.heads import head_path
from harness.capture.rowfile import read_array
from harness.errors import CaptureError, StorageError
from harness.scoring import teacher_stats
from harness.types import Hidden
from tests.capture.made_captures import ROW, T, Tiny, V, files, make_identity, make_panel


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"weights_sha256": "x" * 64}, "identity.weights_sha256"),
        ({"tokenizer_sha256": "u" * 64}, "identity.tokenizer_sha256"),
        ({"version": "2"}, "identity.version: 1, not 2"),
        ({"settings": {"batch": 8}}, "identity.settings.batch: 1, not 8"),
        ({"compute_dtype": "bfloat16"}, "identity.compute_dtype: float32, not bfloat16"),
    ],
)
def test_a_folder_of_another_teacher_is_not_continued(
    tiny: Tiny, tmp_path: Path, changes: dict[str, object], shown: str
) -> None:
    """The key holds weights, tokenizer, engine version, dtypes and settings; both values shown."""
    tiny.write(tmp_path / "a", [0])
    with pytest.raises(CaptureError, match=shown):
        CaptureWriter(tmp_path / "a", replace(tiny.identity, **changes), tiny.panel, tiny.head)
    CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head).close()  # the refusal gave the lock back


def test_another_panel_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    tiny.write(tmp_path / "a", [0])
    other = make_panel([T] * 4, seed=9)
    with pytest.raises(CaptureError, match="panel_sha256"):
        CaptureWriter(tmp_path / "a", tiny.identity, other, tiny.head)
    with pytest.raises(CaptureError, match="capture over panel tiny"):
        open_capture(tmp_path / "a", panel=other)
    writer = CaptureWriter(tmp_path / "b", tiny.identity, tiny.panel, tiny.head)
    with pytest.raises(CaptureError, match="not a row of panel"):
        writer.write_row(other.rows[0], Hidden(states_TH=tiny.states[0]))
    writer.close()


def test_another_teacher_is_refused_and_labels_are_notes(tiny: Tiny, tmp_path: Path) -> None:
    """Two revisions of equal content are one teacher, with a note."""
    capture = open_capture(tiny.write(tmp_path / "a"))
    assert capture.require_teacher(tiny.identity) == []
    assert capture.require_teacher(replace(tiny.identity, revision="def")) == ["revision abc, not def"]
    with pytest.raises(CaptureError, match="weights_sha256"):
        open_capture(tmp_path / "a", identity=replace(tiny.identity, weights_sha256="x" * 64))


def test_a_head_that_is_not_the_identity_s_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    """An identity that names another head than the one that is stored."""
    with pytest.raises(CaptureError, match="the engine says head"):
        CaptureWriter(tmp_path / "a", make_identity("0" * 64), tiny.panel, tiny.head)


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_a_flipped_byte_is_found_with_its_repair(tiny: Tiny, tmp_path: Path, where: float) -> None:
    """A file with the right name and wrong bytes."""
    path = tiny.write(tmp_path / "a") / ROW
    data = bytearray(path.read_bytes())
    data[int(len(data) * where)] ^= 1
    path.write_bytes(data)
    with pytest.raises(CaptureError, match=f"delete {ROW} and run capture again"):
        open_capture(tmp_path / "a").row(2)
    path.unlink()
    tiny.write(tmp_path / "a")
    assert verified(tmp_path / "a")


@pytest.mark.parametrize("size", [0, 4, 4096])
def test_a_truncated_row_is_refused(tiny: Tiny, tmp_path: Path, size: int) -> None:
    """Empty and cut files."""
    path = tiny.write(tmp_path / "a") / ROW
    path.write_bytes(path.read_bytes()[:size])
    for attempt in (lambda: open_capture(tmp_path / "a").row(2), lambda: tiny.write(tmp_path / "a")):
        with pytest.raises(CaptureError, match=f"delete {ROW}"):
            attempt()


def verified(folder: Path) -> bool:
    return all(check.passed for check in verify_capture(open_capture(folder)))


def rewrite(path: Path, change: object) -> None:
    """Edit a row file's metadata, leaving its columns alone."""
    table = pq.read_table(path)
    note = json.loads(table.schema.metadata[b"fidelity"])
    change(note)
    table = table.replace_schema_metadata({b"fidelity": json.dumps(note).encode()})
    pq.write_table(table, path, use_dictionary=False, compression="none", data_page_size=1 << 24)


def test_a_cut_point_must_be_declared(tiny: Tiny, tmp_path: Path) -> None:
    """Nobody may guess whether the final norm was applied."""
    folder = tiny.write(tmp_path / "a", [2])
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["key"]["cut_point"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CaptureError, match="where the hidden states were cut"):
        open_capture(folder)
    (folder / "manifest.json").unlink()
    rewrite(folder / ROW, lambda note: note["key"].pop("cut_point"))
    with pytest.raises(CaptureError, match="where its hidden states were cut"):
        open_capture(folder)


def test_another_dtype_is_an_error_not_a_reinterpretation(tiny: Tiny, tmp_path: Path) -> None:
    """Bits are stored, the dtype is metadata; a wrong one is refused at writing and at reading."""
    with CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head) as writer:
        with pytest.raises(CaptureError, match=r"states are torch.float32 and this capture holds torch.bfloat16"):
            writer.write_row(tiny.panel.rows[2], Hidden(states_TH=tiny.states[2].float()))
        writer.write_row(tiny.panel.rows[2], Hidden(states_TH=tiny.states[2]))
        writer.finish()
    rewrite(tmp_path / "a" / ROW, lambda note: note["key"].update(dtype="float16"))
    with pytest.raises(CaptureError):
        open_capture(tmp_path / "a").row(2)
    (tmp_path / "a" / "manifest.json").unlink()
    with pytest.raises(CaptureError, match="digest it was written with"):
        open_capture(tmp_path / "a")


def test_a_column_of_another_type_is_refused(tmp_path: Path) -> None:
    """A list column in the place of the bits."""
    pq.write_table(pa.table({"states": [[1.0, 2.0]]}), tmp_path / "row-0000.parquet")
    with pytest.raises(CaptureError, match="not fixed-size binary"):
        read_array(tmp_path / "row-0000.parquet", "states", torch.bfloat16)
    with pytest.raises(CaptureError, match="missing"):
        read_array(tmp_path / "row-0000.parquet", "nothing", torch.bfloat16)


def test_two_writers_in_one_folder(tiny: Tiny, tmp_path: Path) -> None:
    with CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head):
        with pytest.raises(StorageError, match="another run is writing"):
            CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head)


def test_no_space_is_said_before_the_first_row(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned bytes against free bytes, before anything is written."""
    usage = shutil.disk_usage(tmp_path)
    with CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head) as writer:
        monkeypatch.setattr("harness.store.shutil.disk_usage", lambda path: usage._replace(free=5000))
        with pytest.raises(StorageError, match="the capture of 4 rows needs"):
            writer.write_row(tiny.panel.rows[0], Hidden(states_TH=tiny.states[0]))
    assert set(files(tmp_path / "a")) == set()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_located(tiny: Tiny, tmp_path: Path, bad: float) -> None:
    states = tiny.states[1].clone()
    states[5, 7] = bad
    with CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head) as writer:
        with pytest.raises(CaptureError, match="row 1, position 5: a hidden state is not finite"):
            writer.write_row(tiny.panel.rows[1], Hidden(states_TH=states))


def test_wrong_shapes_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, tiny.head) as writer:
        row, stats = tiny.panel.rows[0], teacher_stats(tiny.states[0][:-1], tiny.panel.rows[0].ids_T[1:], tiny.head)
        with pytest.raises(CaptureError, match="row 0: states are"):
            writer.write_row(row, Hidden(states_TH=tiny.states[0][:-1]), stats)
        with pytest.raises(CaptureError, match="scored positions"):
            writer.write_row(row, Hidden(states_TH=tiny.states[0]), replace(stats, nll=stats.nll[:-1]))
        with pytest.raises(CaptureError, match="position 3: entropy is nan"):
            broken = stats.entropy.copy()
            broken[3] = np.nan
            writer.write_row(row, Hidden(states_TH=tiny.states[0]), replace(stats, entropy=broken))


def test_an_edited_manifest_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "a") / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["rows"][1]["states_sha256"] = "0" * 64
    path.write_text(json.dumps(manifest))
    with pytest.raises(CaptureError, match="was edited"):
        open_capture(tmp_path / "a")
    path.write_text("{")
    with pytest.raises(CaptureError, match="not JSON"):
        open_capture(tmp_path / "a")


def test_an_empty_folder_is_no_capture(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="did not end"):
        open_capture(tmp_path)


def test_verify_finds_statistics_that_the_states_do_not_give(tiny: Tiny, tmp_path: Path) -> None:
    """A stored NLL that is off by 1 %, or one flipped top-1, in an otherwise whole file."""
    checks = verify_capture(open_capture(tiny.write(tmp_path / "a")), tiny.panel)
    assert [c.name for c in checks] == ["rows", "head", "panel", "digests", "stored NLL", "stored top-1"]
    assert all(c.passed for c in checks)
    row = tiny.panel.rows[0]
    stats = teacher_stats(tiny.states[0][:-1], row.ids_T[1:], tiny.head)
    lies = {
        "stored NLL": replace(stats, nll=stats.nll * 1.01),
        "stored top-1": replace(stats, top1=(stats.top1 + 1) % V),
    }
    for name, lie in lies.items():
        folder = tmp_path / name
        with CaptureWriter(folder, tiny.identity, tiny.panel, tiny.head) as writer:
            writer.write_row(row, Hidden(states_TH=tiny.states[0]), lie)
            writer.finish()
        failed = [c.name for c in verify_capture(open_capture(folder)) if not c.passed]
        assert name in failed, failed


def test_verify_names_the_row_and_the_head_that_are_broken(tiny: Tiny, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "a") / ROW
    data = bytearray(path.read_bytes())
    data[200] ^= 4
    path.write_bytes(data)
    checks = {c.name: c for c in verify_capture(open_capture(tmp_path / "a"))}
    assert not checks["digests"].passed and f"delete {ROW}" in checks["digests"].note
    assert checks["digests"].figure == "3/4 row files" and checks["head"].passed
    head_path(tmp_path, tiny.head.sha256).unlink()
    checks = {c.name: c for c in verify_capture(open_capture(tmp_path / "a"))}
    assert not checks["head"].passed and not checks["stored top-1"].passed
