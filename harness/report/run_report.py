"""One measurement, from measurement.json and positions.parquet alone: its tables, report.md, and the terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.measure.receipt import Interval, Measurement, RowSummary, load_measurement
from harness.numbers import (
    WITHHELD,
    bracket,
    count,
    ends,
    estimate,
    number,
    percent,
    percent_ends,
    signed,
    size,
    with_interval,
)
from harness.report import tables
from harness.report.basis import (
    agreement_text,
    bound_lines,
    cannot_tell,
    floor_text,
    how_measured,
    of_measurement,
    repeat_text,
)
from harness.report.plots import Picture, write_pictures
from harness.report.table import Table, render
from harness.stats import Estimate, exponentiated
from harness.store import refuse_paths, write_text

if TYPE_CHECKING:
    from rich.table import Table as RichTable

#: Worst rows and positions of report.md, and worst rows in the terminal.
WORST_ROWS, WORST_POSITIONS, SHOWN_ROWS = 5, 10, 3
NOT_FINITE = "not finite"
#: Per-row tables longer than this are folded.
FOLD_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a headline table: what, its value, its interval or the reason why there is none."""

    name: str
    value: str
    interval: str = ""


def write_report(folder: Path) -> Path:
    """Write report.md and its pictures into a run folder; returns the report's path."""
    measurement, frame = load_measurement(folder), tables.load_positions(folder)
    pictures = write_pictures(folder, frame, measurement)
    text = report_text(measurement, frame, pictures, started=started(folder))
    refuse_paths("report.md", text)
    write_text(folder / "report.md", text)
    return folder / "report.md"


def started(folder: Path) -> str | None:
    """When the run began (ISO 8601), from run.json; None where that is not known."""
    file = folder / "run.json"
    return json.loads(file.read_text()).get("started") if file.is_file() else None


def report_text(
    measurement: Measurement, frame: pd.DataFrame, pictures: list[Picture], *, started: str | None = None
) -> str:
    """The Markdown of report.md."""
    return render("report.md.j2", **_context(measurement, frame, started), pictures=pictures)


def _context(m: Measurement, frame: pd.DataFrame, started: str | None) -> dict[str, Any]:
    """All that the template shows of one measurement."""
    shown, basis = run_tables(m, frame), of_measurement(m, started=started)
    size_lines = [
        ("size of the candidate", size(m.candidate.bytes), "counted in its files"),
        ("bits per weight", number(m.candidate.bits_per_weight, 3), "counted in its tensors"),
    ]
    return {
        "m": m,
        "headline": replace(shown.headline, rows=[*shown.headline.rows, *size_lines]),
        "bound": shown.bound,
        "counts": shown.counts.under("", ("not ordinary", "positions")),
        "worst_rows": rows_table(worst_rows(m)[:WORST_ROWS]),
        "rows": shown.rows,
        "fold": len(m.per_row) > FOLD_ROWS,
        "domains": _narrow(shown.domains, "domain"),
        "tenths": _narrow(shown.tenths, "positions of the row"),
        "confidence": _narrow(shown.confidence, "teacher's top-1 probability"),
        "worst": worst_table(frame),
        "checks": checks_table(m, failed="**failed**").under("", ("preflight check", "", "figure", "")),
        "identity": shown.identity,
        "standing": basis.standing,
        "how": how_measured(basis),
        "cannot": cannot_tell(basis),
    }


def _narrow(buckets: Table, first: str) -> Table:
    """Buckets whose intervals stand beside what they are of, without saying it again."""
    return buckets.under(buckets.title, (first, "positions", "KL mean", "interval", "top-1", "interval"))


# ---- the tables ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTables:
    """The tables of one measurement, for report.md and the HTML page; ``bound`` is None for exact values."""

    headline: Table
    bound: Table | None
    counts: Table
    rows: Table
    domains: Table
    tenths: Table
    confidence: Table
    checks: Table
    identity: Table


def run_tables(m: Measurement, frame: pd.DataFrame) -> RunTables:
    """All tables of one measurement."""
    units, unit = tables.units_of(frame, m), m.panel.unit
    bound = [(line.name, line.value, line.meaning) for line in bound_lines(m)]
    return RunTables(
        headline=_headline_table(headline(m, frame, units)),
        bound=Table("What the lower bound rests on", ("", "value", "what it is"), bound, sides="lrl")
        if bound
        else None,
        counts=counts_table(m),
        rows=rows_table(m.per_row),
        domains=bucket_table("By domain", "domain", tables.by_domain(frame, units, m)),
        tenths=bucket_table(
            "By position",
            "positions of the row",
            tables.by_position(frame, units, unit),
            slope_sentence(tables.slope(frame, units, unit)),
        ),
        confidence=bucket_table(
            "By the teacher's confidence", "top-1 probability", tables.by_confidence(frame, units, unit)
        ),
        checks=checks_table(m),
        identity=identity_table(m),
    )


