"""Benchmarks of answers: which items, whose prompts, how an answer is read, and what an error bar is."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.compare.tasks import compare_task_runs
from harness.errors import IncomparableError, UsageError
from harness.measure.receipt import SideIdentity
from harness.report.words import task_reason, task_warnings
from harness.tasks.evaluating import first_documents
from harness.tasks.importing import import_results
from harness.tasks.items import SCHEMA, item_rows, items_table, write_items
from harness.tasks.outcome import notes
from harness.tasks.receipt import (
    Count,
    SuiteIdentity,
    TaskReceipt,
    TaskResult,
    group_result,
    leaf_result,
    plus_minus,
    pool,
    save_receipt,
    selection,
)
from harness.tasks.suite import Suite, load_suite
from tests.fault_cases.entry import Fault
from tests.fault_cases.identity import chat
from tests.panel.made_panels import TEMPLATE, make_tokenizer
from tests.tasks.made_runs import outcome_item, write_run

REFERENCE = Path(__file__).parents[2] / "../shared/reference/lm_eval"
#: The sizes of MMLU's 57 subjects are not needed: any 57 that add up to its 14,042 items.
SIZES = [246] * 56 + [266]
SUITE = 'name = "s"\nlm_eval = "0.4.13"\nprimary = "mmlu"\n[[tasks]]\nname = "mmlu"\nlimit = 10\n'


def suite_of(folder: Path, text: str = SUITE) -> Suite:
    folder.mkdir(exist_ok=True)
    (folder / "s.toml").write_text(text)
    return load_suite(folder / "s.toml")


def receipt_of(results: list[TaskResult], limit: dict[str, int | None]) -> TaskReceipt:
    unknown = ("version", "model", "revision", "weights_sha256", "head_sha256", "tokenizer_sha256", "device")
    dtypes = {"weights_dtype": "bfloat16", "compute_dtype": "float32", "engine": "made", "lane": "weights"}
    return TaskReceipt(
        key="k",
        name="m",
        status="complete",
        lane="weights",
        suite=SuiteIdentity(name="s", sha256="s", sealed=False, entries=list(limit)),
        model=SideIdentity.model_validate(dict.fromkeys(unknown, "x") | dtypes),
        limit=limit,
        seeds={},
        results=results,
        items=0,
        items_sha256="",
        environment={},
    )


def template_on_choices(folder: Path) -> None:
    """Log-likelihood tasks take no chat template; thinking on and thinking off are two panels."""
    with pytest.raises(UsageError, match="log-likelihood tasks take no chat template"):
        suite_of(folder / "s", SUITE.replace("[[tasks]]", "chat_template = true\n[[tasks]]"))
    template = "{{ 'think ' if enable_thinking is not defined or enable_thinking }}" + TEMPLATE
    tokenizer = make_tokenizer(folder / "t", template=template)
    first = chat(folder / "p", tokenizer)
    second = chat(folder / "q", tokenizer, "template_kwargs = { enable_thinking = false }\n")
    assert first.recipe_sha256 != second.recipe_sha256 and first.sha256 != second.sha256
    sealed = json.loads((folder / "p" / "panel.lock.json").read_text())["tokenizer"]["chat_template_sha256"]
    assert len(sealed) == 64


def first_of_each(folder: Path) -> None:
    """limit = 10 on 57 subjects: 570 items, named by number, called "57 x first 10"."""
    leaves = [leaf_result(f"mmlu_{i}", Count(7, 10), metric="acc", original=size) for i, size in enumerate(SIZES)]
    group = group_result("mmlu", leaves)
    assert (group.n, group.original) == (570, 14_042)
    assert selection(receipt_of([*leaves, group], {"mmlu": 10}), "mmlu") == "57 x first 10"
    suite = suite_of(folder / "s")
    loaded: Any = SimpleNamespace(
        entry_of={leaf.name: "mmlu" for leaf in leaves},
        tasks={leaf.name: SimpleNamespace(eval_docs=range(size)) for leaf, size in zip(leaves, SIZES, strict=True)},
    )
    chosen = first_documents(suite, loaded, None)
    assert sum(len(documents) for documents in chosen.values()) == 570
    assert chosen["mmlu_3"] == list(range(10))
    assert {"doc_id", "doc_hash", "prompt_hash", "target_hash"} <= set(SCHEMA.names)


def group_error(folder: Path) -> None:
    """14,042 items at 0.58: 0.0042; a file that states 0.1186 is refused."""
    counts = [Count(round(0.58 * n), n) for n in SIZES]
    found = pool(counts)
    assert found.n == 14_042 and found.accuracy == pytest.approx(0.58, abs=2e-3)
    assert found.stderr == pytest.approx(math.sqrt(0.58 * 0.42 / 14_042), rel=0.01) and found.stderr < 0.02
    results = {f"mmlu_{i}": stated(count, group="all") for i, count in enumerate(counts)}
    group = {"acc,none": found.accuracy, "acc_stderr,none": found.stderr}
    reduced(folder / "right.json", results, {"mmlu": group})
    assert import_results([folder / "right.json"], folder / "right", "m").result("mmlu") is not None
    reduced(folder / "wrong.json", results, {"mmlu": group | {"acc_stderr,none": 0.1186}})
    with pytest.raises(IncomparableError, match="mmlu states acc_stderr 0.1186, its counts give 0.0041"):
        import_results([folder / "wrong.json"], folder / "wrong", "m")


def stated(count: Count, **more: Any) -> dict[str, Any]:
    return {"sample_len": count.n, "acc,none": count.accuracy, "acc_stderr,none": count.stderr} | more


def reduced(file: Path, results: dict[str, Any], groups: dict[str, Any], version: str = "0.4.13") -> Path:
    """A file of published counts."""
    content = {"schema": "lm-eval-results-reduced-v1", "results": results, "groups": groups, "lm_eval_version": version}
    file.write_text(json.dumps(content))
    return file


def micro_and_macro(folder: Path) -> None:
    """1 of 1 and 0 of 9: micro 0.1, macro 0.5, and which is which is said."""
    found = pool([Count(1, 1), Count(0, 9)])
    assert (found.accuracy, found.macro) == (0.1, 0.5)
    counts = {"a": Count(1, 1), "b": Count(0, 9)}
    leaves = [leaf_result(name, count, metric="acc", original=None) for name, count in counts.items()]
    group = group_result("mmlu", leaves)
    assert (group.value, group.macro) == (0.1, 0.5)
    assert notes(suite_of(folder / "s"), [*leaves, group]) == [
        "accuracies of groups are micro averages: every item counts the same; macro is the mean of tasks"
    ]


def generated(answers: list[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """lm-eval's samples of a task that generates: (output, what was read of it, right)."""
    return [
        {
            "doc_id": i,
            "doc": {"question": "What is the secret of the mill?"},
            "filter": "strict-match",
            "doc_hash": f"d{i}",
            "prompt_hash": f"p{i}",
            "target_hash": f"t{i}",
            "arguments": [("What is the secret of the mill?", {})],
            "target": "B",
            "resps": [[text]],
            "filtered_resps": [read],
            "metrics": ["exact_match"],
            "exact_match": right,
        }
        for i, (text, read, right) in enumerate(answers)
    ]


