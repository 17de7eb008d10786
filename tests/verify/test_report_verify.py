"""`fidelity verify`: an honest run, comparison and card hold; every forgery is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.compare import compare, save_comparison
from harness.errors import Refused, UsageError
from harness.measure.receipt import load_measurement
from harness.report.card import Options, collect
from harness.report.card_write import write_card
from harness.report.plots import pictures_of
from harness.report.run_report import report_text
from harness.report.tables import load_positions
from harness.report.words import worded
from harness.store import write_json, write_receipt, write_table
from harness.verify import verify, verify_run
from harness.verify.run import differences
from tests.report.fake_run import make_frame, panel_of, write_run


@pytest.fixture()
def honest(tmp_path: Path) -> Path:
    write_run(tmp_path / "run", make_frame(rows=6, length=65), name="honest")
    return tmp_path / "run"


def edit(folder: Path, *path: str | int, value: object) -> None:
    """Set one value of measurement.json and seal it again, as a careful forger would."""
    record = json.loads((folder / "measurement.json").read_text())
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    write_receipt(folder / "measurement.json", record)


def forge(folder: Path, change: object) -> None:
    """Change positions.parquet and make its digest fit, as a careful forger would."""
    from harness.digest import file_digest

    frame = load_positions(folder)
    change(frame)  # type: ignore[operator]
    write_table(folder / "positions.parquet", pa.Table.from_pandas(frame, preserve_index=False))
    edit(folder, "positions_sha256", value=file_digest(folder / "positions.parquet"))


def places(folder: Path, **options: object) -> set[str]:
    return {finding.where for finding in verify_run(folder, **options).findings}  # type: ignore[arg-type]


def test_an_honest_run_holds(honest: Path) -> None:
    outcome = verify_run(honest)
    assert outcome.ok and {"summary", "counts", "per_row", "intervals", "status"} <= set(outcome.checked)
    assert any("weights" in line for line in outcome.unchecked), "what is not checked is said"


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("summary", "kl_mean"), 0.01, "summary.kl_mean"),
        (("summary", "kl_p99"), 0.01, "summary.kl_p99"),
        (("summary", "kl_max_at", "row"), 0, "summary.kl_max_at.row"),
        (("summary", "ppl_token_candidate"), 3.0, "summary.ppl_token_candidate"),
        (("intervals", "kl_mean", "low"), 0.0, "intervals.kl_mean.low"),
        (("intervals", "kl_mean", "n"), 7, "intervals.kl_mean.n"),
        (("per_row", 2, "kl_mean"), 0.5, "per_row[2].kl_mean"),
        (("per_row", 2, "positions"), 63, "rows and their positions.2"),
        (("counts", "negative_kl"), 4, "counts.negative_kl"),
        (("positions",), 100, "positions"),
        (("rows_measured",), 5, "rows_measured"),
        (("status",), "partial", "status"),
    ],
)
def test_every_edited_number_is_named(honest: Path, path: tuple[str, ...], value: object, where: str) -> None:
    edit(honest, *path, value=value)
    assert where in places(honest)


def test_changed_positions_are_found_by_their_digest(honest: Path) -> None:
    frame = load_positions(honest)
    frame.loc[0, "kl"] *= 0.5
    write_table(honest / "positions.parquet", pa.Table.from_pandas(frame, preserve_index=False))
    assert "positions_sha256" in places(honest)


def halve(frame: pd.DataFrame) -> None:
    frame["kl"] *= 1e-3


def disagree(frame: pd.DataFrame) -> None:
    frame["agree"] = True
    frame["agree_lowest_id"] = True


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (halve, "positions where KL is below 2 TV^2"),
        (disagree, "positions where agree_lowest_id is not that of the ids"),
    ],
)
def test_columns_that_contradict_each_other(honest: Path, change: object, where: str) -> None:
    """A forger who rewrites one column is caught by the laws that bind it to the others."""
    forge(honest, change)
    assert where in places(honest)


def test_nan_is_an_invalid_run(tmp_path: Path) -> None:
    frame = make_frame(rows=3, length=33)
    frame.loc[4, "kl"] = np.nan
    write_run(tmp_path, frame)
    assert places(tmp_path) == {"status"}
    write_run(tmp_path, frame, status="invalid")
    assert verify_run(tmp_path).ok


def test_a_stale_report_is_found(honest: Path) -> None:
    m, frame = load_measurement(honest), load_positions(honest)
    text = report_text(m, frame, pictures_of())
    (honest / "report.md").write_text(text)
    assert "report.md, line by line" in verify_run(honest).checked
    (honest / "report.md").write_text(text.replace("| top-1 agreement |", "| top-1 agreement, at least |"))
    assert [w for w in places(honest) if w.startswith("report.md")]


def test_other_tokens_than_the_panel_s(honest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scored tokens are compared with the sealed panel's."""

    panel = panel_of(load_positions(honest))
    monkeypatch.setattr("harness.verify.run.load_panel", lambda folder, tokenizer: panel)
    outcome = verify_run(honest, panel=honest)
    assert outcome.ok and "documents and domains of the rows" in outcome.checked
    panel.rows[3].ids_T[5] += 1
    assert places(honest, panel=honest) == {"row 3"}


