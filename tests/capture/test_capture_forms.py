"""The logits form, for heads that are not separable: what survives storage, what is refused."""

from __future__ import annotations

from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from harness.capture import CaptureWriter, open_capture, verify_capture
from harness.capture.encode import encode_logits
from harness.digest import ids_digest
from harness.errors import CaptureError
from harness.types import Hidden, Logits, Row
from tests.capture.made_captures import T, Tiny, V, make_identity, make_panel


def row_of(positions: int, vocab: int, index: int = 0) -> Row:
    ids = np.random.default_rng(index).integers(0, vocab, positions + 1).astype(np.int32)
    return Row(index=index, ids_T=ids, document="d", domain="test", sha256=ids_digest(ids))


def kl(p_logits: np.ndarray, q_logits: np.ndarray) -> float:
    """KL in 40 digits of the softmaxes of two float vectors."""
    with mpmath.workdps(40):
        p, q = ([mpmath.e ** mpmath.mpf(float(x)) for x in row] for row in (p_logits, q_logits))
        zp, zq = mpmath.fsum(p), mpmath.fsum(q)
        terms = (a / zp * mpmath.log((a / zp) / (b / zq)) for a, b in zip(p, q, strict=True) if a > 0)
        return float(mpmath.fsum(terms))


def logits_with_tail(positions: int = 3, vocab: int = 400) -> torch.Tensor:
    """High-entropy rows whose smallest log-probability lies 40 nats under the largest."""
    generator = torch.Generator().manual_seed(2)
    logits = 20 + 2 * torch.randn(positions + 1, vocab, generator=generator)
    logits[:, 7] = logits.max(1).values - 40
    return logits


def test_round_trip_of_a_row_40_nats_deep() -> None:
    """|KL(P, cached P)| < 1e-6 and |sum exp - 1| < 1e-6."""
    logits = logits_with_tail()
    row = row_of(3, 400)
    got = encode_logits(row, Logits(logits_TV=logits), torch.float16)
    stored = got.array.double().numpy()
    for t in range(3):
        assert abs(kl(logits[t].numpy(), stored[t])) < 1e-6
        logp = stored[t] - got.columns["logsumexp"][t]
        assert abs(np.exp(logp).sum() - 1) < 1e-12
        assert got.columns["nll"][t] == pytest.approx(-logp[row.ids_T[t + 1]], abs=1e-14)
        assert stored[t, 7] == pytest.approx(-40, abs=0.02)
        assert got.columns["entropy"][t] == pytest.approx(-(np.exp(logp) * logp).sum(), abs=1e-12)
    assert np.array_equal(got.columns["top1"], logits[:-1].argmax(1))


def test_bf16_logits_are_never_stored() -> None:
    """bf16 has steps of 0.125 at 20, and ties 20.06 with 20.00; centred fp16 keeps them apart."""
    logits = torch.zeros(2, 50)
    logits[:, 3], logits[:, 4] = 20.00, 20.06
    assert logits.to(torch.bfloat16)[0, 3] == logits.to(torch.bfloat16)[0, 4]
    with pytest.raises(CaptureError, match="cannot be stored as torch.bfloat16"):
        encode_logits(row_of(1, 50), Logits(logits_TV=logits), torch.bfloat16)
    got = encode_logits(row_of(1, 50), Logits(logits_TV=logits), torch.float16)
    assert got.columns["top1"][0] == 4 and got.array[0, 3] < 0


def test_what_fp16_cannot_hold_is_refused_and_fp32_holds_it() -> None:
    logits = torch.zeros(3, 20)
    logits[1, 5] = -1e5
    with pytest.raises(CaptureError, match=r"position 1: a logit lies 100000 below the maximum"):
        encode_logits(row_of(2, 20), Logits(logits_TV=logits), torch.float16)
    assert encode_logits(row_of(2, 20), Logits(logits_TV=logits), torch.float32).array[1, 5] == -1e5


def test_a_flat_row_around_a_far_maximum_does_not_survive_fp16() -> None:
    """All the mass lies where fp16 has steps of 1/128: refused with the position, fp32 takes it."""
    logits = 20 + torch.rand(3, 200_000, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = 30.0
    row = row_of(2, 200)
    with pytest.raises(CaptureError, match="the limit is 1e-06"):
        encode_logits(row, Logits(logits_TV=logits), torch.float16)
    encode_logits(row, Logits(logits_TV=logits), torch.float32)


def test_masked_logits_stay_masked() -> None:
    logits = logits_with_tail()
    logits[:, 100:200] = -torch.inf
    row = row_of(3, 90)
    got = encode_logits(row, Logits(logits_TV=logits), torch.float16)
    assert torch.isinf(got.array[:, 100:200]).all()
    assert np.isfinite(got.columns["entropy"]).all()
    assert abs(kl(logits[0].numpy(), got.array[0].numpy())) < 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_logit_that_is_not_a_number_is_located(bad: float) -> None:
    logits = logits_with_tail()
    logits[2, 9] = bad
    with pytest.raises(CaptureError, match="row 0, position 2: a logit is NaN or"):
        encode_logits(row_of(3, 400), Logits(logits_TV=logits), torch.float16)
    with pytest.raises(CaptureError, match="all are -inf"):
        encode_logits(row_of(3, 400), Logits(logits_TV=torch.full((4, 9), -torch.inf)), torch.float16)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_logits_capture_is_written_read_and_verified(tmp_path: Path, dtype: str) -> None:
    panel = make_panel([T] * 2)
    logits = [torch.randn(T, V, generator=torch.Generator().manual_seed(i)) * 4 for i in range(2)]
    with CaptureWriter(tmp_path / "a", make_identity("none"), panel, None, "logits", dtype) as writer:
        for row, values in zip(panel.rows, logits, strict=True):
            writer.write_row(row, Logits(logits_TV=values))
        writer.finish()
    capture = open_capture(tmp_path / "a", panel=panel)
    assert capture.head is None and capture.manifest.key.cut_point == "lm_head_output_minus_row_max"
    got = capture.row(1)
    assert isinstance(got.outputs, Logits) and got.outputs.logits_TV.shape == (T - 1, V)
    assert float(got.outputs.logits_TV.max()) == 0.0
    assert all(check.passed for check in verify_capture(capture, panel))
    with pytest.raises(CaptureError, match="holds Logits, not hidden states"):
        _ = got.states_TH


def test_outputs_of_another_form_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    with CaptureWriter(tmp_path / "a", tiny.identity, tiny.panel, None, "logits", "float16") as writer:
        with pytest.raises(CaptureError, match="the engine gave Hidden, this capture holds the logits form"):
            writer.write_row(tiny.panel.rows[0], Hidden(states_TH=tiny.states[0]))
    with pytest.raises(ValueError):
        CaptureWriter(tmp_path / "b", tiny.identity, tiny.panel, tiny.head, "logits", "float16")