def with_rates(folder: Path, unread: int, n: int) -> list[str]:
    """What is said of a suite whose one task could not be read ``unread`` times of ``n``."""
    result = leaf_result(
        "mmlu", Count(0, n), metric="exact_match", original=n, extraction_failures=unread, truncations=0
    )
    assert result.extraction_failure_rate == unread / n
    return notes(suite_of(folder), [result])


def extraction(folder: Path) -> None:
    """The share of answers that could not be read is kept, and above 2 % it is a warning."""
    assert with_rates(folder / "s", 2, 100) == []
    assert with_rates(folder / "s", 3, 100) == ["mmlu: no answer could be read from 3.0% of the outputs"]
    rows = item_rows("t", generated([(" B", "B", 1), ("no idea", "[invalid]", 0)]), "exact_match")
    assert [row["outcome"] for row in rows] == ["right", "unparsable"]
    asked = {"t": [outcome_item("t", n, True) for n in range(100)]}
    runs = [write_run(folder / n, n, asked, leaf={"extraction_failures": f}) for n, f in (("a", 0), ("b", 2))]
    told = compare_task_runs(runs)
    assert [arm.extraction_failure_rate for arm in told.tasks[0].arms] == [0.0, 0.02]
    assert task_warnings(told) == ["t: the arms differ by 2.0% in answers that cannot be read"]


def other_implementation(folder: Path) -> None:
    """The task's definition, its prompts and lm-eval's version stand in a result; two versions are not mixed."""
    assert {"config_sha256", "task_hash", "prompts_sha256", "version", "num_fewshot"} <= set(TaskResult.model_fields)
    files = [
        reduced(folder / "a.json", {"one": stated(Count(5, 9))}, {}),
        reduced(folder / "b.json", {"two": stated(Count(5, 9))}, {}, version="0.4.2"),
    ]
    assert import_results(files[:1], folder / "a", "m").environment["lm_eval"] == "0.4.13"
    with pytest.raises(IncomparableError, match="the files are of lm-eval 0.4.13 and 0.4.2"):
        import_results(files, folder / "both", "m")
    asked = {"t": [outcome_item("t", n, True) for n in range(5)]}
    base = write_run(folder / "base", "base", asked)
    for name, change in (("version", {"lm_eval": "0.4.2"}), ("definition", {"leaf": {"config_sha256": "other"}})):
        with pytest.raises(IncomparableError):
            compare_task_runs([base, write_run(folder / name, name, asked, **change)])  # type: ignore[arg-type]
    assert compare_task_runs([base, write_run(folder / "same", "same", asked)]).tasks[0].pairs[0].paired


