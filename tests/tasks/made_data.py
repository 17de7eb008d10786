"""Questions written here, in the shapes of the Hub's MMLU and GPQA; every word of them is looked for in outputs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from harness.engines.models import ModelFolder
from harness.tasks.local import development_questions
from harness.tasks.run import Request

#: In every question and choice that is made here, and nowhere else.
MARK = "zqx"


def mmlu_row(subject: str, number: int) -> dict[str, Any]:
    """A sum; the answers go round."""
    value, right = number + 2, number % 4
    choices = [f"{MARK} {value + (i - right)}" for i in range(4)]
    question = f"  {MARK} {subject}: what is {number} and 2? "
    return {"question": question, "subject": subject, "choices": choices, "answer": right}


def write_mmlu(folder: Path, *, rows: int = 21, subjects: int = 57, kind: str = "parquet") -> Path:
    """``folder/mmlu/<subject>/test-00000-of-00001.parquet`` and ``dev-...``, as in a snapshot of the Hub's set."""
    for subject in sorted(development_questions())[:subjects]:
        place = folder / "mmlu" / subject
        place.mkdir(parents=True)
        for split, count in (("test", rows), ("dev", 5)):
            made = [mmlu_row(subject, n + (100 if split == "dev" else 0)) for n in range(count)]
            if kind == "parquet":
                pd.DataFrame(made).to_parquet(place / f"{split}-00000-of-00001.parquet")
            else:
                (place / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


def gpqa_row(number: int) -> dict[str, Any]:
    """A question in GPQA's columns."""
    return {
        "Record ID": f"rec{number}",
        "Question": f"{MARK} which number follows {number}?",
        "Correct Answer": f"{MARK} {number + 1}",
        "Incorrect Answer 1": f"{MARK} {number + 2}",
        "Incorrect Answer 2": f"{MARK} {number + 3}",
        "Incorrect Answer 3": f"{MARK} {number + 4}",
    }


def write_gpqa(folder: Path, *, rows: int = 12, kind: str = "jsonl") -> Path:
    """``folder/gpqa_diamond.jsonl`` or ``.csv``."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [gpqa_row(n) for n in range(rows)]
    if kind == "csv":
        pd.DataFrame(made).to_csv(folder / "gpqa_diamond.csv", index=False)
    else:
        (folder / "gpqa_diamond.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    return folder


SUITE = """
name = "small"
lm_eval = "0.4.13"
primary = "gpqa_diamond_zeroshot"
[[tasks]]
name = "gpqa_diamond_zeroshot"
margin = 0.02
"""


def write_suite(folder: Path, text: str = SUITE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.toml").write_text(text)
    return folder / "small.toml"


def small(tmp_path: Path, model: ModelFolder, **change: Any) -> Request:
    """A run of twelve GPQA questions."""
    data = tmp_path / "data"
    if not data.is_dir():
        write_gpqa(data)
    suite = tmp_path / "suite" / "small.toml"
    if not suite.is_file():
        write_suite(suite.parent)
    known = {"candidate": str(model.path), "suite": str(suite), "data": data, "out": tmp_path / "run"}
    return Request(**(known | change))


def files_with(mark: str, places: Iterable[Path]) -> list[str]:
    """Files below the places that hold the mark in their bytes, compressed Parquet columns looked into."""
    found = []
    for place in places:
        for file in place.rglob("*"):
            if file.is_file() and mark in content(file):
                found.append(file.name)
    return found


def content(file: Path) -> str:
    """All that a file says, compressed Parquet columns too."""
    if file.suffix == ".parquet":
        return pd.read_parquet(file).to_json()
    return file.read_bytes().decode("utf-8", errors="replace")
