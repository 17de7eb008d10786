"""Whether every tensor of a checkpoint is where the model uses it, and what its codes stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from harness.engines.models import ModelFolder
from harness.errors import CheckpointError
from harness.tasks.subject import open_engine
from tests.fault_cases.command import Tensors, copy_with, measured, refused
from tests.fault_cases.entry import Fault
from tests.fault_cases.statements import fidelity

HOME = "model.layers.0"


def linear(name: str) -> bool:
    return ".mlp." in name or ".self_attn." in name


def norms(tensors: Tensors) -> Tensors:
    return tensors | {f"{HOME}.self_attn.{n}_norm.weight": torch.full((32,), 3.0, dtype=torch.bfloat16) for n in "qk"}


def biases(tensors: Tensors) -> Tensors:
    return tensors | {f"{HOME}.mlp.up_proj.bias": torch.full((256,), 0.8, dtype=torch.bfloat16)}


def head_bias(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.bias": torch.ones(259, dtype=torch.bfloat16)}


def sinks(tensors: Tensors) -> Tensors:
    return tensors | {f"{HOME}.self_attn.sinks": torch.full((4,), 5.0, dtype=torch.bfloat16)}


DROPPED = {"q_norm": norms, "up_proj.bias": biases, "lm_head.bias": head_bias, "sinks": sinks}


def dropped_tensors(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """A tensor without a place is refused: dense and EXL3, whole, streamed, packed, as candidate and teacher."""
    for number, (name, change) in enumerate(DROPPED.items()):
        stale = copy_with(teacher, folder / f"stale{number}", change)
        assert name in refused(folder, stale, teacher, panel)
        assert name in refused(folder, stale, teacher, panel, "--memory-budget", "auto")
        assert name in refused(folder, teacher, stale, panel)
    packed = copy_with(exl3, folder / "packed", norms)
    for how in ((), ("--packed",), ("--memory-budget", "auto")):
        assert "q_norm" in refused(folder, packed, teacher, panel, *how)


def dropped_in_tasks(folder: Path, teacher: Path) -> None:
    """The engine of tasks loads no model with a tensor left over."""
    stale = copy_with(teacher, folder / "stale", biases)
    located = ModelFolder(path=stale, name="stale", revision="local")
    with pytest.raises(CheckpointError, match=r"up_proj\.bias"):
        open_engine(located, weights_sha256="w", tokenizer_sha256="t")


def missing_tensors(folder: Path, teacher: Path, panel: Path) -> None:
    """A parameter that no tensor fills would be a random number."""
    short = copy_with(teacher, folder / "short", lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"})
    for how in ((), ("--memory-budget", "auto")):
        assert "model.norm.weight" in refused(folder, short, teacher, panel, *how)
        assert "model.norm.weight" in refused(folder, teacher, short, panel, *how)


def fewer_layers(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """config.json with a layer too few: a decoder layer is no prediction layer, and the census says so."""
    one = {"num_hidden_layers": 1, "layer_types": None}
    for source in (teacher, exl3):
        short = copy_with(source, folder / f"{source.name}-1", **one)
        for how in ((), ("--memory-budget", "auto")):
            said = refused(folder, short, teacher, panel, *how)
            assert "model.layers.1." in said and "config.json counts 1" in said
    said = fidelity(folder, "exl3", "inspect", folder / f"{exl3.name}-1")[1]
    assert "(MTP)" not in said and "num_hidden_layers=1" in said


def prediction_layer(tensors: Tensors) -> Tensors:
    """One more layer, with what only a prediction layer has, and a rotary table."""
    last = {k.replace("layers.1.", "layers.2."): v.clone() for k, v in tensors.items() if "layers.1." in k}
    own = {"model.layers.2.eh_proj.weight": torch.zeros(128, 256), "model.layers.2.enorm.weight": torch.zeros(128)}
    table = {f"{HOME}.self_attn.rotary_emb.inv_freq": 10_000.0 ** (-torch.arange(16) / 16)}
    return tensors | last | own | table


def excused(folder: Path, teacher: Path, panel: Path) -> None:
    """A proven prediction layer and the model's own rotary table are left out, counted, and change nothing."""
    more = copy_with(teacher, folder / "more", prediction_layer)
    for number, how in enumerate(((), ("--memory-budget", "auto"))):
        receipt = measured(folder, more, teacher, panel, f"run{number}", *how)
        assert receipt["summary"]["kl_mean"] == 0
        left = receipt["candidate"]["settings"]["tensors_left_out"]
        assert left == "11 multi-token-prediction layer; 1 rotary table, computed by the model"
    other = {f"{HOME}.self_attn.rotary_emb.inv_freq": 500_000.0 ** (-torch.arange(16) / 16)}
    wrong = copy_with(teacher, folder / "wrong", lambda tensors: tensors | other)
    for how in ((), ("--memory-budget", "auto")):
        assert "is not the rotary table that config.json gives" in refused(folder, wrong, teacher, panel, *how)


