"""What the command prints after a measurement."""

from __future__ import annotations

from rich.table import Table

from harness.measure.receipt import Measurement, RowSummary
from harness.numbers import count, number, percent, with_interval
from harness.report.bound import agreement_text, bound_lines, floor_text, repeat_text
from harness.report.run_report import rows_text, worst_rows

WORST = 3


def measurement_table(measurement: Measurement) -> Table:
    """Headline numbers of one measurement: two columns, the last lines its worst rows."""
    m, s = measurement, measurement.summary
    bound = " (lower bound)" if m.estimator == "lower_bound" else ""
    title = f"{m.candidate.model} against {m.teacher.model}" + (f"\n[bold]{m.label}[/bold]" if m.label else "")
    caption = f"KL(teacher‖candidate), nats{bound}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", show_header=False)
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
    for row in worst_rows(m)[:WORST]:
        table.add_row(f"worst row {row.row} ({row.domain})", _row_text(row))
    return table


def _row_text(row: RowSummary) -> str:
    return f"KL {number(row.kl_mean)}, top-1 {percent(row.top1_agreement)}"


def _add_bound(table: Table, m: Measurement) -> None:
    """How much a lower bound knows, and the floor of a served lane or that there is none."""
    lines = bound_lines(m)
    for line in lines:
        table.add_row(line.name + (" [red](not a bound)[/red]" if "not a bound" in line.meaning else ""), line.value)
    if lines or m.lane == "served":
        table.add_row(f"floor of the {m.lane} lane", floor_text(m) or f"not measured{repeat_text(m)}", end_section=True)


def _add_oddities(table: Table, m: Measurement) -> None:
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
