"""Lower bounds in reports, comparisons and the table of estimators, from distributions that are known whole."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.compare import compare
from harness.errors import IncomparableError, UsageError
from harness.measure.receipt import Measurement, load_measurement, save_measurement
from harness.measure.result import Extras
from harness.report.estimators import (
    PICTURE,
    columns_of,
    estimators,
    k_table,
    load_runs,
    points_of,
    reference,
    table,
    write,
)
from harness.report.html import run_page
from harness.report.run_report import measurement_table, report_text, write_report
from harness.report.tables import load_positions
from harness.report.words import reason, warnings
from harness.scoring import bounds
from harness.served.score import EXTRA_DTYPES, receipt_extras
from harness.types import SCORE_DTYPES
from harness.verify.run import verify_run
from tests.report.fake_run import log_softmax, panel_of, score, side, write_run

VOCAB, ROWS, LENGTH = 400, 16, 65


def sides(row: int, noise: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities ``[T, V]`` of teacher and candidate, and targets. The teacher does not depend on ``noise``."""
    rng = np.random.default_rng([seed, row])
    teacher = rng.gamma(1.5, 1.2, (LENGTH - 1, 1)) * rng.standard_normal((LENGTH - 1, VOCAB))
    lp = log_softmax(teacher)
    targets = np.array([rng.choice(VOCAB, p=np.exp(line)) for line in lp])
    return lp, log_softmax(teacher + noise * rng.standard_normal(teacher.shape)), targets


def known_part(lp: np.ndarray, lq: np.ndarray, targets: np.ndarray, k: int, m: int, row: int) -> pd.DataFrame:
    """A row as a server tells it: its own top k and the target (``m`` = 0), or the teacher's top k and ``m`` drawn."""
    at = np.arange(len(lp))[:, None]
    whole = score(lp, lq, targets)
    best = np.argsort(-(lp if m else lq), axis=1)[:, :k]
    mask = np.zeros(lp.shape, bool)
    mask[at, best] = True
    if not m:
        mask[at[:, 0], targets] = True
    p, q = np.where(mask, lp, np.nan), np.where(mask, lq, np.nan)
    lower = bounds.lower_bound(p, q)
    total, error = np.full(len(lp), np.nan), np.full(len(lp), np.nan)
    if m:
        tail = np.where(mask, 0.0, np.exp(lp))
        rng = np.random.default_rng(row)
        drawn = np.array([rng.choice(VOCAB, m, p=line / line.sum()) for line in tail])
        found = bounds.tail_estimate(lp[at, drawn], lq[at, drawn], tail.sum(1))
        total, error = bounds.known_sum(p, q) + found.value, found.standard_error
    unknown = np.full(len(lp), np.nan)
    extras = {
        "captured_teacher_mass": lower.mass_p,
        "captured_candidate_mass": lower.mass_q,
        "all_known": np.ones(len(lp)),
        "agree_known": np.ones(len(lp)),
        "mass_rounded": np.zeros(len(lp)),
        "kl_capped": lower.kl,
        "kl_renormalised": bounds.renormalised(p, q),
        "kl_shortfall": bounds.shortfall(p, q, lower.tail_p),
        "kl_tail_estimate": total,
        "kl_tail_se": error,
    }
    missing = dict.fromkeys(("kl_reverse", "tv", "entropy_candidate", "outside_teacher", "outside_candidate"), unknown)
    columns = {**whole, **missing, "kl": lower.kl, "rank": np.full(len(lp), -1)}
    typed = {name: np.asarray(columns[name]).astype(SCORE_DTYPES[name]) for name in SCORE_DTYPES}
    typed |= {name: np.asarray(values).astype(EXTRA_DTYPES[name]) for name, values in extras.items()}
    return pd.DataFrame(typed)


