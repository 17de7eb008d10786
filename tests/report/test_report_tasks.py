"""The card's benchmark table and the Hub's files, from published counts and from items."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from huggingface_hub import parse_eval_result_entries
from scipy import stats as scipy_stats

from harness.compare.task_pairing import TaskFolder, load_tasks
from harness.errors import UsageError
from harness.interop.g4 import import_files
from harness.report.card import Options, build_card, collect
from harness.report.card_write import check_card, write_card
from harness.report.frontmatter import hub_files, index_results
from harness.report.task_tables import task_table
from harness.store import write_json
from harness.tasks.importing import import_results
from harness.tasks.items import items_table, write_items
from harness.tasks.receipt import TaskReceipt, save_receipt
from harness.verify import verify

REFERENCE = Path(__file__).parents[2] / "../shared/reference"
pytestmark = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the published receipts are not here")
NAMES = ("a0", "mosaic12l", "e216", "f216")
ARMS = [(name, "") for name in NAMES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("tasks")
    for name in NAMES:
        files = [REFERENCE / f"lm_eval/{name}-{task}.json" for task in ("mmlu-quick", "gpqa-mc")]
        import_results(files, out / name, name)
    return {name: out / name for name in NAMES}


def test_published_accuracies_digit_for_digit_and_undecided(folders: dict[str, Path]) -> None:
    """951 against 953 of 1,140 and 86 against 87 of 198 are not distinguishable."""
    published = json.loads((REFERENCE / "expected.json").read_text())["published_strings"]
    table = task_table(load_tasks([folders["a0"], folders["mosaic12l"]]), ARMS, "mosaic12l")
    assert table is not None
    mmlu, gpqa = table.lines
    assert mmlu.values == (published["mmlu"]["a0"], published["mmlu"]["mosaic12l"])
    assert gpqa.values == (published["gpqa"]["a0"], published["gpqa"]["mosaic12l"])
    assert (mmlu.n, gpqa.n) == ("1,140", "198")
    assert mmlu.verdict == gpqa.verdict == "undecided (within noise), unpaired"
    assert mmlu.name == "mmlu (57 x first 20)", "a limit is not called the whole benchmark"


def test_metrics_that_disagree_are_all_shown_without_a_winner(folders: dict[str, Path]) -> None:
    """MMLU says f216, GPQA says e216, both within noise."""
    table = task_table(load_tasks([folders["e216"], folders["f216"]]), ARMS, "f216")
    assert table is not None
    assert [line.difference[0] for line in table.lines] == ["+", "-"]
    assert {line.verdict for line in table.lines} == {"undecided (within noise), unpaired"}


def with_items(folder: Path, receipt: TaskReceipt, right: np.ndarray) -> Path:
    """A task run of GPQA whose items were answered so."""
    rows = [
        {
            "task": "gpqa_diamond_zeroshot",
            "doc_id": at,
            "filter": "none",
            "doc_hash": f"d{at}",
            "prompt_hash": f"p{at}",
            "target_hash": f"t{at}",
            "correct": int(value),
            "outcome": "right" if value else "wrong",
            "target": 0,
            "chosen": 0 if value else 1,
        }
        for at, value in enumerate(right)
    ]
    digest = write_items(folder, items_table(rows))
    suite = receipt.suite.model_copy(update={"entries": ["gpqa_diamond_zeroshot"]})
    results = [r for r in receipt.results if r.name == "gpqa_diamond_zeroshot"]
    update = {"items": len(rows), "items_sha256": digest, "suite": suite, "results": results}
    save_receipt(folder, receipt.model_copy(update=update))
    return folder


def test_same_items_are_paired_and_flips_counted(folders: dict[str, Path], tmp_path: Path) -> None:
    a0, subject = (run.receipt for run in load_tasks([folders["a0"], folders["mosaic12l"]]))
    random = np.random.default_rng(0)
    a = random.random(198) < 0.43
    b = a ^ (random.random(198) < 0.06)
    base = with_items(tmp_path / "a", a0, a)
    paired = task_table(load_tasks([base, with_items(tmp_path / "b", subject, b)]), ARMS, "mosaic12l")
    assert paired is not None
    [line] = paired.lines
    lost, won = int((a & ~b).sum()), int((b & ~a).sum())
    p = scipy_stats.binomtest(won, won + lost).pvalue
    assert line.flips.startswith(f"{lost} lost, {won} won of 198") and f"{p:.3f}" in line.flips
    assert line.verdict == "undecided (within noise)" and p > 0.05
    half = with_items(tmp_path / "c", subject, a & (random.random(198) < 0.5))
    worse = task_table(load_tasks([base, half]), ARMS, "mosaic12l")
    assert worse is not None and worse.lines[0].verdict == "worse"


def test_deviations_from_the_suite_are_printed(folders: dict[str, Path]) -> None:
    """Another limit than planned stands on the card."""
    run = load_tasks([folders["a0"]])[0]
    receipt = run.receipt.model_copy(update={"deviations": ["mmlu: the first 20 documents, the suite says all"]})
    table = task_table([TaskFolder(folder=folders["a0"], receipt=receipt)], ARMS, "a0")
    assert table is not None and "a0: mmlu: the first 20 documents, the suite says all" in table.notes


def test_only_whole_listed_benchmarks_go_to_the_hub(folders: dict[str, Path]) -> None:
    table = task_table(load_tasks([folders["mosaic12l"]]), ARMS, "mosaic12l")
    assert table is not None
    files = hub_files(table.subject, "org/quant")
    assert list(files) == [".eval_results/gpqa_diamond_zeroshot.yaml"]
    [entry] = parse_eval_result_entries(yaml.safe_load(files[".eval_results/gpqa_diamond_zeroshot.yaml"]))
    assert entry.dataset_id == "Idavidrein/gpqa" and entry.value == pytest.approx(43.9394)
    assert entry.source_url == "https://huggingface.co/org/quant" and "n = 198" in (entry.notes or "")
    [mmlu, _] = index_results(table.subject)
    assert mmlu.split == "test, 57 x first 20", "the Hub must not take a limited run for the whole test"


def test_tasks_of_another_model_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="belong to none of"):
        task_table(load_tasks([folders["a0"]]), [("someone", "f" * 64)], "someone")


def test_card_with_tasks_is_written_checked_and_verified(folders: dict[str, Path], tmp_path: Path) -> None:
    """The card of the mosaic with its benchmarks; no text of a question is in any file."""
    names = ["a0", "mosaic12l"]
    runs = import_files([REFERENCE / "panel" / f"{name}.json" for name in names], tmp_path / "g4", names)
    tasks = [folders[name] for name in names]
    options = Options(decimals=5, pictures=False)
    write_card(collect(runs), options, tmp_path / "card", tasks=tasks)
    text = (tmp_path / "card/README.md").read_text()
    assert "| gpqa_diamond_zeroshot (all 198) | 198 | 0.4343 ± 0.0353 | 0.4394 ± 0.0354 |" in text
    assert check_card(collect(runs), options, tmp_path / "card", tasks=tasks) == []
    outcome = verify(tmp_path / "card")
    assert not outcome.findings and outcome.unchecked_numbers, "row means and counts alone prove no number"
    hub = tmp_path / "card/.eval_results/gpqa_diamond_zeroshot.yaml"
    hub.write_text(hub.read_text().replace("43.9394", "49.9394"))
    assert any("49.9394" in line for line in check_card(collect(runs), options, tmp_path / "card", tasks=tasks))
    record = json.loads((folders["a0"] / "tasks.json").read_text())
    record["results"][0]["correct"] += 1
    write_json(tmp_path / "forged/tasks.json", record)
    assert {f.where for f in verify(tmp_path / "forged").findings} >= {"results.mmlu.correct", "results.mmlu.value"}


def test_a_card_without_tasks_has_no_table(folders: dict[str, Path], tmp_path: Path) -> None:
    runs = import_files([REFERENCE / "panel/a0.json"], tmp_path, ["a0"])
    assert "Task benchmarks" not in build_card(collect(runs), Options(), pictures=[]).block
