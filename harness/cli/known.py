"""The built-in example's known answer: the committed receipt that the same code gave for the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.names import PROJECT

if TYPE_CHECKING:
    from harness.measure.receipt import Measurement

#: Its receipt is the answer, so that the answer stands in one place.
ANSWER = PROJECT / "reports" / "examples" / "example"
#: Forward passes in float32 differ in their last digits between processors: the KL by so much of itself, and a
#: tie of two tokens may fall to the other at so many positions. Both are far below the last digits that are shown.
KL_TOLERANCE, TIES = 1e-4, 4


def known_answer(found: Measurement) -> tuple[bool, str]:
    """Whether the example's measurement is what it has to be, and the line that says so.

    A run of other rows, another teacher or in another precision has no known answer, and is not called wrong.
    """
    from harness.measure.receipt import load_measurement

    if not (ANSWER / "measurement.json").is_file():
        return True, "known answer: not here; it lies in reports/examples of the project's checkout"
    known = load_measurement(ANSWER)
    if other := _another_question(found, known):
        return True, f"known answer: none for {other}"
    same = found.candidate.weights_sha256 == known.candidate.weights_sha256
    kl, expected = float(found.summary["kl_mean"]), float(known.summary["kl_mean"])
    agree, expected_agree = (int(run.summary["top1_agree_count"]) for run in (found, known))
    met = same and abs(kl - expected) <= KL_TOLERANCE * expected and abs(agree - expected_agree) <= TIES
    line = (
        f"known answer {'met' if met else 'NOT MET'}: weights {found.candidate.weights_sha256[:12]} "
        f"({'as expected' if same else f'expected {known.candidate.weights_sha256[:12]}'}), "
        f"KL {kl:.7f} (expected {expected:.7f}), top-1 equal at {agree:,} of {found.positions:,} "
        f"positions (expected {expected_agree:,})"
    )
    return met, line


def _another_question(found: Measurement, known: Measurement) -> str:
    """In what a run differs from the one whose answer is known, other than in its result; empty where in nothing."""
    if found.panel.sha256 != known.panel.sha256 or found.rows_measured != known.rows_measured:
        return "other rows than all of the example panel"
    if found.teacher.weights_sha256 != known.teacher.weights_sha256:
        return "another teacher"
    if found.candidate.engine != known.candidate.engine or found.estimator != known.estimator:
        return f"the engine {found.candidate.engine}"
    if found.candidate.compute_dtype != known.candidate.compute_dtype:
        return f"{found.candidate.compute_dtype}: it is of {known.candidate.compute_dtype}"
    return ""