def frame_of(noise: float, k: int | None = None, m: int = 0, seed: int = 0) -> pd.DataFrame:
    """Positions of a run: exact without ``k``."""
    parts = []
    for row in range(ROWS):
        lp, lq, targets = sides(row, noise, seed)
        part = pd.DataFrame(score(lp, lq, targets)) if k is None else known_part(lp, lq, targets, k, m, row)
        place = {"row": row, "position": np.arange(LENGTH - 1), "target": targets}
        parts.append(pd.concat([pd.DataFrame(place).astype(np.int32), part], axis=1))
    return pd.concat(parts, ignore_index=True)


def make_run(folder: Path, noise: float = 0.3, k: int | None = None, m: int = 0, **changes: object) -> Path:
    """A run folder of the same candidate: exact, or served with its own top ``k`` or with drawn ids."""
    folder.mkdir(parents=True)
    frame = frame_of(noise, k, m)
    if k is None:
        write_run(folder, frame, **{"name": f"quant-{noise}", **changes})
        return folder
    scoring: dict[str, object] = {"way": "fixed ids" if m else "top-k", "k": k, "concurrency": 1, "support": VOCAB}
    scoring |= {"tail_samples": m, "seed": 1} if m else {}
    given = {
        "name": f"quant-{noise}",
        "estimator": "lower_bound",
        "lane": "served",
        "scoring": {**scoring, **changes.pop("scoring", {})},  # type: ignore[dict-item]
        "candidate": side(model="org/quant-exl3", engine="vllm", lane="served", weights_sha256="f" * 64),
    }
    more = receipt_extras(frame, panel_of(frame))
    made = write_run(folder, frame, **{**given, **changes})
    save_measurement(folder, with_additions(made, more))
    told = {"started": "2026-01-01T00:00:00+00:00", "seconds": 3.0 + k / 50, "wire_bytes": 1024 * (70 * k + 200)}
    (folder / "run.json").write_text(json.dumps(told))
    return folder


def with_additions(made: Measurement, more: Extras) -> Measurement:
    update = {
        "summary": made.summary | dict(more.summary),
        "intervals": made.intervals | dict(more.intervals),
        "counts": made.counts | dict(more.counts),
    }
    return made.model_copy(update=update)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("estimators")
    return {
        "exact": make_run(base / "exact"),
        "20": make_run(base / "k20", k=20),
        "100": make_run(base / "k100", k=100),
        "drawn": make_run(base / "drawn", k=20, m=16),
    }


def text_of(folder: Path) -> str:
    """report.md without its pictures."""
    return report_text(load_measurement(folder), load_positions(folder), [])


def rows_of(text_table: object) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in text_table.rows}  # type: ignore[attr-defined]


# ---- the report of one run -------------------------------------------------------------------------------------------


def test_the_report_of_a_bound_says_what_it_rests_on(runs: dict[str, Path]) -> None:
    report = text_of(runs["drawn"])
    s = load_measurement(runs["drawn"]).summary
    assert "KL(teacher‖candidate) mean, nats (lower bound)" in report
    assert f"{100 * s['captured_teacher_mass_mean']:.2f} %" in report
    assert "the teacher's own top 20 tokens, as the server scores them" in report
    assert "| KL estimate, mean |" in report and "16 tokens a position" in report and "standard error" in report
    assert "**not a bound**" in report
    assert "Floor of the served lane: not measured" in report
    assert "it is at least this number; an estimate of it stands beside" in report
    assert "NaN" not in report and "nan" not in report.replace("finance", "")
    assert "total variation, mean" not in report  # a top-k answer holds none


def test_the_report_of_a_top_k(runs: dict[str, Path]) -> None:
    report = text_of(runs["20"])
    assert "KL estimate" not in report and "| KL capped, mean |" in report
    assert "how much more is not known" in report
    assert "the server's own top 20 tokens and the row's next token" in report


def test_a_floor_is_named_with_its_figure(tmp_path: Path) -> None:
    floor = {"run": "floor-run", "kind": "org/teacher against itself", "kl_mean": 0.000123, "top1_agreement": 0.999}
    folder = make_run(tmp_path / "run", k=20, scoring={"floor": floor})
    report = text_of(folder)
    assert "Floor of the served lane: 0.000123 nats (org/teacher against itself, run floor-run)." in report
    assert "the floor of this lane was not measured" not in report


