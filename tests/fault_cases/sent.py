"""What is sent and what comes back: log-probabilities that are none, other models, prompts and rows that are cut."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fault_cases.command import measured, refused
from tests.fault_cases.entry import Fault
from tests.fault_cases.statements import fidelity
from tests.served.mock_numbers import Faults, Numbers
from tests.served.mock_sglang import MockSglang
from tests.served.mock_vllm import MockVllm, serving

_SERVED = ("teacher_folder", "exl3_folder", "panel_folder")
_TOP_K = ("--engine", "vllm", "--k", "64")
Told = Callable[[torch.Tensor], torch.Tensor]


def numbers(folder: Path, **faults: Any) -> Numbers:
    return Numbers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), Faults(**faults))


def values(told: Told) -> Callable[..., None]:
    """Both servers, top k and chosen ids: what they send is refused as no log-probabilities."""

    def check(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
        for number, (engine, mock) in enumerate(
            (
                ("vllm", MockVllm(numbers=numbers(teacher, told=told), fixed_ids=404)),
                ("vllm", MockVllm(numbers=numbers(teacher, told=told))),
                ("sglang", MockSglang(numbers=numbers(teacher, told=told))),
            )
        ):
            with serving(mock) as url:
                work = folder / str(number)
                work.mkdir()
                said = refused(work, exl3, teacher, panel, "--engine", engine, "--k", "64", "--url", url)
            assert "no log-probabilities, but logits" in said or "add up to" in said, said

    return check


def masked_below(logprobs_TV: torch.Tensor) -> torch.Tensor:
    """All but the likeliest thirty as impossible, the rest as they were: the sampler's view."""
    least = logprobs_TV.topk(30, -1).values[:, -1:]
    return torch.where(logprobs_TV >= least, logprobs_TV - 0.5, -50.0)


