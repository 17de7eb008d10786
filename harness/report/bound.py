"""What a lower bound rests on, line by line: the mass that was known, and the numbers beside the bound.

None of them stands in a column with an exact KL: each line says what kind of number it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.measure.receipt import Measurement
from harness.numbers import number, percent, with_interval

#: How a receipt of an older or a published run calls the way of asking that it does not name.
WAYS = {
    "top-k": "the server's own top {k} tokens and the row's next token",
    "fixed ids": "the teacher's own top {k} tokens, as the server scores them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundLine:
    """One number beside a bound: its name, its value, and what it is."""

    name: str
    value: str
    meaning: str


def bound_lines(m: Measurement) -> list[BoundLine]:
    """The lines that belong under a lower bound; none for an exact measurement."""
    if m.estimator != "lower_bound":
        return []
    s = m.summary
    lines = [_line("known tokens", known_tokens(m), "the tokens of the bound; all others are one bucket")]
    masses = [percent(s.get(f"captured_teacher_mass_{name}")) for name in ("mean", "p01", "min")]
    meaning = "how much of the teacher's distribution the known tokens hold"
    lines.append(_line("captured teacher mass: mean / 1st percentile / least", " / ".join(masses), meaning))
    if "all_known_share" in s:
        name = "positions where all tokens asked for are known"
        lines.append(_line(name, percent(s["all_known_share"]), "the others hold less than was asked for"))
    return [*lines, *_numbers(m)]


def _numbers(m: Measurement) -> list[BoundLine]:
    s = m.summary
    out = []
    capped, total = m.intervals.get("kl_capped_mean"), m.intervals.get("kl_tail_estimate_mean")
    if m.scoring.get("way") != "fixed ids" and "kl_capped_mean" in s:
        meaning = "a lower bound too: tokens that the server did not name are no likelier than the last it named"
        out.append(_line("KL capped, mean", with_interval(s["kl_capped_mean"], capped), meaning))
    if s.get("kl_tail_estimate_mean") is not None:
        meaning = (
            f"unbiased for the full-vocabulary KL, from {m.scoring.get('tail_samples', 'the')} tokens a position drawn "
            f"from the teacher's tail; drawing other tokens moves it by {number(s['kl_tail_estimate_se'])} "
            "(standard error)"
        )
        out.append(_line("KL estimate, mean", with_interval(s["kl_tail_estimate_mean"], total), meaning))
    if "kl_shortfall_mean" in s:
        meaning = "a guess, no bound: what the bound lacks if the tail is disturbed as the known tokens are"
        out.append(_line("estimated shortfall of the bound, mean", number(s["kl_shortfall_mean"]), meaning))
    if "kl_renormalised_mean" in s:
        meaning = "**not a bound**: known tokens scaled to add up to 1, for published numbers made that way"
        out.append(_line("KL renormalised over the known tokens, mean", number(s["kl_renormalised_mean"]), meaning))
    return out


def known_tokens(m: Measurement) -> str:
    """``the server's own top 64 tokens and the row's next token``."""
    way, k = m.scoring.get("way"), m.scoring.get("k")
    return WAYS[way].format(k=k) if way in WAYS else "not told"


def floor_text(m: Measurement) -> str | None:
    """The floor that a receipt names: its mean KL, what was run against what, and in which run."""
    floor = m.scoring.get("floor")
    if not isinstance(floor, dict):
        return None
    return f"{number(floor['kl_mean'])} nats ({floor['kind']}, run {floor['run']})"


def repeat_text(m: Measurement) -> str:
    """What stands in for a floor that was not measured in a served lane: the preflight's same row twice, or nothing."""
    figures = [check.figure for check in m.preflight if check.name.startswith("the same row twice")]
    return f"; the same row twice: {figures[0]} nats" if m.lane == "served" and figures else ""


def agreement_text(m: Measurement) -> str:
    """Top-1 agreement, or the two shares between which it lies."""
    s = m.summary
    if s["top1_agreement"] is not None or "top1_agreement_low" not in s:
        return percent(s["top1_agreement"])
    return f"between {percent(s['top1_agreement_low'])} and {percent(s['top1_agreement_high'])}"


def _line(name: str, value: str, meaning: str) -> BoundLine:
    return BoundLine(name=name, value=value, meaning=meaning)
