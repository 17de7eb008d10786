"""The card's tables from comparison.json or one measurement: every metric, those that got worse too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.compare.model import ArmResult, Comparison, Difference, Estimated, Pair
from harness.measure.quantities import QUANTILES, quantile_key
from harness.measure.receipt import Measurement
from harness.numbers import (
    WITHHELD,
    bracket,
    count,
    ends,
    number,
    percent,
    signed,
    size,
    supported_decimals,
    with_interval,
)
from harness.report.comparison_tables import bars, relative
from harness.report.table import Table
from harness.report.words import bars_title, margin_source

LABELS = {
    "kl_mean": "KL mean",
    "nll_candidate": "NLL, nats",
    "top1_agreement": "top-1 agreement",
    "top5_overlap": "top-5 overlap",
    "tv_mean": "total variation",
    "kl_reverse_mean": "KL(candidate‖teacher) mean",
    "delta_p": "Δp of the true token",
    "delta_p_abs": "abs(Δp) of the true token",
    "tail_rate_0.1": "positions with KL > 0.1 nats",
    "tail_rate_1": "positions with KL > 1 nats",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRow:
    """One metric: a value for each arm, the change of the subject against the baseline, and what it means."""

    name: str
    values: tuple[str, ...]
    change: str = ""
    interval: str = ""
    verdict: str = ""
    worse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What a card says of one table: arm names, rows, and the sentences and smaller tables under it."""

    arms: tuple[str, ...]
    rows: list[QualityRow]
    references: Table
    sentences: list[str] = field(default_factory=list)
    got_worse: list[str] = field(default_factory=list)
    bars: Table | None = None

    @property
    def table(self) -> Table:
        """Measured quality: one arm with its intervals, or every arm, the subject in bold where it is not worse."""
        if len(self.arms) == 1:
            rows = [(row.name, row.values[0], row.interval) for row in self.rows]
            return Table("Measured quality", ("metric", self.arms[0], "interval"), rows, sides="lrl")
        named = (*self.arms[:-1], f"**{self.arms[-1]}**")
        header = ("metric", *named, "Δ", "interval of the difference", "verdict")
        sides = "l" + "r" * (len(named) + 1) + "ll"
        return Table("Measured quality", header, [_cells(row) for row in self.rows], sides=sides)


def _cells(row: QualityRow) -> tuple[str, ...]:
    *others, own = row.values
    worse = ", worse" if row.worse and row.verdict in ("description", "undecided", "no verdict") else ""
    return (row.name, *others, own if row.worse else f"**{own}**", row.change, row.interval, row.verdict + worse)


def metric_name(metric: str, estimator: str) -> str:
    """The table's name of a metric, with its kind where it is a bound."""
    name = LABELS.get(metric, metric)
    is_kl = metric.startswith(("kl_", "tail_rate"))
    return f"{name} (lower bound)" if is_kl and estimator == "lower_bound" else name


