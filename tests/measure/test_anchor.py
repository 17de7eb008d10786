"""Rounding against plain Python and other definitions; anchors measured as candidates are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from scipy.stats import norm
from torch import nn
from typer.testing import CliRunner

from harness.compare import compare
from harness.errors import EngineError, UsageError
from harness.measure.altered import (
    NF4_LEVELS,
    SCHEMES,
    linear_weights,
    round_model,
    round_weight,
    rounded_digest,
    scheme_of,
    teacher_on,
)
from harness.measure.altered import anchor as measure_anchor
from harness.measure.receipt import load_measurement
from harness.measure.run import Request, Result, measure
from harness.verify import verify_run

NAMES = ("int8", "fp8", "nf4", "q4-rtn")


@pytest.fixture
def weight_OI() -> torch.Tensor:
    """Rows of very different size, one of them zero; 200 columns, so that groups of 64 and 128 end short."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(12, 200, generator=generator) * torch.logspace(-6, 2, 12)[:, None]
    weight[4] = 0
    weight[7, 3] = 40 * weight[7].abs().max()
    return weight.to(torch.bfloat16).float()


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "group"), [("int8", None), ("q4-rtn", 64), ("q4-rtn", 128)])
def test_integers_err_by_half_a_step_at_most(name: str, group: int | None, weight_OI: torch.Tensor) -> None:
    scheme = scheme_of(name, group)
    error = (round_weight(weight_OI, scheme) - weight_OI).abs()
    size = scheme.group or weight_OI.shape[1]
    for start in range(0, weight_OI.shape[1], size):
        block = weight_OI[:, start : start + size].double()
        step = block.abs().amax(1, keepdim=True) / scheme.top
        assert (error[:, start : start + size] <= step / 2 * (1 + 1e-5)).all()
    levels = [len(row[: scheme.group].unique()) for row in round_weight(weight_OI, scheme)]
    assert max(levels) <= 2 * scheme.top + 1


def test_int8_against_plain_python(weight_OI: torch.Tensor) -> None:
    ours = round_weight(weight_OI, scheme_of("int8")).tolist()
    for row, got in zip(weight_OI.double().tolist(), ours, strict=True):
        step = max(map(abs, row)) / 127 or 1.0
        assert got == pytest.approx([round(value / step) * step for value in row], rel=1e-5)


def test_fp8_is_the_nearest_of_all_e4m3_numbers(weight_OI: torch.Tensor) -> None:
    """Torch's cast against a search through the 254 finite bit patterns decoded by hand."""
    values = sorted(
        (1 - 2 * sign) * (2.0 ** (e - 7) * (1 + m / 8) if e else 2.0**-6 * m / 8)
        for sign in (0, 1)
        for e in range(16)
        for m in range(8)
        if (e, m) != (15, 7)
    )
    assert max(values) == SCHEMES["fp8"].top
    grid = torch.tensor(values, dtype=torch.float64)
    scale = (weight_OI.double().abs().amax(1, keepdim=True) / 448).clamp_min(1e-300)
    best = ((weight_OI.double() / scale)[..., None] - grid).abs().amin(-1) * scale
    error = (round_weight(weight_OI, scheme_of("fp8")).double() - weight_OI.double()).abs()
    largest = weight_OI.abs().amax(1, keepdim=True).double()
    assert (error <= best + 1e-6 * largest).all()


def test_nf4_levels_are_those_of_the_construction() -> None:
    """Eight positive and seven negative quantiles of the normal distribution, and zero (QLoRA, equation 4)."""
    offset = 0.9677083
    positive = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([positive, negative, [0.0]])) / positive.max()
    np.testing.assert_allclose(NF4_LEVELS, levels, atol=1e-6)


def test_nf4_is_the_nearest_level_by_brute_force(weight_OI: torch.Tensor) -> None:
    ours = round_weight(weight_OI, scheme_of("nf4")).double()
    levels = np.array(NF4_LEVELS)
    for row, got in zip(weight_OI.double().numpy(), ours.numpy(), strict=True):
        for start in range(0, len(row), 64):
            block = row[start : start + 64]
            largest = np.abs(block).max()
            nearest = np.abs(block[:, None] - levels * largest).min(axis=1)
            np.testing.assert_allclose(np.abs(got[start : start + 64] - block), nearest, atol=1e-6 * largest)