# ---- codes and their scales ------------------------------------------------------------------------------------------


def scales_of(weight: torch.Tensor, top: float, way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales as stored, and one for each weight, in float64: the largest of its share becomes ``top``."""
    w = weight.double().abs()
    if way == "tensor":
        scale = w.max().reshape(1)
        return scale.float() / top, (scale.float() / top).double().expand_as(w)
    if way == "row":
        scale = (w.amax(1, keepdim=True) / top).float()
        return scale, scale.double().expand_as(w)
    rows, columns = w.shape
    scale = w.reshape(rows // 64, 64, columns // 64, 64).amax((1, 3)).float() / top
    return scale, scale.double().repeat_interleave(64, 0).repeat_interleave(64, 1)


FORMATS = {
    # name: dtype, largest code, share of a scale, ending, quantization_config
    "fp8-tensor": (torch.float8_e4m3fn, 448.0, "tensor", "_scale", None),
    "fp8-row": (torch.float8_e4m3fn, 448.0, "row", "_scale", {"quant_method": "compressed-tensors"}),
    "fp8-block": (
        torch.float8_e4m3fn,
        448.0,
        "block",
        "_scale_inv",
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
    ),
    "int8-row": (torch.int8, 127.0, "row", "_scale", {"quant_method": "compressed-tensors"}),
    "int8-tensor": (torch.int8, 127.0, "tensor", "_scale", None),
}


def coded(tensors: Tensors, name: str) -> tuple[Tensors, Tensors]:
    """A checkpoint of codes and scales, and the float64 weights that they stand for, rounded once to float32."""
    dtype, top, way, ending, _ = FORMATS[name]
    codes: Tensors = {}
    plain: Tensors = {}
    for key, weight in tensors.items():
        codes[key] = plain[key] = weight
        if linear(key):
            scale, wide = scales_of(weight, top, way)
            ratio = weight.double() / wide
            codes[key] = (ratio.round() if dtype == torch.int8 else ratio.float()).to(dtype)
            codes[key + ending] = scale
            codes[key.replace(".weight", ".input_scale")] = torch.tensor([0.01])
            plain[key] = (codes[key].double() * wide).float()
    return codes, plain


def scaled_weights(folder: Path, teacher: Path, panel: Path) -> None:
    """FP8 and INT8 are what their scales make of them: KL 0 to a float64 oracle, near the BF16 that they came from."""
    for name, (_, _, _, _, claims) in FORMATS.items():
        made = copy_with(teacher, folder / name, lambda t, n=name: coded(t, n)[0], quantization_config=claims)
        plain = copy_with(teacher, folder / f"{name}-plain", lambda t, n=name: coded(t, n)[1])
        assert measured(folder, made, plain, panel, f"oracle-{name}")["counts"]["zero_kl"] == 380
        receipt = measured(folder, made, teacher, panel, f"whole-{name}")
        assert 0 < receipt["summary"]["kl_mean"] < 0.02, name
        settings = receipt["candidate"]["settings"]
        assert settings["dequantised"].startswith("14 tensors of F8_E4M3" if "fp8" in name else "14 tensors of I8")
        assert settings["tensors_left_out"].startswith("14 scale of activations")
        streamed = measured(folder, made, teacher, panel, f"streamed-{name}", "--memory-budget", "auto")
        assert streamed["positions_sha256"] == receipt["positions_sha256"]


def codes_without_scales(folder: Path, teacher: Path, panel: Path) -> None:
    """Codes alone, or a scale that does not fit: refused by the format's name."""

    def alone(tensors: Tensors) -> Tensors:
        return {k: v for k, v in coded(tensors, "fp8-tensor")[0].items() if not k.endswith("_scale")}

    def misfit(tensors: Tensors) -> Tensors:
        codes = coded(tensors, "int8-row")[0]
        return {k: v[:100] if k.endswith("up_proj.weight_scale") else v for k, v in codes.items()}

    for name, change, words in (("alone", alone, "F8_E4M3"), ("misfit", misfit, "no known way to share scales")):
        made = copy_with(teacher, folder / name, change)
        for how in ((), ("--memory-budget", "auto")):
            assert words in refused(folder, made, teacher, panel, *how)
    claimed = copy_with(teacher, folder / "claimed", quantization_config={"quant_method": "fp8"})
    assert "no tensor is packed or scaled" in refused(folder, claimed, teacher, panel)


def packed_formats(folder: Path, teacher: Path, panel: Path) -> None:
    """AWQ, GPTQ and bitsandbytes without their packages, and formats that nobody knows: one line each."""
    wanted = {
        "awq": "pip install gptqmodel",
        "gptq": "pip install gptqmodel optimum",
        "bitsandbytes": "pip install bitsandbytes",
        "quip-sharp": "quant_method quip-sharp",
        None: "names no quant_method",
    }
    for number, (method, words) in enumerate(wanted.items()):
        block = {"bits": 4, "group_size": 128, "load_in_4bit": True} | ({"quant_method": method} if method else {})
        made = copy_with(teacher, folder / f"q{number}", quantization_config=block)
        assert words in refused(folder, made, teacher, panel)
        refused(folder, made, teacher, panel, "--memory-budget", "auto")


def gptq_census(folder: Path, teacher: Path) -> None:
    """4-bit words of GPTQ are eight weights each, and its scales none; our own block has an integer and the mean."""

    def gptq(tensors: Tensors) -> Tensors:
        made = {k: v for k, v in tensors.items() if not linear(k)}
        for key, weight in tensors.items():
            if linear(key):
                rows, columns = weight.shape
                name = key.removesuffix(".weight")
                made[f"{name}.qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
                made[f"{name}.qzeros"] = torch.zeros(columns // 128, rows // 8, dtype=torch.int32)
                made[f"{name}.scales"] = torch.ones(columns // 128, rows, dtype=torch.float16)
                made[f"{name}.g_idx"] = torch.zeros(columns, dtype=torch.int32)
        return made

    made = copy_with(teacher, folder / "gptq", gptq, quantization_config={"quant_method": "gptq", "bits": 4})
    counts = [
        json.loads(fidelity(folder, "exl3", "inspect", path, "--json")[1])["scopes"]["whole_file"]["weights"]
        for path in (teacher, made)
    ]
    assert counts[0] == counts[1]
    code, said = fidelity(folder, "exl3", "quantize", teacher, folder / "out", "--bits", "2.5", "--codebook", "mul1")
    assert code == 0, said
    block = json.loads((folder / "out" / "config.json").read_text())["quantization_config"]
    assert isinstance(block["bits"], int) and block["bits_mean"] == 2.5
    assert json.loads(fidelity(folder, "exl3", "inspect", folder / "out", "--json")[1])["mismatches"] == []


ROWS = [
    Fault(
        id="C3-dropped-tensors",
        title="a tensor without a place is dropped",
        check=dropped_tensors,
        needs=("teacher_folder", "exl3_folder", "panel_folder"),
    ),
    Fault(
        id="C3-dropped-in-tasks",
        title="a tensor without a place is dropped in tasks",
        check=dropped_in_tasks,
        needs=("teacher_folder",),
    ),
    Fault(
        id="C3-missing-tensors",
        title="a parameter that nothing fills",
        check=missing_tensors,
        needs=("teacher_folder", "panel_folder"),
    ),
    Fault(
        id="C3-fewer-layers",
        title="decoder layers taken for prediction layers",
        check=fewer_layers,
        needs=("teacher_folder", "exl3_folder", "panel_folder"),
    ),
    Fault(
        id="C3-excused-and-counted",
        title="what a rule leaves out, unproven and uncounted",
        check=excused,
        needs=("teacher_folder", "panel_folder"),
    ),
    Fault(
        id="C3-scales-of-codes",
        title="FP8 and INT8 codes used without their scales",
        check=scaled_weights,
        needs=("teacher_folder", "panel_folder"),
    ),
    Fault(
        id="C3-codes-without-scales",
        title="codes used as numbers",
        check=codes_without_scales,
        needs=("teacher_folder", "panel_folder"),
    ),
    Fault(
        id="C25-packed-formats",
        title="AWQ, GPTQ, bitsandbytes without their packages: a traceback",
        check=packed_formats,
        needs=("teacher_folder", "panel_folder"),
    ),
    Fault(
        id="C20-packed-words-counted",
        title="packed words counted as weights",
        check=gptq_census,
        needs=("teacher_folder",),
    ),
]