def mode_is_told(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """A server that says that it writes something else is believed."""
    mock = MockVllm(numbers=numbers(exl3_dense(folder, exl3)), dev_mode=True, fixed_ids=404)
    for mode in ("raw_logits", "processed_logits", "processed_logprobs"):
        mock.settings = {"model_config": {"logprobs_mode": mode, "max_logprobs": -1}}
        with serving(mock) as url:
            assert f"the server writes {mode}" in refused(folder, exl3, teacher, panel, *_TOP_K, "--url", url)


def exl3_dense(folder: Path, exl3: Path) -> Path:
    """The candidate's decoded weights, for a server to run."""
    target = folder / "dense"
    if not target.exists():
        code, said = fidelity(folder, "exl3", "decode", exl3, "--out", target)
        assert code == 0, said
    return target


def another_model(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """A server that serves the teacher under the candidate's name: not proven, and the KL is questioned."""
    for number, (engine, mock) in enumerate(
        (
            ("vllm", MockVllm(numbers=numbers(teacher), fixed_ids=404, folder="/models/tiny-teacher")),
            ("sglang", MockSglang(numbers=numbers(teacher), folder="/models/tiny-teacher")),
        )
    ):
        with serving(mock) as url:
            found = measured(
                folder, exl3, teacher, panel, f"other{number}", "--engine", engine, "--k", "259", "--url", url
            )
        failed = [line for line in found["preflight"] if not line["passed"]]
        assert [line["figure"] for line in failed if "one named" in line["name"]] == ["not proven"]
        assert "tiny-teacher" in failed[0]["note"]
        assert any("see that the server does not serve the teacher" in note for note in found["notes"])
        report = (folder / f"other{number}" / "report.md").read_text()
        assert "not proven" in report and "does not serve the teacher" in report
    mock = MockVllm(numbers=numbers(exl3_dense(folder, exl3)), fixed_ids=404, folder=f"/models/{exl3.name}")
    with serving(mock) as url:
        found = measured(folder, exl3, teacher, panel, "right", *_TOP_K, "--url", url)
    assert all(line["passed"] for line in found["preflight"])
    assert not any("serve the teacher" in note for note in found["notes"])


def cap_before_teacher(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """A server's cap on k is met before the teacher runs, told or not."""
    for number, dev in enumerate((False, True)):
        mock = MockVllm(numbers=numbers(teacher, cap=20), dev_mode=dev, fixed_ids=404)
        work = folder / str(number)
        work.mkdir()
        with serving(mock) as url:
            said = refused(work, exl3, teacher, panel, "--engine", "vllm", "--url", url)
        assert "20" in said and "--k 20" in said.replace("fewer with --k", "--k 20"), said
        assert not list(work.rglob("row-*.parquet"))


def never_more_than_all(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """k above the vocabulary kills a real SGLang: it is never asked for more than all ids."""
    mock = MockSglang(numbers=numbers(exl3_dense(folder, exl3)), folder=exl3.name)
    with serving(mock) as url:
        found = measured(folder, exl3, teacher, panel, "all", "--engine", "sglang", "--k", "5000", "--url", url)
    assert found["scoring"]["k"] == 259
    assert max(int(body.get("top_logprobs_num", 0)) for body in mock.numbers.bodies) <= 259


# ---- tasks -----------------------------------------------------------------------------------------------------------

SUITE = (
    'name = "one"\ndescription = "made"\nlm_eval = "0.4.13"\nprimary = "{task}"\nchat_template = false\n'
    '[seeds]\nrandom = 1\nnumpy = 1\ntorch = 1\nfewshot = 1\n[[tasks]]\nname = "{task}"\n{more}'
)


def long_context(folder: Path, teacher: Path) -> Path:
    """The tiny teacher with room for prompts of 2,000 tokens."""
    from tests.fault_cases.command import copy_with

    return copy_with(teacher, folder / "long", max_position_embeddings=2048)


def anatomy(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {
            "question": f"Question number {i} about bones?",
            "subject": "anatomy",
            "choices": ["one", "two", "three", "four"],
            "answer": (3 * i) % 4,
        }
        for i in range(first, count)
    ]


def ask(folder: Path, model: Path, task: str, data: Path, out: str, more: str = "num_fewshot = 0\n") -> tuple[int, str]:
    (folder / "one.toml").write_text(SUITE.format(task=task, more=more))
    return fidelity(folder, "tasks", model, "--suite", "one.toml", "--data", data, "--out", out)


def shards(folder: Path, teacher: Path) -> None:
    """A subject in two Parquet files: all of its items, or a refusal that names the missing one."""
    model, data = long_context(folder, teacher), folder / "data" / "mmlu" / "anatomy"
    data.mkdir(parents=True)
    pd.DataFrame(anatomy(5)).to_parquet(data / "dev-00000-of-00001.parquet")
    pd.DataFrame(anatomy(6)).to_parquet(data / "test-00000-of-00002.parquet")
    pd.DataFrame(anatomy(12, 6)).to_parquet(data / "test-00001-of-00002.parquet")
    code, said = ask(folder, model, "mmlu_anatomy", folder / "data", "whole")
    assert code == 0 and "all 12" in said, said
    (data / "test-00000-of-00002.parquet").unlink()
    code, said = ask(folder, model, "mmlu_anatomy", folder / "data", "half")
    assert code == 2 and "holds 1 of 2 test files" in said
    (data / "test-00001-of-00002.parquet").unlink()
    one_based = [item | {"answer": item["answer"] + 1} for item in anatomy(12)]
    pd.DataFrame(one_based).to_parquet(data / "test-00000-of-00001.parquet")
    code, said = ask(folder, model, "mmlu_anatomy", folder / "data", "one-based")
    assert code in (2, 3) and "answer" in said and "repair:" in said, said


def text_stays_text(folder: Path, teacher: Path) -> None:
    """Answers that read None, NA, null or 007 are these words."""
    model, data = long_context(folder, teacher), folder / "data"
    data.mkdir()
    words = ("None", "NA", "null", "007")
    columns = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    with (data / "gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ("Question", *columns))
        writer.writeheader()
        for number in range(4):
            writer.writerow({"Question": f"Which is right in case {number}?", **dict(zip(columns, words, strict=True))})
    from harness.tasks.local import gpqa_rows

    assert all([row[column] for column in columns] == list(words) for row in gpqa_rows(data / "gpqa_diamond.csv"))
    code, said = ask(folder, model, "gpqa_diamond_zeroshot", data, "run")
    assert code == 0 and "all 4" in said, said


def separators(folder: Path) -> None:
    """A record with U+2028, U+0085 or a form feed in a string is one record."""
    for number, mark in enumerate(("\u2028", "\u2029", "\u0085", "\x0c")):
        work = folder / str(number)
        work.mkdir()
        name = "mmlu_anatomy_2026-05-01T10-00-00.000000"
        results = {
            "results": {"mmlu_anatomy": {"alias": "a", "acc,none": 0.25, "acc_stderr,none": 0.25, "sample_len": 4}},
            "group_subtasks": {},
            "versions": {"mmlu_anatomy": 1},
            "n-shot": {"mmlu_anatomy": 0},
            "configs": {"mmlu_anatomy": {"task": "mmlu_anatomy"}},
            "n-samples": {"mmlu_anatomy": {"original": 4, "effective": 4}},
            "config": {},
        }
        (work / "results_2026-05-01T10-00-00.000000.json").write_text(json.dumps(results))
        (work / f"samples_{name}.jsonl").write_text(
            "".join(json.dumps(sample(i, mark if i == 2 else " "), ensure_ascii=False) + "\n" for i in range(4)),
            encoding="utf-8",
        )
        file = work / "results_2026-05-01T10-00-00.000000.json"
        code, said = fidelity(work, "import-lm-eval", file, "--out", "out", "--name", "q")
        assert code == 0 and "all 4" in said, said


def sample(number: int, mark: str) -> dict[str, Any]:
    import hashlib

    text = f"Which is case {number}?{mark}Choose."
    sha = {name: hashlib.sha256(f"{name}{text}".encode()).hexdigest() for name in ("doc", "prompt", "target")}
    return {
        "doc_id": number,
        "doc": {"question": text},
        "target": str(number % 4),
        "arguments": {f"gen_args_{j}": {"arg_0": text, "arg_1": f" {'ABCD'[j]}"} for j in range(4)},
        "resps": [[[str(-1.0 - j), "False"]] for j in range(4)],
        "filtered_resps": [[str(-1.0 - j), "False"] for j in range(4)],
        "filter": "none",
        "metrics": ["acc"],
        "acc": float(number % 4 == 0),
        **{f"{name}_hash": digest for name, digest in sha.items()},
    }


def long_generation(folder: Path, teacher: Path) -> None:
    """A prompt that leaves no room for what is generated is refused, as one of a log-likelihood is."""
    from lm_eval.api.instance import Instance
    from transformers import AutoTokenizer

    from harness.engines.models import locate
    from harness.engines.open import digests_of, open_engine
    from harness.errors import EngineError
    from harness.tasks.asking import Answers, AskingLM
    from harness.tasks.reference_lm import ReferenceLM

    located = locate(str(teacher), None, cache=folder)
    weights, tokenizer = digests_of(located)
    engine = open_engine(located, weights_sha256=weights, tokenizer_sha256=tokenizer)
    inner = ReferenceLM(engine, AutoTokenizer.from_pretrained(teacher))
    asking = AskingLM(inner, Answers(folder, "key"), limit=256)
    prompt = "the mill by the river turns when the water is high. " * 5
    for options in ({"until": ["."], "max_gen_toks": 16}, {"until": ["."]}):
        long = Instance("generate_until", {}, (prompt, options), 0, ("made", 3, 1))
        with pytest.raises(EngineError, match=r"1 prompts do not fit a context of 256 tokens.*document 3"):
            asking.generate_until([long])
    with pytest.raises(EngineError, match="do not fit a context of 256 tokens"):
        asking.loglikelihood([Instance("loglikelihood", {}, (prompt, " yes"), 0, ("made", 3, 1))])


ROWS = [
    Fault(
        id="C5-raw-logits",
        title="a server that sends logits",
        check=values(lambda logs: logs - 30.0),
        needs=_SERVED,
    ),
    Fault(
        id="C5-shifted",
        title="log-probabilities shifted down by 0.3",
        check=values(lambda logs: logs - 0.3),
        needs=_SERVED,
    ),
    Fault(id="C5-scaled", title="log-probabilities times 1.02", check=values(lambda logs: logs * 1.02), needs=_SERVED),
    Fault(id="C5-masked", title="masked values", check=values(masked_below), needs=_SERVED),
    Fault(id="C5-mode-told", title="a mode that the server tells", check=mode_is_told, needs=_SERVED),
    Fault(
        id="C17-another-model-served",
        title="the teacher behind the candidate's name",
        check=another_model,
        needs=_SERVED,
    ),
    Fault(id="C48-never-more-than-all", title="k above the vocabulary", check=never_more_than_all, needs=_SERVED),
    Fault(id="C48-cap-before-the-teacher", title="the server's cap on k", check=cap_before_teacher, needs=_SERVED),
    Fault(id="C4-long-generation", title="prompts cut in silence", check=long_generation, needs=("teacher_folder",)),
    Fault(id="C15-two-shards", title="half of a subject's items", check=shards, needs=("teacher_folder",)),
    Fault(id="C15-words-for-nothing", title="None, NA, null, 007", check=text_stays_text, needs=("teacher_folder",)),
    Fault(id="C15-separators", title="JSON lines cut at U+2028", check=separators),
]
