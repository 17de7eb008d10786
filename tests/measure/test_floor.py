"""Floors: what a repeat, another precision and a rounding's noise a layer make of the teacher itself."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from harness.compare import compare
from harness.engines.hf import TransformersEngine
from harness.engines.models import locate
from harness.errors import CaptureError, IncomparableError, UsageError
from harness.measure import run as measure_module
from harness.measure.altered import UNIT_ROUNDOFF, anchor, floor, noise_seed, perturb, with_noise
from harness.measure.receipt import load_measurement, save_measurement
from harness.measure.run import Result
from harness.panel import build_panel, load_panel
from harness.report.words import warnings
from harness.verify import verify_run
from tests import tiny

KINDS = ("repeat", "bf16", "perturb")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("floors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def floors(workplace: Path, teacher_folder: Path, panel_folder: Path) -> dict[str, Result]:
    return {kind: floor(str(teacher_folder), panel=panel_folder, kind=kind) for kind in KINDS}


@pytest.fixture(scope="module")
def int8(floors: dict[str, Result], teacher_folder: Path, panel_folder: Path) -> Result:
    return anchor("int8", str(teacher_folder), panel=panel_folder)


@pytest.fixture(scope="module")
def fp8(floors: dict[str, Result], teacher_folder: Path, panel_folder: Path) -> Result:
    return anchor("fp8", str(teacher_folder), panel=panel_folder)


def kl_of(result: Result) -> np.ndarray:
    return pq.read_table(result.folder / "positions.parquet")["kl"].to_numpy()


def engine(folder: Path) -> TransformersEngine:
    located = locate(str(folder), None, cache=folder)
    return TransformersEngine(located, compute="float32", device="cpu", weights_sha256="w", tokenizer_sha256="t")


# ---- the three kinds -------------------------------------------------------------------------------------------------


def test_a_repeat_on_a_cpu_is_exactly_zero(floors: dict[str, Result]) -> None:
    """The same model twice, in another process of the job: here without any noise at all."""
    found = floors["repeat"].measurement
    assert (kl_of(floors["repeat"]) == 0.0).all() and found.summary["top1_agreement"] == 1.0
    assert found.candidate.weights_sha256 == found.teacher.weights_sha256
    assert not any("same model" in note for note in found.notes)


def test_other_precision_against_plain_transformers(
    floors: dict[str, Result], teacher_folder: Path, panel_folder: Path
) -> None:
    """Only the states are in bf16; logits are products in float32, never rounded to bf16 themselves."""
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    exact, short = load(teacher_folder, dtype=torch.float32), load(teacher_folder, dtype=torch.bfloat16)
    head = exact.lm_head.weight.double()
    kl, rounded_kl = [], []
    for row in load_panel(panel_folder).rows:
        ids = torch.from_numpy(row.ids_T.astype(np.int64))[None]
        with torch.inference_mode():
            p = exact(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
            logits = short.model(input_ids=ids).last_hidden_state[0, :-1].double() @ head.T
            for out, q in ((kl, logits), (rounded_kl, logits.bfloat16().double())):
                q = q.log_softmax(-1)
                out.append((p.exp() * (p - q)).sum(-1).numpy())
    stored = kl_of(floors["bf16"])
    np.testing.assert_allclose(stored, np.concatenate(kl), atol=2e-6)
    assert 0 < stored.mean() < np.concatenate(rounded_kl).mean()
    m = floors["bf16"].measurement
    assert (m.candidate.compute_dtype, m.teacher.compute_dtype) == ("bfloat16", "float32")


def test_a_bf16_capture_is_held_against_float32(
    floors: dict[str, Result], teacher_folder: Path, panel_folder: Path
) -> None:
    """The floor of a bf16 teacher is its float32 computation, and of about the same size."""
    spec = Path("bf16.toml")
    spec.write_text(f'name = "bf16-teacher"\nmodel = "{teacher_folder}"\ncompute_dtype = "bfloat16"\n')
    found = floor(str(spec), panel=panel_folder, kind="bf16").measurement
    assert (found.candidate.compute_dtype, found.teacher.compute_dtype) == ("float32", "bfloat16")
    assert found.summary["kl_mean"] == pytest.approx(floors["bf16"].measurement.summary["kl_mean"], rel=0.2)
    assert "computed in float32 against its capture in bfloat16" in found.notes[0]


def test_perturbation_is_small_seeded_and_never_zero(
    floors: dict[str, Result], int8: Result, teacher_folder: Path, panel_folder: Path
) -> None:
    kl = floors["perturb"].measurement.summary["kl_mean"]
    assert 0 < kl < floors["bf16"].measurement.summary["kl_mean"] * 10
    assert (kl_of(floors["perturb"]) > 0).mean() > 0.9
    where = {"panel": panel_folder, "kind": "perturb"}
    again = floor(str(teacher_folder), out=Path("again"), **where)
    other = floor(str(teacher_folder), out=Path("other"), seed=7, **where)
    assert again.measurement.key == floors["perturb"].measurement.key != other.measurement.key
    assert np.array_equal(kl_of(again), kl_of(floors["perturb"]))
    assert not np.array_equal(kl_of(other), kl_of(again))
    assert kl_of(other).mean() == pytest.approx(kl_of(again).mean(), rel=0.5)
    assert again.measurement.preflight[3].passed  # the same row twice: noise and all


def test_noise_of_a_row_does_not_depend_on_the_run(
    floors: dict[str, Result], teacher_folder: Path, panel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer rows, another order, or a run killed and taken up again change no position."""
    whole = kl_of(floors["perturb"])
    first = floor(str(teacher_folder), panel=panel_folder, kind="perturb", rows=2)
    assert np.array_equal(kl_of(first), whole[: len(kl_of(first))])
    real, calls = measure_module.write_row, []

    def dies(*args):
        if calls:
            raise KeyboardInterrupt
        calls.append(real(*args))

    monkeypatch.setattr(measure_module, "write_row", dies)
    with pytest.raises(KeyboardInterrupt):
        floor(str(teacher_folder), panel=panel_folder, kind="perturb", out=Path("killed"))
    monkeypatch.setattr(measure_module, "write_row", real)
    resumed = floor(str(teacher_folder), panel=panel_folder, kind="perturb", out=Path("killed"))
    assert np.array_equal(kl_of(resumed), whole)


