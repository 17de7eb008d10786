"""What does not belong in one table is refused with both values; what may differ is said. Floors and registrations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from harness.compare import compare
from harness.compare.build import correct
from harness.digest import file_digest
from harness.errors import IncomparableError, Refused
from harness.measure.receipt import load_measurement, save_measurement
from harness.registration import Registration
from harness.report.words import margin_source, reason, warnings
from tests.compare.fake_arms import World, side, started

WORLD = World(rows=20, length=60)
A, B = WORLD.columns(0.30, seed=2), WORLD.columns(0.24, seed=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WORLD.run(tmp_path_factory.mktemp("base") / "a", "A", A)


def other(folder: Path, **change: Any) -> Path:
    return WORLD.run(folder / "b", "B", B, **change)


def test_logits_stand_beside_states_through_their_own_head(base: Path, tmp_path: Path) -> None:
    """A GGUF gives logits, an EXL3 model states and its head: both are scored with their own heads, in one table."""
    gguf = other(tmp_path, scoring={"head_policy": "logits", "support": 16})
    assert len(compare([base, gguf]).arms) == 2


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"estimator": "lower_bound"}, "same estimator: 'exact' and 'lower_bound'"),
        ({"lane": "served"}, "same lane: 'weights' and 'served'"),
        ({"scoring": {"head_policy": "teacher's head", "support": 16}}, "scoring .head_policy."),
        ({"scoring": {"head_policy": "own head on each side", "support": 15}}, "scoring .support.*: 16 and 15"),
        ({"scoring": {"head_policy": "own head on each side", "support": 16, "k": 64}}, "scoring .k.*: None and 64"),
    ],
)
def test_other_kinds_of_numbers(base: Path, change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """Another lane, estimator or scoring never stands in one table."""
    with pytest.raises(IncomparableError, match=complaint):
        compare([base, other(tmp_path, **change)])


@pytest.mark.parametrize(
    ("world", "complaint"),
    [
        ({"panel_sha256": "b" * 64}, "same panel: aaaaaaaaaaaaaaaa and bbbbbbbbbbbbbbbb"),
        ({"tokenizer_sha256": "f" * 64}, "same tokenizer"),
        ({"teacher": {"weights_sha256": "9" * 64}}, "teacher .weights_sha256."),
        ({"teacher": {"head_sha256": "9" * 64}}, "teacher .head_sha256."),
        ({"teacher": {"capture_sha256": "9" * 64}}, "same teacher capture"),
        ({"teacher": {"compute_dtype": "bfloat16"}}, "teacher .compute_dtype.*: 'float32' and 'bfloat16'"),
        ({"unit": "row"}, "unit of resampling"),
        ({"seed": 9}, "differ in the column target"),
    ],
)
def test_other_panel_or_teacher(base: Path, world: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """One artefact had 0.12 on one panel and 0.38 on another; both hashes are shown."""
    made = World(rows=20, length=60, **world)
    with pytest.raises(IncomparableError, match=complaint) as refusal:
        compare([base, made.run(tmp_path / "b", "B", made.columns(0.24, seed=3))])
    assert refusal.value.repair


def test_partial_run_against_another_teacher_is_found_out_by_its_numbers(base: Path, tmp_path: Path) -> None:
    """The capture digest of a partial run says nothing, the teacher's own NLL does."""
    moved = {name: values.copy() for name, values in B.items()}
    moved["nll_teacher"] += 0.01
    with pytest.raises(IncomparableError, match="the teacher's NLL differs by up to 0.01 nats"):
        compare([base, WORLD.run(tmp_path / "b", "B", moved, rows=[0, 1, 2])])


def test_a_revision_is_not_content(base: Path, tmp_path: Path) -> None:
    """Two revisions with the same contents are equal, with a note."""
    world = World(rows=20, length=60, teacher={"revision": "v2"})
    found = compare([base, world.run(tmp_path / "b", "B", B)])
    assert any("revision is named main and v2; its contents are equal" in w for w in warnings(found))


def test_another_device_or_cache_type_is_said(base: Path, tmp_path: Path) -> None:
    """The device is part of the identity."""
    candidate = side("B", device="cuda", settings={"kv_dtype": "fp8"})
    told = warnings(compare([base, other(tmp_path, candidate=candidate)]))
    assert "A and B ran with another device (cpu and cuda): part of the difference" in told
    assert "A and B ran with another kv_dtype (None and fp8): part of the difference" in told


def test_one_run_and_no_common_rows(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="two measurements or more"):
        compare([base])
    first = WORLD.run(tmp_path / "x", "X", A, rows=[0, 1])
    with pytest.raises(IncomparableError, match="no row in common"):
        compare([first, WORLD.run(tmp_path / "y", "Y", B, rows=[2, 3])])
    with pytest.raises(Refused, match="there is no nothing"):
        compare([base, tmp_path / "nothing"])