@pytest.mark.parametrize("name", NAMES)
def test_extremes_zeros_and_broken_weights(name: str, weight_OI: torch.Tensor) -> None:
    """The largest weight of a channel stays, zero stays zero, rounding twice is rounding once, NaN stays NaN."""
    scheme = scheme_of(name)
    once = round_weight(weight_OI, scheme)
    assert once.shape == weight_OI.shape and (once[4] == 0).all()
    torch.testing.assert_close(once.abs().amax(1), weight_OI.abs().amax(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(round_weight(once, scheme), once, rtol=1e-5, atol=0)
    broken = weight_OI.clone()
    broken[0, 0] = float("nan")
    assert round_weight(broken, scheme)[0].isnan().any() and not round_weight(broken, scheme)[1:].isnan().any()


def test_a_finer_format_errs_less(weight_OI: torch.Tensor) -> None:
    normal = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1))
    error = {name: float((round_weight(normal, scheme_of(name)) - normal).square().mean()) for name in NAMES}
    assert error["int8"] < error["fp8"] < error["nf4"] < error["q4-rtn"]


# ---- which weights ---------------------------------------------------------------------------------------------------


def llama(folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_only_decoder_linears_change(teacher_folder: Path) -> None:
    """The head is the teacher's own on both sides, so an anchor's KL is never that of its head."""
    model = llama(teacher_folder)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    said = round_model(model, scheme_of("nf4"))
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    wanted = {name for name in before if ".layers." in name and name.endswith("_proj.weight")}
    assert changed == wanted and len(wanted) == said["rounded_matrices"] == 14
    assert said["rounded_weights"] == sum(before[name].numel() for name in wanted)
    assert said["bits_per_rounded_weight"] == 4.5
    for name in wanted:
        torch.testing.assert_close(dict(model.named_parameters())[name], round_weight(before[name], scheme_of("nf4")))


def test_experts_are_rounded_and_routers_are_not() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    model = MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=3,
            num_experts_per_tok=2,
        )
    )
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    scheme = scheme_of("q4-rtn", 64)
    said = round_model(model, scheme)
    now = dict(model.named_parameters())
    kept = [name for name in before if torch.equal(now[name], before[name])]
    assert any("gate" in name for name in kept) and not any("gate_up_proj" in name for name in kept)
    assert said["rounded_matrices"] == 4 + 2 * 3
    stack = next(name for name in before if name.endswith("experts.down_proj"))
    for expert in range(3):
        torch.testing.assert_close(now[stack][expert], round_weight(before[stack][expert], scheme))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0)))


class Decoder(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer])


