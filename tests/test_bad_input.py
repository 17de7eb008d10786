"""Every bad input of the main job: one clear line with a repair, a non-zero exit, nothing lost or half-written."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import cli
from harness.measure import run as measure_module
from harness.store import folder_lock


@pytest.fixture
def workplace(tmp_path, monkeypatch, teacher_folder, exl3_folder, panel_folder):
    """A working folder with its own copies of teacher, candidate and panel, free to be damaged."""
    monkeypatch.chdir(tmp_path)
    for name, folder in (("teacher", teacher_folder), ("quant", exl3_folder), ("panel", panel_folder)):
        shutil.copytree(folder, name)
    return tmp_path


def fidelity(monkeypatch, capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a command line, as a user would see them."""
    monkeypatch.setattr(sys, "argv", ["fidelity", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0), capsys.readouterr().err


MEASURE = ("measure", "quant", "--teacher", "teacher", "--panel", "panel", "--out", "run")


def tensors_of(folder: str, change) -> None:
    """Rewrite a checkpoint's one shard after ``change(tensors)``."""
    shard = Path(folder) / "model.safetensors"
    tensors = load_file(shard)
    change(tensors)
    shard.unlink()
    save_file(tensors, shard, metadata={"format": "pt"})


def first(tensors: dict[str, torch.Tensor], suffix: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(suffix))


def impossible_trellis(tensors):
    name = first(tensors, ".trellis")
    tensors[name] = tensors[name][:, :, :-5].contiguous()


def unknown_marker(tensors):
    name = first(tensors, ".mcg")
    tensors[name] = torch.tensor(12345, dtype=torch.int32)


def missing_scale(tensors):
    del tensors[first(tensors, ".suh")]


def missing_norm(tensors):
    del tensors["model.norm.weight"]


def extra_tensor(tensors):
    tensors["model.layers.0.mystery.weight"] = torch.zeros(4, 4)


def no_config():
    (Path("quant") / "config.json").unlink()


def truncated_shard():
    shard = Path("quant/model.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1000])


def edited_panel():
    text = Path("panel/text/doc1.txt")
    text.write_text(text.read_text() + " ")
    lock = Path("panel/panel.lock.json")
    lock.write_text(lock.read_text().replace('"rows"', '"rows" ', 1))
    rows = Path("panel/rows.parquet")
    rows.write_bytes(rows.read_bytes()[:-60] + bytes(60))


def other_tokenizer():
    file = Path("quant/tokenizer.json")
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(tokenizer))


def shard_change(change):
    return lambda: tensors_of("quant", change)


@pytest.mark.parametrize(
    ("damage", "code", "words"),
    [
        pytest.param(no_config, 3, "not a checkpoint", id="not-a-checkpoint"),
        pytest.param(truncated_shard, 3, "model.safetensors", id="truncated-shard"),
        pytest.param(shard_change(impossible_trellis), 3, "trellis", id="impossible-trellis"),
        pytest.param(shard_change(unknown_marker), 3, "mcg", id="unknown-marker"),
        pytest.param(shard_change(missing_scale), 3, "suh", id="missing-part"),
        pytest.param(shard_change(missing_norm), 3, "model.norm.weight", id="missing-tensor"),
        pytest.param(shard_change(extra_tensor), 3, "mystery", id="extra-tensor"),
        pytest.param(edited_panel, 3, "panel", id="edited-panel"),
        pytest.param(other_tokenizer, 3, "not sealed for tokenizer", id="other-tokenizer"),
    ],
)
def test_damaged_input_is_one_line_with_a_repair(workplace, monkeypatch, capsys, damage, code, words):
    damage()
    exit_code, message = fidelity(monkeypatch, capsys, *MEASURE)
    assert exit_code == code
    assert words in message and "repair:" in message and "Traceback" not in message
    assert not Path("run/measurement.json").exists()


def test_a_candidate_that_is_nowhere_is_usage(workplace, monkeypatch, capsys):
    exit_code, message = fidelity(monkeypatch, capsys, "measure", "./no/such", "--teacher", "teacher")
    assert exit_code == 2 and "neither a checkpoint folder nor a Hub id" in message


def test_corrupt_row_of_the_capture(workplace, monkeypatch, capsys):
    assert fidelity(monkeypatch, capsys, "measure", "teacher", *MEASURE[2:7], "first")[0] == 0
    row = next(Path("teachers/captures").glob("*/row-0002.parquet"))
    data = bytearray(row.read_bytes())
    data[len(data) // 2] ^= 0xFF
    row.write_bytes(bytes(data))
    exit_code, message = fidelity(monkeypatch, capsys, *MEASURE)
    assert exit_code == 3 and "row-0002.parquet" in message and "repair:" in message
    row.unlink()
    assert fidelity(monkeypatch, capsys, *MEASURE)[0] == 0


def test_capture_of_another_panel(workplace, monkeypatch, capsys):
    assert fidelity(monkeypatch, capsys, *MEASURE)[0] == 0
    capture = next(Path("teachers/captures").glob("teacher-*"))
    shutil.copytree("panel", "longer")
    recipe = Path("longer/panel.toml")
    recipe.write_text(recipe.read_text().replace("length = 96", "length = 80").replace('"tiny"', '"longer"'))
    for sealed in ("panel.lock.json", "rows.parquet"):
        (Path("longer") / sealed).unlink()
    arguments = ("measure", "quant", "--teacher", str(capture), "--panel", "longer", "--out", "other")
    exit_code, message = fidelity(monkeypatch, capsys, *arguments)
    assert exit_code == 3 and "over panel tiny" in message


def test_full_disk_loses_nothing(workplace, monkeypatch, capsys):
    """The disk fills at the third row: one line, exit 3; with space again the run ends as if nothing had happened."""
    real, calls = measure_module.write_row, []

    def full(*args):
        calls.append(args)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(measure_module, "write_row", full)
    exit_code, message = fidelity(monkeypatch, capsys, *MEASURE)
    assert exit_code == 3 and "disk is full" in message
    assert sorted(p.name for p in Path("run/rows").iterdir()) == ["row-0000.parquet", "row-0001.parquet"]
    monkeypatch.setattr(measure_module, "write_row", real)
    assert fidelity(monkeypatch, capsys, *MEASURE)[0] == 0


def test_interrupt_says_how_to_go_on(workplace, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_module, "write_row", interrupted)
    exit_code, message = fidelity(monkeypatch, capsys, *MEASURE)
    assert exit_code == 130 and "run the same command again" in message


def test_two_runs_in_one_folder(workplace, monkeypatch, capsys):
    with folder_lock(Path("run")):
        exit_code, message = fidelity(monkeypatch, capsys, *MEASURE)
    assert exit_code == 3 and "another run is writing to run" in message


def test_nan_logits_exit_with_one(workplace, monkeypatch, capsys):
    def nan_embedding(tensors):
        tensors["model.embed_tokens.weight"][ord("E") - 33] = float("nan")

    tensors_of("quant", nan_embedding)
    exit_code, message = fidelity(monkeypatch, capsys, *MEASURE)
    assert exit_code == 1 and "invalid" in message
    assert json.loads(Path("run/measurement.json").read_text())["status"] == "invalid"