def _headline_table(lines: Sequence[Line]) -> Table:
    return Table("Headline", ("", "value", "interval"), [(x.name, x.value, x.interval) for x in lines], sides="lrl")


# ---- headline --------------------------------------------------------------------------------------------------------


def headline(m: Measurement, frame: pd.DataFrame, units: np.ndarray) -> list[Line]:
    """The headline table; every number that is a mean over positions carries its interval."""
    unit, s = m.panel.unit, m.summary
    delta = tables.quantity("nll_difference", frame, units, unit)
    kl = m.intervals.get("kl_mean")
    return [
        Line(name="rows, positions", value=f"{rows_text(m)}, {count(m.positions)}"),
        _agreement(m, frame, units),
        Line(name=kl_name(m, "mean"), value=estimate(s["kl_mean"], kl), interval=interval_text(kl, m)),
        *_finite_lines(m),
        *_quantile_lines(m, tables.quantiles(frame, units, unit)),
        max_line(m),
        _top_line(m, tables.top_positions_share(frame)),
        *[_share(f"positions with KL > {nats:g} nats", rate) for nats, rate in tables.tail_rates(frame, units, unit)],
        *_where_measured(m, frame, units),
        Line(name="NLL of the teacher, nats", value=number(s["nll_teacher"], 5)),
        Line(name="NLL of the candidate, nats", value=number(s["nll_candidate"], 5)),
        _mean("NLL candidate - teacher", delta, sign=True),
        Line(name="ppl_token of the teacher", value=number(s["ppl_token_teacher"], 5)),
        Line(name="ppl_token of the candidate", value=number(s["ppl_token_candidate"], 5)),
        _ratio("ppl_token candidate / teacher", delta),
        *_text_lines(m),
    ]


def _text_lines(m: Measurement) -> list[Line]:
    """What holds for any tokenizer on this text, where its size is known."""
    named = (("bits_per_byte", "bits per byte"), ("ppl_word", "ppl_word"))
    return [
        Line(name=f"{text} of the {side}", value=number(m.summary[f"{name}_{side}"], 5))
        for name, text in named
        for side in ("teacher", "candidate")
        if f"{name}_{side}" in m.summary
    ]


def _agreement(m: Measurement, frame: pd.DataFrame, units: np.ndarray) -> Line:
    """Top-1 agreement; between which shares it lies where a server does not tell every choice."""
    if m.summary["top1_agreement"] is None:
        unknown = m.counts.get("agreement_unknown")
        return Line(name="top-1 agreement", value=agreement_text(m), interval=f"none: unknown at {count(unknown)}")
    return _share("top-1 agreement", tables.quantity("top1_agreement", frame, units, m.panel.unit))


def _where_measured(m: Measurement, frame: pd.DataFrame, units: np.ndarray) -> list[Line]:
    """The means that only a full vocabulary gives; withheld ones are left out."""
    named = (("kl_reverse_mean", "KL(candidate‖teacher) mean"), ("tv_mean", "total variation, mean"))
    return [
        _mean(text, tables.quantity(name, frame, units, m.panel.unit))
        for name, text in named
        if m.summary.get(name) is not None
    ]


def kl_name(m: Measurement, what: str) -> str:
    """``KL(teacher‖candidate) mean, nats``, with "lower bound" where the estimator is one."""
    return f"KL(teacher‖candidate) {what}, nats" + (" (lower bound)" if m.estimator == "lower_bound" else "")


def rows_text(m: Measurement) -> str:
    """``32 rows``, or ``4 of 32 rows``."""
    return f"{m.rows_measured} rows" if m.status == "complete" else f"{m.rows_measured} of {m.rows_planned} rows"


def interval_text(interval: Interval | None, m: Measurement) -> str:
    """Both ends and how they were made, or why there are none."""
    if interval is not None and interval.low is None:
        return ends(interval)
    if interval is not None:
        level = f"{interval.confidence:.0%}".replace("%", " %")
        return f"{bracket(interval)} ({level}, {interval.method}, {interval.n} {interval.unit}s)"
    return "none: not every position is finite" if not np.isfinite(float(m.summary["kl_mean"])) else "none"


def _mean(name: str, e: Estimate, sign: bool = False) -> Line:
    value = estimate(e.estimate, e)
    return Line(name=name, value=f"+{value}" if sign and e.estimate > 0 else value, interval=ends(e))


def _share(name: str, e: Estimate) -> Line:
    return Line(name=name, value=percent(e.estimate), interval=percent_ends(e))


def _ratio(name: str, delta: Estimate) -> Line:
    ratio = exponentiated(delta, "exp of the t interval of the NLL difference")
    return Line(name=name, value=estimate(ratio.estimate, ratio), interval=ends(ratio))


