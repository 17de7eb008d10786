"""report.md of one run: from its two files alone, labelled, complete, the same bytes each time."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from harness.measure.receipt import load_measurement
from harness.report.run_report import measurement_table, report_text, write_report
from harness.report.tables import load_positions
from tests.report.fake_run import make_frame, write_run

PICTURES = {"kl_distribution", "kl_by_row", "kl_by_position", "agreement_by_confidence"}


@pytest.fixture(scope="module")
def report(run: Path) -> str:
    return write_report(run).read_text()


def text_of(folder: Path) -> str:
    """report.md without drawing its pictures."""
    return report_text(load_measurement(folder), load_positions(folder), [])


def section(text: str, title: str) -> str:
    """The body of ``## title``."""
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_every_picture_is_linked_and_is_there(run: Path, report: str) -> None:
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", report)
    assert {Path(link).stem for link in links} == PICTURES
    for link in links:
        with Image.open(run / link) as picture:
            assert picture.width == 1800 and picture.height >= 800
            assert set(picture.info) == {"dpi"}, "a picture carries a version or a date"


def test_headline_numbers_are_the_receipt_s(run: Path, report: str) -> None:
    measurement, head = load_measurement(run), section(report, "Headline")
    s, ends = measurement.summary, measurement.intervals["kl_mean"]
    assert f"{s['kl_mean']:.3f}" in head and f"[{ends.low:.3f}, {ends.high:.3f}]" in head
    for text in (f"{s['ppl_token_teacher']:.5f}", f"{s['nll_candidate']:.5f}", f"{100 * s['top1_agreement']:.2f} %"):
        assert text in head
    at = s["kl_max_at"]
    assert f"row {at['row']}, position {at['position']}, of 2,048 positions" in head
    assert "ppl_token" in head and "2,048" in head


def test_the_report_states_how_and_what_not(report: str) -> None:
    how = section(report, "How it was measured")
    for text in ("sum_v P(v) * ln(P(v) / Q(v))", "1" * 64, "Estimator: exact", "Lane: weights", "not measured"):
        assert text in how
    assert "Exploratory" in how and "ids echoed" in how
    assert "driven by" not in report
    assert "served model" in section(report, "What this cannot tell you")


def test_a_maximum_never_has_an_interval(report: str) -> None:
    """Value, place and N, never an interval or a rank."""
    line = next(line for line in report.splitlines() if "max, nats" in line)
    assert "a maximum has none" in line and "[" not in line


def test_lower_bound_appears_only_where_the_estimator_is_one(report: str, tmp_path: Path) -> None:
    """A weights-only KL is not called a bound of the served one."""
    assert "lower bound" not in report and "at least" not in report
    write_run(tmp_path, make_frame(rows=3), estimator="lower_bound", lane="served")
    bound = text_of(tmp_path)
    assert "mean, nats (lower bound)" in bound and "how much more is not known" in bound


def test_self_compare_is_zero_everywhere(tmp_path: Path) -> None:
    measurement = write_run(tmp_path, make_frame(rows=4, noise=0.0))
    text = text_of(tmp_path)
    assert "| KL(teacher‖candidate) mean, nats | 0 | [0, 0]" in text
    assert "| top-1 agreement | 100 % |" in text
    assert "| positions with KL exactly 0 | 512 |" in text
    assert measurement.summary["kl_max"] == 0


def test_small_negative_kl_is_counted_and_shown_raw(tmp_path: Path) -> None:
    """Never clamped before averaging, counted, printed with its sign."""
    frame = make_frame(rows=2, noise=0.0)
    frame["kl"] = -3e-7
    write_run(tmp_path, frame)
    text = text_of(tmp_path)
    assert "| positions with KL below 0 | 256 |" in text
    assert "| -3.00e-7 |" in text


def test_partial_and_nonfinite_runs_say_so(tmp_path: Path) -> None:
    """NaN and inf are named and counted; a partial run is labelled in text and pictures."""
    frame = make_frame(rows=1)
    frame.loc[3, "kl"], frame.loc[5, "kl"] = np.nan, np.inf
    measurement = write_run(tmp_path, frame, status="partial", rows_planned=32)
    text = text_of(tmp_path)
    assert "**Partial: 1/32 rows.**" in text
    assert "mean, nats | NaN |" in text and "| positions whose KL is not finite | 2 |" in text
    assert "only 1 of 32 rows were measured" in text
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    console.print(measurement_table(measurement))
    shown = console.export_text()
    assert "partial 1/32 rows" in shown and "NaN" in shown and "not finite" in shown


def test_one_context_that_carries_the_mean_is_named(tmp_path: Path) -> None:
    frame = make_frame(rows=8)
    frame.loc[frame["row"] == 5, "kl"] *= 50
    write_run(tmp_path, frame)
    assert re.search(r"row 5 alone carries \d\d\.\d %", text_of(tmp_path))


def test_names_cannot_break_a_table(tmp_path: Path) -> None:
    frame = make_frame(rows=2)
    measurement = write_run(tmp_path, frame)
    rows = [row.model_copy(update={"document": "a|b\n<script>x"}) for row in measurement.per_row]
    write_run(tmp_path, frame, per_row=rows)
    text = text_of(tmp_path)
    assert "a\\|b &lt;script>x" in text and "<script>" not in text


def test_long_panels_fold_the_table_of_rows(tmp_path: Path) -> None:
    write_run(tmp_path, make_frame(rows=48, length=9))
    text = text_of(tmp_path)
    assert "<details><summary>48 rows</summary>" in text


def test_same_numbers_same_bytes_in_another_process(run: Path, report: str, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for name in ("measurement.json", "positions.parquet"):
        shutil.copy(run / name, copy / name)
    code = "from harness.report.run_report import write_report, Path; import sys; write_report(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(copy)], check=True)
    assert (copy / "report.md").read_text() == report
    for picture in sorted((run / "pictures").glob("*.png")):
        assert (copy / "pictures" / picture.name).read_bytes() == picture.read_bytes(), picture.name


def test_no_path_or_host_in_any_output(run: Path, report: str) -> None:
    """Nothing of this machine is in what a report says."""
    import socket

    for secret in (str(run), str(Path.home()), str(Path.cwd()), socket.gethostname()):
        assert secret not in report
    assert not re.search(r"(?<![\w./])/(?:root|home|tmp|work|usr|mnt|data)/", report)
