"""Paired comparison from positions, against loops over the same arrays; what is counted, held back and said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

from harness.compare import Comparison, compare, load_comparison
from harness.errors import IncomparableError, Refused
from harness.report.comparison_report import markdown, require_panels_tokenizer, with_texts, write
from harness.report.words import margin_source, reason, sentence, warnings, worded
from harness.store import write_receipt
from tests.compare.fake_arms import World

WORLD = World()
A = WORLD.columns(0.30, seed=2)
B = WORLD.columns(0.26, seed=3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("runs")
    return WORLD.run(out / "a", "A", A), WORLD.run(out / "b", "B", B)


@pytest.fixture(scope="module")
def found(runs: tuple[Path, Path]) -> Comparison:
    return compare(runs)


def row_means(columns: dict[str, np.ndarray], name: str) -> np.ndarray:
    return np.array([columns[name][WORLD.row_N == r].mean() for r in range(WORLD.rows)])


@pytest.mark.parametrize(
    ("metric", "column"),
    [
        ("kl_mean", "kl"),
        ("nll_candidate", "nll_candidate"),
        ("top1_agreement", "agree"),
        ("tv_mean", "tv"),
        ("kl_reverse_mean", "kl_reverse"),
    ],
)
def test_paired_t_is_scipys_on_row_means(found: Comparison, metric: str, column: str) -> None:
    difference = next(d for d in found.pairs[0].differences if d.metric == metric)
    test = scipy_stats.ttest_rel(row_means(B, column), row_means(A, column))
    interval = test.confidence_interval()
    assert (difference.difference.low, difference.difference.high) == pytest.approx((interval.low, interval.high))
    assert difference.p == pytest.approx(test.pvalue, rel=1e-6)
    assert difference.other - difference.baseline == pytest.approx(B[column].mean() - A[column].mean())


def test_derived_metrics(found: Comparison) -> None:
    by_name = {d.metric: d for d in found.pairs[0].differences}
    p = [np.exp(-c["nll_candidate"]) - np.exp(-c["nll_teacher"]) for c in (A, B)]
    assert by_name["delta_p"].other == pytest.approx(p[1].mean())
    assert by_name["delta_p"].verdict == "no verdict"
    assert by_name["delta_p_abs"].baseline == pytest.approx(np.abs(p[0]).mean())
    assert by_name["tail_rate_0.1"].baseline == pytest.approx((A["kl"] > 0.1).mean())
    assert by_name["top5_overlap"].other == pytest.approx(B["top5_overlap"].mean() / 5)
    ratio = found.pairs[0].ppl_ratio
    assert ratio.estimate == pytest.approx(np.exp(B["nll_candidate"].mean() - A["nll_candidate"].mean()))
    assert found.arms[1].ppl_token.estimate == pytest.approx(np.exp(B["nll_candidate"].mean()))


def test_the_sentence_and_verdict(found: Comparison) -> None:
    first = found.pairs[0].primary
    assert first.verdict == "better" and margin_source(first) == "exploratory default: 0.1 of the baseline"
    lower = int((row_means(B, "kl") < row_means(A, "kl")).sum())
    assert sentence(first).startswith(f"lower by {-first.difference.estimate:.4f} nats (95 % CI ")
    assert sentence(first).endswith(f", lower on {lower} of 24 contexts")
    assert first.signs.p == pytest.approx(scipy_stats.binomtest(lower, 24).pvalue)
    assert first.bootstrap.method.startswith("expanded percentile bootstrap over documents, 10000")
    assert found.status == "exploratory"


def test_breakdowns_add_up_to_the_whole(found: Comparison) -> None:
    pair = found.pairs[0]
    for parts in (pair.domains, pair.deciles, pair.confidence):
        assert sum(part.positions for part in parts) == WORLD.rows * WORLD.length
        whole = sum(part.other * part.positions for part in parts) / (WORLD.rows * WORLD.length)
        assert whole == pytest.approx(B["kl"].mean())
    assert [part.label for part in pair.deciles][0] == "0-29"
    code = np.isin(WORLD.row_N % 3, [0])
    assert next(p for p in pair.domains if p.label == "code").baseline == pytest.approx(A["kl"][code].mean())
    sure = pair.confidence[-1]
    bucket = WORLD_CONFIDENCE >= 0.99
    assert (sure.label, sure.positions) == ("0.99-1", int(bucket.sum()))
    assert sure.baseline == pytest.approx(A["kl"][bucket].mean())


WORLD_CONFIDENCE = A["p_top1_teacher"]


def test_rows_have_their_own_intervals(found: Comparison) -> None:
    rows = found.pairs[0].rows
    assert [r.row for r in rows] == list(range(24))
    wanted = row_means(B, "kl") - row_means(A, "kl")
    assert [r.difference for r in rows] == pytest.approx(wanted.tolist())
    assert all(r.low is not None and r.high is not None and r.low < r.difference < r.high for r in rows)
    one = rows[7]
    naive = scipy_stats.ttest_1samp((B["kl"] - A["kl"])[WORLD.row_N == 7], 0).confidence_interval()
    assert one.high is not None and one.low is not None
    assert 0.6 < (one.high - one.low) / (naive.high - naive.low) < 1.6


def test_flips_by_counting(found: Comparison) -> None:
    right = A["top1_teacher"] == WORLD.targets
    candidate = B["top1_candidate"] == WORLD.targets
    flips = found.arms[1].flips
    assert flips is not None
    assert flips.right_to_wrong == sum(1 for t, c in zip(right, candidate, strict=True) if t and not c)
    assert flips.wrong_to_right == sum(1 for t, c in zip(right, candidate, strict=True) if c and not t)
    top = found.pairs[0].flips
    assert top is not None
    assert top.both + top.baseline_only + top.other_only + top.neither == len(right)
    assert top.baseline_only == int((A["agree"] & ~B["agree"]).sum())


def test_the_worst_positions_are_the_worst(found: Comparison) -> None:
    largest = np.maximum(A["kl"], B["kl"])
    wanted = np.argsort(-largest, kind="stable")[:20]
    assert [(p.row, p.position) for p in found.worst] == [
        (int(WORLD.row_N[i]), int(WORLD.position_N[i])) for i in wanted
    ]
    for p, at in zip(found.worst, wanted, strict=True):
        assert p.kl == {"A": pytest.approx(A["kl"][at]), "B": pytest.approx(B["kl"][at])}
        begin = at - min(24, int(WORLD.position_N[at]))
        assert p.context == WORLD.targets[begin:at].tolist()


def test_a_maximum_has_a_place_and_no_interval(found: Comparison) -> None:
    """A maximum of one panel is no estimate of anything."""
    largest = found.arms[0].largest
    at = int(A["kl"].argmax())
    assert largest is not None
    assert (largest.row, largest.position, largest.token) == (
        WORLD.row_N[at],
        WORLD.position_N[at],
        WORLD.targets[at],
    )
    assert (largest.value, largest.positions) == (A["kl"][at], 7200)
    assert not hasattr(largest, "low")


def test_quantiles_and_the_withheld_one(found: Comparison) -> None:
    """7,200 positions do not support p99.9."""
    quantiles = found.arms[0].quantiles
    assert quantiles["p50"].estimate == np.sort(A["kl"])[3599]
    assert quantiles["p50"].low is not None and quantiles["p50"].low < quantiles["p50"].estimate
    assert "p99.9" not in quantiles
    assert found.arms[0].withheld == {"p99.9": "7 positions lie beyond it, 50 are needed"}
    assert "| KL p99.9 | withheld | withheld |" in markdown(found)


def test_a_against_itself_is_exactly_zero_everywhere(runs: tuple[Path, Path]) -> None:
    same = compare([runs[0], runs[0]])
    assert [arm.name for arm in same.arms] == ["A", "A (2)"]
    for d in same.pairs[0].differences:
        assert (d.difference.estimate, d.difference.low, d.difference.high) == (0.0, 0.0, 0.0)
        assert (d.bootstrap.low, d.bootstrap.high) == (0.0, 0.0)
        assert d.verdict == ("equivalent" if d.lower_is_better is not None else "no verdict")
    assert all((r.difference, r.low, r.high) == (0.0, 0.0, 0.0) for r in same.pairs[0].rows)
    assert sentence(same.pairs[0].primary) == "differs by 0 nats (95 % CI 0 to 0), the same on 24 of 24 contexts"
    assert "A and A (2) are the same measurement" in warnings(same)


def test_the_teacher_against_itself_with_kl_zero(tmp_path: Path) -> None:
    zero = WORLD.score(WORLD.lp)
    paths = [WORLD.run(tmp_path / n, n, zero) for n in ("x", "y")]
    first = compare(paths).pairs[0].primary
    assert (first.baseline, first.verdict, first.pooled_ratio) == (0.0, "equivalent", None)


def test_one_row_gives_no_verdict(tmp_path: Path) -> None:
    """A single window said that 8 bits are worse than 6."""
    paths = [WORLD.run(tmp_path / n, n, c, rows=[0]) for n, c in (("A", A), ("B", B))]
    comparison = compare(paths)
    for d in comparison.pairs[0].differences:
        assert d.verdict == "no verdict" and d.difference.low is None
    assert "one document gives no interval" in sentence(comparison.pairs[0].primary)
    assert "no verdict" in markdown(comparison)


def test_nan_positions_leave_both_arms_and_hold_the_verdict_back(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    """B breaks on its hardest positions; its own finite mean would look better still."""
    broken = {name: values.copy() for name, values in B.items()}
    hardest = np.argsort(-B["kl"])[:10]
    for name in ("kl", "nll_candidate", "kl_reverse", "tv"):
        broken[name][hardest] = np.nan
    path = WORLD.run(tmp_path / "broken", "B", broken, status="invalid")
    comparison = compare([runs[0], path])
    keep = np.isfinite(broken["kl"])
    first = comparison.pairs[0].primary
    assert first.baseline == pytest.approx(A["kl"][keep].mean())
    assert first.other == pytest.approx(B["kl"][keep].mean())
    assert (first.positions, first.excluded) == (7190, 10)
    assert (comparison.arms[0].nonfinite, comparison.arms[1].nonfinite) == (0, 10)
    assert first.verdict == "undecided"
    held = "the candidate has 10 more positions that are not finite"
    assert held in reason(comparison, comparison.pairs[0], first)
    assert "10 positions are not finite in some arm; they are left out of all arms" in markdown(comparison)
    back = compare([path, runs[0]])
    turned = back.pairs[0].primary
    assert turned.verdict == "undecided" and "the baseline has 10 more" in reason(back, back.pairs[0], turned)


def test_infinite_kl_is_counted_as_infinite(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    infinite = {name: values.copy() for name, values in A.items()}
    infinite["kl"][5] = np.inf
    path = WORLD.run(tmp_path / "inf", "inf", infinite)
    comparison = compare([runs[1], path])
    assert (comparison.arms[1].nonfinite, comparison.arms[1].infinite) == (1, 1)
    assert any("1 positions are not finite, 1 of them infinite" in w for w in warnings(comparison))
    assert comparison.pairs[0].primary.verdict == "worse"


def test_an_error_that_grows_along_the_row_is_flagged(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    """KL rises with the position in one arm only."""
    path = WORLD.run(tmp_path / "s", "S", WORLD.columns(0.3, seed=4, slope=2.0))
    comparison = compare([runs[0], path])
    trends = [arm.trend for arm in comparison.arms]
    assert trends[0] is not None and trends[1] is not None
    assert (trends[0].rising, trends[1].rising) == (False, True)
    assert [d.other for d in comparison.pairs[0].deciles] == sorted(d.other for d in comparison.pairs[0].deciles)
    assert any("S: KL rises along the row" in w for w in warnings(comparison))


def test_documents_are_the_unit_when_rows_share_them(tmp_path: Path) -> None:
    """24 windows of 4 documents."""
    world = World(documents=4)
    paths = [world.run(tmp_path / n, n, c) for n, c in (("A", A), ("B", B))]
    comparison = compare(paths)
    first = comparison.pairs[0].primary
    assert (first.difference.n, first.difference.unit, comparison.settings.units) == (4, "document", 4)
    assert first.signs.rows == 24
    assert first.signs.units_lower + first.signs.units_higher + first.signs.units_tied == 4
    assert first.signs.p >= 0.125
    assert first.bootstrap.note == "few documents: the bootstrap is not to be trusted"


def test_partial_runs_are_compared_on_common_rows_and_labelled(tmp_path: Path, runs: tuple[Path, Path]) -> None:
    part = WORLD.run(tmp_path / "p", "B", B, rows=[1, 2, 3, 4, 5])
    comparison = compare([runs[0], part])
    assert comparison.paired_on.rows == [1, 2, 3, 4, 5]
    assert len(comparison.paired_on.rows_left_out) == 19
    keep = np.isin(WORLD.row_N, [1, 2, 3, 4, 5])
    assert comparison.arms[0].metrics["kl_mean"].estimate == pytest.approx(A["kl"][keep].mean())
    assert "B is partial 5/24 rows" in warnings(comparison)


def test_one_context_that_decides_is_named(tmp_path: Path) -> None:
    """The top row's share and the mean without each row."""
    spiked = {name: values.copy() for name, values in A.items()}
    spiked["kl"] = np.where(WORLD.row_N == 9, A["kl"] * 40, A["kl"])
    paths = [WORLD.run(tmp_path / n, n, c) for n, c in (("B", B), ("spike", spiked))]
    share = compare(paths).arms[1].share
    assert share is not None and (share.row, share.driven_by_one) == (9, True)
    means = row_means(spiked, "kl")
    assert share.leave_one_out_low == pytest.approx((means.sum() - means[9]) / 23)
    assert any("driven by one context: row 9" in w for w in warnings(compare(paths)))


