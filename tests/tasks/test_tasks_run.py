"""Suites end to end on a tiny model: whole, resumed, partial, refused; and not a word of a question anywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.engines.models import ModelFolder
from harness.errors import EngineError, IncomparableError, PanelError, Refused, UsageError
from harness.tasks import reference_lm
from harness.tasks.asking import Answers
from harness.tasks.items import read_items
from harness.tasks.loading import config_digest, find_sources, load_tasks
from harness.tasks.local import development_questions
from harness.tasks.receipt import selection
from harness.tasks.run import run_suite, seal
from harness.tasks.suite import load_suite
from tests.tasks.made_data import MARK, SUITE, files_with, gpqa_row, small, write_gpqa, write_mmlu, write_suite
from tests.tasks.made_models import save_tiny

GPQA = "gpqa_diamond_zeroshot"
SHIPPED = Path(__file__).parents[2] / "panels" / "suites"


def test_nothing_at_all_is_one_line(tiny: ModelFolder, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(UsageError, match="nothing of suite small can be run: data holds no gpqa_diamond"):
        run_suite(small(tmp_path, tiny))
    with pytest.raises(UsageError, match="cannot be fetched from the Hub"):
        run_suite(small(tmp_path, tiny, data=None))
    with pytest.raises(UsageError, match="is not a folder"):
        run_suite(small(tmp_path, tiny, data=tmp_path / "nowhere"))


def test_the_right_answers_are_the_asked_ones(tiny: ModelFolder, tmp_path: Path, monkeypatch: Any) -> None:
    """GPQA shuffles its choices whenever its documents are looked at: who knows the answers must score 1."""
    right = {f"{gpqa_row(n)['Question']}": gpqa_row(n)["Correct Answer"] for n in range(12)}

    def knows(self: Any, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        found = []
        for (context, answer), _ctx, _ids in requests:
            question = context.split("question:")[1].split("\nChoices")[0]
            line = next(line for line in context.splitlines() if line.startswith(answer.strip()))
            found.append((0.0 if line.endswith(right[question]) else -1.0, False))
        return found

    monkeypatch.setattr(reference_lm.ReferenceLM, "_loglikelihood_tokens", knows)
    receipt = run_suite(small(tmp_path, tiny)).receipt
    assert receipt.results[0].value == 1.0
    frame = read_items(tmp_path / "run", receipt).to_pandas()  # type: ignore[union-attr]
    assert (frame.margin == 1.0).all() and (frame.chosen == frame.target).all()
    assert frame.target.nunique() > 1


def test_seeds_fix_the_order_of_choices(tmp_path: Path) -> None:
    """The same seed gives the same prompts, another seed others, whatever was asked before."""

    def prompts(seed: int, folder: str) -> list[str]:
        text = SUITE.replace("[[tasks]]", f"[seeds]\nrandom = {seed}\n[[tasks]]")
        suite = load_suite(write_suite(tmp_path / folder, text))
        sources, missing = find_sources(suite, write_gpqa(tmp_path / "data"))
        task = load_tasks(suite, sources, missing, tmp_path / folder).tasks[GPQA]
        assert [d["choice1"] for d in task.eval_docs] == [d["choice1"] for d in task.eval_docs]
        return [task.doc_to_text(doc) for doc in task.eval_docs]

    first = prompts(1234, "a")
    assert prompts(1234, "b") == first != prompts(1, "c")


def test_local_prompts_are_the_stock_ones(tmp_path: Path, monkeypatch: Any) -> None:
    """The same questions through lm-eval's untouched definition and through --data: same prompts, hashes and digest."""
    import datasets
    from lm_eval.tasks import TaskManager

    from harness.tasks import local
    from harness.tasks.local import tasks_folder

    data = write_mmlu(tmp_path / "data", rows=3)
    suite = load_suite(SHIPPED / "quick.toml")
    sources, missing = find_sources(suite, data)
    ours = load_tasks(suite, sources, missing, tmp_path / "copies")

    load = datasets.load_dataset
    monkeypatch.setattr(
        "lm_eval.api.task.datasets.load_dataset", lambda path, name, **k: _hub(load, data, tmp_path, path, name)
    )
    stock = TaskManager(include_path=str(tasks_folder() / "mmlu/default"), include_defaults=False).load(
        ["mmlu_anatomy"]
    )
    task = stock["tasks"]["mmlu_anatomy"]
    task.set_config(key="num_fewshot", value=0)
    assert config_digest(task) == ours.configs["mmlu_anatomy"]
    mine = ours.tasks["mmlu_anatomy"]
    assert [json.dumps(d) for d in mine.eval_docs] == [json.dumps(d) for d in task.eval_docs]
    assert [mine.doc_to_text(d) for d in mine.eval_docs] == [task.doc_to_text(d) for d in task.eval_docs]
    assert local.mmlu_root(data) == data / "mmlu"