def test_nothing_finite_at_all(base: Path, tmp_path: Path) -> None:
    broken = {**B, "kl": np.full_like(B["kl"], np.nan)}
    with pytest.raises(IncomparableError, match="no position is finite in every measurement"):
        compare([base, WORLD.run(tmp_path / "b", "B", broken)])


def test_a_missing_or_damaged_positions_file(base: Path, tmp_path: Path) -> None:
    path = other(tmp_path)
    (path / "positions.parquet").unlink()
    with pytest.raises(Refused, match="has no positions.parquet"):
        compare([base, path])


def test_row_means_only_are_compared_by_row(base: Path, tmp_path: Path) -> None:
    path = other(tmp_path, row_level_only=True, positions_sha256="")
    found = compare([base, path])
    whole = compare([base, other(tmp_path / "again")])
    assert (found.paired_on.basis, found.worst, found.pairs[0].deciles) == ("rows", [], [])
    ours, theirs = found.pairs[0].primary.difference, whole.pairs[0].primary.difference
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)


# ---- floor and anchors ---------------------------------------------------------------------------------------------


def test_a_difference_below_the_floor_is_not_claimed(base: Path, tmp_path: Path) -> None:
    """Noise of 8.7e-4 between launches of one engine."""
    difference = float(A["kl"].mean() - B["kl"].mean())
    plain = compare([base, other(tmp_path)])
    assert plain.pairs[0].primary.verdict == "better"
    assert any("no floor was measured" in w for w in warnings(plain))
    noisy = {**A, "kl": np.full_like(A["kl"], 1.1 * difference)}
    floor = WORLD.run(tmp_path / "floor", "teacher again", noisy)
    found = compare([base, tmp_path / "b"], floor=floor)
    assert found.pairs[0].primary.verdict == "undecided"
    assert "smaller than the floor" in reason(found, found.pairs[0], found.pairs[0].primary)
    assert found.references[0].kl.estimate == pytest.approx(1.1 * difference)
    assert not any("no floor was measured" in w for w in warnings(found))


def test_arms_at_the_floor_are_not_ranked(base: Path, tmp_path: Path) -> None:
    floor = WORLD.run(tmp_path / "floor", "teacher again", {**A, "kl": A["kl"] * 2})
    found = compare([base, other(tmp_path)], floor=floor)
    assert [arm.at_floor for arm in found.arms] == [True, True]
    assert "both are at the floor" in reason(found, found.pairs[0], found.pairs[0].primary)
    assert any("A is at the floor" in w for w in warnings(found))


def test_a_floor_of_another_lane_is_refused(base: Path, tmp_path: Path) -> None:
    """Attributing an error by another lane's floor."""
    floor = WORLD.run(tmp_path / "floor", "teacher again", A, lane="served")
    with pytest.raises(IncomparableError, match="same lane"):
        compare([base, other(tmp_path)], floor=floor)


def test_anchors_stand_beside_and_are_not_judged(base: Path, tmp_path: Path) -> None:
    anchor = WORLD.run(tmp_path / "int8", "INT8", WORLD.columns(0.05, seed=8))
    found = compare([base, other(tmp_path)], anchors=[anchor])
    assert [(r.kind, r.name) for r in found.references] == [("anchor", "INT8")]
    assert len(found.pairs) == 1


# ---- registration ----------------------------------------------------------------------------------------------------

PLAN = Registration.model_validate(
    {
        "teacher": "teacher",
        "candidates": ["A", "B"],
        "primary": {"metric": "tv_mean", "margin": 0.5, "margin_kind": "relative"},
        "secondary": [{"metric": "kl_mean", "margin": 0.001}],
        "seed": 7,
        "resamples": 500,
        "rows": 20,
        "exclusions": [{"row": 3, "reason": "quotes the calibration text"}],
        "bars": [
            {"name": "PPL not above", "metric": "ppl_token_candidate", "relation": "<=", "reference": "baseline"},
            {"name": "tiny KL", "metric": "kl_mean", "relation": "<", "value": 1e-9},
        ],
    }
)


def block(committed: str | None = "2026-01-01T00:00:00+00:00") -> dict[str, Any]:
    return {
        "sha256": PLAN.sha256,
        "content": PLAN.model_dump(mode="json"),
        "commit": "c" * 40,
        "committed": committed,
        "changed_since_commit": False,
    }


def registered_runs(folder: Path, **change: Any) -> list[Path]:
    world = World(rows=20, length=60, registration=block())
    paths = [world.run(folder / n, n, c, **change) for n, c in (("A", A), ("B", B))]
    for path in paths:
        started(path, "2026-01-03T02:00:00+00:00")
    return paths