def test_the_terminal_shows_masses_and_the_floor(runs: dict[str, Path]) -> None:
    shown = measurement_table(load_measurement(runs["drawn"]))
    names = list(shown.columns[0].cells)
    assert any("captured teacher mass" in str(name) for name in names)
    assert any("not a bound" in str(name) for name in names)
    assert list(shown.columns[1].cells)[names.index("floor of the served lane")] == "not measured"
    exact = measurement_table(load_measurement(runs["exact"]))
    assert not any("captured" in str(name) or "floor" in str(name) for name in exact.columns[0].cells)


def test_a_weights_lane_number_is_never_called_a_bound(runs: dict[str, Path]) -> None:
    """No directional claim about what is not a bound."""
    report = text_of(runs["exact"]).lower()
    assert "lower bound" not in report and "at least" not in report and "captured" not in report


def test_verify_computes_the_bound_s_numbers_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", k=20, m=8)
    assert not verify_run(folder).findings
    changed = load_measurement(folder)
    summary = changed.summary | {"kl_tail_estimate_mean": 0.5, "captured_teacher_mass_mean": 0.999}
    save_measurement(folder, changed.model_copy(update={"summary": summary}))
    found = {finding.where for finding in verify_run(folder).findings}
    assert {"summary.kl_tail_estimate_mean", "summary.captured_teacher_mass_mean"} <= found


def test_an_unknown_choice_is_no_disagreement(tmp_path: Path) -> None:
    """Where a server does not tell its choice, agreement lies between two shares, and no table counts it as a miss."""
    folder = tmp_path / "run"
    folder.mkdir()
    frame = frame_of(0.3, 20, 8)
    hidden = frame.index % 10 == 0
    frame.loc[hidden, ["top1_candidate", "agree", "agree_lowest_id", "agree_known"]] = [-1, False, False, False]
    frame = frame.astype({**SCORE_DTYPES, **EXTRA_DTYPES})
    changes = {"estimator": "lower_bound", "lane": "served", "scoring": {"way": "fixed ids", "k": 20}}
    made = write_run(folder, frame, **changes)
    save_measurement(folder, with_additions(made, receipt_extras(frame, panel_of(frame))))
    report = write_report(folder).read_text()
    low, high = frame["agree"].mean(), frame["agree"].mean() + hidden.mean()
    assert f"between {100 * low:.2f} % and {100 * high:.2f} %" in report
    assert load_measurement(folder).summary["top1_agreement"] is None
    assert "| positions where agreement is not known | 103 |" in report


# ---- several estimators of one candidate -----------------------------------------------------------------------------


def test_one_column_an_estimator(runs: dict[str, Path]) -> None:
    """Exact, lower bound and estimate of one candidate stand in columns of their own."""
    columns = columns_of(load_runs([runs["drawn"], runs["exact"], runs["100"]]))
    assert [c.kind for c in columns] == ["exact", "lower bound", "lower bound", "estimate"]
    found = table(columns)
    assert found.header[1:] == (
        "exact (weights, exl3)",
        "lower bound (served, vllm, fixed ids, k = 20)",
        "lower bound (served, vllm, top-k, k = 100)",
        "estimate (served, vllm, fixed ids, k = 20)",
    )
    rows = rows_of(found)
    exact, drawn = (load_measurement(runs[name]).summary for name in ("exact", "drawn"))
    assert rows["share of the exact KL"][1] == f"{100 * drawn['kl_mean'] / exact['kl_mean']:.2f} %"
    assert rows["share of the exact KL"][0] == "n/a"
    implied = (exact["kl_mean"] - drawn["kl_mean"]) / (1 - drawn["captured_teacher_mass_mean"])
    assert float(rows["the same over the mass that is not known"][1]) == pytest.approx(implied, rel=1e-2)
    assert rows["positions where the bound exceeds the exact KL"][1:3] == ("0", "0")
    assert rows["same top-1 choice"][1] == "100 %"
    assert rows["largest NLL difference at a position"][1] == "0"
    error = drawn["kl_tail_estimate_se"]
    assert abs(drawn["kl_tail_estimate_mean"] - exact["kl_mean"]) < 4 * error
    assert drawn["kl_mean"] < exact["kl_mean"] and rows["bytes on the wire"][0] == "n/a"