def _hub(load: Any, data: Path, tmp_path: Path, path: str, name: str) -> Any:
    assert path == "cais/mmlu"
    files = {s: str(data / "mmlu" / name / f"{s}-00000-of-00001.parquet") for s in ("test", "dev")}
    return load("parquet", data_files=files, cache_dir=str(tmp_path / "hub"))


def test_gpqa_from_the_hub_leaves_nothing_behind(tiny: ModelFolder, tmp_path: Path, monkeypatch: Any) -> None:
    """A gated set is never in a cache in the clear."""
    places = []

    def download(repo: str, file: str, *, repo_type: str, cache_dir: str) -> str:
        assert (repo, file, repo_type) == ("Idavidrein/gpqa", "gpqa_diamond.csv", "dataset")
        places.append(Path(cache_dir))
        return str(write_gpqa(Path(cache_dir), kind="csv") / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    receipt = run_suite(small(tmp_path, tiny, data=None)).receipt
    assert receipt.results[0].n == 12 and receipt.results[0].data == "hub"
    assert places and not places[0].exists()
    assert files_with(MARK, [tmp_path / "run", tmp_path / "datasets-cache"]) == []


def test_layer_by_layer_gives_the_same_answers(tiny: ModelFolder, tmp_path: Path) -> None:
    """A model larger than memory is asked through the engine seam, all rows through one layer after the other."""
    whole = run_suite(small(tmp_path, tiny, out=tmp_path / "whole"))
    streamed = run_suite(small(tmp_path, tiny, memory_budget="auto"))
    assert streamed.receipt.key != whole.receipt.key
    assert whole.receipt.model.settings["kv_cache"] == "within a question"
    assert streamed.receipt.model.settings["kv_cache"] is False
    ours, theirs = (pd.read_parquet(tmp_path / n / "items.parquet") for n in ("whole", "run"))
    difference = [abs(a - b).max() for a, b in zip(ours.loglikelihoods, theirs.loglikelihoods, strict=True)]
    assert max(difference) < 1e-3


# ---- resume and reuse ------------------------------------------------------------------------------------------------


def test_a_killed_run_goes_on_at_the_first_missing_item(tiny: ModelFolder, tmp_path: Path, monkeypatch: Any) -> None:
    """Killed after five questions; what is left is asked, and every byte of the items is that of a whole run."""
    whole = run_suite(small(tmp_path, tiny, out=tmp_path / "whole"))
    score = reference_lm.CachedScorer.score
    asked: list[int] = []

    def dies(self: Any, questions: Any) -> Any:
        for number, answers in enumerate(score(self, questions)):
            if number == 5:
                raise KeyboardInterrupt
            yield answers

    def counts(self: Any, questions: Any) -> Any:
        asked.append(len(questions))
        return score(self, questions)

    monkeypatch.setattr(reference_lm.CachedScorer, "score", dies)
    with pytest.raises(KeyboardInterrupt):
        run_suite(small(tmp_path, tiny))
    stored = (tmp_path / "run" / "answers.jsonl").read_text()
    assert len(stored.splitlines()) == 20 and MARK not in stored
    (tmp_path / "run" / "answers.jsonl").write_text(stored + '{"request": "half')
    monkeypatch.setattr(reference_lm.CachedScorer, "score", counts)
    resumed = run_suite(small(tmp_path, tiny))
    assert asked == [7]
    assert resumed.receipt == whole.receipt
    assert (tmp_path / "run" / "items.parquet").read_bytes() == (tmp_path / "whole" / "items.parquet").read_bytes()


def test_one_models_answers_are_not_anothers(tiny: ModelFolder, tmp_path: Path) -> None:
    """The same folder, with A's answers in it, is asked again for B."""
    other = save_tiny(tmp_path / "other", seed=1)
    alone = run_suite(small(tmp_path, tiny, candidate=str(other), out=tmp_path / "alone"))
    run_suite(small(tmp_path, tiny, out=tmp_path / "a"))
    a = Answers(tmp_path / "mixed", "key of A")
    a.add("context", " A", (-1.0, False))
    assert Answers(tmp_path / "mixed", "key of A").get("context", " A") == (-1.0, False)
    assert Answers(tmp_path / "mixed", "key of B").get("context", " A") is None
    beside = run_suite(small(tmp_path, tiny, candidate=str(other), out=tmp_path / "mixed"))
    assert beside.receipt == alone.receipt
    first, second = (pd.read_parquet(tmp_path / n / "items.parquet") for n in ("a", "mixed"))
    assert (first.margin != second.margin).any()


def test_an_answer_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="log-likelihood of nan"):
        Answers(tmp_path, "k").add("c", "a", (math.nan, False))


