"""Sealing, loading, and every way in which a sealed panel can be wrong."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.cli import main
from harness.errors import HarnessError, PanelError, StorageError, UsageError
from harness.panel import build_panel, check_tokenizer, ensure_built, load_panel, tokenizer_digest
from harness.panel.seal import ROWS_FILE, ROWS_SCHEMA, read_lock, write_lock
from harness.store import folder_lock
from harness.types import Panel
from tests.panel.made_panels import make_panel, make_tokenizer, words

FILES: dict[str, str | bytes] = {f"{i}.txt": words(60, i) for i in range(4)}


@pytest.fixture
def panel(tmp_path: Path, tokenizer_folder: Path) -> Path:
    folder = make_panel(tmp_path / "p", files=FILES, tokenizer=str(tokenizer_folder))
    build_panel(folder)
    return folder


def edit_lock(panel: Path, change: Any) -> None:
    file = panel / "panel.lock.json"
    lock = json.loads(file.read_text())
    change(lock)
    file.write_text(json.dumps(lock))


def edit_rows(panel: Path, change: Any) -> None:
    records = pq.read_table(panel / ROWS_FILE).to_pylist()
    pq.write_table(
        type(pq.read_table(panel / ROWS_FILE)).from_pylist(change(records), schema=ROWS_SCHEMA), panel / ROWS_FILE
    )


def test_what_is_built_is_what_is_loaded(panel: Path) -> None:
    loaded = load_panel(panel)
    assert (len(loaded.rows), loaded.positions) == (4, 4 * 31)
    for row in loaded.rows:
        assert row.ids_T.dtype == np.int32
        assert not row.ids_T.flags.writeable
        little_endian = b"".join(int(token).to_bytes(4, "little") for token in row.ids_T)
        assert row.sha256 == hashlib.sha256(little_endian).hexdigest()
    whole = "[" + ",".join(f'"{row.sha256}"' for row in loaded.rows) + "]"
    assert loaded.sha256 == hashlib.sha256(whole.encode()).hexdigest()
    assert loaded.registration_sha256 is None


def test_same_recipe_same_bytes(panel: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in panel.iterdir() if file.suffix in (".json", ".parquet")}
    build_panel(panel)
    build_panel(panel, out=tmp_path / "elsewhere")
    for name, data in before.items():
        assert (panel / name).read_bytes() == data
        assert (tmp_path / "elsewhere" / name).read_bytes() == data


def test_right_rows_are_left_alone_and_damaged_ones_replaced(panel: Path) -> None:
    """A tracked rows.parquet must not change with the version of pyarrow that rebuilds it."""
    file = panel / ROWS_FILE
    pq.write_table(pq.read_table(file), file, compression="none")
    foreign = file.read_bytes()
    build_panel(panel)
    assert file.read_bytes() == foreign
    file.write_bytes(foreign[:100])
    build_panel(panel)
    assert len(load_panel(panel).rows) == 4


def test_lock_holds_no_path(panel: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    text = (panel / "panel.lock.json").read_text()
    assert str(tmp_path) not in text
    assert str(tokenizer_folder.parent) not in text


def test_fault_a6_one_trailing_space_is_another_panel(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Corpora that differ by one space have different digests."""
    first, second = (
        build_panel(make_panel(tmp_path / name, files={"0.txt": text}, tokenizer=str(tokenizer_folder)))
        for name, text in (("a", words(60, 0)), ("b", words(10, 0).strip() + "  " + words(60, 1)))
    )
    assert first.sha256 != second.sha256


def test_fault_a8_crlf(tmp_path: Path, tokenizer_folder: Path) -> None:
    """CR LF is refused with its line, or normalised with the decision in the seal."""
    text = "amber basin\n" + words(60, 0)
    body = '[[sources]]\nkind = "text"\ndomain = "a"\nrows = 1\nlicense = "none"\nfiles = ["0.txt"]\n'
    crlf: dict[str, str | bytes] = {"0.txt": text.replace("\n", "\r\n").encode()}
    keys = {"tokenizer": str(tokenizer_folder), "rows": 1}
    with pytest.raises(PanelError, match=r"0\.txt, line 1: carriage return"):
        build_panel(make_panel(tmp_path / "crlf", files=crlf, body=body, **keys))
    normalise = body + 'newlines = "normalise"\n'
    plain = build_panel(make_panel(tmp_path / "lf", files={"0.txt": text}, body=body, **keys))
    fixed = build_panel(make_panel(tmp_path / "fixed", files=crlf, body=normalise, **keys))
    assert fixed.rows[0].sha256 == plain.rows[0].sha256
    sources = [json.loads((tmp_path / name / "panel.lock.json").read_text())["sources"][0] for name in ("lf", "fixed")]
    assert [source["newlines"] for source in sources] == ["lf", "normalised"]
    assert sources[0]["sha256"] != sources[1]["sha256"]