def test_no_row_moves_another(teacher_folder: Path, panel_folder: Path) -> None:
    """A row alone, after others, and in reverse order gives the same bits."""
    rows, runs = load_panel(panel_folder).rows, engine(teacher_folder)
    together = {out.index: out.outputs.states_TH for out in runs.run(rows)}
    for out in runs.run(list(reversed(rows))):
        assert torch.equal(out.outputs.states_TH, together[out.index])
    assert torch.equal(next(iter(runs.run(rows[2:3]))).outputs.states_TH, together[2])


# ---- noise -----------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_within_one_unit_roundoff() -> None:
    """2^-8 is the largest relative error of rounding to bfloat16, found by rounding; the noise fills that range."""
    x = torch.linspace(1, 2, 100_001, dtype=torch.float64)
    worst = float(((x.bfloat16().double() - x).abs() / x).max())
    assert worst == pytest.approx(UNIT_ROUNDOFF, rel=0.01) and UNIT_ROUNDOFF == torch.finfo(torch.bfloat16).eps / 2
    states = torch.full((200, 100), 3.0)
    relative = (with_noise(states, 5) / states - 1).double() / UNIT_ROUNDOFF
    assert relative.abs().max() <= 1 + 1e-4 and abs(float(relative.mean())) < 0.02
    assert float(relative.square().mean()) == pytest.approx(1 / 3, rel=0.03)
    assert torch.equal(with_noise(states, 5), with_noise(states, 5))
    assert with_noise(states.bfloat16(), 5).dtype == torch.bfloat16


def test_every_layer_and_row_has_noise_of_its_own(teacher_folder: Path) -> None:
    seeds = {noise_seed(s, layer, row) for s in (1, 2) for layer in range(4) for row in (b"a", b"b")}
    assert len(seeds) == 16 and all(0 <= seed < 2**63 for seed in seeds)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=torch.float32)
    ids, seen = torch.arange(40)[None], []
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(input_ids=ids)
        model(input_ids=ids + 100)
        assert perturb(model, 1) == {"perturbed_layers": 2}
        model(input_ids=ids)
        model(input_ids=ids + 100)
        model(ids)
    clean, noisy = (seen[:3], seen[3:6]), (seen[6:9], seen[9:12])
    assert torch.equal(noisy[0][0], clean[0][0])
    first, second = (n[1] / c[1] - 1 for n, c in zip(noisy, clean, strict=True))
    assert UNIT_ROUNDOFF / 2 < float(first.abs().max()) <= UNIT_ROUNDOFF * (1 + 1e-3)
    assert float((first - second).abs().mean()) > UNIT_ROUNDOFF / 3
    assert all(torch.equal(a, b) for a, b in zip(noisy[0], seen[12:], strict=True))


# ---- in a comparison -------------------------------------------------------------------------------------------------


