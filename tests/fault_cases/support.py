"""Over which vocabulary, through which head, from which point of the model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.capture import open_capture
from harness.compare import compare
from harness.engines.head import head_logits, require_own_head
from harness.engines.models import ModelFolder
from harness.errors import CaptureError, EngineError, IncomparableError, ScoreError
from harness.interop.g4 import import_g4
from harness.measure.preflight import check_support
from harness.measure.result import SAME_MODEL
from harness.report.basis import how_measured, of_measurement
from harness.scoring import score_logits
from harness.scoring.bounds import lower_bound, renormalised
from tests.compare.fake_arms import World
from tests.fault_cases import made
from tests.fault_cases.entry import Fault
from tests.interop.test_g4 import receipt as g4_receipt

P6, Q6 = (0.3, 0.25, 0.2, 0.1, 0.1, 0.05), (0.25, 0.3, 0.2, 0.05, 0.1, 0.1)
KL6 = float(np.sum(np.array(P6) * np.log(np.array(P6) / np.array(Q6))))


def padded(distribution: tuple[float, ...], padding: float, positions: int = 2) -> torch.Tensor:
    """Logits of 8 columns, the last two at ``padding``."""
    plain = made.logits(*[distribution] * positions)
    return torch.cat([plain, torch.full((positions, 2), padding)], dim=1)


def wider_logits(folder: Path) -> None:
    """8 columns against 6: one declared support, the mass outside it told, other widths refused."""
    targets = np.zeros(2, np.int32)
    p, q = padded(P6, -1e4), made.logits(Q6, Q6)
    found = score_logits(p, q, targets, vocab_size=6)
    assert found.kl == pytest.approx([KL6] * 2, abs=1e-6)
    assert (found.outside_teacher == 0).all() and (found.outside_candidate == 0).all()
    leaking = score_logits(padded(P6, np.log(0.01)), q, targets, vocab_size=6)
    assert leaking.kl == pytest.approx([KL6] * 2, abs=1e-6)
    assert leaking.outside_teacher == pytest.approx([0.02 / 1.02] * 2, rel=1e-5)
    with pytest.raises(ScoreError, match="the teacher declares a vocabulary of 8, the candidate 6"):
        score_logits(p, q, targets)
    with pytest.raises(ScoreError, match="the teacher has 6 tokens and the candidate 7"):
        check_support(8, 7, 6, 7)
    assert check_support(8, 6, 6, 6).figure == "6 tokens; padding columns: teacher 2, candidate 0"
    told = made.receipt(
        folder,
        [made.row([0, 1])],
        [padded(P6, np.log(0.01))],
        [padded(Q6, -1e4)],
        teacher_head=made.passing_head(8, 6),
        candidate_head=made.passing_head(8, 6),
    )
    assert told.summary["kl_mean"] == pytest.approx(KL6, abs=1e-6)
    assert told.summary["outside_teacher_max"] == pytest.approx(0.02 / 1.02, rel=1e-5)
    assert any("0.0196" in note and "teacher" in note and "padding" in note for note in told.notes)


def renormalised_topk(folder: Path) -> None:
    """Full KL 0.415888; the renormalised top 2 would say 0.831777: top-k is never scored as if it were all."""
    p, q = (0.4, 0.1, 0.25, 0.25), (0.1, 0.4, 0.25, 0.25)
    full = score_logits(made.logits(p), made.logits(q), np.array([1], np.int32))
    assert full.kl[0] == pytest.approx(0.415888, abs=1e-6)
    lp, lq = (np.log([side[:2]]) for side in (p, q))
    assert lower_bound(lp, lq).kl[0] == pytest.approx(0.415888, abs=1e-6)
    assert renormalised(lp, lq)[0] == pytest.approx(0.831777, abs=1e-6)
    (folder / "g4.json").write_text(json.dumps(g4_receipt()))
    bound = import_g4(folder / "g4.json")
    assert bound.estimator == "lower_bound"
    how = " ".join(how_measured(of_measurement(bound)))
    assert "a lower bound of the full-vocabulary value (known tokens hold 99.00 % of the teacher's mass)" in how


def cut_point(folder: Path) -> None:
    """H = 64, V = 128, norm weight of RMS 1.43: states from before the final norm are no input of the head."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, generator=generator)
    weight *= 1.43 / weight.square().mean().sqrt()
    raw = 7 * torch.randn(17, 64, generator=generator)
    normed = raw / (raw.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
    matrix = torch.randn(128, 64, generator=generator) / 8
    head = made.head(matrix)
    logits = head_logits(head, normed)
    located = ModelFolder(path=folder, name="m", revision="local")
    assert require_own_head(located, "an engine", logits, head, normed, "") < 1e-5
    with pytest.raises(EngineError, match="logits differ by .* from those of the checkpoint's head on the same states"):
        require_own_head(located, "an engine", logits.bfloat16(), head, raw, "")
    row = made.row([0] * 17)
    made.capture(folder / "c", [row], [normed], head)
    manifest = json.loads((folder / "c" / "manifest.json").read_text())
    assert manifest["key"].pop("cut_point") == "after_final_norm_before_lm_head"
    (folder / "c" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CaptureError, match="does not say where the hidden states were cut"):
        open_capture(folder / "c")


def shared_head(folder: Path) -> None:
    """A candidate that differs in its head alone: its own head shows it; one head for both is called the same model."""
    generator = torch.Generator().manual_seed(1)
    weight, states = torch.randn(64, 32, generator=generator), torch.randn(9, 32, generator=generator)
    scale = weight.abs().max() / 15.5
    rounded = made.head((weight / scale).round() * scale)
    own, rows = made.head(weight), [made.row(list(range(9)))]
    honest = made.receipt(folder / "own", rows, [states], [states], teacher_head=own, candidate_head=rounded)
    assert honest.summary["kl_mean"] > 1e-4 and honest.counts["zero_kl"] == 0
    assert honest.scoring["head_policy"] == "own head on each side" and not honest.scoring["heads_equal"]
    vacuous = made.receipt(folder / "shared", rows, [states], [states], teacher_head=own, candidate_head=own)
    assert vacuous.summary["kl_mean"] == 0.0 and SAME_MODEL in vacuous.notes
    world = World(rows=4, length=20)
    runs = [world.run(folder / n, n, world.columns(0.3, 2)) for n in "a"]
    runs += [world.run(folder / "b", "b", world.columns(0.2, 3), scoring={"head_policy": "teacher's head"})]
    with pytest.raises(IncomparableError, match="do not have the same scoring .head_policy."):
        compare(runs)


def padded_columns(folder: Path) -> None:
    """V = 130, 128 of them real, 5 % of the candidate on padding: masked KL and the mass, so both values are known."""
    p = torch.zeros(3, 130)
    p[:, 128:] = -1e4
    q = torch.zeros(3, 130)
    q[:, 128], q[:, 129] = -1e4, np.log(128 * 0.05 / 0.95)
    assert q.argmax(1).tolist() == [129] * 3
    told = made.receipt(
        folder,
        [made.row([0, 1, 2])],
        [p],
        [q],
        teacher_head=made.passing_head(130, 128),
        candidate_head=made.passing_head(130, 128),
    )
    assert told.scoring["support"] == 128
    found = score_logits(p, q, np.zeros(3, np.int32), vocab_size=128)
    assert (found.top1_candidate < 128).all() and found.outside_candidate == pytest.approx([0.05] * 3, rel=1e-5)
    assert abs(told.summary["kl_mean"]) < 1e-9
    unmasked = score_logits(p, q, np.zeros(3, np.int32)).kl
    assert unmasked == pytest.approx(found.kl - np.log1p(-found.outside_candidate), abs=1e-6)
    assert any("at most 0.05," in note and "candidate" in note and "padding" in note for note in told.notes)


ROWS = [
    Fault(id="A13-wider-logits", title="logits wider than the tokenizer", check=wider_logits),
    Fault(id="A15-renormalised-topk", title="renormalised top-k passed off as KL", check=renormalised_topk),
    Fault(id="B1-cut-point", title="before or after the final norm", check=cut_point),
    Fault(id="B3-shared-head", title="a head-only quant scored through the reference head", check=shared_head),
    Fault(id="B8-padded-columns", title="padded columns in or out of the softmax", check=padded_columns),
]