def test_fault_a8_panels_are_never_converted_on_checkout() -> None:
    """Git leaves panels alone on every system."""
    attributes = (Path(__file__).parents[2] / ".gitattributes").read_text()
    assert re.search(r"^panels/\*\* +-text$", attributes, flags=re.MULTILINE)


def flip(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    records[2]["ids"][5] += 1
    return records


def rename(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    records[1]["domain"] = "other"
    return records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (flip, r"row 2: SHA-256 \w+ is not the sealed"),
        (rename, "row 1: its number, document or domain"),
        (lambda records: records[:3], "3 rows, and 4 are sealed"),
        (lambda records: records + records[:1], "5 rows, and 4 are sealed"),
        (lambda records: [records[1], records[0], *records[2:]], "row 0: its number"),
    ],
    ids=["one id", "a domain", "fault B 2: a row is missing", "fault A 50: a row twice", "two rows swapped"],
)
def test_edited_rows_are_refused(panel: Path, change: Any, message: str) -> None:
    edit_rows(panel, change)
    with pytest.raises(PanelError, match=message):
        load_panel(panel)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lock: lock["rows"][3].update(sha256="0" * 64), "row 3: SHA-256"),
        (lambda lock: lock.update(sha256="0" * 64), "the whole is"),
        (lambda lock: lock.update(length=31), r"rows \[0, 1, 2, 3\] do not have 31 tokens"),
        (lambda lock: lock.update(extra=1), "cannot be read"),
        (lambda lock: lock.update(format="exl3-fidelity/panel/9"), "cannot be read"),
    ],
    ids=["row digest", "whole digest", "length", "unknown key", "other format"],
)
def test_edited_locks_are_refused(panel: Path, change: Any, message: str) -> None:
    """By the seal where only a field was edited, and by the rows where the seal was made to fit."""
    edit_lock(panel, change)
    with pytest.raises(PanelError, match=message if message == "cannot be read" else "was changed after sealing"):
        load_panel(panel)
    if message != "cannot be read":
        write_lock(panel, read_lock(panel, check=False))
    with pytest.raises(PanelError, match=message):
        load_panel(panel)


def test_a_lock_without_a_seal_is_sealed_by_building(panel: Path) -> None:
    """A lock of an older version is refused, and the repair it names works; an edited field is not sealed so."""
    whole = (panel / "panel.lock.json").read_text()
    edit_lock(panel, lambda lock: lock.pop("seal_sha256"))
    with pytest.raises(PanelError, match="of an older version.*\n  repair: .*fidelity panel build"):
        load_panel(panel)
    build_panel(panel)
    assert json.loads((panel / "panel.lock.json").read_text()) == json.loads(whole)
    edit_lock(panel, lambda lock: lock.update(unit="row"))
    with pytest.raises(PanelError, match="what was built is not what is sealed .different: unit;"):
        build_panel(panel)


def test_edited_recipe_is_refused(panel: Path) -> None:
    file = panel / "panel.toml"
    file.write_text(file.read_text().replace("seed = 1", "seed = 2"))
    with pytest.raises(PanelError, match=r"panel\.toml was changed after sealing"):
        load_panel(panel)