def test_receipts_say_what_they_are(floors: dict[str, Result], panel_folder: Path) -> None:
    for kind, result in floors.items():
        m = result.measurement
        assert (m.role, m.name, m.status) == ("floor", f"{kind} floor of tiny-teacher", "complete")
        assert m.candidate.settings["floor"] == kind and m.notes[0].startswith("floor: ")
        assert m.candidate.bits_per_weight == 16.0 and load_measurement(result.folder) == m
        assert verify_run(result.folder, panel=panel_folder).ok
    assert floors["perturb"].measurement.candidate.settings["perturbed_layers"] == 2
    assert len({r.measurement.key for r in floors.values()}) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_comparison_takes_every_kind(kind: str, floors: dict[str, Result], int8: Result, fp8: Result) -> None:
    """The floor is a row of its own; nothing is subtracted from any KL."""
    plain = compare([fp8.folder, int8.folder])
    found = compare([fp8.folder, int8.folder], floor=floors[kind].folder)
    row = found.references[0]
    assert (row.kind, row.kl.estimate) == ("floor", floors[kind].measurement.summary["kl_mean"])
    assert [a.metrics["kl_mean"] for a in found.arms] == [a.metrics["kl_mean"] for a in plain.arms]
    assert found.pairs[0].ppl_ratio == plain.pairs[0].ppl_ratio
    assert not any("no floor was measured" in text for text in warnings(found))
    assert [arm.at_floor for arm in plain.arms] == [None, None]


def test_what_is_at_the_floor_is_not_ranked(
    floors: dict[str, Result], int8: Result, fp8: Result, teacher_folder: Path, panel_folder: Path
) -> None:
    """Two arms that are noise of the floor's size have no better one; those above it have."""
    other = floor(str(teacher_folder), panel=panel_folder, kind="perturb", seed=8)
    found = compare([floors["perturb"].folder, other.folder], floor=floors["perturb"].folder)
    assert [arm.at_floor for arm in found.arms] == [True, True]
    assert found.pairs[0].primary.verdict not in ("better", "worse")
    above = compare([fp8.folder, int8.folder], floor=floors["repeat"].folder)
    assert [arm.at_floor for arm in above.arms] == [False, False]
    assert above.pairs[0].primary.verdict == "better"


def test_a_floor_of_another_question_is_refused(
    floors: dict[str, Result], int8: Result, fp8: Result, workplace: Path, panel_folder: Path, tmp_path: Path
) -> None:
    """Another panel's, teacher's or lane's floor is no floor of this comparison."""
    runs = [fp8.folder, int8.folder]
    panel = tmp_path / "panel"
    panel.mkdir()
    other_teacher = tmp_path / "other-teacher"
    other_teacher.mkdir()
    tiny.save_llama(other_teacher, seed=5)
    tiny.write_panel(panel, other_teacher, rows=2, length=64)
    build_panel(panel)
    foreign = floor(str(other_teacher), panel=panel_folder, rows=1, out=tmp_path / "a")
    with pytest.raises(IncomparableError, match="teacher .weights_sha256."):
        compare(runs, floor=foreign.folder)
    foreign = floor(str(other_teacher), panel=panel, rows=1, out=tmp_path / "b")
    with pytest.raises(IncomparableError, match="same panel"):
        compare(runs, floor=foreign.folder)
    served = tmp_path / "served"
    shutil.copytree(floors["repeat"].folder, served)
    save_measurement(served, load_measurement(served).model_copy(update={"lane": "served"}))
    with pytest.raises(IncomparableError, match="same lane: 'weights' and 'served'"):
        compare(runs, floor=served)


def test_a_capture_that_is_not_reproduced_gives_no_floor(
    floors: dict[str, Result], teacher_folder: Path, panel_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The teacher must first give its stored top-1 and NLL again, unaltered."""
    from harness.measure import teacher

    real = teacher.one_sided

    def flipped(*args):
        stats = real(*args)
        stats.top1[3] += 1
        return stats

    monkeypatch.setattr(teacher, "one_sided", flipped)
    with pytest.raises(CaptureError, match="does not reproduce its capture"):
        floor(str(teacher_folder), panel=panel_folder, kind="perturb", seed=99)


def test_bad_requests_and_the_command(floors: dict[str, Result], teacher_folder: Path, panel_folder: Path) -> None:
    from harness.cli import app
    from harness.cli.anchor import floor as command

    with pytest.raises(UsageError, match="no floor fp4"):
        floor(str(teacher_folder), panel=panel_folder, kind="fp4")
    defaults = [inspect.signature(f).parameters["seed"].default for f in (floor, command)]
    assert defaults[0] == defaults[1]
    arguments = ["floor", str(teacher_folder), "--panel", str(panel_folder), "--kind", "bf16", "--json"]
    receipt = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert receipt["role"] == "floor" and receipt["key"] == floors["bf16"].measurement.key