def test_an_exact_served_number_is_what_served_bounds_are_held_against(runs: dict[str, Path], tmp_path: Path) -> None:
    served = side(model="org/quant-exl3", engine="vllm-local", lane="served", weights_sha256="f" * 64)
    third = make_run(tmp_path / "hidden", lane="served", candidate=served)
    columns = columns_of(load_runs([runs["exact"], third, runs["20"]]))
    against = reference(columns)
    assert against is not None and against.header == "exact (served, vllm-local)"
    assert [c.kind for c in columns] == ["exact", "exact", "lower bound"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"teacher": side(weights_sha256="9" * 64)}, r"teacher \(weights\)"),
        ({"teacher": side(capture_sha256="8" * 64)}, "teacher capture"),
    ],
)
def test_another_teacher_is_refused(runs: dict[str, Path], tmp_path: Path, changes: dict, what: str) -> None:
    other = make_run(tmp_path / "other", k=20, **changes)
    with pytest.raises(IncomparableError, match=f"same {what}"):
        load_runs([runs["exact"], other])


def test_another_panel_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", k=20)
    m = load_measurement(other)
    save_measurement(other, m.model_copy(update={"panel": m.panel.model_copy(update={"sha256": "7" * 64})}))
    with pytest.raises(IncomparableError, match="same panel"):
        load_runs([runs["exact"], other])


def test_what_k_costs_and_its_picture(runs: dict[str, Path], tmp_path: Path) -> None:
    found = estimators([runs["exact"], runs["20"], runs["100"]])
    points = points_of(found.columns)
    assert [p.k for p in points] == [20, 100]
    assert points[0].mass < points[1].mass and points[0].bound < points[1].bound < (points[1].exact or 0)
    rows = rows_of(k_table(points))
    assert rows["top-k, k = 20"][4:] == (f"{1024 * 1600:,}", "1600", "3.400")
    report = write(tmp_path / "out", found)
    first = (tmp_path / "out" / f"{PICTURE}.svg").read_bytes()
    assert (tmp_path / "out" / f"{PICTURE}.png").stat().st_size > 10_000
    text = report.read_text()
    assert "![Known tokens and what they cost](known-tokens.png)" in text
    write(tmp_path / "out", found)
    assert (tmp_path / "out" / f"{PICTURE}.svg").read_bytes() == first and report.read_text() == text


def test_an_upper_bound_needs_an_assumption(runs: dict[str, Path]) -> None:
    """No finite upper bound from known tokens alone; under a range R it is bound + p_T R^2 / 8."""
    plain = estimators([runs["exact"], runs["20"]])
    assert not any(row[0].startswith("at most") for row in plain.tables[0].rows)
    assert any("No upper bound follows" in text for text in plain.sentences)
    assumed = estimators([runs["exact"], runs["20"]], tail_range=2.0)
    s = load_measurement(runs["20"]).summary
    most = rows_of(assumed.tables[0])["at most, if ln(p/q) varies by 2.000 outside"]
    assert float(most[1]) == pytest.approx(s["kl_mean"] + (1 - s["captured_teacher_mass_mean"]) / 2, rel=1e-3)
    assert most[0] == "n/a" and any("an assumption of the reader" in text for text in assumed.sentences)
    with pytest.raises(UsageError, match="is no range"):
        estimators([runs["exact"], runs["20"]], tail_range=-1.0)