def noise_as_gain(folder: Path) -> None:
    """951 against 953 of 1,140: not distinguishable, by item where there are items, else unpaired."""
    outcomes = {"a": [1] * 951 + [0] * 189, "b": [0] * 10 + [1] * 953 + [0] * 177}
    runs = [
        write_run(folder / n, n, {"t": [outcome_item("t", i, bool(right)) for i, right in enumerate(found)]})
        for n, found in outcomes.items()
    ]
    paired = compare_task_runs(runs).tasks[0].pairs[0]
    assert (paired.lost, paired.won, paired.n) == (10, 12, 1140) and paired.p == pytest.approx(0.8318, abs=1e-4)
    counted = []
    for name, correct in (("x", 951), ("y", 953)):
        file = reduced(folder / f"{name}.json", {"t": stated(Count(correct, 1140))}, {})
        import_results([file], folder / name, name)
        counted.append(folder / name)
    unpaired = compare_task_runs(counted).tasks[0].pairs[0]
    assert not unpaired.paired and unpaired.p is None and "not distinguishable" in task_reason(unpaired)
    assert unpaired.difference.low is not None and unpaired.difference.low < 0 < unpaired.difference.high  # type: ignore[operator]
    assert {paired.verdict, unpaired.verdict} <= {"within noise", "equivalent"}


def extraction_not_ability(folder: Path) -> None:
    """3.5 % where the answers could not be read: said to be no headline; 32 % unread is a warning only."""
    assert with_rates(folder / "s", 191, 198) == [
        "mmlu: no answer could be read from 96.5% of the outputs",
        "mmlu: extraction, not ability, is what this number shows: no headline",
    ]
    assert len(with_rates(folder / "s", 63, 198)) == 1


def wrong_unparsable_truncated(folder: Path) -> None:
    """Wrong, not readable and cut off are three outcomes of the same zero."""
    long = "so " * 2048
    answers = [("B", "B", 1), ("A", "A", 0), ("```json\n{}", "[invalid]", 0), (long, "[invalid]", 0), ("", "", 0)]
    rows = item_rows("t", generated(answers), "exact_match", lambda text: len(text.split()) >= 2048)
    assert [row["outcome"] for row in rows] == ["right", "wrong", "unparsable", "truncated", "unparsable"]
    assert [row["truncated"] for row in rows] == [False, False, False, True, False]
    assert [row["correct"] for row in rows] == [1, 0, 0, 0, 0]


def question_text(folder: Path) -> None:
    """What is written holds hashes and numbers: no word of a question or of an answer."""
    samples = generated([("the miller's own answer", "the miller's own answer", 1), ("x", "[invalid]", 0)])
    table = items_table(item_rows("t", samples, "exact_match"))
    digest = write_items(folder, table)
    save_receipt(folder, receipt_of([], {}).model_copy(update={"items_sha256": digest, "items": 2}))
    written = b"".join(file.read_bytes() for file in sorted(folder.iterdir())) + str(table.to_pylist()).encode()
    assert b"prompt_hash" in written and b"right" in written
    for secret in (b"secret of the mill", b"miller", b"question"):
        assert secret not in written
    with pytest.raises(ValueError, match="question"):
        TaskReceipt.model_validate(receipt_of([], {}).model_dump() | {"question": "What?"})


def subjects_not_groups(folder: Path) -> None:
    """The overall error pools the 57 subjects, not the four groups; the published 0.8342 +- 0.0105 from its counts."""
    leaves = [Count(20 - i % 8, 20) for i in range(57)]
    by_group = [Count(sum(c.correct for c in leaves[i::4]), sum(c.n for c in leaves[i::4])) for i in range(4)]
    by_hand = math.sqrt(sum(c.accuracy * (1 - c.accuracy) / 19 for c in leaves)) / 57
    assert pool(leaves).stderr == pytest.approx(by_hand, rel=1e-12) and pool(by_group).stderr != pool(leaves).stderr
    if not REFERENCE.is_dir():
        pytest.skip("the published counts are not here")
    found = import_results([REFERENCE / "a0-mmlu-quick.json"], folder / "a0", "a0").result("mmlu")
    assert found is not None and (found.correct, found.n) == (951, 1140)
    assert found.shown == plus_minus(951 / 1140, found.stderr) == "0.8342 ± 0.0105"
    assert found.stderr == pytest.approx(0.0104704, abs=1e-7)


ROWS = [
    Fault(id="A4-template-on-choices", title="a chat template on log-likelihoods", check=template_on_choices),
    Fault(id="A59-first-of-each", title="a limit is the first N of each subject", check=first_of_each),
    Fault(id="A61-group-error", title="the standard error of a group", check=group_error),
    Fault(id="A62-micro-and-macro", title="micro and macro averages", check=micro_and_macro),
    Fault(id="A68-extraction", title="answers that could not be extracted", check=extraction),
    Fault(id="A69-other-implementation", title="two implementations of one benchmark", check=other_implementation),
    Fault(id="B26-noise-as-gain", title="noise reported as a gain", check=noise_as_gain),
    Fault(id="B44-extraction-not-ability", title="extraction, not ability", check=extraction_not_ability),
    Fault(id="B46-wrong-or-unread", title="format and length errors", check=wrong_unparsable_truncated),
    Fault(id="B49-question-text", title="gated questions in public files", check=question_text),
    Fault(id="B56-subjects-not-groups", title="pooling over subjects", check=subjects_not_groups),
]
