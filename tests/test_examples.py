"""The committed examples are what the code makes of their receipts, hold no third-party text, and stay small."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from harness import cli
from harness.measure.receipt import load_measurement
from harness.panel import load_panel
from harness.report.run_report import write_report
from reports.examples import remake

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "reports" / "examples"
RUNS = sorted(path.parent for path in EXAMPLES.rglob("measurement.json"))
WHOLE = [run for run in RUNS if (run / "positions.parquet").is_file()]


def test_there_are_examples():
    assert WHOLE


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_receipt_is_readable_and_of_a_shipped_panel(run):
    found = load_measurement(run)
    lock = (ROOT / "panels" / found.panel.name / "panel.lock.json").read_text()
    assert found.panel.sha256 in lock and found.panel.tokenizer_sha256 in lock


@pytest.mark.parametrize("run", WHOLE, ids=lambda run: run.name)
def test_positions_are_only_of_text_written_for_this_project(run):
    """positions.parquet holds each row's token ids: for any other panel that would be somebody's text."""
    found = load_measurement(run)
    panel = load_panel(ROOT / "panels" / found.panel.name)
    assert panel.sha256 == found.panel.sha256 and found.panel.name == "example"


@pytest.mark.parametrize("run", WHOLE, ids=lambda run: run.name)
def test_report_is_made_again_from_the_receipt(run, tmp_path):
    again = tmp_path / run.name
    shutil.copytree(run, again)
    (again / "report.md").unlink()
    assert write_report(again).read_text() == (run / "report.md").read_text()


def test_card_is_made_again_from_the_receipts(tmp_path, monkeypatch, capsys):
    """``fidelity card --check`` on the committed card; the panel lies outside git, so that no commit is part of it."""
    panel = shutil.copytree(ROOT / "panels" / "example", tmp_path / "example")
    card = shutil.copytree(EXAMPLES / "card", tmp_path / "card")
    runs = [str(EXAMPLES / name) for name in ("mlp-2bit", "mlp-2bit-10to19at3")]
    monkeypatch.setattr(sys, "argv", ["fidelity", "card", *runs, "--panel", str(panel), "-o", str(card), "--check"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert not caught.value.code, capsys.readouterr().out
    readme = card / "README.md"
    readme.write_text(readme.read_text().replace("lower on", "higher on", 1))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1


def test_every_example_is_made_by_a_part_of_the_command():
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {name for names in remake.PARTS.values() for name in names}
    assert set(remake.PARTS) == set(remake.MAKERS) >= set(remake.USUAL)
    table = (EXAMPLES / "README.md").read_text()
    assert all(f"`{part}`" in table for part in remake.PARTS)


def test_the_command_makes_the_same_texts_again(tmp_path, monkeypatch):
    """``--texts`` of the task runs, from another folder than the project's: a comparison and a card by the command."""
    for name in ("panels", "reports/examples", "teachers"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["remake", "tasks", "--texts", "--into", "made"])
    remake.main()
    made = {file.relative_to("made"): file.read_bytes() for file in Path("made").rglob("*") if file.is_file()}
    assert made == {
        file.relative_to(EXAMPLES): file.read_bytes() for file in (EXAMPLES / "tasks").rglob("*") if file.is_file()
    }


def test_receipts_without_their_positions_keep_their_numbers(monkeypatch, tmp_path):
    """What cannot be computed again stays as it was committed; it only gets its seal."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(remake, "WORK", tmp_path / "work")
    monkeypatch.setattr(sys, "argv", ["remake", "open", "--texts", "--into", str(tmp_path / "into")])
    remake.main()
    for file in sorted((EXAMPLES / "open-32x2048").glob("*/measurement.json")):
        made = tmp_path / "into" / "open-32x2048" / file.parent.name / file.name
        assert made.read_bytes() == file.read_bytes()


def test_examples_are_small():
    assert sum(file.stat().st_size for file in EXAMPLES.rglob("*") if file.is_file()) < 15_000_000
