"""A gate for automation: bars on one run, held or missed, as lines, JUnit XML and annotations of hosted CI.

A bar takes the value of a metric or an end of its interval, so that "the upper end of the mean KL is at most 0.02" can
be asked. A value or an interval that is not there misses its bar: nothing passes for want of a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

from pydantic import Field

from harness.compare import compare
from harness.errors import UsageError
from harness.measure.receipt import Measurement, load_measurement
from harness.records import Strict, load_toml
from harness.registration.deviations import RELATIONS
from harness.store import write_bytes


class GateBar(Strict):
    """One bar: ``metric`` is a key of the receipt's summary, ``end`` the value itself or an end of its interval."""

    name: str = Field(min_length=1)
    metric: str = Field(min_length=1)
    relation: Literal["<=", "<", ">=", ">"]
    value: float
    end: Literal["estimate", "low", "high"] = "estimate"


class NonInferior(Strict):
    """Not worse than a baseline run by more than ``margin``: the interval of the paired difference decides."""

    metric: str = "kl_mean"
    margin: float = Field(gt=0)
    margin_kind: Literal["relative", "absolute"] = "relative"


class Bars(Strict):
    """A bars.toml."""

    bars: tuple[GateBar, ...] = ()
    non_inferior: tuple[NonInferior, ...] = ()
    allow_partial: bool = False


class Held(Strict):
    """What a bar came to."""

    name: str
    held: bool
    told: str


_FORM = '[[bars]] name = "mean KL", metric = "kl_mean", relation = "<=", value = 0.02, end = "high"'


def load_bars(file: Path) -> Bars:
    """A bars file.

    Raises:
        UsageError: it is none, or asks for nothing.
    """
    bars = load_toml(file, Bars, f"a bar is {_FORM}", UsageError)
    if not bars.bars and not bars.non_inferior:
        raise UsageError(f"{file.name} holds no bar", f"a bar is {_FORM}")
    return bars


def check_gate(run: Path, bars: Bars, baseline: Path | None = None) -> list[Held]:
    """Every bar on the run, and first whether the run is one that bars may be held against.

    Raises:
        UsageError: a bar names a metric that receipts do not have, or needs a baseline and there is none.
    """
    measurement = load_measurement(run)
    if bars.non_inferior and baseline is None:
        raise UsageError("non_inferior needs a baseline", "name its run with --baseline")
    held = [_whole(measurement, bars.allow_partial), _checks(measurement)]
    held += [_bar(measurement, bar) for bar in bars.bars]
    if baseline is not None and bars.non_inferior:
        held += _paired(run, baseline, bars.non_inferior)
    return held


def _whole(m: Measurement, allow_partial: bool) -> Held:
    fine = m.status == "complete" or (allow_partial and m.status == "partial")
    return Held(name="complete run", held=fine, told=f"{m.status}, {m.rows_measured} of {m.rows_planned} rows")


def _checks(m: Measurement) -> Held:
    failed = [check.name for check in m.preflight if not check.passed]
    return Held(name="checks before scoring", held=not failed, told="; ".join(failed) or "all passed")


def _bar(m: Measurement, bar: GateBar) -> Held:
    if bar.metric not in m.summary:
        known = ", ".join(sorted(name for name, value in m.summary.items() if isinstance(value, (int, float))))
        raise UsageError(f"bar {bar.name}: there is no metric {bar.metric}", f"choose one of {known}")
    interval = m.intervals.get(bar.metric)
    value = m.summary[bar.metric] if bar.end == "estimate" else getattr(interval, bar.end, None)
    what = bar.metric if bar.end == "estimate" else f"{'upper' if bar.end == 'high' else 'lower'} end of {bar.metric}"
    if not isinstance(value, (int, float)):
        why = interval.note if interval is not None and interval.note else "the receipt has none"
        return Held(name=bar.name, held=False, told=f"{what} is not known: {why}")
    held = bool(RELATIONS[bar.relation](float(value), bar.value))
    return Held(name=bar.name, held=held, told=f"{what} is {value:.6g}, asked is {bar.relation} {bar.value:g}")


def _paired(run: Path, baseline: Path, asked: Sequence[NonInferior]) -> list[Held]:
    pair = compare([baseline, run]).pairs[0]
    by_name = {line.metric: line for line in pair.differences}
    found = []
    for one in asked:
        line = by_name.get(one.metric)
        if line is None:
            raise UsageError(f"{one.metric} is not compared in pairs", f"choose one of {', '.join(by_name)}")
        margin = one.margin * abs(line.baseline) if one.margin_kind == "relative" else one.margin
        worst = line.difference.high if line.lower_is_better else line.difference.low
        sign = 1 if line.lower_is_better else -1
        held = worst is not None and sign * worst <= margin
        told = "no interval" if worst is None else f"worst end {worst:+.6g}, margin {margin:.6g}"
        name = f"{one.metric} not worse than {pair.baseline}"
        found.append(Held(name=name, held=held, told=f"{told} against {pair.baseline}"))
    return found


def write_junit(file: Path, name: str, held: Sequence[Held]) -> None:
    """The outcome as JUnit XML, a test case a bar."""
    missed = [one for one in held if not one.held]
    suite = ElementTree.Element(
        "testsuite", name=f"fidelity gate {name}", tests=str(len(held)), failures=str(len(missed)), errors="0"
    )
    for one in held:
        case = ElementTree.SubElement(suite, "testcase", classname="fidelity.gate", name=one.name)
        if not one.held:
            ElementTree.SubElement(case, "failure", message=one.told).text = one.told
    write_bytes(file, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n")


def annotation(one: Held) -> str:
    """A missed bar as GitHub reads it in a log."""
    escaped = one.told.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    title = one.name.replace("%", "%25").replace(",", "%2C").replace(":", "%3A").replace("\n", "%0A")
    return f"::error title=fidelity gate%3A {title}::{escaped}"
