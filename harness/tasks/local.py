"""Documents of MMLU and GPQA from files on this disk, in memory, in the columns of the Hub's data sets.

Nothing is written: a gated set must not lie in a cache in the clear, and an in-memory set has no stale shuffle of its
choices from another seed. MMLU's development questions come from the installed lm_eval package: they are its
chain-of-thought examples, question and lettered choices in one text, and an explanation that ends with the letter.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from harness.digest import file_digest, json_digest
from harness.errors import EngineError, UsageError

FORMATS = (".parquet", ".jsonl", ".json", ".csv")
MMLU_COLUMNS = ("question", "subject", "choices", "answer")
GPQA_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
#: Stands for all documents where only a task's definition is looked at.
EMPTY = dict.fromkeys((*MMLU_COLUMNS, *GPQA_COLUMNS), "") | {"choices": [""] * 4, "answer": 0}
GPQA_HUB = "Idavidrein/gpqa"

LETTERS = "ABCD"
_QUESTION = re.compile(r"(.*?)\s*\(A\)\s*(.*?)\s*\(B\)\s*(.*?)\s*\(C\)\s*(.*?)\s*\(D\)\s*(.*)\Z", re.DOTALL)
_ANSWER = re.compile(r"answer is \(?([A-D])\)?")


# ---- finding ---------------------------------------------------------------------------------------------------------


def mmlu_root(folder: Path) -> Path | None:
    """The folder that holds one folder a subject: ``folder`` itself, or ``mmlu`` in it."""
    for root in (folder, folder / "mmlu"):
        if any(_split_files(child, "test") for child in _folders(root)):
            return root
    return None


def gpqa_file(folder: Path, config: str) -> Path | None:
    """The file of one GPQA configuration, such as ``gpqa_diamond.csv``, in ``folder`` or ``folder/gpqa``."""
    for root in (folder, folder / "gpqa"):
        for suffix in FORMATS:
            if (root / f"{config}{suffix}").is_file():
                return root / f"{config}{suffix}"
        if found := _split_files(root / config, "train"):
            return found[0]
    return None


def data_digest(files: Sequence[Path], root: Path) -> str:
    """Digest over the contents of data files and their names below ``root``."""
    return json_digest({file.relative_to(root).as_posix(): file_digest(file) for file in sorted(files)})


def mmlu_files(root: Path) -> list[Path]:
    """Every split file of every subject."""
    return [file for child in _folders(root) for split in ("test", "dev") for file in _split_files(child, split)]


def _folders(root: Path) -> list[Path]:
    return sorted(child for child in root.iterdir() if child.is_dir()) if root.is_dir() else []


def _split_files(folder: Path, split: str) -> list[Path]:
    """``test-00000-of-00002.parquet`` and its sisters as on the Hub, or ``test.jsonl`` and so on.

    Raises:
        UsageError: a shard is missing: part of the questions is another test.
    """
    if not folder.is_dir():
        return []
    for suffix in FORMATS:
        if (folder / f"{split}{suffix}").is_file():
            return [folder / f"{split}{suffix}"]
        shards = sorted(folder.glob(f"{split}-*-of-*{suffix}"))
        if shards:
            count = int(shards[0].stem.rpartition("-of-")[2])
            wanted = [f"{split}-{index:05d}-of-{count:05d}{suffix}" for index in range(count)]
            missing = sorted(set(wanted) ^ {file.name for file in shards})
            if missing:
                raise UsageError(
                    f"{folder.name} holds {len(shards)} of {count} {split} files: {missing[0]} does not fit",
                    "fetch all files of one version",
                )
            return shards
    return []


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet, JSON (lines or a list) or CSV file; errors never show its text."""
    readers: dict[str, Callable[[Path], pd.DataFrame]] = {
        ".parquet": pd.read_parquet,
        ".jsonl": lambda f: pd.read_json(f, lines=True, dtype=False, convert_dates=False),
        ".json": lambda f: pd.read_json(f, dtype=False, convert_dates=False),
        # Text stays text: an answer may be None, NA, null or 007.
        ".csv": lambda f: pd.read_csv(f, dtype=str, keep_default_na=False),
    }
    try:
        frame = readers[file.suffix](file)
    except (ValueError, OSError) as error:
        kind = type(error).__name__
        raise UsageError(f"{file.parent.name}/{file.name} cannot be read ({kind})", "fetch the file again") from None
    return [{str(k): _plain(v) for k, v in row.items()} for row in frame.to_dict("records")]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and np.isnan(value) else value


def _require(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], where: str) -> None:
    if not rows:
        raise UsageError(f"{where} holds no rows", "fetch the file again")
    missing = [column for column in columns if column not in rows[0]]
    if missing:
        raise UsageError(f"{where} lacks the column {missing[0]}", f"the columns are {', '.join(columns)}")