def _quantile_lines(m: Measurement, quantiles: dict[str, Estimate]) -> list[Line]:
    shown = {name: WITHHELD if e.withheld else estimate(e.estimate, e) for name, e in quantiles.items()}
    return [Line(name=kl_name(m, name), value=shown[name], interval=ends(e)) for name, e in quantiles.items()]


def _finite_lines(m: Measurement) -> list[Line]:
    """Beside a mean that is not finite, the mean without such positions, with their number."""
    if (finite := m.summary.get("kl_mean_finite")) is None:
        return []
    bad = count(m.counts["nonfinite_positions"])
    name = kl_name(m, f"mean excluding {bad} positions")
    return [
        Line(name=name, value=number(finite), interval=f"over {percent(m.summary['finite_share'], 4)} of positions")
    ]


def _top_line(m: Measurement, share: float | None) -> Line:
    """How heavy the tail is: a mean that few positions carry is theirs."""
    name = f"{kl_name(m, 'sum').removesuffix(', nats')} in the top 1 % of positions"
    if share is None:
        return Line(name=name, value="n/a", interval="none: the sum is 0 or not finite")
    return Line(name=name, value=percent(share), interval="a share of this panel; none")


def max_line(m: Measurement) -> Line:
    """The maximum with its place and N: never with an interval, since it only grows with N."""
    place = f"of {count(m.positions)} positions"
    if at := m.summary.get("kl_max_at"):
        place = f"row {at['row']}, position {at['position']}, {place}"
    return Line(name=kl_name(m, "max"), value=number(m.summary["kl_max"]), interval=f"at {place}; a maximum has none")


# ---- the other tables ------------------------------------------------------------------------------------------------

COUNT_NAMES = {
    "nonfinite_positions": "positions whose KL is not finite",
    "infinite_kl": "of these, infinite",
    "nonfinite_logits_teacher": "positions with non-finite teacher logits",
    "nonfinite_logits_candidate": "positions with non-finite candidate logits",
    "infinite_nll": "positions with infinite NLL on either side",
    "negative_kl": "positions with KL below 0",
    "negative_kl_beyond_rounding": "of these, below what rounding explains",
    "zero_kl": "positions with KL exactly 0",
    "tied_teacher": "positions where the teacher's top-1 is a tie",
    "tied_candidate": "positions where the candidate's top-1 is a tie",
    "top1_unknown": "positions where the candidate's top-1 is not known",
    "agreement_unknown": "positions where agreement is not known",
    "asked_not_known": "positions where a token that was asked for is not known",
    "mass_rounded": "positions whose uncovered mass is below rounding",
    "tail_estimate_unknown": "positions without an estimate",
}


def counts_table(m: Measurement) -> Table:
    """Every count of the receipt, named."""
    rows = [(COUNT_NAMES.get(name, name), count(value)) for name, value in m.counts.items()]
    return Table("Not ordinary", ("", "positions"), rows)


def worst_rows(m: Measurement) -> list[RowSummary]:
    """Rows by mean KL, highest first; rows without a finite mean come before all."""
    return sorted(m.per_row, key=lambda row: (-np.nan_to_num(row.kl_mean, nan=np.inf), row.row))


def rows_table(rows: Sequence[RowSummary]) -> Table:
    """Rows with their means, in the order given."""
    header = ("row", "document", "domain", "positions", "KL mean", "KL max", "top-1", "NLL teacher", "NLL candidate")
    cells = [
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
            count(row.nonfinite),
        )
        for row in rows
    ]
    return Table("Every row", (*header, NOT_FINITE), cells, sides="rllrrrrrrr")


def bucket_table(title: str, first: str, buckets: Sequence[tables.Bucket], note: str = "") -> Table:
    """KL and agreement in each bucket, with their intervals."""
    header = (first, "positions", "KL mean", "interval of KL", "top-1", "interval of top-1")
    rows = [
        (
            b.label,
            count(b.positions),
            estimate(b.kl.estimate, b.kl),
            ends(b.kl),
            percent(b.agreed),
            percent_ends(b.agreement),
        )
        for b in buckets
    ]
    return Table(title, header, rows, note=note, sides="lrrlrl")


def worst_table(frame: pd.DataFrame) -> Table:
    """The positions of highest KL."""
    header = (
        "row",
        "position",
        "next token id",
        "KL",
        "teacher's top-1",
        "its probability",
        "candidate's top-1",
        "NLL teacher",
        "NLL candidate",
    )
    rows = [
        (
            str(p["row"]),
            str(p["position"]),
            str(p["target"]),
            number(p["kl"]),
            str(p["top1_teacher"]),
            number(p["p_top1_teacher"], 3),
            str(p["top1_candidate"]),
            number(p["nll_teacher"], 3),
            number(p["nll_candidate"], 3),
        )
        for p in tables.worst_positions(frame, WORST_POSITIONS).to_dict("records")
    ]
    return Table("Worst positions", header, rows, sides="r" * len(header))


