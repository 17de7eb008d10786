"""The HTML report of one run: all that report.md says, and the worst positions one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from harness.receipt import Measurement, RowSummary, load_measurement
from harness.report import tables
from harness.report.basis import of_measurement
from harness.report.bound import bound_lines
from harness.report.card_pictures import drawings
from harness.report.card_sources import Part
from harness.report.caveats import cannot_tell, how_measured
from harness.report.html_page import Decoder, Expanded, Page, Table, context_text, labels_of, shown
from harness.report.numbers import bracket, count, estimate, number, percent, percent_bracket
from harness.report.run_report import count_lines, headline, identity_lines, slope_sentence, started
from harness.report.tables import Bucket

WORST = 20
#: Token ids shown in front of a position.
CONTEXT = 24


def run_page(folder: Path, decoder: Decoder | None = None) -> Page:
    """All that report.md says, and the worst positions one by one."""
    m, frame = load_measurement(folder), tables.load_positions(folder)
    units, unit = tables.units_of(frame, m), m.panel.unit
    basis = of_measurement(m, started=started(folder), top_row=tables.top_row_share(frame))
    lines = [(line.name, line.value, line.interval) for line in headline(m, frame, units)]
    return Page(
        title=f"{m.candidate.model} against {m.teacher.model}",
        lead=f"Measurement {m.name}, key {m.key[:12]}. KL(teacher‖candidate) in nats.",
        labels=labels_of(basis, m.label),
        tables=[
            Table(title="Headline", header=("", "value", "interval"), rows=lines),
            *_bound(m),
            Table(title="Not ordinary", header=("", "positions"), rows=[(x.name, x.value) for x in count_lines(m)]),
        ],
        pictures=[shown(d.picture, d.draw) for d in drawings(_run_part(m, folder), m.name) if d.draw],
        details=[
            _rows_table(m.per_row),
            _buckets("By domain", "domain", tables.by_domain(frame, units, m)),
            _buckets(
                "By position",
                "positions of the row",
                tables.by_position(frame, units, unit),
                slope_sentence(tables.slope(frame, units, unit)).replace("**", ""),
            ),
            _buckets("By the teacher's confidence", "top-1 probability", tables.by_confidence(frame, units, unit)),
            _checks(m),
            Table(title="Identity", header=("", "teacher", "candidate"), rows=identity_lines(m)),
        ],
        worst=list(_worst_of_run(m, frame, decoder)),
        how=how_measured(basis),
        cannot=cannot_tell(basis),
    )


def _bound(m: Measurement) -> list[Table]:
    """What a lower bound rests on; nothing for an exact measurement."""
    rows = [(line.name, line.value, line.meaning.replace("**", "")) for line in bound_lines(m)]
    title = "What the lower bound rests on"
    return [Table(title=title, header=("", "value", "what it is"), rows=rows)] if rows else []


def _run_part(m: Measurement, folder: Path) -> Part:
    return Part(comparison=None, measurement=m, runs=(folder,))


def _rows_table(rows: Sequence[RowSummary]) -> Table:
    header = ("row", "document", "domain", "positions", "KL mean", "KL max", "top-1", "NLL teacher", "NLL candidate")
    lines = [
        (
            str(row.row),
            row.document,
            row.domain,
            count(row.positions),
            number(row.kl_mean, 5),
            number(row.kl_max),
            percent(row.top1_agreement),
            number(row.nll_teacher_mean, 4),
            number(row.nll_candidate_mean, 4),
        )
        for row in rows
    ]
    return Table(title="Every row", header=header, rows=lines)


def _buckets(title: str, first: str, buckets: Sequence[Bucket], note: str = "") -> Table:
    header = (first, "positions", "KL mean", "interval of KL", "top-1", "interval of top-1")
    rows = [
        (
            b.label,
            count(b.positions),
            estimate(b.kl.estimate, b.kl),
            bracket(b.kl),
            percent(b.agreed),
            percent_bracket(b.agreement),
        )
        for b in buckets
    ]
    return Table(title=title, header=header, rows=rows, note=note)


def _checks(m: Measurement) -> Table:
    rows = [(c.name, "passed" if c.passed else "FAILED", c.figure, c.note) for c in m.preflight]
    return Table(title="Preflight", header=("check", "", "figure", "note"), rows=rows)


def _worst_of_run(m: Measurement, frame: pd.DataFrame, decoder: Decoder | None) -> Iterator[Expanded]:
    named = {row.row: row for row in m.per_row}
    for p in tables.worst_positions(frame, WORST).to_dict("records"):
        row, place = named[int(p["row"])], int(p["position"])
        near = frame[(frame["row"] == row.row) & frame["position"].between(place - CONTEXT, place - 1)]
        teacher, candidate = _token(p["top1_teacher"], decoder), _token(p["top1_candidate"], decoder)
        figures = [
            ("next token", _token(p["target"], decoder)),
            ("teacher's choice", f"{teacher}, p = {number(p['p_top1_teacher'], 3)}"),
            ("candidate's choice", candidate),
            ("rank of the teacher's choice in the candidate", count(p["rank"] if p["rank"] > 0 else None)),
            ("NLL teacher / candidate", f"{number(p['nll_teacher'], 3)} / {number(p['nll_candidate'], 3)}"),
            ("entropy teacher / candidate", f"{_told(p['entropy_teacher'])} / {_told(p['entropy_candidate'])}"),
            ("total variation", _told(p["tv"])),
        ]
        heading = f"KL {number(p['kl'])} at row {row.row}, position {place} ({row.domain}, {row.document})"
        yield Expanded(heading=heading, figures=figures, context=context_text(near["target"].tolist(), decoder))


def _told(value: float) -> str:
    """A position's number, or that it is not there: a server's answer holds some of them only."""
    return number(None if math.isnan(value) else value)


def _token(token: float, decoder: Decoder | None) -> str:
    if token < 0:
        return "not known"
    return f"{int(token)}" if decoder is None else f"{decoder.decode([int(token)])!r} ({int(token)})"
