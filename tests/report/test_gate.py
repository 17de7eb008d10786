"""The gate through the command: held, missed, unknown, paired, and what CI reads of it."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from harness.measure.receipt import Interval
from tests.compare.fake_arms import World
from tests.fault_cases.statements import fidelity

EXAMPLES = Path(__file__).parents[2] / "reports" / "examples"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    world = World(rows=8, length=60, documents=8)
    world.run(tmp_path / "released", "released", world.columns(0.3, 10))
    ends = Interval(low=0.01, high=0.5, method="t", confidence=0.95, unit="document", n=8)
    world.run(tmp_path / "same", "same", world.columns(0.3, 11), intervals={"kl_mean": ends})
    world.run(tmp_path / "worse", "worse", world.columns(0.9, 12))
    return tmp_path


def bars(folder: Path, text: str) -> Path:
    (folder / "bars.toml").write_text(text)
    return folder / "bars.toml"


MEAN = '[[bars]]\nname = "mean"\nmetric = "kl_mean"\nrelation = "<="\nvalue = {value}\nend = "{end}"\n'


@pytest.mark.parametrize(("value", "end", "code"), [(1, "high", 0), (0.0001, "estimate", 1), (1, "low", 0)])
def test_bars(runs: Path, value: float, end: str, code: int) -> None:
    file = bars(runs, MEAN.format(value=value, end=end))
    found, said = fidelity(runs, "gate", "same", "--bars", file, "--junit", "gate.xml")
    assert found == code, said
    suite = ElementTree.parse(runs / "gate.xml").getroot()
    assert suite.get("tests") == "3" and suite.get("failures") == str(code)
    assert ("MISSED mean" in said) == bool(code)


def test_annotations_where_ci_reads_them(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    file = bars(runs, MEAN.format(value=0.0001, end="estimate").replace('"mean"', '"mean, 100%"'))
    _, said = fidelity(runs, "gate", "same", "--bars", file)
    assert "::error title=fidelity gate%3A mean%2C 100%25::kl_mean is" in said


def test_non_inferiority_is_paired(runs: Path) -> None:
    file = bars(runs, '[[non_inferior]]\nmetric = "kl_mean"\nmargin = 0.5\n')
    for run, code in (("same", 0), ("worse", 1)):
        found, said = fidelity(runs, "gate", run, "--bars", file, "--baseline", "released")
        assert found == code and "kl_mean not worse than released" in said, said
    found, said = fidelity(runs, "gate", "same", "--bars", file)
    assert found == 2 and "non_inferior needs a baseline" in said


def test_a_number_that_is_not_there_misses(tmp_path: Path) -> None:
    world = World(rows=2, length=60, documents=2)
    world.run(tmp_path / "few", "few", world.columns(0.3, 10))
    found, said = fidelity(tmp_path, "gate", "few", "--bars", bars(tmp_path, MEAN.format(value=9, end="high")))
    assert found == 1 and "is not known" in said, said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "holds no bar"),
        ("[[bars]]\n", "bars.0.name"),
        (MEAN.format(value=1, end="high").replace("kl_mean", "kl_meen"), "there is no metric kl_meen"),
        ("x = [", "it is not TOML"),
    ],
)
def test_bad_bars_are_one_line(runs: Path, text: str, line: str) -> None:
    found, said = fidelity(runs, "gate", "same", "--bars", bars(runs, text))
    assert found == 2 and line in said and "repair:" in said, said


def test_the_shipped_example_holds_and_its_workflow_is_yaml(tmp_path: Path) -> None:
    gate, quants = EXAMPLES.parent / "gate", [EXAMPLES / name for name in ("mlp-2bit", "mlp-3bit")]
    found, said = fidelity(tmp_path, "gate", quants[1], "--bars", gate / "bars.toml", "--baseline", quants[0])
    assert found in (0, 1) and said.count("\n") == 5, said
    steps = yaml.safe_load((gate / "workflow.yml").read_text())["jobs"]["gate"]["steps"]
    assert any("fidelity gate" in step.get("run", "") for step in steps)
