"""C18, C53: the receipt, report.md, the page, a comparison and the card show one interval, or one reason for none."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.measure.receipt import Interval, Measurement, load_measurement
from harness.numbers import bracket, ends, percent_bracket
from harness.report import style
from harness.report.run_report import write_report
from tests.report.fake_run import make_frame, write_run
from tests.report.test_report_card import table_rows

#: Key in the receipt, line of report.md and of the page, line of the card.
LINES = {
    "kl_mean": ("KL(teacher‖candidate) mean, nats", "KL mean"),
    "kl_reverse_mean": ("KL(candidate‖teacher) mean", "KL(candidate‖teacher) mean"),
    "top1_agreement": ("top-1 agreement", "top-1 agreement"),
    "tv_mean": ("total variation, mean", "total variation"),
    "tail_rate_0.1": ("positions with KL > 0.1 nats", "positions with KL > 0.1 nats"),
    "tail_rate_1": ("positions with KL > 1 nats", "positions with KL > 1 nats"),
    "nll_difference": ("NLL candidate - teacher", ""),
    "top5_overlap": ("", "top-5 overlap"),
}
PERCENT = ("top1_agreement", "tail_rate_0.1", "tail_rate_1")


@dataclass
class Told:
    """What each place says of one run: a receipt, a comparison's arm, and table rows by their first cell."""

    receipt: Measurement
    arm: dict[str, Any]
    report: dict[str, list[str]]
    page: dict[str, list[str]]
    card: dict[str, list[str]]


@pytest.fixture(autouse=True)
def _coarse_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "DPI", 20)


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def page_rows(text: str) -> dict[str, list[str]]:
    rows = {}
    for line in re.findall(r"<tr>(.*?)</tr>", text, re.S):
        cells = [unescape(re.sub(r"<[^>]*>", "", c)).strip() for c in re.findall(r"<td.*?>(.*?)</td>", line, re.S)]
        if cells:
            rows.setdefault(cells[0], cells[1:])
    return rows


def told(folder: Path, frame: pd.DataFrame, documents: int) -> Told:
    """Make the run's files and read what each says; documents come in an order that no sorting gives."""
    names = [f"doc {(7 * at + 3) % 23:02d}" for at in range(documents)]
    for name in ("one", "two"):
        write_run(folder / name, frame, lambda row: names[row % documents], name=name)
    run = folder / "two"
    write_report(run)
    command("verify", run)
    command("compare", folder / "one", run, "-o", folder / "comparison")
    command("report", run)
    command("card", run, "-o", folder / "card", "--no-pictures", "--base-model", "org/teacher")
    arms = json.loads((folder / "comparison" / "comparison.json").read_text())["arms"]
    return Told(
        receipt=load_measurement(run),
        arm=arms[1],
        report=table_rows((run / "report.md").read_text()),
        page=page_rows((run / "report.html").read_text()),
        card=table_rows((folder / "card" / "README.md").read_text()),
    )


@pytest.mark.parametrize("documents", [1, 2, 3, 4, 8, 20])
def test_every_place_prints_the_same_ends(documents: int, tmp_path: Path) -> None:
    found = told(tmp_path, make_frame(rows=max(4, documents), length=65, noise=0.7), documents)
    assert set(found.receipt.intervals) == set(LINES)
    for name, (line, card_line) in LINES.items():
        interval = found.receipt.intervals[name]
        check_ends(name, interval, documents)
        in_arm = found.arm["metrics"].get(name)
        if in_arm is not None:
            assert [in_arm[field] for field in Interval.model_fields] == list(interval.model_dump().values()), name
        if line:
            shown = percent_bracket(interval) if name in PERCENT and interval.low is not None else ends(interval)
            assert found.report[line][1].split(" (")[0] == shown.split(" (")[0], name
            assert found.page[line][1] == found.report[line][1]
        if card_line:
            assert found.card[card_line][1] == ends(interval), name
    kl = found.receipt.intervals["kl_mean"]
    shown = bracket(kl) if documents >= 4 else "(no interval: fewer than 4 documents)"
    assert shown in found.card["Distance from the teacher"][0]


def check_ends(name: str, interval: Interval, documents: int) -> None:
    """Withheld with the reason below four documents; else inside what the quantity can be."""
    assert (interval.unit, interval.n) == ("document", documents)
    if documents < 4:
        assert (interval.low, interval.high, interval.note) == (None, None, "fewer than 4 documents")
    elif interval.low is not None and interval.high is not None:
        assert interval.low < interval.high
        assert name == "nll_difference" or interval.low > 0
        assert name.startswith(("kl", "nll")) or interval.high < 1
    else:
        assert interval.note.startswith("no exception in"), name


@pytest.mark.parametrize(("documents", "shown"), [(1, False), (9, False), (10, True)])
def test_every_place_withholds_the_same_quantile(documents: int, shown: bool, tmp_path: Path) -> None:
    """A p99.9 with 51 positions beyond it, from enough documents or too few: one rule in all five places."""
    small = make_frame(rows=documents, length=65, noise=0.7)
    times = -(-51_000 // len(small))
    frame = pd.concat([small.assign(position=small["position"] + 64 * at) for at in range(times)], ignore_index=True)
    frame["kl"] = np.where(frame["position"] % 64 == 0, 9 + frame["position"] / 1e5, frame["kl"])
    frame = frame.sort_values(["row", "position"], ignore_index=True).astype({"position": np.int32})
    found = told(tmp_path, frame, documents)
    value = found.receipt.summary["kl_p999"]
    assert (value is not None) == shown
    assert (found.report["KL(teacher‖candidate) p99.9, nats"][0] != "withheld") == shown
    assert found.page["KL(teacher‖candidate) p99.9, nats"] == found.report["KL(teacher‖candidate) p99.9, nats"]
    assert (found.card["KL p99.9"][0] != "withheld") == shown
    assert ("p99.9" in found.arm["quantiles"]) == shown
    if shown:
        assert found.arm["quantiles"]["p99.9"]["estimate"] == value
    else:
        assert f"come from {documents} contexts, 10 are needed" in found.arm["withheld"]["p99.9"]
        assert f"come from {documents} contexts, 10 are needed" in found.report["KL(teacher‖candidate) p99.9, nats"][1]
    assert found.receipt.summary["kl_p99"] == found.arm["quantiles"]["p99"]["estimate"]


@pytest.mark.parametrize("heavy", [1.0, 1.5, 4.0])
def test_every_place_calls_the_same_mean_driven_by_one_context(heavy: float, tmp_path: Path) -> None:
    """Four rows with one KL each are never "driven by one"; one that carries 4 of 7 is, in all places."""
    frame = make_frame(rows=4, length=65)
    frame["kl"], frame["tv"] = np.where(frame["row"] == 2, 0.1 * heavy, 0.1), 0.05
    driven = heavy > 2
    told(tmp_path, frame, 4)
    for place in ("two/report.md", "two/report.html", "card/README.md", "comparison/report.md"):
        assert ("driven by one context" in (tmp_path / place).read_text()) == driven, place
