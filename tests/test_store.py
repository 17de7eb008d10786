"""Files are whole or absent; JSON keeps what it was given; one writer to a folder."""

from __future__ import annotations

import errno
import json

import pytest

from harness.errors import StorageError
from harness.store import atomic_path, folder_lock, require_space, write_json, write_text


def test_interrupted_write_leaves_the_old_file(tmp_path):
    """Killed while writing, the target is absent or complete."""
    target = tmp_path / "row.parquet"
    write_text(target, "first")
    with pytest.raises(KeyboardInterrupt), atomic_path(target) as temporary:
        temporary.write_text("half of the sec")
        raise KeyboardInterrupt
    assert target.read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["row.parquet"]


def test_full_disk_is_one_clear_line(tmp_path):
    """What cannot be written is said, with what to do; nothing half-written stays."""
    with (
        pytest.raises(StorageError, match="disk is full: row.parquet") as caught,
        atomic_path(tmp_path / "row.parquet"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "run the same command again" in caught.value.repair
    assert list(tmp_path.iterdir()) == []


def test_other_os_errors_are_not_renamed(tmp_path):
    with pytest.raises(PermissionError), atomic_path(tmp_path / "x"):
        raise PermissionError("no")


def test_space_is_asked_for_before_the_start(tmp_path):
    """Rows x positions x bytes against the disk, before anything runs."""
    with pytest.raises(StorageError, match="this capture needs 1000000000.00 GB"):
        require_space(tmp_path, 10**18, "this capture")
    require_space(tmp_path, 1, "this capture")


def test_second_writer_is_refused(tmp_path):
    with folder_lock(tmp_path), pytest.raises(StorageError, match="another run"), folder_lock(tmp_path):
        pass
    with folder_lock(tmp_path):
        pass


def test_nonfinite_json_is_a_string_never_null(tmp_path):
    """A reader of JSON has no number for it, and null or 0 would pass for one."""
    write_json(tmp_path / "a.json", {"max": float("inf"), "mean": float("nan"), "low": float("-inf"), "n": 3})
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"max": "inf", "mean": "nan", "low": "-inf", "n": 3}
    write_json(tmp_path / "b.json", {"max": float("inf"), "mean": float("nan"), "low": float("-inf"), "n": 3})
    assert (tmp_path / "b.json").read_bytes() == text.encode()