def test_a_finished_run_is_the_answer(tiny: ModelFolder, tmp_path: Path) -> None:
    first = run_suite(small(tmp_path, tiny))
    again = run_suite(small(tmp_path, tiny))
    assert again.reused and again.receipt == first.receipt
    with pytest.raises(IncomparableError, match="holds the run"):
        run_suite(small(tmp_path, tiny, limit=3))
    (tmp_path / "data" / "gpqa_diamond.jsonl").write_text("".join(json.dumps(gpqa_row(n)) + "\n" for n in range(3)))
    with pytest.raises(IncomparableError, match="holds the run"):
        run_suite(small(tmp_path, tiny))
    write_gpqa(tmp_path / "data")
    (tmp_path / "run" / "items.parquet").write_bytes(b"other")
    with pytest.raises(Refused, match="is not what its tasks.json was made from"):
        run_suite(small(tmp_path, tiny))


def test_a_limit_is_a_deviation(tiny: ModelFolder, tmp_path: Path) -> None:
    """What the suite registered and what was done, in words."""
    receipt = run_suite(small(tmp_path, tiny, limit=3)).receipt
    assert receipt.status == "partial" and receipt.results[0].n == 3
    assert receipt.deviations == [f"{GPQA}: the first 3 documents of each task, the suite says all"]
    assert selection(receipt, GPQA) == "first 3 of 12"


# ---- suites and seals ------------------------------------------------------------------------------------------------


def test_a_sealed_suite_is_held_to_its_prompts(tiny: ModelFolder, tmp_path: Path) -> None:
    request = small(tmp_path, tiny)
    path, lock = seal(request.suite, request.data)
    assert lock.tasks[GPQA].n == 12 and MARK not in path.read_text()
    assert run_suite(request).receipt.suite.sealed
    rows = [gpqa_row(n) for n in range(12)]
    rows[7]["Question"] += "!"
    (tmp_path / "data" / "gpqa_diamond.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(IncomparableError, match=f"{GPQA}: its prompts are not what the suite was sealed with"):
        run_suite(small(tmp_path, tiny, out=tmp_path / "other"))
    assert not (tmp_path / "other" / "tasks.json").exists()


def test_a_definition_other_than_the_sealed_one_is_refused(tiny: ModelFolder, tmp_path: Path) -> None:
    """Sealed before its documents could be had, a task is still held to what it asks."""
    request = small(tmp_path, tiny)
    path, lock = seal(request.suite, None)
    assert not lock.tasks and list(lock.definitions) == [GPQA] and lock.unsealed == (GPQA,)
    assert not run_suite(request).receipt.suite.sealed, "no prompt was sealed"
    path.write_text(path.read_text().replace(lock.definitions[GPQA], "0" * 64))
    with pytest.raises(IncomparableError, match=f"{GPQA}: its definition is not what the suite was sealed with"):
        run_suite(small(tmp_path, tiny, out=tmp_path / "other"))
    assert not (tmp_path / "other" / "answers.jsonl").exists()


def test_a_suite_changed_after_its_seal_is_refused(tiny: ModelFolder, tmp_path: Path) -> None:
    request = small(tmp_path, tiny)
    seal(request.suite, request.data)
    write_suite(tmp_path / "suite", SUITE.replace("0.02", "0.05"))
    with pytest.raises(PanelError, match="small.toml is not the suite that was sealed"):
        run_suite(request)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[[tasks]]", "chat_template = true\n[[tasks]]"), "log-likelihood tasks take no chat template"),
        (('primary = "gpqa_diamond_zeroshot"', 'primary = "mmlu"'), "primary task mmlu is not among the tasks"),
        (("margin = 0.02", "margins = 0.02"), "Extra inputs are not permitted"),
        (("margin = 0.02", "limit = 0"), "greater than or equal to 1"),
        (("[[tasks]]", "[[tasks"), "is not TOML"),
        (("margin = 0.02", f'[[tasks]]\nname = "{GPQA}"'), "is named twice"),
    ],
)
def test_suites_that_cannot_be(change: tuple[str, str], said: str, tmp_path: Path) -> None:
    """Among them a chat template with log-likelihood tasks."""
    path = write_suite(tmp_path, SUITE.replace(*change))
    with pytest.raises(UsageError, match=said):
        load_suite(path)