def checks_table(m: Measurement, failed: str = "FAILED") -> Table:
    """The preflight checks and their figures."""
    rows = [(c.name, "passed" if c.passed else failed, c.figure, c.note) for c in m.preflight]
    return Table("Preflight", ("check", "", "figure", "note"), rows, sides="llll")


def identity_table(m: Measurement) -> Table:
    """Field, teacher, candidate: all that the numbers depend on. Digests are whole, so that they can be searched."""
    sides = [side.model_dump() for side in (m.teacher, m.candidate)]
    fields = [name for name in sides[0] if name not in ("settings", "bits_per_weight", "bytes")]
    texts = [{name: "-" if side[name] is None else str(side[name]) for name in fields} for side in sides]
    settings = [", ".join(f"{k}={v}" for k, v in side["settings"].items()) or "-" for side in sides]
    rows = [*((name, texts[0][name], texts[1][name]) for name in fields), ("settings", settings[0], settings[1])]
    return Table("Identity", ("", "teacher", "candidate"), rows, sides="lll", verbatim=True)


def slope_sentence(slope: tables.Slope | None) -> str:
    """Whether KL grows along the row, with the figures that say so."""
    if slope is None:
        return "Too few positions to see whether KL changes along the row."
    e = slope.estimate
    figures = f"slope {signed(e.estimate)} nats per 1,000 positions"
    figures += f" {bracket(e)}" if e.has_interval else f" (no interval: {e.note})"
    figures += f"; last tenth {number(slope.ratio)} times the first" if np.isfinite(slope.ratio) else ""
    if slope.rising:
        return f"**KL rises along the row: {figures}.** That is the sign of a fault that grows with the context."
    return f"No rise along the row is called out: {figures}."


# ---- what the command prints after a measurement ---------------------------------------------------------------------


def measurement_table(measurement: Measurement) -> RichTable:
    """Headline numbers of one measurement: two columns, the last lines its worst rows."""
    from rich.table import Table as RichTable

    m, s = measurement, measurement.summary
    bound = " (lower bound)" if m.estimator == "lower_bound" else ""
    title = f"{m.candidate.model} against {m.teacher.described}" + (f"\n[bold]{m.label}[/bold]" if m.label else "")
    caption = f"KL(teacher‖candidate), nats{bound}"
    table = RichTable(title=title, title_justify="left", caption=caption, caption_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("rows, positions", f"{rows_text(m)}, {count(m.positions)}")
    table.add_row("top-1 agreement", agreement_text(m))
    table.add_row("KL mean, 95 % interval", with_interval(s["kl_mean"], m.intervals.get("kl_mean")))
    table.add_row("KL p50 / p95 / p99", " / ".join(number(s[f"kl_{name}"]) for name in ("p50", "p95", "p99")))
    at = s.get("kl_max_at")
    place = f" (row {at['row']}, position {at['position']})" if at else ""
    table.add_row("KL max", f"{number(s['kl_max'])}{place}")
    table.add_row("NLL teacher / candidate", f"{number(s['nll_teacher'])} / {number(s['nll_candidate'])}")
    ppl = f"{number(s['ppl_token_teacher'])} / {number(s['ppl_token_candidate'])}"
    table.add_row("ppl_token teacher / candidate", ppl, end_section=True)
    _add_bound(table, m)
    _add_oddities(table, m)
    for row in worst_rows(m)[:SHOWN_ROWS]:
        table.add_row(f"worst row {row.row} ({row.domain})", _row_text(row))
    return table


def _row_text(row: RowSummary) -> str:
    return f"KL {number(row.kl_mean)}, top-1 {percent(row.top1_agreement)}"


def _add_bound(table: RichTable, m: Measurement) -> None:
    """How much a lower bound knows, and the floor of a served lane or that there is none."""
    lines = bound_lines(m)
    for line in lines:
        table.add_row(line.name + (" [red](not a bound)[/red]" if "not a bound" in line.meaning else ""), line.value)
    if lines or m.lane == "served":
        table.add_row(f"floor of the {m.lane} lane", floor_text(m) or f"not measured{repeat_text(m)}", end_section=True)


def _add_oddities(table: RichTable, m: Measurement) -> None:
    """Counts that a reader must not miss: only where there are any."""
    for name, text in (
        ("nonfinite_positions", "[red]positions not finite[/red]"),
        ("negative_kl_beyond_rounding", "[red]KL below 0 beyond rounding[/red]"),
    ):
        if m.counts.get(name):
            table.add_row(text, count(m.counts[name]))
    for check in m.preflight:
        if not check.passed:
            table.add_row(f"[red]check failed[/red]: {check.name}", check.figure)