def test_comparison_json_round_trips_and_is_deterministic(
    found: Comparison, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Nothing becomes null or 0 on its way through JSON."""
    write(tmp_path / "x", found)
    assert load_comparison(tmp_path / "x") == worded(found)
    write(tmp_path / "y", compare(runs))
    for name in ("comparison.json", "report.md"):
        assert (tmp_path / "x" / name).read_bytes() == (tmp_path / "y" / name).read_bytes()
    text = (tmp_path / "x" / "comparison.json").read_text()
    assert str(tmp_path) not in text and "NaN" not in text


def test_names_of_folders_change_nothing(runs: tuple[Path, Path], tmp_path: Path, found: Comparison) -> None:
    shutil.copytree(runs[0], tmp_path / "renamed")
    assert compare([tmp_path / "renamed", runs[1]]) == found


def test_edited_positions_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / "edited")
    WORLD.run(tmp_path / "other", "B", B)
    shutil.copy(tmp_path / "other" / "positions.parquet", tmp_path / "edited" / "positions.parquet")
    with pytest.raises(Refused, match="not what its measurement.json was made from"):
        compare([runs[1], tmp_path / "edited"])


def test_a_row_listed_twice_is_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    """It would count twice in every mean and count as an independent unit."""
    shutil.copytree(runs[0], tmp_path / "twice")
    content = json.loads((tmp_path / "twice" / "measurement.json").read_text())
    content["per_row"].append(content["per_row"][7])
    write_receipt(tmp_path / "twice" / "measurement.json", content)
    with pytest.raises(IncomparableError, match="a row is listed twice"):
        compare([runs[1], tmp_path / "twice"])


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_worst_positions_can_be_read(found: Comparison) -> None:
    first = with_texts(found, Letters()).worst[0]
    assert first.texts is not None
    assert first.texts["target"] == chr(97 + first.target)
    assert first.texts["context"] == "".join(chr(97 + i) for i in first.context)
    assert first.texts["B"] == chr(97 + first.top1["B"])
    require_panels_tokenizer(found.panel.tokenizer_sha256, "e" * 64)
    with pytest.raises(IncomparableError, match="this tokenizer is"):
        require_panels_tokenizer(found.panel.tokenizer_sha256, "f" * 64)


def test_a_damaged_comparison_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="comparison.json is not in"):
        load_comparison(tmp_path)
    (tmp_path / "comparison.json").write_text('{"format": "other"}')
    with pytest.raises(Refused, match="comparison.json cannot be read"):
        load_comparison(tmp_path)
