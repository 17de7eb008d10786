"""The built-in example ends with its known answer: met, not met, or none for another question."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.cli import known
from harness.measure.receipt import load_measurement

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "reports" / "examples" / "example"


def test_the_committed_example_is_its_own_answer():
    met, line = known.known_answer(load_measurement(EXAMPLE))
    assert met and line.startswith("known answer met: weights ")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("kl_mean", 1.001, "KL 0.0549"), ("top1_agree_count", 0.999, "top-1 equal at 7,0")],
)
def test_another_number_is_not_met(field, value, words):
    found = load_measurement(EXAMPLE)
    found.summary[field] = type(found.summary[field])(found.summary[field] * value)
    met, line = known.known_answer(found)
    assert not met and line.startswith("known answer NOT MET: ") and words in line


def test_other_bytes_are_not_met():
    found = load_measurement(EXAMPLE)
    other = found.candidate.model_copy(update={"weights_sha256": "0" * 64})
    met, line = known.known_answer(found.model_copy(update={"candidate": other}))
    assert not met and "weights 000000000000 (expected " in line


def test_another_question_has_no_known_answer():
    met, line = known.known_answer(
        load_measurement(ROOT / "reports" / "examples" / "mlp-3bit").model_copy(update={"rows_measured": 4})
    )
    assert met and line == "known answer: none for other rows than all of the example panel"


def test_without_the_checkout_it_says_where_the_answer_lies(tmp_path, monkeypatch):
    shutil.copy(EXAMPLE / "measurement.json", tmp_path)
    monkeypatch.setattr(known, "ANSWER", tmp_path / "none")
    assert known.known_answer(load_measurement(EXAMPLE))[1].startswith("known answer: not here")