def quality(c: Comparison, subject: str, *, decimals: int | None = None) -> Quality:
    """All metrics of all arms, and the subject's paired difference to the baseline."""
    pair = next(p for p in c.pairs if p.other == subject)
    arms = [c.arms[0], *(a for a in c.arms[1:] if a.name != subject), next(a for a in c.arms if a.name == subject)]
    rows = [_metric_row(c, arms, d, decimals) for d in pair.differences]
    rows += [_ppl_row(arms, pair, decimals), *_quantile_rows(c, arms), *_largest_row(c, arms)]
    return Quality(
        arms=tuple(arm.name for arm in arms),
        rows=rows,
        sentences=[_wins_sentence(pair), *_others(c, subject), *_band(c, pair), _margins(pair)],
        got_worse=[f"{row.name} ({row.values[0]} to {row.values[-1]})" for row in rows if row.worse],
        references=_references(
            [
                (f"{r.kind}: {r.name}", with_interval(r.kl.estimate, r.kl, decimals), percent(r.top1_agreement))
                for r in c.references
            ]
        ),
        bars=_bars(c, subject),
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def _metric_row(c: Comparison, arms: Sequence[ArmResult], d: Difference, decimals: int | None) -> QualityRow:
    places = decimals if decimals is not None else supported_decimals(d.difference.low, d.difference.high)
    change, interval = _share_change(d) if d.unit == "share" else _nats_change(d)
    return QualityRow(
        name=metric_name(d.metric, c.estimator) + (" (primary)" if d.role == "primary" else ""),
        values=tuple(number(_value(arm, d.metric), places) for arm in arms),
        change=change,
        interval=interval,
        verdict=_verdict(d),
        worse=_is_worse(d.baseline, d.other, d.lower_is_better),
    )


def _value(arm: ArmResult, metric: str) -> float | None:
    figure = arm.metrics.get(metric)
    return None if figure is None else figure.estimate


def _is_worse(baseline: float, other: float, lower_is_better: bool | None) -> bool:
    if lower_is_better is None:
        return False
    return other > baseline if lower_is_better else other < baseline


def _share_change(d: Difference) -> tuple[str, str]:
    """A share changes by percentage points."""
    figure = d.difference.scaled(100.0)
    places = supported_decimals(figure.low, figure.high)
    return f"{signed(figure.estimate, 2 if places is None else max(2, places))} pp", _ends(figure, "pp")


def _nats_change(d: Difference) -> tuple[str, str]:
    """KL changes by a share of the baseline, with the interval in nats; NLL by nats alone."""
    ends = _ends(d.difference, "nats")
    if d.pooled_ratio is not None:
        return relative(d.baseline, d.other), ends
    places = supported_decimals(d.difference.low, d.difference.high)
    return f"{signed(d.difference.estimate, places)} nats", ends


def _ends(figure: Estimated, unit: str) -> str:
    return ends(figure) if figure.low is None else f"{ends(figure)} {unit}"


def _verdict(d: Difference) -> str:
    if d.lower_is_better is None:
        return "no matter of fidelity"
    return d.verdict if d.role != "other" else f"{d.verdict} (not registered)"


def _ppl_row(arms: Sequence[ArmResult], pair: Pair, decimals: int | None) -> QualityRow:
    ratio = pair.ppl_ratio
    change = ratio.model_copy(update=_minus_one(ratio)).scaled(100.0)
    places = decimals if decimals is not None else _ppl_decimals(pair)
    return QualityRow(
        name="ppl_token",
        values=tuple(number(arm.ppl_token.estimate, places) for arm in arms),
        change=relative(1.0, ratio.estimate),
        interval=_ends(change, "%"),
        verdict="see NLL",
        worse=ratio.estimate > 1,
    )


def _minus_one(ratio: Estimated) -> dict[str, float | None]:
    ends = {name: None if (v := getattr(ratio, name)) is None else v - 1 for name in ("low", "high")}
    return {"estimate": ratio.estimate - 1, **ends}


def _ppl_decimals(pair: Pair) -> int | None:
    nll = next((d.difference for d in pair.differences if d.metric == "nll_candidate"), None)
    return None if nll is None else supported_decimals(nll.low, nll.high)


def _quantile_rows(c: Comparison, arms: Sequence[ArmResult]) -> list[QualityRow]:
    """Quantiles by themselves: their difference has no interval here, so no verdict either."""
    rows = []
    for name in QUANTILES:
        values = [quantile(arm, name) for arm in arms]
        if all(value is None for value in values):
            continue
        first, last = values[0], values[-1]
        known = first is not None and last is not None
        rows.append(
            QualityRow(
                name=f"KL {name}" + (" (lower bound)" if c.estimator == "lower_bound" else ""),
                values=tuple(WITHHELD if value is None else number(value) for value in values),
                change=relative(first, last) if first is not None and last is not None else "",
                interval="not computed",
                verdict="description",
                worse=known and _is_worse(first or 0.0, last or 0.0, True),
            )
        )
    return rows


def quantile(arm: ArmResult, name: str) -> float | None:
    """A quantile of an arm, from its positions or as its receipt published it; None where it is withheld."""
    figure = arm.quantiles.get(name)
    return figure.estimate if figure is not None else arm.published.get(quantile_key(name))


def _largest_row(c: Comparison, arms: Sequence[ArmResult]) -> list[QualityRow]:
    """The maxima: values and N, without interval or verdict."""
    found = [arm.largest for arm in arms]
    if any(value is None for value in found):
        return []
    values = [value.value for value in found if value is not None]
    return [
        QualityRow(
            name="KL max" + (" (lower bound)" if c.estimator == "lower_bound" else ""),
            values=tuple(number(value) for value in values),
            change=relative(values[0], values[-1]),
            interval=f"a maximum of {count(c.paired_on.positions)} positions has none",
            verdict="description",
            worse=values[-1] > values[0],
        )
    ]


# ---- sentences and smaller tables ------------------------------------------------------------------------------------


def _wins_sentence(pair: Pair) -> str:
    """``top-1 agreement higher on 32/32 rows, KL lower on 32/32, NLL lower on 32/32; no row regresses on any.``"""
    parts, losses = [], []
    for metric, name in (("top1_agreement", "top-1 agreement"), ("kl_mean", "KL"), ("nll_candidate", "NLL")):
        d = next((d for d in pair.differences if d.metric == metric), None)
        if d is None:
            continue
        s = d.signs
        won, lost = (s.rows_lower, s.rows_higher) if d.lower_is_better else (s.rows_higher, s.rows_lower)
        word = "lower" if d.lower_is_better else "higher"
        tied = f" ({s.rows_tied} tied)" if s.rows_tied else ""
        parts.append(f"{name} {word} on {won}/{s.rows} rows{tied}")
        losses += [f"{lost} on {name}"] if lost else []
    tail = f"Rows that regress: {', '.join(losses)}." if losses else "No row regresses on any of these."
    return f"{pair.other} against {pair.baseline}: {', '.join(parts)}. {tail}"


def _others(c: Comparison, subject: str) -> list[str]:
    return [_wins_sentence(pair) for pair in c.pairs if pair.other != subject]


def _band(c: Comparison, pair: Pair) -> list[str]:
    """With several candidates the primary verdict rests on a band that holds for all of them at once."""
    d = pair.primary
    if d.band is None or d.band.low is None:
        return []
    band = d.band.scaled(100.0) if d.unit == "share" else d.band
    unit = "pp" if d.unit == "share" else d.unit
    name = metric_name(d.metric, c.estimator)
    return [f"{name}: band that holds for all {len(c.pairs)} candidates at once {bracket(band)} {unit}."]


def _margins(pair: Pair) -> str:
    """The largest differences that do not matter, and where they come from."""
    by_source: dict[str, list[str]] = {}
    for d in pair.differences:
        if d.margin is not None:
            by_source.setdefault(margin_source(d), []).append(LABELS.get(d.metric, d.metric))
    margins = [f"{source} for {', '.join(names)}" for source, names in by_source.items()]
    return f"Verdicts weigh the paired interval against a margin: {'; '.join(margins)}."


def _references(rows: Sequence[tuple[str, ...]]) -> Table:
    """Floor and anchors of the same panel, never ranked."""
    return Table("References", ("reference on the same panel", "KL mean, nats", "top-1 agreement"), rows)


def _bars(c: Comparison, subject: str) -> Table | None:
    """Registered bars of the subject, met or not; None where nothing was registered."""
    words = {True: "met", False: "**not met**", None: "not known"}
    rows = [tuple(cells) for arm, *cells in bars(c, words).rows if arm == subject]
    header = (bars_title(c).removesuffix("s"), "condition", "value", "threshold", "")
    return Table(bars_title(c), header, rows, sides="llrrl") if rows else None


# ---- one measurement alone -------------------------------------------------------------------------------------------


def single_quality(
    m: Measurement, *, decimals: int | None = None, beside: Sequence[tuple[str, Measurement]] = ()
) -> Quality:
    """The quality table of one measurement: values and intervals; ``beside`` are its floor and anchors."""
    s, bound = m.summary, " (lower bound)" if m.estimator == "lower_bound" else ""
    rows = [
        _single(m, "top-1 agreement", "top1_agreement", decimals),
        _single(m, f"KL mean{bound}", "kl_mean", decimals),
        *(
            QualityRow(name=f"KL {name}{bound}", values=(WITHHELD if s[key] is None else number(s[key]),))
            for name in QUANTILES
            if (key := quantile_key(name)) in s
        ),
        QualityRow(
            name=f"KL max{bound}",
            values=(number(s["kl_max"]),),
            interval=f"a maximum of {count(m.positions)} positions has none",
        ),
        _single(m, "total variation", "tv_mean", decimals),
        _single(m, "KL(candidate‖teacher) mean", "kl_reverse_mean", decimals),
        _single(m, "top-5 overlap", "top5_overlap", decimals),
        *(_single(m, metric_name(f"tail_rate_{t}", m.estimator), f"tail_rate_{t}", decimals) for t in ("0.1", "1")),
        _single(m, "NLL of the candidate, nats", "nll_candidate", decimals),
        _single(m, "NLL of the teacher, nats", "nll_teacher", decimals),
        _single(m, "ppl_token of the candidate", "ppl_token_candidate", decimals),
        _single(m, "ppl_token of the teacher", "ppl_token_teacher", decimals),
    ]
    rows = [row for row in rows if row.values != ("n/a",)]
    references = [_reference(kind, other, decimals) for kind, other in beside]
    return Quality(arms=(m.name,), rows=rows, references=_references(references))


def _reference(kind: str, m: Measurement, decimals: int | None) -> tuple[str, ...]:
    kl = with_interval(m.summary["kl_mean"], m.intervals.get("kl_mean"), decimals)
    return (f"{kind}: {m.name}", kl, percent(m.summary["top1_agreement"]))


def _single(m: Measurement, name: str, key: str, decimals: int | None) -> QualityRow:
    interval = m.intervals.get(key)
    places = decimals
    if places is None and interval is not None:
        places = supported_decimals(interval.low, interval.high)
    return QualityRow(
        name=name, values=(number(m.summary.get(key), places),), interval=ends(interval) if interval is not None else ""
    )


def size_text(nbytes: int | None) -> str:
    """``96.11 GB (96,105,137,024 B)``."""
    return "not in the receipt" if nbytes is None else f"{size(nbytes)} ({count(nbytes)} B)"