def test_a_registration_fixes_metric_margin_seed_and_exclusions(tmp_path: Path) -> None:
    found = compare(registered_runs(tmp_path))
    first = found.pairs[0].primary
    assert (found.status, first.metric, first.role) == ("registered in advance", "tv_mean", "primary")
    assert first.verdict == "equivalent" and first.margin == pytest.approx(0.5 * first.baseline)
    assert margin_source(first) == "registered: 0.5 of the baseline"
    assert (found.settings.seed, found.settings.resamples) == (7, 500)
    assert found.paired_on.rows_excluded_by_registration == [3] and 3 not in found.paired_on.rows
    assert found.registration is not None and found.registration.lead_time == "2 d 2 h before the run"
    assert [d.role for d in found.pairs[0].differences[:3]] == ["primary", "secondary", "other"]
    assert [bar.met for bar in found.bars] == [
        found.arms[1].ppl_token.estimate <= found.arms[0].ppl_token.estimate,
        False,
    ]


def test_deviations_are_printed(tmp_path: Path) -> None:
    """Fewer rows than registered is a deviation, here and on the card."""
    found = compare(registered_runs(tmp_path, rows=[0, 1, 2, 4]))
    assert "A: 4 rows measured, 19 registered" in found.deviations
    whole = compare(registered_runs(tmp_path / "whole"))
    assert whole.deviations == [
        "A: rows 3 were registered as excluded, and are in the summary",
        "B: rows 3 were registered as excluded, and are in the summary",
    ]


def test_a_run_made_before_registering_deviates(base: Path, tmp_path: Path) -> None:
    found = compare([registered_runs(tmp_path)[0], base])
    assert f"A (2): measured under no registration, not under {PLAN.sha256[:12]}" in found.deviations


def test_a_registered_panel_without_the_registration_says_so(tmp_path: Path) -> None:
    paths = registered_runs(tmp_path, registration=None)
    found = compare(paths)
    assert found.status == "exploratory"
    assert any(f"registered as {PLAN.sha256[:12]}, what was registered is not here" in w for w in warnings(found))


def test_an_altered_registration_is_refused(tmp_path: Path) -> None:
    altered = block()
    altered["content"] = altered["content"] | {"seed": 8}
    with pytest.raises(Refused, match="not its own digest"):
        compare(registered_runs(tmp_path, registration=altered))


def test_a_primary_metric_that_row_means_lack_is_a_deviation(tmp_path: Path) -> None:
    paths = registered_runs(tmp_path, row_level_only=True, positions_sha256="")
    found = compare(paths)
    assert found.pairs[0].primary.metric == "kl_mean"
    assert "primary metric kl_mean, registered is tv_mean" in found.deviations


def test_holm_takes_back_what_does_not_survive(base: Path, tmp_path: Path) -> None:
    whole = compare([base, other(tmp_path)])
    found = whole.pairs[0].differences
    secondary = [d.model_copy(update={"p": 0.03, "verdict": "better"}) for d in found if d.role == "secondary"]
    corrected = correct([secondary], 0.95)[0]
    assert {d.verdict for d in corrected} == {"undecided"}
    assert corrected[0].p_holm == pytest.approx(0.03 * len(secondary))
    told = reason(whole, whole.pairs[0], corrected[0])
    assert told == f"does not survive Holm's correction (p = {corrected[0].p_holm:.3g})"
    assert correct([[d.model_copy(update={"p": 1e-9}) for d in secondary]], 0.95)[0][0].verdict == "better"


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_prints_and_exits_1_below_a_bar(tmp_path: Path) -> None:
    from harness.cli import app

    paths = [str(p) for p in registered_runs(tmp_path)]
    result = CliRunner().invoke(app, ["compare", *paths, "-o", str(tmp_path / "out")], terminal_width=200)
    assert result.exit_code == 1
    assert "NOT met" in result.output and "deviation" in result.output
    assert "for a card: mean total variation lower by" in " ".join(result.output.split())
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {"comparison.json", "report.md"}
    found = CliRunner().invoke(app, ["compare", *paths, "-o", str(tmp_path / "out"), "--json"])
    assert found.output == (tmp_path / "out" / "comparison.json").read_text()


def test_the_import_command(tmp_path: Path) -> None:
    from harness.cli import app
    from tests.interop.test_g4 import receipt, write

    file = write(tmp_path / "r.json", receipt())
    result = CliRunner().invoke(app, ["import-g4", str(file), "-o", str(tmp_path / "out"), "--name", "x"])
    assert result.exit_code == 0 and "3 rows" in result.output
    assert load_measurement(tmp_path / "out" / "x").name == "x"


def test_positions_that_lack_a_column_or_are_no_parquet(base: Path, tmp_path: Path) -> None:
    lacking = WORLD.run(tmp_path / "l", "B", {k: v for k, v in B.items() if k != "rank"})
    with pytest.raises(Refused, match="positions.parquet lacks rank"):
        compare([base, lacking])
    path = other(tmp_path)
    measured = load_measurement(path)
    (path / "positions.parquet").write_bytes(b"no parquet")
    found = measured.model_copy(update={"positions_sha256": file_digest(path / "positions.parquet")})
    save_measurement(path, found)
    with pytest.raises(Refused, match="positions.parquet cannot be read"):
        compare([base, path])