def test_comparison_and_card(honest: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "other", make_frame(rows=6, length=65, noise=0.3), name="other")
    runs = [honest, tmp_path / "other"]
    save_comparison(tmp_path / "cmp", worded(compare(runs)))
    found = verify(tmp_path / "cmp")
    assert found.ok and "comparison" in found.checked, "runs beside it are found by their keys"
    write_card(collect(runs), Options(pictures=False, positions=True), tmp_path / "card")
    assert verify(tmp_path / "card").ok and verify(tmp_path / "card/README.md").ok
    readme = tmp_path / "card/README.md"
    readme.write_text(readme.read_text().replace("lower on 6 of 6 contexts", "lower on 7 of 7 contexts"))
    assert {f.where for f in verify(tmp_path / "card").findings} == {"README.md"}
    record = json.loads((tmp_path / "cmp/comparison.json").read_text())
    record["pairs"][0]["differences"][0]["difference"]["low"] = -9.0
    write_receipt(tmp_path / "cmp/comparison.json", record)
    assert [f.where for f in verify(tmp_path / "cmp").findings] == ["comparison.pairs[0].differences[0].difference.low"]


def test_without_its_runs_a_comparison_is_not_called_right(honest: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "a/other", make_frame(rows=6, length=65, noise=0.3), name="other")
    save_comparison(tmp_path / "b/cmp", compare([honest, tmp_path / "a/other"]))
    outcome = verify(tmp_path / "b/cmp")
    assert not outcome.ok and not any("seal" not in line for line in outcome.checked)
    assert "are not here (name them with --run)" in outcome.unchecked_numbers[0]


def test_a_change_without_a_new_seal_is_found_by_every_reader(honest: Path) -> None:
    """C8: an edited number is not printed by a card, a report or a comparison."""
    file = honest / "measurement.json"
    record = json.loads(file.read_text())
    record["summary"]["kl_mean"] /= 100
    write_json(file, record)
    for words in (["card", str(honest), "-o", str(honest.parent / "card")], ["compare", str(honest), str(honest)]):
        refused = CliRunner().invoke(app, words)
        assert isinstance(refused.exception, Refused) and "seal does not hold" in str(refused.exception)
    assert {"seal of measurement.json", "summary.kl_mean"} <= places(honest)
    shutil.rmtree(honest)


def test_a_receipt_from_before_seals_is_sealed_where_it_holds(honest: Path) -> None:
    file = honest / "measurement.json"
    record = json.loads(file.read_text())
    del record["seal"]
    write_json(file, record)
    with pytest.raises(Refused, match="carries no seal"):
        load_measurement(honest)
    assert CliRunner().invoke(app, ["verify", str(honest), "--seal"]).exit_code == 0
    assert load_measurement(honest).seal
    record["summary"]["kl_mean"] /= 100
    write_json(file, record)
    refused = CliRunner().invoke(app, ["verify", str(honest), "--seal"])
    assert isinstance(refused.exception, Refused) and "is not sealed" in str(refused.exception)


def test_every_leaf_is_checked_or_named(honest: Path) -> None:
    outcome = verify_run(honest)
    named = next(line for line in outcome.unchecked if line.startswith("stated, and not checked here: "))
    listed = set(named.removeprefix("stated, and not checked here: ").split(", "))
    record = json.loads((honest / "measurement.json").read_text())
    for leaf in (
        f"candidate.{name}" for name in record["candidate"] if record["candidate"][name] not in (None, {}, "")
    ):
        assert any(place == leaf or place.startswith(f"{leaf}.") for place in listed), leaf
    assert not any(place.startswith(("summary", "intervals", "per_row", "counts")) for place in listed)


def test_command(honest: Path) -> None:
    good = CliRunner().invoke(app, ["verify", str(honest)])
    assert good.exit_code == 0 and "things checked, all hold; " in good.output.splitlines()[-1]
    edit(honest, "summary", "kl_mean", value=0.01)
    bad = CliRunner().invoke(app, ["verify", str(honest), "--json"])
    assert bad.exit_code == 1
    assert json.loads(bad.output)["findings"][0]["where"] == "summary.kl_mean"
    with pytest.raises(UsageError, match="is not there"):
        verify(honest / "nothing")
    shutil.rmtree(honest)


def test_differences_know_types_and_rounding() -> None:
    assert differences(1.0, 1.0 + 1e-12, "x") == []
    assert differences(1, True, "x") and differences(1.0, "1.0", "x")
    assert [d.where for d in differences({"a": [1, 2], "b": 1}, {"a": [1, 3]}, "x")] == ["x.a[1]", "x.b"]
    assert differences([1], [1, 2], "x")[0].where == "x"
