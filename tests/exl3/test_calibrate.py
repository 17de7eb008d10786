"""Calibration: ids from files, Hessians of a tiny model, and LDLQ through the whole quantiser."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.errors import UsageError
from harness.exl3.calibrate import calibration_ids, collect_hessians
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.decode import dense_weight
from harness.exl3.quantize import quantize_checkpoint
from harness.exl3.quantize_plan import QuantizeSettings, make_plan
from tests.exl3.oracle import proxy_loss

UP = "model.layers.0.mlp.up_proj"


def ids_of(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 250, (rows, length))


def test_hessians_are_the_second_moments_of_the_inputs(teacher_folder: Path) -> None:
    settings = QuantizeSettings(bits=2, modules="mlp", layers=(0,))
    jobs = make_plan(open_checkpoint(teacher_folder), settings).jobs
    found = collect_hessians(teacher_folder, ids_of(3, 40), jobs)
    assert set(found) == {job.signs.input for job in jobs} and len(found) == 2
    model = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    model.get_submodule(UP).register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].detach()))
    for row in ids_of(3, 40):
        model(input_ids=torch.from_numpy(row)[None])
    inputs = torch.cat(seen, dim=1)[0].double()
    expected = (inputs.T @ inputs / len(inputs)).numpy()
    assert np.allclose(found[next(j.signs.input for j in jobs if j.module == UP)], expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(UsageError, match="calibration ids run from"):
        collect_hessians(teacher_folder, ids_of(1, 8) + 10_000, jobs)


def test_calibrated_loses_less_and_says_so(teacher_folder: Path, tmp_path: Path) -> None:
    settings = QuantizeSettings(bits=2, modules="mlp", layers=(0,))
    ids = ids_of(8, 64)
    source = open_checkpoint(teacher_folder)
    weight = source.tensor(f"{UP}.weight").double().numpy()
    jobs = make_plan(source, settings).jobs
    hessian = collect_hessians(teacher_folder, ids, jobs)[next(j.signs.input for j in jobs if j.module == UP)]
    losses = []
    for name, calibration in (("plain", None), ("ldlq", ids)):
        quantize_checkpoint(teacher_folder, tmp_path / name, settings, calibration_RT=calibration)
        linear = open_checkpoint(tmp_path / name).linear(UP, in_features=weight.shape[1], out_features=weight.shape[0])
        error = dense_weight(linear).double().numpy() - weight
        losses.append(proxy_loss(error.T, weight.T, hessian.astype(np.float64)))
    assert losses[1] < 0.8 * losses[0]
    about = json.loads((tmp_path / "ldlq/config.json").read_text())["quantization_config"]
    assert about["calibration"] == {"rows": 8, "cols": 64}
    with pytest.raises(UsageError, match="other settings"):
        quantize_checkpoint(teacher_folder, tmp_path / "ldlq", settings, calibration_RT=ids + 1)


def test_ids_from_files(teacher_folder: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.arange(100))
    assert calibration_ids(tmp_path / "flat.npy", teacher_folder, rows=2, length=30).tolist() == [
        list(range(30)),
        list(range(30, 60)),
    ]
    np.save(tmp_path / "rows.npy", ids_of(4, 7))
    assert calibration_ids(tmp_path / "rows.npy", teacher_folder).shape == (4, 7)
    (tmp_path / "text.txt").write_text("some text to calibrate on, " * 40)
    ids = calibration_ids(tmp_path / "text.txt", teacher_folder, rows=3, length=16)
    assert ids.shape == (3, 16) and ids.dtype == np.int64
    np.save(tmp_path / "floats.npy", np.ones(100))
    for name, message in (("absent.txt", "not a file"), ("floats.npy", "float64"), ("flat.npy", "a row needs 512")):
        with pytest.raises(UsageError, match=message):
            calibration_ids(tmp_path / name, teacher_folder)
