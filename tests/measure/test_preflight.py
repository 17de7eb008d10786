"""The checks before scoring, on the toy engine and on engines that do one thing wrong each."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.errors import EngineError, ScoreError
from harness.measure.preflight import check_echo, check_support, probes_of
from harness.measure.repeat import check_same, difference_of
from harness.types import Logits, Row, RowOutputs
from tests.engines.toy import ToyEngine
from tests.measure.checked import check_engine


def counting_row(length: int = 40, vocab: int = 16) -> Row:
    return Row(index=3, ids_T=np.arange(length, dtype=np.int32) % vocab, document="d", domain="x", sha256="")


class Wrong(ToyEngine):
    """The toy engine with its outputs changed on the way out."""

    def __init__(self, change, **options):
        super().__init__(**options)
        self._change = change

    def run(self, rows, want="logits"):
        for number, out in enumerate(super().run(rows, want)):
            yield self._change(out, number)


def shifted(out: RowOutputs, _: int) -> RowOutputs:
    return replace(out, outputs=Logits(logits_TV=out.outputs.logits_TV.roll(1, dims=0)))


def uniform(out: RowOutputs, _: int) -> RowOutputs:
    return replace(out, outputs=Logits(logits_TV=torch.zeros_like(out.outputs.logits_TV)))


def test_toy_engine_passes_with_its_exact_nll():
    """Aligned outputs of P(next) = 0.9 have NLL -ln 0.9 = 0.105."""
    checks = {check.name: check for check in check_engine(ToyEngine(), counting_row())}
    assert all(check.passed for check in checks.values())
    assert f"mean {-math.log(0.9):.4f}" in checks["NLL is a language model's"].figure


def test_outputs_shifted_by_one_are_refused():
    """Position t scored with the outputs of t - 1 gives numbers that look like a bad quant."""
    with pytest.raises(ScoreError, match="off by one"):
        check_engine(Wrong(shifted), counting_row())


def test_uniform_outputs_are_refused():
    """NLL = ln V means that no weights were loaded."""
    with pytest.raises(ScoreError, match="uniform output"):
        check_engine(Wrong(uniform), counting_row())


def test_nll_of_zero_everywhere_is_refused():
    """Speculative decoding once reported logprob 0.0 for every token."""
    with pytest.raises(ScoreError, match="NLL = 0 on 100%"):
        check_engine(ToyEngine(p=1 - 1e-300), counting_row())


def test_engine_that_differs_between_repeats_is_told():
    """A repeated row that is not bit-equal becomes a line with its figure, in nats."""

    def noisy(out: RowOutputs, number: int) -> RowOutputs:
        moved = out.outputs.logits_TV.clone()
        moved[:, 0] += size * number  # only token 0 has other logits: P(0) is 0.9 where it is next, else 0.0067
        return replace(out, outputs=Logits(logits_TV=moved))

    size = 0.1
    repeat = [c for c in check_engine(Wrong(noisy), counting_row()) if "twice" in c.name]
    want = 0.2 - np.log(0.1 / 15 * np.exp(0.2) + 1 - 0.1 / 15)  # the first and the third request
    assert not repeat[0].passed and repeat[0].figure.startswith(f"max |difference| {want:.3g} at position")
    size = 1.0
    with pytest.raises(EngineError, match="row 3: the same tokens have other log-probabilities after a row with the"):
        check_engine(Wrong(noisy), counting_row())


def test_what_both_answers_lack_is_no_difference():
    """-inf and NaN at the same places are equal; where only one has them, nothing compares."""
    logits = ToyEngine().run([counting_row()])
    a = next(iter(logits)).outputs.logits_TV
    b = a.clone()
    a[:, 5], b[:, 5] = -np.inf, -np.inf
    b[7, 3] += 1e-4
    found = difference_of(Logits(logits_TV=a), Logits(logits_TV=b), None, np.zeros(39, np.int64))
    assert not found.equal and 0 < found.largest < 2e-4 and found.at == 7
    b[9, 5] = 0.0
    assert difference_of(Logits(logits_TV=a), Logits(logits_TV=b), None, np.full(39, 5)).largest == np.inf
    b[9, 5] = np.nan
    broken = difference_of(Logits(logits_TV=a), Logits(logits_TV=b), None, np.full(39, 5))
    assert broken.largest == np.inf
    with pytest.raises(EngineError, match="max .difference. inf at position 9"):
        check_same(0, broken, name="n", cause="again", repair="r")


@pytest.mark.parametrize(
    ("echoed", "message"),
    [
        (np.array([9, *range(1, 40)]) % 16, "ran token 9 at index 0, the panel has 0"),
        (np.arange(41) % 16, "ran 41 tokens, the panel has 40"),
    ],
)
def test_other_tokens_than_the_panels_are_refused(echoed, message):
    """A BOS added or a token changed by the engine is named with row and index."""
    out = RowOutputs(index=3, echoed_ids_T=echoed.astype(np.int32), outputs=Logits(logits_TV=torch.zeros(40, 16)))
    with pytest.raises(EngineError, match=message):
        check_echo(counting_row(), out)


def test_vocabularies_must_be_one():
    """Padding is fine, another vocabulary is not."""
    assert "padding columns: teacher 2, candidate 0" in check_support(8, 6, 6, 6).figure
    with pytest.raises(ScoreError, match="8 tokens and the candidate 6"):
        check_support(8, 6, 8, 6)


def test_the_probe_is_run_around_a_row_that_begins_like_it():
    """r0, r1 with a common beginning, r0 again; tokens of r1 are of the row itself."""
    first, beside, again = probes_of(counting_row(300, 97))
    assert len(first.ids_T) == len(beside.ids_T) == 256 and np.array_equal(first.ids_T, again.ids_T)
    assert np.array_equal(first.ids_T[:128], beside.ids_T[:128])
    assert not np.array_equal(first.ids_T, beside.ids_T)
    assert sorted(first.ids_T) == sorted(beside.ids_T)