def mmlu_rows(file: Path, subject: str) -> list[dict[str, Any]]:
    """Rows in the Hub's columns and order, so that lm-eval's document hashes are the same."""
    where = f"{subject}/{file.name}"
    rows = read_rows(file)
    _require(rows, ("question", "choices", "answer"), where)
    made = [
        {
            "question": str(row["question"]),
            "subject": str(row.get("subject", subject)),
            "choices": [str(choice) for choice in row["choices"]],
            "answer": row["answer"],
        }
        for row in rows
    ]
    for number, row in enumerate(made):
        if len(row["choices"]) != 4 or row["answer"] not in (0, 1, 2, 3):
            raise UsageError(f"{where}, row {number}: not four choices and an answer of 0 to 3", "correct that row")
    return made


#: From so many questions on, a letter that no answer names is a numbering that begins elsewhere, not chance.
_ENOUGH = 40


def _check_base(rows: Sequence[Mapping[str, Any]], subject: str) -> None:
    """Refuse answers numbered from 1: of many questions at least one has the first choice as its answer."""
    if len(rows) >= _ENOUGH and all(row["answer"] != 0 for row in rows):
        raise UsageError(
            f"{subject}: no answer of {len(rows)} questions is 0, so they seem to be numbered from 1",
            "number the choices from 0",
        )


def gpqa_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of GPQA, all columns as they are."""
    rows = read_rows(file)
    _require(rows, GPQA_COLUMNS, file.name)
    return rows


def hub_gpqa_rows(config: str) -> list[dict[str, Any]]:
    """GPQA from the Hub through a folder that is gone when this returns."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    with tempfile.TemporaryDirectory() as folder:
        try:
            file = hf_hub_download(GPQA_HUB, f"{config}.csv", repo_type="dataset", cache_dir=folder)
        except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
            raise EngineError(
                f"{config} cannot be fetched from the Hub ({type(error).__name__})",
                f"accept the terms of {GPQA_HUB} and run `hf auth login`, or give --data a folder with {config}.csv",
            ) from error
        return gpqa_rows(Path(file))


# ---- development questions -------------------------------------------------------------------------------------------


def tasks_folder() -> Path:
    """The folder of task definitions in the installed lm_eval package."""
    package = importlib.util.find_spec("lm_eval")
    if package is None or package.origin is None:
        raise EngineError("lm_eval is not installed", "pip install 'lm_eval>=0.4.13'")
    return Path(package.origin).parent / "tasks"


@cache
def development_questions() -> dict[str, list[dict[str, Any]]]:
    """Rows ``question, subject, choices, answer`` by subject; an example that names no answer is left out."""
    files = sorted((tasks_folder() / "mmlu" / "flan_cot_fewshot").glob("mmlu_*.yaml"))
    by_subject: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        subject = str(content["dataset_name"])
        rows = [_row(sample, subject) for sample in content["fewshot_config"]["samples"]]
        by_subject[subject] = [row for row in rows if row is not None]
    if len(by_subject) != 57 or not all(by_subject.values()):
        raise EngineError(
            f"the installed lm_eval carries development questions of {len(by_subject)} subjects, not of 57",
            "install the version that the suite names",
        )
    return by_subject


def _row(sample: dict[str, str], subject: str) -> dict[str, Any] | None:
    question, answers = _QUESTION.match(sample["question"]), _ANSWER.findall(sample["target"])
    if question is None or not answers:
        return None
    text, *choices = question.groups()
    answer = LETTERS.index(answers[-1])
    return {"question": text.strip(), "subject": subject, "choices": [c.strip() for c in choices], "answer": answer}


# ---- what lm-eval calls ----------------------------------------------------------------------------------------------


def load(*, kind: str, folder: str, config_source: str, **_metadata: Any) -> Any:
    """lm-eval's ``custom_dataset``: the splits of the task whose definition lies at ``config_source``."""
    task = Path(config_source).stem
    if kind == "none":
        return _splits({split: [EMPTY] for split in ("test", "dev", "train")})
    if kind == "wheel":
        return _splits({"test": development_questions()[task.removeprefix("mmlu_")], "dev": []})
    if kind == "mmlu":
        subject = task.removeprefix("mmlu_")
        files = {split: _split_files(Path(folder) / subject, split) for split in ("test", "dev")}
        if not files["test"]:
            raise UsageError(f"the data folder has no {subject}/test file", "MMLU needs all of its 57 subjects")
        rows = {split: [row for file in found for row in mmlu_rows(file, subject)] for split, found in files.items()}
        _check_base(rows["test"], subject)
        return _splits(rows)
    config = "_".join(task.split("_")[:2])
    return _splits({"train": gpqa_rows(Path(folder)) if folder else hub_gpqa_rows(config)})


def _splits(rows: Mapping[str, list[dict[str, Any]]]) -> Any:
    """An in-memory ``DatasetDict``; an empty split takes the columns of the others."""
    from datasets import Dataset, DatasetDict

    full = {name: Dataset.from_list(split) for name, split in rows.items() if split}
    first = next(iter(full.values()))
    return DatasetDict({name: full[name] if name in full else first.select([]) for name in rows})