def test_the_command(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["estimators", str(runs["exact"]), str(runs["drawn"]), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "estimate" in done.output and (out / "estimators.md").is_file()
    assert not (out / f"{PICTURE}.png").exists()  # one k is no picture


# ---- two lower bounds ------------------------------------------------------------------------------------------------


def test_what_the_tails_could_change(runs: dict[str, Path], tmp_path: Path) -> None:
    """A difference of two bounds comes with the tail divergence that would undo it; an assumed range can hold it."""
    better = make_run(tmp_path / "better", noise=0.25, k=20, m=8)
    found = compare([runs["drawn"], better])
    tails = found.pairs[0].tails
    a, b = (load_measurement(run).summary for run in (runs["drawn"], better))
    assert tails is not None and found.pairs[0].primary.verdict == "better"
    assert tails.difference == pytest.approx(b["kl_mean"] - a["kl_mean"])
    uncovered = 1 - b["captured_teacher_mass_mean"]
    assert tails.uncovered_other == pytest.approx(uncovered)
    assert tails.overturning == pytest.approx(abs(tails.difference) / uncovered)
    assert tails.shortfall_baseline == pytest.approx(a["kl_shortfall_mean"]) and tails.could_move is None
    assert any("the order of the two turns" in text for text in warnings(found))

    needed = float(np.sqrt(8 * abs(tails.difference) / uncovered))
    held = compare([runs["drawn"], better], tail_range=1.01 * needed)
    assert held.pairs[0].primary.verdict == "undecided" and "could undo this" in reason(
        held, held.pairs[0], held.pairs[0].primary
    )
    kept = compare([runs["drawn"], better], tail_range=0.99 * needed)
    assert kept.pairs[0].primary.verdict == "better" and kept.key != held.key != found.key


def test_exact_comparisons_do_not_speak_of_tails(runs: dict[str, Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", noise=0.2)
    found = compare([runs["exact"], other])
    assert found.pairs[0].tails is None and "tails" not in found.model_dump()["pairs"][0]
    with pytest.raises(UsageError, match="these values are exact"):
        compare([runs["exact"], other], tail_range=1.0)


def test_bounds_of_another_k_or_way_are_refused(runs: dict[str, Path]) -> None:
    """Never two lower bounds of different k."""
    with pytest.raises(IncomparableError, match=r"scoring \(k\): 20 and 100") as refused:
        compare([runs["20"], runs["100"]])
    assert "same --k" in refused.value.repair
    with pytest.raises(IncomparableError, match=r"scoring \(way\): 'top-k' and 'fixed ids'"):
        compare([runs["20"], runs["drawn"]])
    with pytest.raises(IncomparableError, match="estimator"):
        compare([runs["exact"], runs["20"]])


def test_the_number_of_drawn_tokens_does_not_part_two_bounds(runs: dict[str, Path], tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", noise=0.25, k=20, m=8)
    assert compare([runs["drawn"], other]).pairs[0].tails is not None


def test_an_unknown_choice_is_left_out_of_a_paired_agreement(runs: dict[str, Path], tmp_path: Path) -> None:
    folder = make_run(tmp_path / "other", noise=0.25, k=20, m=8)
    arms = load_runs([runs["drawn"], folder])
    from harness.compare.metrics import BY_NAME

    columns = dict(arms[1].columns)
    columns["top1_candidate"] = np.where(np.arange(len(columns["kl"])) < 5, -1, columns["top1_candidate"])
    values = BY_NAME["top1_agreement"].values(columns)
    assert np.isnan(values[:5]).all() and np.isfinite(values[5:]).all()


def test_the_html_report_of_a_bound(runs: dict[str, Path]) -> None:
    page = run_page(runs["drawn"])
    named = {one.title: one.rows for one in page.tables}
    assert any(row[0] == "KL estimate, mean" for row in named["What the lower bound rests on"])
    cells = [text for shown in page.worst for _, text in shown.figures]
    assert "n/a" in cells and not any("NaN" in text for text in cells)


def test_the_card_of_a_bound(runs: dict[str, Path], tmp_path: Path) -> None:
    """A card of a served lower bound says so wherever its KL stands, and prints nothing that was not measured."""
    done = CliRunner().invoke(app, ["card", str(runs["drawn"]), "-o", str(tmp_path), "--no-pictures"])
    assert done.exit_code == 0, done.output
    card = (tmp_path / "README.md").read_text()
    assert "lower bound" in card and "NaN" not in card and "nan" not in card.split("## ")[1]