class Model(nn.Module):
    """The least that has a stack of decoder layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.model = Decoder(layer)

    @property
    def config(self) -> Model:
        return self

    num_hidden_layers = 1

    def get_text_config(self) -> Model:
        return self

    def get_decoder(self) -> nn.Module:
        return self.model


def test_transposed_experts_are_rounded_along_their_input() -> None:
    stack = Stack()
    stack.is_transposed = True
    before = stack.gate_up_proj.detach().clone()
    round_model(Model(stack), scheme_of("int8"))
    for expert in range(2):
        wanted = round_weight(before[expert].T, scheme_of("int8")).T
        assert torch.equal(stack.gate_up_proj[expert], wanted)


def test_layers_that_cannot_be_rounded_are_refused() -> None:
    with pytest.raises(EngineError, match="does not say which dimension is the input"):
        list(linear_weights(Model(Stack())))
    with pytest.raises(EngineError, match="no linear weights"):
        list(linear_weights(Model(nn.LayerNorm(4))))


# ---- measured --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("anchors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def anchors(workplace: Path, teacher_folder: Path, panel_folder: Path) -> dict[str, Result]:
    return {name: measure_anchor(name, str(teacher_folder), panel=panel_folder) for name in NAMES}


def test_kl_grows_with_coarseness(anchors: dict[str, Result]) -> None:
    """int8 < fp8 < the 4-bit formats, which are close to each other; all far from 0 and from nonsense."""
    kl = {name: result.measurement.summary["kl_mean"] for name, result in anchors.items()}
    assert 0 < kl["int8"] < kl["fp8"] / 2 < kl["fp8"] < min(kl["nf4"], kl["q4-rtn"]) / 2
    assert 0.3 < kl["nf4"] / kl["q4-rtn"] < 1.1 and kl["q4-rtn"] < 1


def test_numbers_are_those_of_a_rounded_checkpoint(
    anchors: dict[str, Result], teacher_folder: Path, panel_folder: Path
) -> None:
    """Against plain transformers with weights rounded here, and float64 log-softmax."""
    from harness.panel import load_panel

    model, teacher = llama(teacher_folder), llama(teacher_folder)
    for name, weight in model.named_parameters():
        if name.endswith("_proj.weight"):
            step = weight.data.abs().amax(1, keepdim=True) / 127
            weight.data = torch.round(weight.data / step) * step
    kl = []
    for row in load_panel(panel_folder).rows:
        ids = torch.from_numpy(row.ids_T.astype(np.int64))[None]
        with torch.inference_mode():
            p, q = (m(input_ids=ids).logits[0, :-1].double().log_softmax(-1) for m in (teacher, model))
        kl.append((p.exp() * (p - q)).sum(-1).numpy())
    stored = pq.read_table(anchors["int8"].folder / "positions.parquet")["kl"].to_numpy()
    np.testing.assert_allclose(stored, np.concatenate(kl), atol=2e-6)


def test_the_receipt_says_what_it_is(anchors: dict[str, Result], teacher_folder: Path, panel_folder: Path) -> None:
    m = anchors["fp8"].measurement
    assert (m.role, m.name, m.lane) == ("anchor", "fp8-e4m3 anchor of tiny-teacher", "weights")
    assert m.candidate.settings["anchor"] == "fp8-e4m3" and m.candidate.settings["rounded_matrices"] == 14
    assert m.candidate.weights_sha256 == rounded_digest(m.teacher.weights_sha256, SCHEMES["fp8"])
    assert m.candidate.head_sha256 == m.teacher.head_sha256 and m.scoring["heads_equal"]
    assert (m.candidate.bytes, m.candidate.bits_per_weight) == (None, None)
    assert m.notes[0].startswith("anchor: the linear weights of the decoder layers") and len(m.notes) == 1
    digests = {r.measurement.candidate.weights_sha256 for r in anchors.values()} | {m.teacher.weights_sha256}
    assert len(digests) == 5 and len({r.measurement.key for r in anchors.values()}) == 4
    assert load_measurement(anchors["fp8"].folder) == m
    assert verify_run(anchors["fp8"].folder, panel=panel_folder).ok


def test_an_anchor_is_measured_once(anchors: dict[str, Result], teacher_folder: Path, panel_folder: Path) -> None:
    again = measure_anchor("fp8", str(teacher_folder), panel=panel_folder)
    assert again.reused and again.folder == anchors["fp8"].folder
    part = measure_anchor("q4-rtn", str(teacher_folder), panel=panel_folder, rows=1, group=64)
    assert part.measurement.label == "partial 1/4 rows"
    assert part.measurement.name == "q4-rtn-g64 anchor of tiny-teacher"


def test_it_stands_beside_candidates(anchors: dict[str, Result], teacher_folder: Path, panel_folder: Path) -> None:
    """Issue 4, part 4: a comparison prints KL and top-1 of the anchor; as a candidate it may be compared itself."""
    teacher = measure(Request(candidate=str(teacher_folder), panel=panel_folder, teacher=str(teacher_folder)))
    found = compare([anchors["nf4"].folder, teacher.folder], anchors=[anchors["fp8"].folder])
    row, m = found.references[0], anchors["fp8"].measurement
    assert (row.kind, row.name) == ("anchor", "fp8-e4m3 anchor of tiny-teacher")
    assert row.kl.estimate == m.summary["kl_mean"] and row.top1_agreement == m.summary["top1_agreement"]
    pair = compare([anchors["q4-rtn"].folder, anchors["int8"].folder]).pairs[0]
    assert pair.primary.verdict == "better"


def test_bad_requests(workplace: Path, anchors: dict[str, Result], teacher_folder: Path, panel_folder: Path) -> None:
    for name, group, complaint in (("int3", None, "no anchor int3"), ("nf4", 64, "--group"), ("q4-rtn", 32, "--group")):
        with pytest.raises(UsageError, match=complaint):
            scheme_of(name, group)
    capture = next((workplace / "teachers/captures").glob("tiny-teacher-*"))
    with pytest.raises(UsageError, match="is a capture"):
        teacher_on(str(capture), panel_folder, None)


def test_the_command(anchors: dict[str, Result], teacher_folder: Path, panel_folder: Path) -> None:
    from harness.cli import app

    arguments = ["anchor", "int8", str(teacher_folder), "--panel", str(panel_folder)]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and "report.md" in shown.output
    receipt = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert receipt["role"] == "anchor" and receipt["key"] == anchors["int8"].measurement.key
