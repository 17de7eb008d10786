"""The tables of a comparison as plain text cells; the terminal and report.md show the same ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.compare.model import ArmResult, Comparison, Difference, Estimated, Pair, RowDifference, Slice, Tails
from harness.measure.quantities import QUANTILES
from harness.numbers import (
    MISSING,
    WITHHELD,
    bracket,
    count,
    ends,
    number,
    percent,
    signed,
    size,
    supported_decimals,
)
from harness.report.table import Table
from harness.report.words import bars_title, margin_source, reason

#: Decimals of single values, as published cards show them.
DECIMALS = 5
#: Whether a registered bar was met.
BAR_WORDS = {True: "met", False: "NOT met", None: "not measured"}


def interval_text(figure: Estimated, factor: float = 1.0) -> str:
    """``[-0.0674, -0.0497]`` with the digits it supports."""
    return bracket(figure.scaled(factor))


def figure_text(figure: Estimated, factor: float = 1.0) -> str:
    """An estimate and its interval with the digits that the interval supports."""
    if figure.low is None or figure.high is None:
        return signed(factor * figure.estimate)
    places = supported_decimals(factor * figure.low, factor * figure.high)
    return f"{signed(factor * figure.estimate, places)} {interval_text(figure, factor)}"


def change(d: Difference) -> str:
    """``+1.94 pp`` of a share, ``-15.3 %`` of anything that has a ratio."""
    if d.unit == "share":
        return f"{signed(100 * (d.other - d.baseline), 2)} pp"
    return relative(d.baseline, d.other) if d.baseline > 0 else MISSING


def relative(baseline: float, other: float) -> str:
    """``-15.3 %``."""
    if not baseline:
        return MISSING if other else "0 %"
    return f"{signed(100 * (other / baseline - 1), 1)} %"


def summary(comparison: Comparison, pair: Pair) -> Table:
    """One candidate against the baseline, the primary metric first."""
    rows: list[tuple[str, ...]] = []
    for d in pair.differences:
        rows.append(
            (
                f"{metric_label(comparison, d)}{' *' if d.role == 'primary' else ''}",
                number(d.baseline, DECIMALS),
                number(d.other, DECIMALS),
                change(d),
                figure_text(d.band or d.difference),
                interval_text(d.bootstrap),
                _contexts(d),
                d.verdict,
            )
        )
        if d.metric == "nll_candidate":
            rows.append(_ppl_row(comparison, pair))
    level = f"{comparison.settings.confidence * 100:g} %"
    header = (
        "metric",
        pair.baseline,
        pair.other,
        "change",
        f"difference [{level}]",
        "bootstrap",
        "lower / higher",
        "verdict",
    )
    return Table(f"{pair.other} - {pair.baseline}", header, rows)


def _ppl_row(comparison: Comparison, pair: Pair) -> tuple[str, ...]:
    arms = {arm.name: arm for arm in comparison.arms}
    values = [number(arms[name].ppl_token.estimate, DECIMALS) for name in (pair.baseline, pair.other)]
    ratio = pair.ppl_ratio
    places = supported_decimals(ratio.low, ratio.high) if ratio.low is not None and ratio.high is not None else None
    text = f"x {number(ratio.estimate, places)} {interval_text(ratio)}"
    return ("PPL per token", *values, relative(1.0, ratio.estimate), text, "", "", "")


def metric_label(comparison: Comparison, d: Difference) -> str:
    """The metric with its unit, and with its kind where KL is a lower bound."""
    name = d.label.replace("KL", comparison.kl)
    return f"{name}, mean nats" if d.unit == "nats" else name


def _contexts(d: Difference) -> str:
    tied = f" ({d.signs.rows_tied} tied)" if d.signs.rows_tied else ""
    return f"{d.signs.rows_lower} / {d.signs.rows_higher}{tied}"


def arms(comparison: Comparison) -> Table:
    """Each arm by itself: what it is, its means, percentiles, tail and maximum; floor and anchors beside it."""
    header = ("", *(arm.name for arm in comparison.arms), *(f"{r.name} ({r.kind})" for r in comparison.references))
    rows = [
        _line("size", [size(arm.candidate.bytes) for arm in comparison.arms], comparison),
        _line("bits per weight", [number(arm.candidate.bits_per_weight, 3) for arm in comparison.arms], comparison),
        (
            f"{comparison.kl}, mean",
            *(number(arm.metrics["kl_mean"].estimate, DECIMALS) for arm in comparison.arms),
            *(number(r.kl.estimate, DECIMALS) for r in comparison.references),
        ),
        (
            "  interval",
            *(ends(arm.metrics["kl_mean"]) for arm in comparison.arms),
            *(ends(r.kl) for r in comparison.references),
        ),
        (
            "top-1 agreement",
            *(number(arm.metrics["top1_agreement"].estimate, DECIMALS) for arm in comparison.arms),
            *(number(r.top1_agreement, DECIMALS) for r in comparison.references),
        ),
        _line("PPL per token", [number(arm.ppl_token.estimate, DECIMALS) for arm in comparison.arms], comparison),
    ]
    rows += [_line(*line, comparison) for line in _quantile_lines(comparison)]
    rows += [_line(*line, comparison) for line in _tail_lines(comparison)]
    rows.append(_line(f"{comparison.kl} max", [_largest(arm) for arm in comparison.arms], comparison))
    rows.append(_line(f"top row's share of {comparison.kl}", [_share(arm) for arm in comparison.arms], comparison))
    rows.append(_line("mean without any one row", [_leave_one_out(arm) for arm in comparison.arms], comparison))
    return Table("Each by itself", header, rows)


def _line(label: str, cells: Sequence[str], comparison: Comparison) -> tuple[str, ...]:
    return (label, *cells, *("" for _ in comparison.references))


def _quantile_lines(comparison: Comparison) -> list[tuple[str, list[str]]]:
    if comparison.paired_on.basis == "positions":
        return [(f"{comparison.kl} {name}", [_quantile(arm, name) for arm in comparison.arms]) for name in QUANTILES]
    published = [key for key in ("kl_p50", "kl_p95", "kl_p99") if all(key in arm.published for arm in comparison.arms)]
    return [
        (f"{comparison.kl} {key[3:]} (published)", [number(arm.published[key], DECIMALS) for arm in comparison.arms])
        for key in published
    ]


def _quantile(arm: ArmResult, name: str) -> str:
    figure = arm.quantiles.get(name)
    if figure is None:
        return WITHHELD
    text = number(figure.estimate, DECIMALS)
    return f"{text} {interval_text(figure)}" if figure.low is not None else text


def _tail_lines(comparison: Comparison) -> list[tuple[str, list[str]]]:
    names = [name for name in comparison.arms[0].metrics if name.startswith("tail_rate_")]
    return [
        (
            f"positions with {comparison.kl} > {name.removeprefix('tail_rate_')}",
            [_rate(arm.metrics[name]) for arm in comparison.arms],
        )
        for name in names
    ]


def _rate(figure: Estimated) -> str:
    text = percent(figure.estimate)
    return f"{text} {interval_text(figure, 100.0)}" if figure.low is not None else text


def _largest(arm: ArmResult) -> str:
    if arm.largest is None:
        return MISSING
    where = "" if arm.largest.row is None else f" (row {arm.largest.row}, position {arm.largest.position})"
    return f"{number(arm.largest.value, DECIMALS)} of {count(arm.largest.positions)}{where}"


def _share(arm: ArmResult) -> str:
    return MISSING if arm.share is None else f"{percent(arm.share.share, 1)} (row {arm.share.row})"


def _leave_one_out(arm: ArmResult) -> str:
    if arm.share is None:
        return MISSING
    return f"{number(arm.share.leave_one_out_low, DECIMALS)} to {number(arm.share.leave_one_out_high, DECIMALS)}"


def verdicts(comparison: Comparison, pair: Pair) -> Table:
    """Margins, tests and reasons behind the verdicts."""
    rows = [
        (
            metric_label(comparison, d),
            d.role,
            number(d.margin) if d.margin is not None else MISSING,
            margin_source(d),
            number(d.p, None) if d.p is not None else MISSING,
            number(d.p_holm, None) if d.p_holm is not None else "",
            number(d.p_equivalence, None) if d.p_equivalence is not None else MISSING,
            f"{d.verdict}: {reason(comparison, pair, d)}",
        )
        for d in pair.differences
    ]
    header = ("metric", "role", "margin", "from", "p (no difference)", "p Holm", "p (equivalence)", "verdict and why")
    return Table("Verdicts", header, rows)


def resolution(comparison: Comparison, pair: Pair) -> Table:
    """What this panel could have shown with 80 % power."""
    unit = comparison.settings.unit
    rows = [
        (
            metric_label(comparison, d),
            number(d.resolution.detectable),
            percent(d.resolution.detectable_relative, 1) if d.resolution.detectable_relative is not None else MISSING,
            count(d.resolution.units_for_a_tenth),
        )
        for d in pair.differences
    ]
    header = ("metric", "smallest difference shown", "of the baseline", f"{unit}s needed for 10 %")
    return Table(f"What {comparison.settings.units} {unit}s can resolve (80 % power)", header, rows)


def bars(comparison: Comparison, words: Mapping[bool | None, str] = BAR_WORDS) -> Table:
    """Registered bars and what came out."""
    rows = [
        (bar.arm, bar.name, bar.statement, number(bar.value), number(bar.threshold), words[bar.met])
        for bar in comparison.bars
    ]
    return Table(bars_title(comparison), ("candidate", "bar", "condition", "value", "threshold", ""), rows)


def tails_table(pair: Pair, tails: Tails) -> Table:
    """The figures behind the warning, both arms side by side."""
    rows = [
        ("teacher mass outside the known tokens", percent(tails.uncovered_baseline), percent(tails.uncovered_other)),
        ("shortfall of the bound, a guess, nats", number(tails.shortfall_baseline), number(tails.shortfall_other)),
        ("difference of the bounds, nats", "", signed(tails.difference)),
        ("difference of the tails' divergences that undoes it, nats", "", number(tails.overturning)),
    ]
    if tails.log_range is not None:
        assumed = f"most that the tails can move it, if ln(p/q) varies by {number(tails.log_range)} there, nats"
        rows.append((assumed, "", number(tails.could_move) if tails.could_move is not None else MISSING))
    return Table("What the bounds leave out", ("", pair.baseline, pair.other), rows)


# Tables of where a difference lies: rows, domains, positions, confidence, flips, and the worst positions.

#: A report lists at most this many rows from each end.
ROWS_SHOWN = 32


def rows_table(comparison: Comparison, pair: Pair) -> Table:
    """Rows by difference, lowest first; a long panel shows both ends."""
    ordered = sorted(pair.rows, key=lambda r: (r.difference, r.row))
    if len(ordered) > 2 * ROWS_SHOWN:
        ordered = ordered[:ROWS_SHOWN] + ordered[-ROWS_SHOWN:]
    title = (
        f"{comparison.kl} by row ({len(ordered)} of {len(pair.rows)}); the interval speaks of this context's text only"
    )
    header = ("row", "domain", "document", "positions", pair.baseline, pair.other, "difference", "top-1, pp", "NLL")
    return Table(title, header, [_row(r) for r in ordered])


def _row(r: RowDifference) -> tuple[str, ...]:
    places = supported_decimals(r.low, r.high) if r.low is not None and r.high is not None else None
    own = f" {bracket(r)}" if r.low is not None and r.high is not None else ""
    return (
        str(r.row),
        r.domain,
        r.document,
        count(r.positions),
        number(r.baseline, 4),
        number(r.other, 4),
        signed(r.difference, places or DECIMALS) + own,
        signed(100 * r.top1_difference, 2),
        signed(r.nll_difference, 4),
    )


def slices(title: str, pair: Pair, parts: Sequence[Slice]) -> Table:
    """KL by domain, position or confidence."""
    rows = [
        (
            part.label,
            count(part.positions),
            str(part.units),
            number(part.baseline, DECIMALS),
            number(part.other, DECIMALS),
            figure_text(part.difference),
            number(part.p_holm, None) if part.p_holm is not None else MISSING,
            signed(100 * part.top1_difference, 2),
        )
        for part in parts
    ]
    header = ("", "positions", "units", pair.baseline, pair.other, "difference", "p Holm", "top-1, pp")
    return Table(title, header, rows)


def flips(comparison: Comparison) -> Table:
    """What each arm makes of the positions that the teacher gets right."""
    rows = [
        (
            arm.name,
            count(arm.flips.teacher_right),
            count(arm.flips.candidate_right),
            count(arm.flips.right_to_wrong),
            count(arm.flips.wrong_to_right),
        )
        for arm in comparison.arms
        if arm.flips
    ]
    header = ("", "teacher right", "candidate right", "right to wrong", "wrong to right")
    return Table("Most likely token against the text", header, rows)


def agreement_flips(pairs: Sequence[Pair]) -> Table:
    """Agreement with the teacher's most likely token, gained and lost."""
    rows = [
        (
            f"{p.other} - {p.baseline}",
            *map(count, (p.flips.both, p.flips.baseline_only, p.flips.other_only, p.flips.neither)),
        )
        for p in pairs
        if p.flips
    ]
    header = ("", "both agree", "only the baseline", "only the candidate", "neither")
    return Table("Agreement with the teacher's most likely token", header, rows)


def worst(comparison: Comparison) -> Table:
    """The positions with the largest KL in any arm."""
    names = [arm.name for arm in comparison.arms]
    rows = []
    for p in comparison.worst:
        texts = p.texts or {}
        rows.append(
            (
                f"{p.row}:{p.position}",
                p.domain,
                *(number(p.kl[name], 3) for name in names),
                percent(p.p_top1_teacher, 1),
                _token(p.target, texts.get("target")),
                _token(p.top1_teacher, texts.get("teacher")),
                *(_token(p.top1[name], texts.get(name)) for name in names),
                texts.get("context", " ".join(str(i) for i in p.context[-6:])),
            )
        )
    kl = [f"{comparison.kl} {name}" for name in names]
    header = ("row:position", "domain", *kl, "teacher's p", "true token", "teacher", *names, "context")
    return Table(f"The {len(rows)} positions with the largest {comparison.kl}", header, rows)


def _token(token: int, text: str | None) -> str:
    return str(token) if text is None else f"{token} {text!r}"
