"""The card's quality table of one measurement alone: values and intervals, its floor and anchors beside it."""

from __future__ import annotations

from collections.abc import Sequence

from harness.measure.quantities import QUANTILES, quantile_key
from harness.measure.receipt import Measurement
from harness.numbers import WITHHELD, count, ends, number, percent, size, supported_decimals, with_interval
from harness.report.card_tables import Quality, Row, metric_name


def single_quality(
    m: Measurement, *, decimals: int | None = None, beside: Sequence[tuple[str, Measurement]] = ()
) -> Quality:
    """The quality table of one measurement: values and intervals; ``beside`` are its floor and anchors."""
    s, bound = m.summary, " (lower bound)" if m.estimator == "lower_bound" else ""
    rows = [
        _single(m, "top-1 agreement", "top1_agreement", decimals),
        _single(m, f"KL mean{bound}", "kl_mean", decimals),
        *(
            Row(name=f"KL {name}{bound}", values=(WITHHELD if s[key] is None else number(s[key]),))
            for name in QUANTILES
            if (key := quantile_key(name)) in s
        ),
        Row(
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
    return Quality(arms=(m.name,), rows=rows, sentences=[], got_worse=[], references=references, bars=[])


def _reference(kind: str, m: Measurement, decimals: int | None) -> Row:
    kl = with_interval(m.summary["kl_mean"], m.intervals.get("kl_mean"), decimals)
    return Row(name=f"{kind}: {m.name}", values=(kl, percent(m.summary["top1_agreement"])))


def _single(m: Measurement, name: str, key: str, decimals: int | None) -> Row:
    interval = m.intervals.get(key)
    places = decimals
    if places is None and interval is not None:
        places = supported_decimals(interval.low, interval.high)
    return Row(
        name=name, values=(number(m.summary.get(key), places),), interval=ends(interval) if interval is not None else ""
    )


def size_text(nbytes: int | None) -> str:
    """``96.11 GB (96,105,137,024 B)``."""
    return "not in the receipt" if nbytes is None else f"{size(nbytes)} ({count(nbytes)} B)"
