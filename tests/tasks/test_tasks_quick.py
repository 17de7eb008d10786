"""The whole `quick` suite through the command, without a network: 57 subjects x first 20, and 198 of GPQA's shape."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.engines.models import ModelFolder
from harness.tasks import reference_lm
from harness.tasks.items import read_items
from harness.tasks.receipt import TaskReceipt, load_receipt, selection
from tests.tasks.made_data import MARK, files_with, write_gpqa, write_mmlu

GPQA = "gpqa_diamond_zeroshot"
ROOT = Path(__file__).parents[2]
QUICK = ROOT / "panels" / "suites" / "quick.toml"
#: Subjects of MMLU's four groups, as in its paper.
GROUPS = {"mmlu_stem": 19, "mmlu_humanities": 13, "mmlu_social_sciences": 12, "mmlu_other": 13}
ANSWERS = 4 * (57 * 20 + 198)


@pytest.fixture(scope="session")
def hub_shaped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """57 subjects of 21 questions each, and 198 of GPQA's columns, as snapshots of the Hub lie on a disk."""
    return write_gpqa(write_mmlu(tmp_path_factory.mktemp("data")), rows=198, kind="csv")


def arguments(model: ModelFolder, data: Path, out: Path) -> list[str]:
    return ["tasks", str(model.path), "--suite", str(QUICK), "--data", str(data), "--out", str(out)]


def test_killed_and_resumed_it_is_whole(
    hub_shaped: Path, tiny: ModelFolder, tmp_path: Path, monkeypatch: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C after 800 questions, then the same command: the same items, counts and hashes, and no text."""
    score, asked = reference_lm.CachedScorer.score, []

    def dies(self: Any, questions: Any) -> Any:
        for number, answers in enumerate(score(self, questions)):
            if number == 800:
                raise KeyboardInterrupt
            yield answers

    def counts(self: Any, questions: Any) -> Any:
        asked.append(len(questions))
        return score(self, questions)

    command, run = arguments(tiny, hub_shaped, tmp_path / "run"), tmp_path / "run"
    monkeypatch.setattr(reference_lm.CachedScorer, "score", dies)
    assert CliRunner().invoke(app, command).exit_code == 130
    assert not (run / "tasks.json").exists() and len((run / "answers.jsonl").read_text().splitlines()) == 3200
    assert files_with(MARK, [run]) == []
    monkeypatch.setattr(reference_lm.CachedScorer, "score", counts)
    shown = CliRunner().invoke(app, command, terminal_width=200)
    assert shown.exit_code == 0, shown.output
    assert asked == [1140 + 198 - 800]
    require_whole(load_receipt(run), run)
    assert "57 x first 20" in shown.output and "all 198" in shown.output
    streams = capfd.readouterr()
    assert MARK not in shown.output + streams.out + streams.err
    assert files_with(MARK, [tmp_path]) == []
    assert not list(run.glob("answers*"))


def require_whole(receipt: TaskReceipt, run: Path) -> None:
    """Counts, groups and pooling, from the items and from what lm-eval itself reported for the very run."""
    assert receipt.status == "complete" and not receipt.missing and not receipt.deviations
    items = read_items(run, receipt)
    assert items is not None and items.num_rows == receipt.items == 1338
    frame = items.to_pandas()
    mmlu, gpqa = receipt.result("mmlu"), receipt.result(GPQA)
    assert mmlu is not None and gpqa is not None
    assert (mmlu.n, mmlu.original, len(mmlu.tasks), gpqa.n) == (1140, 57 * 21, 57, 198)
    assert selection(receipt, "mmlu") == "57 x first 20" and selection(receipt, GPQA) == "all 198"
    assert sorted(frame[frame.task != GPQA].groupby("task").doc_id.apply(list).tolist()) == [list(range(20))] * 57
    for group, subjects in GROUPS.items():
        result = receipt.result(group)
        assert result is not None and (len(result.tasks), result.n) == (subjects, 20 * subjects)
    lock = json.loads(QUICK.with_suffix(".lock.json").read_text())
    assert {leaf.name: leaf.config_sha256 for leaf in receipt.results if leaf.kind == "task"} == lock["definitions"]
    for result in receipt.results:
        right = frame[frame.task.isin(result.tasks or [result.name])].correct
        assert (result.correct, result.n, result.value) == (right.sum(), len(right), right.mean())
        theirs = result.metrics["acc,none"]
        assert result.value == pytest.approx(theirs.value, abs=1e-12)
        assert result.stderr == pytest.approx(theirs.stderr, abs=1e-12)


def test_without_gpqa_the_rest_runs(tiny: ModelFolder, tmp_path: Path) -> None:
    """The command says what is missing, the run is partial, and the numbers of the rest stand."""
    data, run = write_mmlu(tmp_path / "data", rows=1, kind="jsonl"), tmp_path / "run"
    shown = CliRunner().invoke(app, arguments(tiny, data, run), terminal_width=200)
    assert shown.exit_code == 0, shown.output
    assert f"missing: {GPQA}: data holds no gpqa_diamond.csv" in " ".join(shown.output.split())
    receipt = load_receipt(run)
    assert receipt.status == "partial" and [m.task for m in receipt.missing] == [GPQA]
    assert receipt.missing[0].why == "data holds no gpqa_diamond.csv, .jsonl or .parquet; " + (
        "the set is gated: ask for it on the Hub"
    )
    assert receipt.suite.entries == ["mmlu"] and receipt.result("mmlu").n == 57  # type: ignore[union-attr]
    assert any("was not run" in text for text in receipt.deviations)


def test_its_seal_is_made_again_without_documents(tmp_path: Path) -> None:
    """The committed seal: the suite's meaning and the definitions of all 58 tasks, as lm-eval has them."""
    shutil.copy(QUICK, tmp_path / "quick.toml")
    shown = CliRunner().invoke(app, ["tasks", "--suite", str(tmp_path / "quick.toml"), "--seal"], terminal_width=200)
    assert shown.exit_code == 0 and "definitions sealed: 58 tasks" in shown.output, shown.output
    assert "prompts not sealed: mmlu" in shown.output and f"prompts not sealed: {GPQA}" in shown.output
    assert (tmp_path / "quick.lock.json").read_text() == QUICK.with_suffix(".lock.json").read_text()


@pytest.mark.slow
def test_a_process_that_is_killed_loses_nothing(hub_shaped: Path, tiny: ModelFolder, tmp_path: Path) -> None:
    """SIGKILL in the middle of the whole suite; resumed, every byte is that of a run that nobody disturbed."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    start(arguments(tiny, hub_shaped, whole)).wait()
    process = start(arguments(tiny, hub_shaped, killed))
    stored = killed / "answers.jsonl"
    while process.poll() is None and (not stored.is_file() or stored.read_bytes().count(b"\n") < 1000):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (killed / "tasks.json").exists()
    assert 1000 <= stored.read_bytes().count(b"\n") < ANSWERS
    assert start(arguments(tiny, hub_shaped, killed)).wait() == 0
    assert load_receipt(killed) == load_receipt(whole)
    assert (killed / "items.parquet").read_bytes() == (whole / "items.parquet").read_bytes()
    require_whole(load_receipt(killed), killed)
    kept = pd.read_json(killed / "run.json", typ="series").answers_kept_from_before
    assert kept >= 1000 and files_with(MARK, [tmp_path]) == []


def start(command: list[str]) -> subprocess.Popen[bytes]:
    """The command in a process of its own, one thread, no Hub."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    program = "import sys; from harness.cli import main; sys.argv[0] = 'fidelity'; main()"
    return subprocess.Popen(
        [sys.executable, "-c", program, *command], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    )
