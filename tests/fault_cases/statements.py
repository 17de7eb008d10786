"""What is said around the numbers: registered, sealed, checked, failed. Each case goes through the command."""

from __future__ import annotations

import contextlib
import html
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from harness import environment
from harness.cli import main
from harness.engines.hf import TransformersEngine
from harness.measure import run as measuring
from harness.types import Hidden, Row, RowOutputs
from tests.fault_cases.entry import Fault


def fidelity(folder: Path, *arguments: str | Path) -> tuple[int, str]:
    """Run the command in ``folder``: its exit code, and all that it printed."""
    said = io.StringIO()
    argv = ["fidelity", *map(str, arguments)]
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict("os.environ", {"COLUMNS": "200"}),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            main()
        except SystemExit as done:
            return int(done.code or 0), said.getvalue()
        except KeyboardInterrupt:
            return 130, said.getvalue()
    return 0, said.getvalue()


def done(folder: Path, *arguments: str | Path) -> str:
    """Run a command that must succeed."""
    code, said = fidelity(folder, *arguments)
    assert code == 0, said
    return said


def measure(candidate: Path, teacher: Path, panel: Path, out: str) -> list[str]:
    return ["measure", str(candidate), "--teacher", str(teacher), "--panel", str(panel), "-o", out]


class Leak:
    """`TransformersEngine.run` that adds noise of ``size`` to all states from request ``begins`` on."""

    def __init__(self, begins: int, size: float) -> None:
        self._run, self._begins, self._size = TransformersEngine.run, begins, size

    def patched(self) -> Any:
        leak = self

        def run(engine: TransformersEngine, rows: Sequence[Row], want: str = "hidden") -> Iterator[RowOutputs]:
            for number, out in enumerate(leak._run(engine, rows, want)):  # type: ignore[arg-type]
                yield leak.spoilt(out) if number >= leak._begins else out

        return mock.patch.object(TransformersEngine, "run", run)

    def spoilt(self, out: RowOutputs) -> RowOutputs:
        assert isinstance(out.outputs, Hidden)
        states = out.outputs.states_TH
        noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
        return replace(out, outputs=Hidden(states_TH=states + self._size * noise))


