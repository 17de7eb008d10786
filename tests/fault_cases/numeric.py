"""Numbers: infinities, NaN, half precision, signs, directions, ties and long sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.capture.encode import encode_logits
from harness.errors import CaptureError, ScoreError
from harness.measure.receipt import DIRECTION, load_measurement
from harness.measure.summary import row_summary
from harness.numbers import number
from harness.report.run_report import report_text
from harness.report.tables import load_positions
from harness.scoring import score_hidden, score_logits, teacher_stats
from harness.stats import group_totals
from harness.types import SCORE_DTYPES, Logits, Scores
from tests.fault_cases import made
from tests.fault_cases.entry import Fault
from tests.fault_cases.made import logits

ZERO = np.zeros(1, np.int32)


def one(teacher: list[float], candidate: list[float], target: int = 0) -> dict[str, float]:
    """Scores of one position as plain numbers."""
    scores = score_logits(logits(teacher), logits(candidate), np.array([target], np.int32), second_pass=True)
    return {name: getattr(scores, name)[0].item() for name in scores.__dataclass_fields__}


def inf_minus_inf(folder: Path) -> None:
    """(a) and (b): a zero of the teacher adds nothing; (c) and (d): its opposite is infinite, located, kept."""
    assert one([0.5, 0.5, 0], [0.5, 0.25, 0.25])["kl"] == pytest.approx(0.346574, abs=1e-6)
    both = one([0.5, 0.5, 0], [0.25, 0.75, 0])
    assert both["kl"] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), abs=1e-6)
    p, q = logits(*[(0.5, 0.25, 0.25)] * 4), logits(*[(0.4, 0.3, 0.3)] * 4)
    broken = torch.cat([q[:2], logits((0.5, 0.5, 0)), q[3:]])
    rows = [made.row([0, 1, 1, 0], 0), made.row([1, 1, 1, 2], 1)]
    found = made.receipt(folder, rows, [p, p], [q, broken])
    assert found.counts["infinite_kl"] == found.counts["nonfinite_positions"] == 1
    assert found.summary["kl_max_at"] == {"row": 1, "position": 2}
    usual = 0.5 * np.log(0.5 / 0.4) + 0.5 * np.log(0.25 / 0.3)
    assert found.summary["kl_mean"] == np.inf and found.summary["finite_share"] == 5 / 6
    assert found.summary["kl_mean_finite"] == pytest.approx(usual, abs=1e-6)
    assert found.per_row[1].nonfinite == 1 and found.intervals == {}
    assert one([0.5, 0.5, 0], [0.4, 0.3, 0.3], target=2)["nll_teacher"] == np.inf
    unlikely = made.receipt(folder / "d", [made.row([0, 2])], [logits(*[(0.5, 0.5, 0)] * 2)], [p[:2]])
    assert unlikely.summary["nll_teacher"] == np.inf and unlikely.counts["infinite_nll"] == 1


def bf16_logits(folder: Path) -> None:
    """Steps of 0.125 tie 20.06 and 20.00: never stored so; products in fp32 keep the two apart; a tie is seen."""
    exact = torch.zeros(2, 50)
    exact[:, 3], exact[:, 4] = 20.00, 20.06
    rounded = exact.to(torch.bfloat16)
    assert rounded[0, 3] == rounded[0, 4]
    with pytest.raises(CaptureError, match="cannot be stored as torch.bfloat16"):
        encode_logits(made.row([0, 1]), Logits(logits_TV=exact), torch.bfloat16)
    scores = score_logits(exact, rounded, np.array([4, 4], np.int32))
    assert not scores.tied_teacher.any() and scores.tied_candidate.all()
    assert scores.agree.all() and not scores.agree_lowest_id.any()
    # The same two logits from bf16 states and a bf16 head: 20 + 0.0625 needs more bits than bf16 has.
    weight = torch.zeros(50, 2, dtype=torch.bfloat16)
    weight[3, 0], weight[4] = 20.0, torch.tensor([20.0, 0.0625], dtype=torch.bfloat16)
    states, through = torch.ones(1, 2, dtype=torch.bfloat16), made.head(weight)
    assert score_hidden(states, states, ZERO, teacher_head=through, candidate_head=through).top1_teacher[0] == 4


def cache_precision(folder: Path) -> None:
    """A row 40 nats deep survives the store; one that does not is refused."""
    deep = 20 + 2 * torch.randn(4, 400, generator=torch.Generator().manual_seed(2))
    deep[:, 7] = deep.max(1).values - 40
    row = made.row([7, 1, 7, 3])
    got = encode_logits(row, Logits(logits_TV=deep), torch.float16)
    stored = got.array.float()
    scores = score_logits(deep[:3], stored, row.ids_T[1:])
    assert (np.abs(scores.kl) < 1e-6).all() and scores.kl.max() > 0
    total = np.exp(stored.double().numpy() - got.columns["logsumexp"][:, None]).sum(1)
    assert (np.abs(total - 1) < 1e-6).all()
    flat = 20 + torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0))
    flat[:, 0] = 30.0
    with pytest.raises(CaptureError, match="the limit is 1e-06"):
        encode_logits(made.row([0, 1]), Logits(logits_TV=flat), torch.float16)


def negative_kl(folder: Path) -> None:
    """-3e-7 stays in the mean, counted; -1e-3 is an error; equal logits give 0."""
    p = logits((0.5, 0.3, 0.2), (0.5, 0.3, 0.2), (0.2, 0.3, 0.5))
    rows = [made.row([0, 1, 2])]
    assert abs(score_logits(p, p, np.zeros(3, np.int32)).kl).max() <= 1e-7
    small = made.receipt(folder / "small", rows, [p], [p], change=lambda s: replace(s, kl=np.array([-3e-7, 1e-7])))
    assert small.summary["kl_mean"] == pytest.approx(-1e-7, rel=1e-9)
    assert small.counts["negative_kl"] == 1 and small.counts["negative_kl_beyond_rounding"] == 0
    with pytest.raises(ScoreError, match="at 1 positions: one side is not normalised"):
        made.receipt(folder / "large", rows, [p], [p], change=lambda s: replace(s, kl=np.array([-1e-3, 0.1])))


def argument_order(folder: Path) -> None:
    """KL(P||Q) = 0.368064, not 0.510826; nothing is broadcast; no position is an error."""
    found = one([0.9, 0.1], [0.5, 0.5])
    assert found["kl"] == pytest.approx(0.368064, abs=1e-6)
    assert found["kl_reverse"] == pytest.approx(0.510826, abs=1e-6)
    p = logits((0.9, 0.1), (0.9, 0.1))
    with pytest.raises(ScoreError, match="the teacher has 2 positions, the candidate 1"):
        score_logits(p, p[:1], np.zeros(2, np.int32))
    with pytest.raises(ScoreError, match="hold no position"):
        score_logits(p[:0], p[:0], np.zeros(0, np.int32))


def nan_positions(folder: Path) -> None:
    """One NaN position of 1,000: invalid, no mean, located; 70000 does not fit into fp16."""
    p, q = (logits(*[d] * 1001) for d in ((0.5, 0.3, 0.2), (0.4, 0.4, 0.2)))
    q[371] = torch.nan
    found = made.receipt(folder, [made.row([1] * 1001)], [p], [q])
    assert found.status == "invalid" and np.isnan(found.summary["kl_mean"]) and found.intervals == {}
    assert found.counts["nonfinite_positions"] == found.counts["nonfinite_logits_candidate"] == 1
    assert found.summary["finite_share"] == 0.999
    assert found.summary["kl_mean_finite"] == pytest.approx(0.5 * np.log(1.25) + 0.3 * np.log(0.75), abs=1e-6)
    text = report_text(found, load_positions(folder / "run"), [])
    assert "**Invalid" in text and "mean, nats | NaN |" in text and "| 0 | 371 |" in text
    assert "mean excluding 1 positions, nats | 0.0253 | over 99.9000 % of positions" in text
    high = torch.zeros(2, 9)
    high[0, 1] = 70_000.0
    with pytest.raises(CaptureError, match="position 0: a logit lies 70000 below the maximum, past fp16"):
        encode_logits(made.row([0, 1]), Logits(logits_TV=high), torch.float16)


def nonfinite_json(folder: Path) -> None:
    """kl_max = inf is the string "inf" in measurement.json: never null, 0 or a bare Infinity."""
    p, q = logits((0.5, 0.5), (0.5, 0.5)), logits((0.5, 0.5), (0.5, 0.5))
    q[0, 1] = -torch.inf
    made.receipt(folder, [made.row([0, 0])], [p], [q])
    text = (folder / "run" / "measurement.json").read_text()
    assert '"kl_max": "inf"' in text and "Infinity" not in text and "NaN" not in text
    assert json.loads(text)["per_row"][0]["kl_mean"] == "inf"
    again = load_measurement(folder / "run")
    assert again.per_row[0].kl_mean == np.inf and number(again.summary["kl_max"]) == "inf"


def accumulation(folder: Path) -> None:
    """2e7 copies of 0.1: float64 sums; float32 ones would say 0.1048576."""
    count = 20_000_000
    same = {
        name: np.broadcast_to(np.array(0.1 if dtype == "float64" else 0, dtype=dtype), count)
        for name, dtype in SCORE_DTYPES.items()
    }
    found = row_summary(made.panel([made.row([0, 1])]), 0, Scores(**same))
    assert abs(found.kl_mean - 0.1) < 1e-9 and abs(found.nll_teacher_mean - 0.1) < 1e-9
    totals = group_totals(np.broadcast_to(0.1, 2_000_000), np.repeat(np.arange(4), 500_000))
    assert abs(totals.mean - 0.1) < 1e-9
    narrow = np.float32(0)
    for _ in range(20):
        narrow = np.cumsum(np.append(narrow, np.full(count // 20, 0.1, np.float32)), dtype=np.float32)[-1]
    assert narrow / count == pytest.approx(0.1048576, abs=1e-7)


def ties(folder: Path) -> None:
    """Teacher's top two equal (ids 3 and 9), candidate's choice 9: both ways of counting, and the tie."""
    p, q = torch.zeros(1, 12), torch.zeros(1, 12)
    p[0, [3, 9]], q[0, 9] = 5.0, 5.0
    scores = score_logits(p, q, ZERO)
    assert scores.agree[0] and not scores.agree_lowest_id[0]
    assert scores.tied_teacher[0] and not scores.tied_candidate[0]
    assert (scores.top1_teacher[0], scores.top1_candidate[0]) == (3, 9)
    rows = [made.row([0, 1])]
    found = made.receipt(folder, rows, [p.repeat(2, 1)], [q.repeat(2, 1)])
    assert (found.summary["top1_agreement"], found.summary["top1_agreement_lowest_id"]) == (1.0, 0.0)
    assert found.counts["tied_teacher"] == 1


def precision_label(folder: Path) -> None:
    """Near-equal rows of 50,000 entries: within 1e-12 of float64, where a float32 sum says -8e-7."""
    generator = torch.Generator().manual_seed(4)
    p = 4 * torch.randn(8, 50_000, generator=generator)
    q = p + 2e-4 * torch.randn(8, 50_000, generator=generator)
    lp, lq = (x.double().log_softmax(1).numpy() for x in (p, q))
    truth = (np.exp(lp) * (lp - lq)).sum(1)
    found = score_logits(p, q, np.zeros(8, np.int32)).kl
    assert 1e-8 < truth.min() and np.abs(found - truth).max() < 1e-12
    rough = (p.softmax(1) * (p.log_softmax(1) - q.log_softmax(1))).sum(1).numpy()
    assert np.abs(rough - truth).max() > 1e-9, "float32 would not do"


def named_direction(folder: Path) -> None:
    """The receipt says which way; nothing is added inside the logarithm; the last token is not scored."""
    p, q = logits(*[(0.9, 0.1)] * 3), logits(*[(0.5, 0.5)] * 3)
    found = made.receipt(folder, [made.row([0, 0, 0])], [p], [q])
    assert found.direction == DIRECTION and "KL(teacher||candidate)" in DIRECTION
    assert found.summary["kl_mean"] == pytest.approx(0.9 * np.log(1.8) + 0.1 * np.log(0.2), abs=1e-7)
    assert found.summary["kl_reverse_mean"] == pytest.approx(0.510826, abs=1e-6)
    assert found.positions == 2
    text = report_text(found, load_positions(folder / "run"), [])
    assert "KL(teacher‖candidate) mean, nats | 0.3681" in text and "KL(candidate‖teacher) mean | 0.5108" in text
    assert teacher_stats(p, np.zeros(3, np.int32)).nll[0] == pytest.approx(-np.log(0.9), abs=1e-7)


ROWS = [
    Fault(id="A21-inf-minus-inf", title="zeros of teacher and candidate", check=inf_minus_inf),
    Fault(id="A22-bf16-logits", title="logits in bf16 tie and cost 1e-4 nats", check=bf16_logits),
    Fault(id="A23-cache-precision", title="a teacher's store that clamps the tail", check=cache_precision),
    Fault(id="A24-negative-kl", title="negative KL: kept, counted, or refused", check=negative_kl),
    Fault(id="A25-argument-order", title="argument order and reduction of a KL", check=argument_order),
    Fault(id="A27-nan-positions", title="overflow and NaN at some positions", check=nan_positions),
    Fault(id="A29-nonfinite-json", title="infinities in JSON", check=nonfinite_json),
    Fault(id="A31-accumulation", title="sums of 2e7 numbers", check=accumulation),
    Fault(id="A32-ties", title="ties and top-1 agreement", check=ties),
    Fault(id="B5-precision-label", title="float64 by name, float32 by sum", check=precision_label),
    Fault(id="B6-direction", title="a metric's name carries its direction", check=named_direction),
]
