"""The card: from receipts alone, every number, every metric, one estimator a table, and stale cards found."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from typer.testing import CliRunner

from harness.cli import app
from harness.compare import compare, save_comparison
from harness.errors import IncomparableError, UsageError
from harness.interop.g4 import import_files
from harness.report import style
from harness.report.card import Options, build_card, collect
from harness.report.card_pictures import shown
from harness.report.card_write import check_card, write_card
from harness.report.plots import PICTURES
from harness.verify import verify
from tests.report.fake_run import make_frame, side, write_run

REFERENCE = Path(__file__).parents[2] / "../shared/reference"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the published receipts are not here")


def table_rows(text: str) -> dict[str, list[str]]:
    """First cell -> the other cells, of every table row; bold marks stripped."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("| "):
            cells = [c.strip().replace("**", "") for c in line.strip("|").split(" | ")]
            rows[cells[0]] = cells[1:]
    return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A 2-bit and a mixed candidate of one teacher on one panel."""
    folder, out = tmp_path_factory.mktemp("runs"), []
    for name, noise, bpw in (("two-bit", 0.8, 2.05), ("mixed", 0.5, 2.31)):
        frame = make_frame(rows=16, length=65, noise=noise, seed=3)
        candidate = side(
            model=f"org/{name}-exl3", engine="exl3", capture_sha256=None, bytes=int(bpw * 1e9), bits_per_weight=bpw
        )
        write_run(folder / name, frame, name=name, candidate=candidate)
        out.append(folder / name)
    return out


@pytest.fixture(scope="module")
def card(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("card")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "DPI", 40)
        write_card(collect(runs), Options(positions=True), folder)
    return folder


# ---- the published mosaic --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    names = ["a0", "mosaic10l", "mosaic12l"]
    out = tmp_path_factory.mktemp("g4")
    return import_files([REFERENCE / "panel" / f"{name}.json" for name in names], out, names)


@needs_reference
def test_published_numbers_digit_for_digit(published: list[Path]) -> None:
    """The card of the GLM-5.3-Flash mosaic, as it was published, from its receipts."""
    expected = json.loads((REFERENCE / "expected.json").read_text())["published_strings"]
    block = build_card(collect(published), Options(decimals=5), pictures=[]).block
    rows = table_rows(block)
    a0, l12, l10 = (0, 2, 1)
    for name, strings in (
        ("top-1 agreement", expected["top1"]),
        ("KL mean (lower bound) (primary)", expected["kl"]),
        ("ppl_token", expected["ppl"]),
    ):
        assert [rows[name][at] for at in (a0, l12, l10)] == strings, name
    assert rows["top-1 agreement"][3] == "+1.94 pp"
    assert rows["KL mean (lower bound) (primary)"][3:] == ["-15.3 %", "[-0.0674, -0.0497] nats", "better"]
    assert rows["ppl_token"][3] == "-5.9 %"
    percentiles = {"p50": ("0.1044", "0.0811"), "p95": ("1.797", "1.540"), "p99": ("3.849", "3.424")}
    for name, (base, subject) in percentiles.items():
        assert (rows[f"KL {name} (lower bound)"][a0], rows[f"KL {name} (lower bound)"][l12]) == (base, subject)
    assert rows["KL max (lower bound)"][:3] == ["13.73", "13.93", "14.23"]
    won = "top-1 agreement higher on 32/32 rows, KL lower on 32/32 rows, NLL lower on 32/32 rows. No row regresses"
    assert f"mosaic12l against a0: {won}" in block
    sibling = "top-1 agreement higher on 32/32 rows, KL lower on 32/32 rows, NLL lower on 30/32 rows. Rows that regress"
    assert f"mosaic10l against a0: {sibling}: 2 on NLL." in block


@needs_reference
def test_a_metric_that_got_worse_is_on_the_card(published: list[Path]) -> None:
    """The larger maximum is called worse, not "about equal"."""
    block = build_card(collect(published), Options(decimals=5), pictures=[]).block
    assert "**Got worse**: KL max (lower bound) (13.73 to 14.23)." in block
    assert table_rows(block)["KL max (lower bound)"][-1] == "description, worse"


@needs_reference
def test_lower_bounds_say_so_everywhere(published: list[Path]) -> None:
    made = build_card(collect(published), Options(), pictures=[])
    for line in made.block.splitlines():
        if re.match(r"\| KL ", line):
            assert "lower bound" in line
    [entry] = made.keys["model-index"][0]["results"]
    assert entry["dataset"]["split"] == "served-lower-bound"
    assert entry["metrics"][0]["type"] == "kl_divergence_lower_bound"
    assert "it is at least this number" in made.block


# ---- tables never mix ------------------------------------------------------------------------------------------------


@needs_reference
def test_a_lower_bound_and_an_exact_value_get_a_table_each(published: list[Path], runs: list[Path]) -> None:
    """Another panel, lane or estimator never shares a table."""
    block = build_card(collect([published[0], *runs, published[2]]), Options(subject="mixed"), pictures=[]).block
    titles = re.findall(r"^### (.*)$", block, re.MULTILINE)
    assert titles == ["toy-panel, weights lane, exact", "g4-32x2048, served lane, lower bound"]
    for part, names in zip(block.split("\n### ")[1:], (("two-bit", "mixed"), ("a0", "mosaic12l")), strict=True):
        header = next(line for line in part.splitlines() if line.startswith("| metric"))
        assert [name.strip("* ") for name in header.split("|")[2:4]] == list(names)


def test_another_panel_is_another_table(runs: list[Path], tmp_path: Path) -> None:
    """The same artifact on another panel has another number."""
    frame = make_frame(rows=4, length=33)
    measurement = write_run(tmp_path / "x", frame, name="elsewhere")
    panel = measurement.panel.model_copy(update={"sha256": "9" * 64, "name": "other-panel"})
    write_run(tmp_path / "x", frame, name="elsewhere", panel=panel)
    parts = collect([*runs, tmp_path / "x"])
    assert [part.names for part in parts] == [["elsewhere"], ["two-bit", "mixed"]] or [p.names for p in parts] == [
        ["two-bit", "mixed"],
        ["elsewhere"],
    ]


# ---- what the card says ----------------------------------------------------------------------------------------------


def test_every_metric_of_the_comparison_is_a_row(runs: list[Path], card: Path) -> None:
    """Nothing is left out."""
    found = compare(runs)
    rows = table_rows((card / "README.md").read_text())
    from harness.report.card_tables import LABELS

    for d in found.pairs[0].differences:
        name = LABELS[d.metric] + (" (primary)" if d.role == "primary" else "")
        assert rows[name][-1].startswith(d.verdict) or d.lower_is_better is None
    assert {"KL p50", "KL p95", "KL p99", "KL max", "ppl_token"} <= set(rows)
    assert rows["KL p99.9"][:2] == ["withheld", "withheld"] if "KL p99.9" in rows else True


def test_sections_and_paragraphs(card: Path) -> None:
    text = (card / "README.md").read_text()
    for heading in ("## At a glance", "## Measured quality", "## How it was measured", "## What this cannot tell you"):
        assert heading in text
    for fact in ("sum_v P(v) * ln(P(v) / Q(v))", "1" * 64, "Floor of the weights lane: not measured", "Exploratory"):
        assert fact in text
    assert "lower bound" not in text and "at least" not in text
    assert table_rows(text)["Bits per weight, counted in the tensors"] == ["2.31"]


def test_pictures_are_there_in_both_themes_and_formats(card: Path) -> None:
    """A README is never without its figures."""
    links = re.findall(r'src="([^"]+)"|srcset="([^"]+)"', (card / "README.md").read_text())
    files = [a or b for a, b in links]
    assert len(files) == 12
    for file in files:
        assert (card / file).is_file() and (card / file).with_suffix(".svg").is_file()


def test_front_matter_holds_full_precision_and_the_hub_reads_it(card: Path, runs: list[Path]) -> None:
    data = ModelCard.load(card / "README.md").data
    assert data.base_model == "org/teacher" and data.model_name == "mixed-exl3"
    stated = json.loads((runs[1] / "measurement.json").read_text())["summary"]
    values = {r.metric_type: r.metric_value for r in data.eval_results or []}
    assert values["kl_divergence"] == pytest.approx(stated["kl_mean"], rel=1e-12)
    assert values["top1_agreement"] == pytest.approx(stated["top1_agreement"], rel=1e-12)
    assert all(
        r.dataset_split == "weights" and r.metric_args["floor"] == "not measured" for r in data.eval_results or []
    )


def test_one_run_alone_has_values_and_intervals(runs: list[Path], tmp_path: Path) -> None:
    write_card(collect(runs[1:]), Options(pictures=False), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| metric | mixed | interval |" in text and "Verdict" not in text and "<img" not in text
    shown_now = [picture.file for picture in shown(collect(runs[1:])[0], "mixed", tmp_path)]
    assert shown_now == [f"fidelity/{name}.png" for name, *_ in PICTURES]


def test_floor_and_anchors_stand_beside_one_run(runs: list[Path], tmp_path: Path) -> None:
    """A card can say what a perfect quant and a plain FP8 would score, also without a second candidate."""
    write_run(tmp_path / "floor", make_frame(rows=16, length=65, noise=0.05, seed=3), name="teacher again")
    write_run(tmp_path / "fp8", make_frame(rows=16, length=65, noise=0.2, seed=3), name="fp8")
    parts = collect(runs[1:], floor=tmp_path / "floor", anchors=[tmp_path / "fp8"])
    write_card(parts, Options(pictures=False), tmp_path / "card")
    text = (tmp_path / "card/README.md").read_text()
    rows = table_rows(text)
    assert re.match(r"0\.00\d+ \[", rows["floor: teacher again"][0]) and "%" in rows["anchor: fp8"][1]
    assert "Floor of the weights lane: teacher again, 0.00" in text and "not measured" not in text.split("---")[2]
    outcome = verify(tmp_path / "card")
    assert not outcome.findings and "positions.parquet is not here" in outcome.unchecked_numbers[0]
    panel = write_run(tmp_path / "fp8", make_frame(rows=4), name="fp8").panel.model_copy(update={"sha256": "9" * 64})
    write_run(tmp_path / "fp8", make_frame(rows=4), name="fp8", panel=panel)
    with pytest.raises(IncomparableError, match="panel"):
        collect(runs[1:], anchors=[tmp_path / "fp8"])


def test_registered_bars_and_deviations_are_on_the_card(runs: list[Path], tmp_path: Path) -> None:
    """A missed bar and a departure from the registration are printed."""
    found = compare(runs)
    from harness.compare.model import BarOutcome, Registered

    bar = BarOutcome(arm="mixed", name="samples", statement="samples >= 16", value=14.0, threshold=16.0, met=False)
    update = {
        "status": "registered in advance",
        "registration": Registered(sha256="7" * 64, commit="ab" * 20, committed="2026-09-01", lead_time="3 d before"),
        "bars": [bar],
        "deviations": ["task mmlu: the first 20 items of each task, registered all items"],
    }
    save_comparison(tmp_path / "c", found.model_copy(update=update))
    block = build_card(collect([tmp_path / "c"]), Options(), pictures=[]).block
    assert "| Registered bars | 0 of 1 met; not met: samples |" in block.replace("**", "")
    assert (
        "| samples | samples &gt;= 16" in block or "| samples | samples >= 16 | 14.00 | 16.00 | **not met** |" in block
    )
    assert "deviations: task mmlu: the first 20 items" in block and "7" * 64 in block


def test_partial_runs_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "p", make_frame(rows=2, length=17), status="partial", rows_planned=32)
    with pytest.raises(UsageError, match="2 of 32 rows"):
        build_card(collect([tmp_path / "p"]), Options(), pictures=[])


def test_unknown_subject_and_missing_receipts(runs: list[Path]) -> None:
    with pytest.raises(UsageError, match="two-bit, mixed"):
        build_card(collect(runs), Options(subject="none such"), pictures=[])
    with pytest.raises(UsageError, match="baseline"):
        build_card(collect(runs), Options(subject="two-bit"), pictures=[])
    with pytest.raises(UsageError, match="needs a receipt"):
        collect([])


# ---- staleness -------------------------------------------------------------------------------------------------------


def test_check_finds_an_edited_number(card: Path, runs: list[Path], tmp_path: Path) -> None:
    """Numbers are regenerated; a stale one is an error."""
    copy = tmp_path / "card"
    shutil.copytree(card, copy)
    assert check_card(collect(runs), Options(), copy) == []
    readme = copy / "README.md"
    readme.write_text(re.sub(r"(\| ppl_token \| )\d", r"\g<1>9", readme.read_text()))
    stale = check_card(collect(runs), Options(), copy)
    assert len(stale) == 2 and stale[0].startswith("-| ppl_token | 9")
    (copy / "fidelity/by_row.png").unlink()
    assert "fidelity/by_row.png is not there" in check_card(collect(runs), Options(), copy)


def test_command_writes_checks_and_says_how_it_ended(runs: list[Path], tmp_path: Path) -> None:
    arguments = ["card", *map(str, runs), "-o", str(tmp_path / "c"), "--decimals", "5", "--no-pictures"]
    readme = tmp_path / "c/README.md"
    readme.parent.mkdir()
    readme.write_text("# Mine\n")
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert readme.read_text().split("---\n", 2)[2].startswith("# Mine\n")
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 0
    readme.write_text(readme.read_text().replace("| ppl_token |", "| PPL |"))
    found = CliRunner().invoke(app, [*arguments, "--check"])
    assert found.exit_code == 1 and "ppl_token" in found.output and "stale" in found.output


def test_renaming_the_runs_changes_nothing(runs: list[Path], card: Path, tmp_path: Path) -> None:
    moved = [tmp_path / f"moved-{n}" for n in range(2)]
    for old, new in zip(runs, moved, strict=True):
        shutil.copytree(old, new)
    assert check_card(collect(moved), Options(), card) == []


def test_no_path_or_host_in_anything_that_is_published(card: Path, runs: list[Path]) -> None:
    """Scan of every file of the card, pictures too."""
    secrets = {str(card), str(runs[0].parent), str(Path.home()), str(Path.cwd())}
    host = re.compile(rb"\b" + re.escape(socket.gethostname().encode()) + rb"\b")
    for file in sorted(card.rglob("*")):
        if file.is_file() and file.name != ".lock":
            data = file.read_bytes()
            for secret in secrets:
                assert secret.encode() not in data, f"{secret} in {file.name}"
            if file.suffix in (".md", ".json", ".yaml", ".svg"):
                assert not host.search(data), file.name
                assert not re.search(rb"(?<![\w./])/(?:root|home|tmp|work|usr|mnt|data)/", data), file.name
    front = (card / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(front)