def test_unreadable_files_are_refused(panel: Path) -> None:
    data = (panel / ROWS_FILE).read_bytes()
    (panel / ROWS_FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(PanelError, match="not a readable Parquet file"):
        load_panel(panel)
    (panel / "panel.lock.json").write_text("{")
    with pytest.raises(PanelError, match="cannot be read"):
        load_panel(panel)


def test_rebuilding_must_reproduce_the_seal(panel: Path) -> None:
    sealed = load_panel(panel)
    (panel / "0.txt").write_text(words(60, 99))
    with pytest.raises(PanelError, match="what was built is not what is sealed.*different: .*sha256.*sources.*rows"):
        build_panel(panel)
    assert load_panel(panel).sha256 == sealed.sha256, "a refused build changes nothing"
    resealed = build_panel(panel, reseal=True)
    assert resealed.sha256 != sealed.sha256
    assert load_panel(panel).sha256 == resealed.sha256


def test_library_versions_do_not_break_a_seal(panel: Path) -> None:
    edit_lock(panel, lambda lock: lock["versions"].update(numpy="0.1"))
    build_panel(panel)


def test_rows_that_are_not_there_are_built(panel: Path) -> None:
    sealed = load_panel(panel)
    (panel / ROWS_FILE).unlink()
    with pytest.raises(PanelError, match="its rows are not built here") as caught:
        load_panel(panel)
    assert caught.value.repair == f"fidelity panel build {panel}"
    assert ensure_built(panel).sha256 == sealed.sha256
    assert load_panel(panel).sha256 == sealed.sha256


def test_a_recipe_without_seal_is_told_what_to_do(tmp_path: Path, tokenizer_folder: Path) -> None:
    folder = make_panel(tmp_path / "p", files=FILES, tokenizer=str(tokenizer_folder))
    with pytest.raises(UsageError, match="not sealed yet") as caught:
        load_panel(folder)
    assert caught.value.repair == f"fidelity panel build {folder}"
    assert len(ensure_built(folder).rows) == 4


def test_one_panel_holds_seals_for_several_tokenizers(panel: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    other = make_tokenizer(tmp_path / "other", words_seed=5)
    build_panel(panel, tokenizer=str(other))
    default, second = load_panel(panel), load_panel(panel, tokenizer=tokenizer_digest(other))
    assert default.tokenizer_sha256 == tokenizer_digest(tokenizer_folder)
    assert second.tokenizer_sha256 == tokenizer_digest(other)
    assert default.sha256 != second.sha256
    assert default.recipe_sha256 == second.recipe_sha256
    assert load_panel(panel, tokenizer=second.tokenizer_sha256[:8]).sha256 == second.sha256
    assert [folder.name for folder in (panel / "seals").iterdir()] == [f"other-{second.tokenizer_sha256[:8]}"]
    with pytest.raises(PanelError, match="not sealed for tokenizer ffffffff"):
        load_panel(panel, tokenizer="f" * 64)


def test_fault_a52_another_tokenizer_is_refused_with_both_digests(panel: Path, tmp_path: Path) -> None:
    """Two tokenizers of one class are two tokenizers."""
    loaded = load_panel(panel)
    other = make_tokenizer(tmp_path / "other", words_seed=5)
    with pytest.raises(PanelError) as caught:
        check_tokenizer(loaded, other)
    assert loaded.tokenizer_sha256 in caught.value.what
    assert tokenizer_digest(other) in caught.value.what


def test_fault_b14_identity_is_content_not_name(panel: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    """The same tokenizer under another name is the same; its name does not break the seal."""
    renamed = tmp_path / "renamed"
    shutil.copytree(tokenizer_folder, renamed)
    loaded: Panel = load_panel(panel)
    check_tokenizer(loaded, renamed)
    assert build_panel(panel, tokenizer=str(renamed)).sha256 == loaded.sha256
    assert not (panel / "seals").exists()


def test_two_builds_of_one_panel_do_not_mix(panel: Path) -> None:
    with folder_lock(panel), pytest.raises(StorageError, match="another run is writing"):
        build_panel(panel)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fidelity", "panel", *arguments])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_command(panel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "build", str(panel)) == 0
    assert "4 rows, 124 positions, 4 documents" in capsys.readouterr().out
    assert run(monkeypatch, "verify", str(panel), "--json") == 0
    assert json.loads(capsys.readouterr().out)["sha256"] == load_panel(panel).sha256
    assert run(monkeypatch, "show", str(panel)) == 0
    shown = capsys.readouterr().out
    assert "3.txt" in shown and "words 4" in shown and "32 tokens" in shown
    assert not any(word in shown for word in ("juniper", "lantern")), "no text unless asked"
    assert run(monkeypatch, "show", str(panel), "--text") == 0
    assert any(word in capsys.readouterr().out for word in ("juniper", "lantern", "amber", "ember"))
    edit_rows(panel, flip)
    assert run(monkeypatch, "verify", str(panel)) == 3
    assert "repair:" in capsys.readouterr().err
    assert run(monkeypatch, "verify", str(panel / "nowhere")) == 2


def test_command_seal(panel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make_tokenizer(tmp_path / "other", words_seed=5)
    assert run(monkeypatch, "seal", str(panel), "--tokenizer", str(other)) == 0
    assert load_panel(panel, tokenizer=tokenizer_digest(other)).tokenizer_name == "other"


def test_fault_b54_thirteen_words_in_a_row_flag_a_row(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quotation of 13 words from calibration text flags the row, 12 words do not."""
    panel = make_panel(tmp_path / "p", files=FILES, tokenizer=str(tokenizer_folder))
    quoted_row = next(row for row in build_panel(panel).rows if row.document == "2.txt").index
    text = words(60, 2).split()
    for count, flagged in ((12, False), (13, True)):
        calibration = tmp_path / f"{count}.txt"
        calibration.write_text("Other text, then:\n" + ", ".join(text[:count]).upper() + "\nand other text.\n")
        assert run(monkeypatch, "contamination", str(panel), str(calibration), "--json") == int(flagged)
        found = json.loads(capsys.readouterr().out)
        assert found["quoted"] == ({str(quoted_row): 1} if flagged else {})
        assert len(found["clean"]) == 4 - flagged


def test_every_error_has_a_repair(panel: Path) -> None:
    edit_rows(panel, flip)
    with pytest.raises(HarnessError) as caught:
        load_panel(panel)
    assert caught.value.repair and caught.value.exit_code == 3
