"""The MMLU development questions inside the installed lm_eval package, in the shape of the Hub's data set.

They are its chain-of-thought examples: question and lettered choices in one text, and an explanation that ends with
the letter. Read when asked for and kept in memory: nothing of them is stored.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from harness.errors import EngineError

LETTERS = "ABCD"
_QUESTION = re.compile(r"(.*?)\s*\(A\)\s*(.*?)\s*\(B\)\s*(.*?)\s*\(C\)\s*(.*?)\s*\(D\)\s*(.*)\Z", re.DOTALL)
_ANSWER = re.compile(r"answer is \(?([A-D])\)?")


def tasks_folder() -> Path:
    """The folder of task definitions in the installed lm_eval package."""
    found = importlib.util.find_spec("lm_eval")
    if found is None or found.origin is None:
        raise EngineError("lm_eval is not installed", "pip install 'lm_eval>=0.4.13'")
    return Path(found.origin).parent / "tasks"


@cache
def development_questions() -> dict[str, list[dict[str, Any]]]:
    """Rows ``question, subject, choices, answer`` by subject; an example that names no answer is left out."""
    files = sorted((tasks_folder() / "mmlu" / "flan_cot_fewshot").glob("mmlu_*.yaml"))
    found: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        subject = str(content["dataset_name"])
        rows = [_row(sample, subject) for sample in content["fewshot_config"]["samples"]]
        found[subject] = [row for row in rows if row is not None]
    if len(found) != 57 or not all(found.values()):
        raise EngineError(
            f"the installed lm_eval carries development questions of {len(found)} subjects, not of 57",
            "install the version that the suite names",
        )
    return found


def _row(sample: dict[str, str], subject: str) -> dict[str, Any] | None:
    question, answers = _QUESTION.match(sample["question"]), _ANSWER.findall(sample["target"])
    if question is None or not answers:
        return None
    text, *choices = question.groups()
    answer = LETTERS.index(answers[-1])
    return {"question": text.strip(), "subject": subject, "choices": [c.strip() for c in choices], "answer": answer}
