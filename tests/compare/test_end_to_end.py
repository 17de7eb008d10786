"""From a real small teacher and two real candidates, through the main job and a sealed registration, to a verdict."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from harness.compare import load_comparison
from harness.measure.run import Request, measure
from harness.report.words import sentence, warnings

REGISTRATION = """
question = "Does the finer rounding lower the KL?"
teacher = "tiny-teacher"
candidates = ["coarse", "fine"]
[primary]
metric = "kl_mean"
margin = 0.1
margin_kind = "relative"
[[bars]]
name = "agreement"
metric = "top1_agreement"
relation = ">="
reference = "baseline"
"""


def rounded(teacher: Path, folder: Path, levels: int) -> Path:
    """The teacher with its MLP weights rounded to ``2 * levels + 1`` values a row."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(teacher, folder)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if "mlp" in name:
            scale = weight.data.float().abs().amax(dim=1, keepdim=True) / levels
            weight.data = (torch.round(weight.data.float() / scale) * scale).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def test_a_registered_comparison_of_two_measured_candidates(
    tmp_path: Path, teacher_folder: Path, panel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.cli import app

    monkeypatch.chdir(tmp_path)
    panel = tmp_path / "panel"
    shutil.copytree(panel_folder, panel)
    (panel / "registration.toml").write_text(REGISTRATION)
    registered = CliRunner().invoke(app, ["panel", "register", str(panel)])
    assert registered.exit_code == 0 and "commit registration.toml" in registered.output
    runs = []
    for name, levels in (("coarse", 3), ("fine", 15)):
        candidate = rounded(teacher_folder, tmp_path / "models" / name, levels)
        runs.append(measure(Request(candidate=str(candidate), panel=panel, teacher=str(teacher_folder))).folder)
    result = CliRunner().invoke(app, ["compare", *map(str, runs), "--panel", str(panel), "-o", "out"])
    assert result.exit_code == 0, result.output
    found = load_comparison(tmp_path / "out")
    kl = [pq.read_table(run / "positions.parquet")["kl"].to_numpy() for run in runs]
    first = found.pairs[0].primary
    assert found.status == "registered, time not proven" and found.deviations == []
    assert first.difference.estimate == pytest.approx(np.mean(kl[1]) - np.mean(kl[0]), rel=1e-9)
    assert first.verdict == "better" and sentence(first).endswith("lower on 4 of 4 contexts")
    assert [bar.met for bar in found.bars] == [True]
    assert found.worst[0].texts is not None and len(found.worst[0].texts["context"]) > 0
    assert not any("not here" in w for w in warnings(found))
