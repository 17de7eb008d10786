"""lm-eval's local-completions against a real vLLM server: the log-likelihoods of the process, and each fault in a line.

The models are the tiny one of these tests, and SmolLM2 where a panel run has unpacked it before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.engines.models import ModelFolder
from harness.errors import HarnessError
from harness.tasks.receipt import load_receipt
from harness.tasks.run import Request, run_suite
from tests.served.real_vllm import vllm_server
from tests.tasks.made_data import MARK, files_with, gpqa_row, write_gpqa, write_suite
from tests.tasks.made_models import save_tiny

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
#: Two engines in float32 on the same weights, summed over an answer's tokens; nats.
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def url(tiny: ModelFolder) -> Iterator[str]:
    with vllm_server(tiny.path, "--max-model-len", "512") as found:
        yield found


def suite_of(tmp_path: Path, rows: int = 12) -> list[str]:
    """Arguments that name made-up questions."""
    write_gpqa(tmp_path / "data", rows=rows)
    return ["--suite", str(write_suite(tmp_path / "suite")), "--data", str(tmp_path / "data")]


def run(*arguments: str) -> str:
    """The command's output; it must succeed."""
    shown = CliRunner().invoke(app, ["tasks", *arguments], terminal_width=200)
    assert shown.exit_code == 0, f"{shown.output}{shown.exception}"
    return shown.output


def require_same_answers(served: Path, process: Path) -> float:
    """Same items, same choices, log-likelihoods within the tolerance; returns their largest difference."""
    ours, theirs = (pd.read_parquet(folder / "items.parquet") for folder in (process, served))
    keys = ["task", "doc_id", "doc_hash", "prompt_hash", "target_hash"]
    assert ours[keys].equals(theirs[keys])
    a, b = (np.stack(frame.loglikelihoods.to_list()) for frame in (ours, theirs))
    largest = float(np.abs(a - b).max())
    assert largest <= TOLERANCE, f"log-likelihoods differ by up to {largest:.3g} nats"
    clear = -np.diff(np.sort(a, axis=1)[:, ::-1][:, :2])[:, 0] > 2 * TOLERANCE
    assert clear.any() and (ours.chosen == theirs.chosen)[clear].all()
    return largest


def test_served_answers_are_those_of_the_process(url: str, tiny: ModelFolder, tmp_path: Path) -> None:
    common = [str(tiny.path), *suite_of(tmp_path)]
    shown = run(*common, "--base-url", url, "-o", str(tmp_path / "served"))
    run(*common, "-o", str(tmp_path / "process"))
    require_same_answers(tmp_path / "served", tmp_path / "process")
    receipt = load_receipt(tmp_path / "served")
    assert (receipt.lane, receipt.status, receipt.model.engine) == ("served", "complete", "vllm")
    assert receipt.model.version[0].isdigit() and receipt.model.settings["context"] == 512
    assert receipt.model.settings["served_as"] == tiny.path.name
    written = (tmp_path / "served" / "tasks.json").read_text()
    assert str(tiny.path.parent) not in written and "127.0.0.1" not in written
    assert any("ids at /tokenize" in check.figure for check in receipt.preflight)
    assert MARK not in shown and files_with(MARK, [tmp_path / "served"]) == []


def test_smollm2_served_and_in_process(tmp_path: Path) -> None:
    """Real weights and the first MMLU development question of each subject, through both."""
    folder = ROOT / "teachers" / "models" / "SmolLM2-135M-Instruct.Q4_1-0.1.2-bfloat16"
    if not (folder / "config.json").is_file():
        pytest.skip("the example's teacher is not unpacked here (make panel unpacks it)")
    common = [str(folder), "--suite", str(ROOT / "panels" / "suites" / "mmlu-dev.toml"), "--limit", "1"]
    with vllm_server(folder) as url:
        run(*common, "--base-url", url, "-o", str(tmp_path / "served"))
    run(*common, "--compute-dtype", "float32", "-o", str(tmp_path / "process"))
    require_same_answers(tmp_path / "served", tmp_path / "process")
    assert load_receipt(tmp_path / "served").items == 57


FAULTS = {
    "an address without a server": ({"base_url": "http://127.0.0.1:9/v1"}, "nothing answers at http://127.0.0.1:9/v1"),
    "another model": ({"served_model": "other"}, "the server does not know other; it has "),
    "another tokenizer": ({"candidate": "shifted"}, "the server's tokenizer disagrees with the candidate's: "),
    "a context too short": ({"data": "long"}, "4 prompts do not fit a context of 512 tokens; the longest has "),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_one_line_and_nothing_is_scored(name: str, url: str, tiny: ModelFolder, tmp_path: Path) -> None:
    """An answer that is wrong in kind would count as a wrong answer."""
    change, said = FAULTS[name]
    suite_of(tmp_path)
    known = {
        "candidate": str(tiny.path),
        "suite": str(tmp_path / "suite" / "small.toml"),
        "data": tmp_path / "data",
        "out": tmp_path / "served",
        "base_url": url,
    }
    places = {"shifted": lambda: str(shifted(tmp_path / "shifted")), "long": lambda: long_question(tmp_path / "long")}
    known |= {key: places[value]() if value in places else value for key, value in change.items()}
    with pytest.raises(HarnessError) as caught:
        run_suite(Request(**known))
    assert said in caught.value.what and "\n" not in caught.value.what and MARK not in str(caught.value)
    assert not [file.name for file in (tmp_path / "served").glob("*") if file.name != ".lock"]


def shifted(folder: Path) -> Path:
    """The tiny model with a tokenizer whose bytes have other ids."""
    file = save_tiny(folder) / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {text: (number + 1) % 256 if number < 256 else number for text, number in vocab.items()}
    file.write_text(json.dumps(content))
    return folder


def long_question(folder: Path) -> Path:
    """Three questions, one of them longer than the server's context."""
    rows = [gpqa_row(number) for number in range(3)]
    rows[1]["Question"] = "why? " * 120
    folder.mkdir()
    (folder / "gpqa_diamond.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
