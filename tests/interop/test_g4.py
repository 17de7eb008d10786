"""The published G4 receipts, digit for digit, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import IncomparableError, UsageError
from harness.interop.g4 import import_files, import_g4
from harness.measure.receipt import load_measurement

REFERENCE = Path(__file__).parents[2] / "../shared/reference"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the published receipts are not here")
POINTS = ("a0", "mosaic12l", "mosaic10l", "e216", "f216", "r216")


def receipt(rows: int = 3) -> dict[str, Any]:
    """A small consistent receipt; row r has KL (r + 1) / 10 and 5 + r agreements of 10 positions."""
    per_row = [
        {
            "row": r,
            "positions": 10,
            "top1_agree": 5 + r,
            "kl_lb_mean": (r + 1) / 10,
            "cand_nll_mean": 1.0,
            "teacher_nll_mean": 0.5,
            "teacher_mass_covered_mean": 0.99,
            "candidate_seconds": 8.0,
        }
        for r in range(rows)
    ]
    return {
        "schema": "glm53-g4-panel-served-v1",
        "status": "complete",
        "point": "X12: some layers at 3 bits",
        "panel": {
            "positions_expected": 10 * rows,
            "rows": rows,
            "columns": 11,
            "fixture_manifest_sha256": "f",
            "token_rows_sha256": "t",
            "teacher_manifest_sha256": "m",
        },
        "teacher": {"model": "M", "revision": "r", "native_head_shard_sha256": "h", "source": "states"},
        "method": {"candidate_arithmetic": "5-bit head"},
        "summary": {
            "positions": 10 * rows,
            "top1_agreement": (5 + (rows - 1) / 2) / 10,
            "top1_agree_count": sum(r["top1_agree"] for r in per_row),
            "kl_lower_bound_mean": (rows + 1) / 20,
            "kl_lower_bound_p50": 0.1,
            "kl_lower_bound_p95": 0.2,
            "kl_lower_bound_p99": 0.3,
            "kl_lower_bound_max": 0.4,
            "candidate_ppl": 2.718281828459045,
            "candidate_nll_mean": 1.0,
            "teacher_ppl_recomputed": 1.6487212707001282,
            "coverage": {
                "teacher_mass_in_known_set_mean": 0.99,
                "topk_teacher": 256,
                "topk_candidate_requested": 2048,
            },
        },
        "per_row": per_row,
        "teacher_reproduction": {"top1_exact_all_rows": True, "max_nll_sum_abs_delta": 0.005, "ok": True},
    }


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@needs_reference
@pytest.mark.parametrize("point", POINTS)
def test_published_values_are_kept_digit_for_digit(point: str, tmp_path: Path) -> None:
    file = REFERENCE / "panel" / f"{point}.json"
    folder = import_files([file], tmp_path, [point])[0]
    text = (folder / "measurement.json").read_text()
    found, published = load_measurement(folder), json.loads(file.read_text())
    assert found.summary["published"] == published["summary"]
    table = json.loads((REFERENCE / "expected.json").read_text())["panel_table"]
    expected = dict(zip(table["columns"], next(r for r in table["rows"] if r[0] == point), strict=True))
    ours = {
        "top1": "top1_agreement",
        "kl_lb_mean": "kl_mean",
        "kl_p50": "kl_p50",
        "kl_p95": "kl_p95",
        "kl_p99": "kl_p99",
        "kl_max": "kl_max",
        "ppl": "ppl_token_candidate",
    }
    assert {k: found.summary[v] for k, v in ours.items()} == {k: expected[k] for k in ours}
    assert repr(expected["kl_lb_mean"]) in text
    assert (found.estimator, found.lane, found.row_level_only, found.status) == (
        "lower_bound",
        "served",
        True,
        "complete",
    )
    assert [r.kl_mean for r in found.per_row] == [r["kl_lb_mean"] for r in published["per_row"]]


@needs_reference
def test_the_file_name_changes_nothing(tmp_path: Path) -> None:
    original = REFERENCE / "panel" / "mosaic12l.json"
    copy = tmp_path / "anything-else.json"
    copy.write_bytes(original.read_bytes())
    assert import_g4(copy) == import_g4(original)
    assert import_g4(copy).name == "M288-12L"
    assert import_g4(REFERENCE / "panel" / "a0.json").name == "a0"


def test_times_are_no_part_of_the_identity(tmp_path: Path) -> None:
    slow = receipt()
    slow["per_row"][0]["candidate_seconds"] = 99.0
    first = import_g4(write(tmp_path / "a.json", receipt()))
    assert import_g4(write(tmp_path / "b.json", slow)).key == first.key
    moved = receipt()
    moved["per_row"][0]["teacher_nll_mean"] = 0.6
    assert import_g4(write(tmp_path / "c.json", moved)).key != first.key


def test_an_unfinished_receipt_is_partial(tmp_path: Path) -> None:
    part = receipt()
    part["panel"] |= {"rows": 5, "positions_expected": 50}
    assert import_g4(write(tmp_path / "a.json", part)).label == "partial 3/5 rows"


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("schema",), "glm53-g4-summary-v1", "has schema glm53-g4-summary-v1"),
        (("per_row", 1, "row"), 0, "row 0 is there twice"),
        (("per_row", 1, "positions"), 9, "rows hold 29 positions, the summary says 30"),
        (("per_row", 1, "kl_lb_mean"), 0.3, "KL mean is 0.2 in the summary"),
        (("per_row", 1, "kl_lb_mean"), float("nan"), "KL mean is 0.2 in the summary and nan"),
        (("summary", "candidate_ppl"), 3.0, "NLL behind the PPL"),
        (("summary", "kl_lower_bound_mean"), None, "summary.kl_lower_bound_mean"),
        (("per_row",), [], "per_row"),
    ],
)
def test_what_does_not_follow_is_refused(
    path: tuple[str | int, ...], value: object, complaint: str, tmp_path: Path
) -> None:
    """A row twice and a summary of other rows, among others."""
    content: Any = receipt()
    inner = content
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    with pytest.raises((UsageError, IncomparableError), match=complaint):
        import_g4(write(tmp_path / "x.json", content))


def test_unreadable_files_and_doubled_names(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UsageError, match="x.json is not JSON"):
        import_g4(tmp_path / "x.json")
    with pytest.raises(UsageError, match="gone.json cannot be read"):
        import_g4(tmp_path / "gone.json")
    with pytest.raises(UsageError, match="has schema None"):
        import_g4(write(tmp_path / "list.json", [1]))
    good = write(tmp_path / "good.json", receipt())
    with pytest.raises(UsageError, match="two receipts are called X12"):
        import_files([good, good], tmp_path / "out", [])
    with pytest.raises(UsageError, match="1 names for 2 files"):
        import_files([good, good], tmp_path / "out", ["a"])
    assert not (tmp_path / "out").exists()