def state_leak(folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """A leak that begins in the probes, or at the fourth row: refused in one line, and nothing of it is kept."""
    asked = measure(exl3_folder, teacher_folder, panel_folder, "run")
    done(folder, "teacher", "capture", str(teacher_folder), "--panel", str(panel_folder))
    for begins, cause in ((2, "after a row with the same beginning"), (6, "after the panel's other rows")):
        with Leak(begins, 1.0).patched():
            code, said = fidelity(folder, *asked)
        assert code == 3 and f"row 0: the same tokens have other log-probabilities {cause}" in said, said
        assert not list((folder / "run").glob("rows/*")) and not (folder / "run/measurement.json").exists()
    done(folder, *asked)


def failed_check_travels(folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Noise within the limit is no refusal: receipt, report, comparison, card, HTML and JSON all name it."""
    line = "the first row again at the end: max |difference| 0.0"
    done(folder, *measure(teacher_folder, teacher_folder, panel_folder, "exact"))
    with Leak(6, 0.003).patched():
        done(folder, *measure(exl3_folder, teacher_folder, panel_folder, "noisy"))
    assert (
        "the first row again at the end" in (folder / "noisy/report.md").read_text().split("What the failed checks")[1]
    )
    done(folder, "report", "noisy", "-o", "noisy.html")
    said = done(folder, "compare", "exact", "noisy", "-o", "both")
    record = json.loads((folder / "both/comparison.json").read_text())
    assert [len(arm["failed_checks"]) for arm in record["arms"]] == [0, 1] and line in record["arms"][1][
        "failed_checks"
    ][0]
    assert "a check failed" in " ".join(said.split())
    done(folder, "report", "both", "-o", "both.html")
    done(folder, "card", "exact", "noisy", "-o", "two", "--no-pictures")
    done(folder, "card", "noisy", "-o", "one", "--no-pictures")
    for place in ("both/report.md", "noisy.html", "both.html", "two/README.md", "one/README.md"):
        assert line in (folder / place).read_text().replace("\\|", "|"), place
    for place in ("two/README.md", "one/README.md"):
        assert "| **Failed checks** |" in (folder / place).read_text()


def same_receipt_after_a_kill(folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Killed while the teacher or the candidate ran: measurement.json has the same bytes as a run in one go."""
    done(folder, *measure(exl3_folder, teacher_folder, panel_folder, "whole"))
    want = (folder / "whole/measurement.json").read_bytes()
    for place in ("harness.measure.teacher.CaptureWriter.write_row", "harness.measure.run.write_row"):
        for rows in (0, 1, 3):
            shutil.rmtree(folder / "teachers", ignore_errors=True)
            with dies_after(place, rows):
                assert (
                    fidelity(folder, *measure(exl3_folder, teacher_folder, panel_folder, f"{rows}{place[-20:]}"))[0]
                    == 130
                )
            done(folder, *measure(exl3_folder, teacher_folder, panel_folder, f"{rows}{place[-20:]}"))
            assert (folder / f"{rows}{place[-20:]}/measurement.json").read_bytes() == want


def dies_after(place: str, calls: int) -> Any:
    """``place`` is called so often, and then the user presses Ctrl-C."""
    owner, name = place.rsplit(".", 1)
    target = measuring if owner == "harness.measure.run" else __import__("harness.capture").capture.CaptureWriter
    real, count = getattr(target, name), iter(range(calls))

    def call(*arguments: Any) -> Any:
        if next(count, None) is None:
            raise KeyboardInterrupt
        return real(*arguments)

    return mock.patch.object(target, name, call)


def teacher_verify(folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Plain lines; exit code 1 for a row that is corrupt, 3 for a capture that cannot be opened."""
    done(folder, "teacher", "capture", teacher_folder, "--panel", panel_folder)
    capture = next((folder / "teachers/captures").glob("tiny-teacher-*"))
    said = done(folder, "teacher", "verify", capture)
    assert "ok      stored NLL: max |dNLL|" in said and "passed=" not in said and "Check(" not in said
    row = capture / "row-0001.parquet"
    data = bytearray(row.read_bytes())
    data[len(data) // 2] ^= 1
    row.write_bytes(data)
    code, said = fidelity(folder, "teacher", "verify", capture)
    assert code == 1 and "FAILED  digests: 3/4 row files" in said and "row-0001.parquet" in said, said
    (capture / "manifest.json").write_text("{")
    code, said = fidelity(folder, "teacher", "verify", capture)
    assert code == 3 and "repair:" in said and "Traceback" not in said, said


def panel_seal(folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Each field that changes a result, edited in the lock: refused by measure and verify; the repair restores it."""
    panel = folder / "panel"
    shutil.copytree(panel_folder, panel)
    sealed = (panel / "panel.lock.json").read_text()
    asked = measure(exl3_folder, teacher_folder, panel, "run")
    edits: dict[str, Any] = {
        "unit": "row",
        "bos": "always",
        "length": 95,
        "name": "other",
        "recipe_sha256": "0" * 64,
        "tokenizer": {"vocabulary": 9, "bos_token_id": 3, "add_bos": True, "chat_template_sha256": "0" * 64},
        "counts": {"documents": 2, "positions": 3},
    }
    for field, value in edits.items():
        for name, part in value.items() if isinstance(value, dict) else ((None, value),):
            lock = json.loads(sealed)
            lock[field] = lock[field] | {name: part} if name else part
            (panel / "panel.lock.json").write_text(json.dumps(lock))
            for command in (asked, ["panel", "verify", str(panel)]):
                code, said = fidelity(folder, *command)
                assert code == 3 and "panel.lock.json was changed after sealing" in said, (field, name, said)
    lock = {name: value for name, value in json.loads(sealed).items() if name != "seal_sha256"}
    (panel / "panel.lock.json").write_text(json.dumps(lock))
    code, said = fidelity(folder, *asked)
    assert code == 3 and "is of an older version" in said
    done(folder, "panel", "build", panel)
    assert json.loads((panel / "panel.lock.json").read_text()) == json.loads(sealed)
    done(folder, *asked)


def source_in_key(folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """After an interval or a served estimator was mended, the receipt of before is not the answer any more."""
    asked = measure(exl3_folder, teacher_folder, panel_folder, "run")
    done(folder, *asked)
    assert "nothing has changed" in done(folder, *asked)
    for name in ("stats/bootstrap.py", "measure/result.py", "measure/text_size.py", "served/score.py"):
        home = folder / "changed" / name.replace("/", "-")
        shutil.copytree(environment.HARNESS, home, ignore=shutil.ignore_patterns("__pycache__"))
        (home / name).write_text((home / name).read_text() + "\n# mended\n")
        changed = subprocess.run(
            [sys.executable, "-c", DIGEST, str(home)], capture_output=True, text=True, check=True
        ).stdout.strip()
        with mock.patch("harness.measure.teacher.source_digest", lambda digest=changed: digest):
            code, said = fidelity(folder, *asked)
        assert code == 3 and "run holds the measurement" in said, (name, said)


#: The digest that a process with these sources in the place of ours would have.
DIGEST = """
import sys
from pathlib import Path
from harness import environment
environment.HARNESS = Path(sys.argv[1])
print(environment.current_source_digest())
"""


def git(folder: Path, *arguments: str, when: str = "") -> None:
    person = {f"GIT_{who}_{what}": "n@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    dated = {"GIT_COMMITTER_DATE": when} if when else {}
    subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, env=dict(os.environ) | person | dated
    )


def said_of(folder: Path, exl3_folder: Path, teacher_folder: Path, pages: tuple[str, ...]) -> list[str]:
    """Two candidates on the panel in ``folder``: the claim as report, comparison, card, HTML and JSON have it."""
    for name, model in (("a", teacher_folder), ("b", exl3_folder)):
        done(folder, *measure(model, teacher_folder, folder / "panel", name))
    said = done(folder, "compare", "a", "b", "-o", "ab")
    for page in pages:
        done(folder, "report", page, "-o", f"{page}.html")
    done(folder, "card", "b", "-o", "one", "--no-pictures")
    done(folder, "card", "a", "b", "-o", "two", "--no-pictures")
    receipts = [json.loads((folder / place).read_text()) for place in ("b/measurement.json", "ab/comparison.json")]
    status = [str(receipts[0]["registration"]["status"]), str(receipts[1]["status"])]
    files = ["b/report.md", "ab/report.md", "one/README.md", "two/README.md", *(f"{page}.html" for page in pages)]
    return [*status, " ".join(said.split()), *((folder / name).read_text() for name in files)]


def registration_of(folder: Path, panel_folder: Path, *flags: str) -> Path:
    """A copy of the panel in a git repository, registered by flags and not committed yet."""
    shutil.copytree(panel_folder, folder / "panel")
    git(folder, "init", "-q")
    plan = ("--metric", "kl_mean", "--margin", "10%", "--secondary", "top1_agreement=0.0025")
    done(folder, "panel", "register", folder / "panel", *plan, *flags)
    return folder / "panel"


NAMED = ("--teacher", "tiny-teacher", "--candidate", "tiny-*")
#: Flags, the commit's date ("" is now, None no commit), what is said, and why.
CLAIMS: dict[str, tuple[tuple[str, ...], str | None, str, str]] = {
    "stranger": ((), "2026-01-01T00:00:00Z", "exploratory", "names no teacher and no candidates"),
    "owner": (NAMED, "2026-01-01T00:00:00Z", "registered in advance", "its commit is older than the first scored row"),
    "other": (
        ("--teacher", "tiny-teacher", "--candidate", "tiny-teacher"),
        "2026-01-01T00:00:00Z",
        "exploratory",
        "not the registered question: tiny-exl3 is not among tiny-teacher",
    ),
    "no-git": (NAMED, None, "registered, time not proven", "its file is in no commit"),
    "late": (NAMED, "2099-01-01T00:00:00Z", "exploratory", "its commit is younger than the first scored row"),
}


def registered_in_advance(folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Whoever did not ask this question before its first row gets no such words, anywhere; who did gets them."""
    for name, (flags, when, status, why) in CLAIMS.items():
        place = folder / name
        place.mkdir()
        registration_of(place, panel_folder, *flags)
        if when is not None:
            git(place, "add", ".")
            git(place, "commit", "-qm", "register", when=when)
        pages = {"stranger": ("b", "ab"), "owner": ("ab",)}.get(name, ())
        for number, text in enumerate(said_of(place, exl3_folder, teacher_folder, pages)):
            assert status in text.lower(), (name, number, text[:3000])
            assert number in (0, 1) or why in text or html.escape(why) in text, (name, number, text[:3000])
            assert status == "registered in advance" or "registered in advance" not in text.lower(), (name, number)


def registered_after_looking(folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """Measured, looked at, then registered and committed: a comparison with that panel says that it came later."""
    shutil.copytree(panel_folder, folder / "panel")
    git(folder, "init", "-q")
    for name, model in (("a", teacher_folder), ("b", exl3_folder)):
        done(folder, *measure(model, teacher_folder, folder / "panel", name))
    done(folder, "panel", "register", folder / "panel", "--metric", "kl_mean", "--margin", "10%", *NAMED)
    git(folder, "add", "panel")
    git(folder, "commit", "-qm", "register", when="2099-01-01T00:00:00Z")
    said = " ".join(done(folder, "compare", "a", "b", "--panel", "panel", "-o", "ab").split())
    assert "Exploratory: its commit is younger than the first scored row" in said
    assert "tiny-exl3: measured under no registration" in said
    assert json.loads((folder / "ab/comparison.json").read_text())["status"] == "exploratory"


def a_resumed_run_keeps_its_beginning(
    folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path
) -> None:
    """Rows were scored, the run was killed, then the registration was committed: not in advance."""
    registration_of(folder, panel_folder, *NAMED)
    asked = measure(exl3_folder, teacher_folder, folder / "panel", "b")
    with mock.patch("harness.measure.folder.datetime", Clock("2026-01-02T00:00:00+00:00")), dies_after(ROW, 2):
        assert fidelity(folder, *asked)[0] == 130
    git(folder, "add", "panel")
    git(folder, "commit", "-qm", "register", when="2026-01-03T00:00:00Z")
    done(folder, *asked)
    receipt = json.loads((folder / "b/measurement.json").read_text())
    assert receipt["registration"]["status"] == "exploratory" and not receipt["registration"]["before_first_row"]
    assert json.loads((folder / "b/run.json").read_text())["started"] == "2026-01-02T00:00:00+00:00"


ROW = "harness.measure.run.write_row"


class Clock:
    """`datetime` whose now is fixed."""

    def __init__(self, now: str) -> None:
        self._now = now

    def now(self, _: object) -> datetime:
        return datetime.fromisoformat(self._now)


def worked_example(folder: Path, exl3_folder: Path, teacher_folder: Path, panel_folder: Path) -> None:
    """The commands of panels/README, as they stand there, end with the words that it promises."""
    text = (Path(__file__).parents[2] / "panels/README.md").read_text()
    block = text.split("## A question, registered")[1].split("```")[1].removeprefix("sh\n").replace("\\\n", " ")
    shutil.copytree(panel_folder, folder / "panels/example")
    shutil.copytree(teacher_folder, folder / "models/base")
    shutil.copytree(exl3_folder, folder / "models/mine-2bit")
    shutil.copytree(teacher_folder, folder / "models/mine-3bit")
    git(folder, "init", "-q")
    said = ""
    for line in filter(None, block.splitlines()):
        words = shlex.split(line, comments=True)
        match words[0]:
            case "fidelity":
                said = done(folder, *words[1:])
            case "git":
                git(folder, *words[1:])
            case "cp":
                shutil.copytree(folder / words[2], folder / words[3])
    assert "Registered in advance: its commit is older than the first scored row" in " ".join(said.split())
    assert "mine-3bit is better than mine-2bit" in " ".join(said.split())


MODELS = ("exl3_folder", "teacher_folder", "panel_folder")
ROWS = [
    Fault(id="C7-in-advance", title="registered in advance is earned", check=registered_in_advance, needs=MODELS),
    Fault(id="C7-after-looking", title="registered after measuring", check=registered_after_looking, needs=MODELS),
    Fault(
        id="C7-resumed", title="begun before it was registered", check=a_resumed_run_keeps_its_beginning, needs=MODELS
    ),
    Fault(id="C44-how-to-register", title="the documented commands work", check=worked_example, needs=MODELS),
    Fault(id="C9-source-in-key", title="the key covers all code that makes numbers", check=source_in_key, needs=MODELS),
    Fault(id="C10-panel-seal", title="the seal covers every field that matters", check=panel_seal, needs=MODELS),
    Fault(id="C11-state-leak", title="a leak in the probes or at row 4", check=state_leak, needs=MODELS),
    Fault(id="C11-travels", title="a failed check is named downstream", check=failed_check_travels, needs=MODELS),
    Fault(id="C36-same-bytes", title="one receipt after a kill", check=same_receipt_after_a_kill, needs=MODELS),
    Fault(id="C38-teacher-verify", title="plain lines and exit codes", check=teacher_verify, needs=MODELS[1:]),
]
