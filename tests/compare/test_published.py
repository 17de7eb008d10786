"""The published receipts, compared: the card's numbers digit for digit, and the paired intervals it lacked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness.compare import Comparison, compare
from harness.interop.g4 import import_files
from harness.report.comparison_report import markdown
from harness.report.comparison_tables import arms, summary
from harness.report.words import warnings

REFERENCE = Path(__file__).parents[2] / "../shared/reference"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the published receipts are not here")
POINTS = ("a0", "mosaic12l", "mosaic10l", "e216", "f216", "r216")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("g4")
    folders = import_files([REFERENCE / "panel" / f"{p}.json" for p in POINTS], out, list(POINTS))
    return dict(zip(POINTS, folders, strict=True))


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return dict(json.loads((REFERENCE / "expected.json").read_text()))


def cells(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in summary(comparison, comparison.pairs[0]).rows}


def test_the_card_of_the_twelve_layer_mosaic(runs: dict[str, Path]) -> None:
    comparison = compare([runs["a0"], runs["mosaic12l"]])
    found = cells(comparison)
    assert found["KL lower bound, mean nats *"][:3] == ("0.38378", "0.32522", "-15.3 %")
    assert found["top-1 agreement"][:3] == ("0.78902", "0.80842", "+1.94 pp")
    assert found["PPL per token"][:3] == ("4.28692", "4.03563", "-5.9 %")
    assert found["KL lower bound, mean nats *"][3] == "-0.0586 [-0.0674, -0.0497]"
    wins = [found[name][5] for name in ("KL lower bound, mean nats *", "NLL of the text, mean nats", "top-1 agreement")]
    assert wins == ["32 / 0", "32 / 0", "0 / 32"]
    assert {d.verdict for d in comparison.pairs[0].differences} == {"better"}
    lines = {row[0]: row[1:] for row in arms(comparison).rows}
    assert lines["KL lower bound p50 (published)"] == ("0.10443", "0.08110")
    assert lines["KL lower bound p99 (published)"] == ("3.84861", "3.42432")
    assert lines["KL lower bound max"] == ("13.73050 of 65,504", "14.22812 of 65,504")


def test_the_ten_layer_sibling_wins_on_32_32_and_30_rows(runs: dict[str, Path]) -> None:
    pair = compare([runs["a0"], runs["mosaic10l"]]).pairs[0]
    by_name = {d.metric: d for d in pair.differences}
    assert by_name["kl_mean"].signs.rows_lower == 32
    assert by_name["top1_agreement"].signs.rows_higher == 32
    assert by_name["nll_candidate"].signs.rows_lower == 30
    assert cells(compare([runs["a0"], runs["mosaic10l"]]))["KL lower bound, mean nats *"][:2] == ("0.38378", "0.34264")


@pytest.mark.parametrize("names", ["mosaic12l-a0", "mosaic10l-a0", "mosaic10l-mosaic12l", "f216-e216", "e216-r216"])
def test_paired_t_intervals_as_derived_independently(
    names: str, runs: dict[str, Path], expected: dict[str, Any]
) -> None:
    other, baseline = names.split("-")
    by_name = {d.metric: d for d in compare([runs[baseline], runs[other]]).pairs[0].differences}
    for theirs, ours in (("kl_lb_mean", "kl_mean"), ("top1", "top1_agreement"), ("nll", "nll_candidate")):
        wanted, found = expected["derived_paired_by_us_t31"][names][theirs], by_name[ours]
        assert found.difference.estimate == pytest.approx(wanted["mean_diff_b_minus_a"], abs=1e-12)
        assert (found.difference.low, found.difference.high) == pytest.approx(tuple(wanted["t_ci95"]), abs=1e-12)
        assert found.resolution.deviation == pytest.approx(wanted["sd"], rel=1e-12)
        assert (found.signs.rows_lower, found.signs.rows_higher) == (wanted["rows_b_lower"], wanted["rows_b_higher"])


def test_lower_bounds_are_called_so_wherever_kl_stands(runs: dict[str, Path]) -> None:
    """The words of a bound appear because the estimator is one, and nothing exact stands beside it."""
    text = markdown(compare([runs["a0"], runs["mosaic12l"]]))
    table_lines = [line for line in text.splitlines() if line.startswith("|") and "KL" in line]
    assert table_lines and all("KL lower bound" in line for line in table_lines)
    assert "teacher mass outside: 0.70 % on average" in text
    assert "mean KL lower bound lower by 0.0586 nats (95 % CI 0.0497 to 0.0674), lower on 32 of 32 contexts" in text


def test_several_candidates_get_bands_and_a_warning(runs: dict[str, Path]) -> None:
    comparison = compare([runs["a0"], runs["mosaic12l"], runs["mosaic10l"]])
    first = comparison.pairs[0].primary
    assert first.band is not None and first.band.low is not None and first.difference.low is not None
    assert first.band.low < first.difference.low
    assert any("flattered by the choice" in w for w in warnings(comparison))


def test_renaming_a_run_folder_changes_nothing(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["a0"], tmp_path / "zzz")
    assert compare([tmp_path / "zzz", runs["mosaic12l"]]) == compare([runs["a0"], runs["mosaic12l"]])