def test_tasks_that_lm_eval_does_not_know(tiny: ModelFolder, tmp_path: Path) -> None:
    write_suite(tmp_path / "suite", SUITE.replace(GPQA, "gpqa_emerald_zeroshot"))
    write_gpqa(tmp_path / "data")
    (tmp_path / "data" / "gpqa_diamond.jsonl").rename(tmp_path / "data" / "gpqa_emerald.jsonl")
    with pytest.raises(UsageError, match="lm-eval knows no task gpqa_emerald_zeroshot"):
        run_suite(small(tmp_path, tiny))
    with pytest.raises(UsageError, match="there is no suite nowhere"):
        run_suite(small(tmp_path, tiny, suite="nowhere"))


def test_the_wheels_questions_are_281_and_sealed(tmp_path: Path) -> None:
    """Real questions out of the installed package: 57 subjects, and exactly the prompts of the committed seal."""
    found = development_questions()
    assert len(found) == 57 and sum(map(len, found.values())) == 281
    assert {len(row["choices"]) for rows in found.values() for row in rows} == {4}
    assert all(row["question"] and all(row["choices"]) for rows in found.values() for row in rows)
    text = (SHIPPED / "mmlu-dev.toml").read_text()
    (tmp_path / "mmlu-dev.toml").write_text(text)
    path, lock = seal(str(tmp_path / "mmlu-dev.toml"), None)
    assert path.read_text() == (SHIPPED / "mmlu-dev.lock.json").read_text()
    assert sum(task.n for task in lock.tasks.values()) == 281
    assert not any(row["question"][:30] in path.read_text() for rows in found.values() for row in rows)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"question": "q", "choices": ["a"]}], "anatomy/test.jsonl lacks the column answer"),
        ([{"question": "q", "choices": ["a"], "answer": 0}], "row 0: not four choices and an answer of 0 to 3"),
        ([{"question": "q", "choices": list("abcd"), "answer": 4}], "row 0: not four choices"),
        ([], "anatomy/test.jsonl holds no rows"),
    ],
)
def test_local_files_that_cannot_be(rows: list[Any], said: str, tmp_path: Path) -> None:
    from harness.tasks.local import mmlu_rows

    (tmp_path / "anatomy").mkdir()
    file = tmp_path / "anatomy" / "test.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UsageError, match=said):
        mmlu_rows(file, "anatomy")


def test_a_broken_file_shows_none_of_its_text(tmp_path: Path) -> None:
    from harness.tasks.local import gpqa_rows

    (tmp_path / "gpqa_diamond.jsonl").write_text(f'{{"Question": "{MARK}')
    with pytest.raises(UsageError, match="cannot be read") as caught:
        gpqa_rows(tmp_path / "gpqa_diamond.jsonl")
    assert MARK not in str(caught.value) and caught.value.__cause__ is None


def test_few_subjects_are_not_mmlu(tiny: ModelFolder, tmp_path: Path) -> None:
    write_mmlu(tmp_path / "data", rows=1, subjects=56)
    text = SUITE.replace(GPQA, "mmlu")
    write_suite(tmp_path / "suite", text)
    with pytest.raises(UsageError, match="has no world_religions/test file"):
        run_suite(small(tmp_path, tiny))
