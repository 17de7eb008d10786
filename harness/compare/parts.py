"""Tables of where a difference lies: rows, domains, positions, confidence, flips, and the worst positions."""

from __future__ import annotations

from collections.abc import Sequence

from harness.compare.model import Comparison, Pair, RowDifference, Slice
from harness.compare.tables import DECIMALS, Ends, Table, figure_text
from harness.report.numbers import MISSING, bracket, count, number, percent, signed, supported_decimals

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
    own = f" {bracket(Ends(r.low, r.high))}" if r.low is not None and r.high is not None else ""
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
