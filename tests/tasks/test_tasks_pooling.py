"""Pooling against lm-eval's own functions and against published results, digit for digit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from harness.errors import IncomparableError, UsageError
from harness.tasks.importing import import_results
from harness.tasks.receipt import Count, load_receipt, plus_minus, pool, pooled_stderr, selection

REFERENCE = Path(__file__).parents[2] / "../shared/reference"
PUBLISHED = {
    "a0": ("0.8342 ± 0.0105", "0.4343 ± 0.0353"),
    "mosaic12l": ("0.8360 ± 0.0104", "0.4394 ± 0.0354"),
    "e216": ("0.7728", "0.3788"),
    "f216": ("0.7868", "0.3687"),
}


def test_equals_lm_eval_to_1e_12() -> None:
    """Unequal sizes, accuracies of 0 and 1 among them."""
    from lm_eval.api.metrics import aggregate_subtask_metrics, mean_stderr, pooled_sample_stderr

    rng = np.random.default_rng(5)
    sizes = [2, 3, 20, 20, 100, 7, 1534]
    outcomes = [rng.integers(0, 2, n) for n in sizes]
    outcomes[2][:], outcomes[3][:] = 1, 0
    counts = [Count(int(o.sum()), len(o)) for o in outcomes]
    for count, outcome in zip(counts, outcomes, strict=True):
        assert count.stderr == pytest.approx(mean_stderr(outcome.astype(float)), abs=1e-12)
    pooled = pool(counts)
    theirs = pooled_sample_stderr([mean_stderr(o.astype(float)) for o in outcomes], sizes)
    assert pooled.stderr == pytest.approx(theirs, abs=1e-12)
    assert pooled.accuracy == pytest.approx(aggregate_subtask_metrics([o.mean() for o in outcomes], sizes), abs=1e-12)


def test_pooled_equals_a_stratified_error_computed_in_plain_steps() -> None:
    """For equal sizes the pooled error is that of a stratified sample, whatever the formula is called."""
    counts = [Count(c, 20) for c in (3, 11, 20, 0, 15)]
    by_hand = math.sqrt(sum(c.accuracy * (1 - c.accuracy) / 19 for c in counts)) / 5
    assert pool(counts).stderr == pytest.approx(by_hand, rel=1e-14)


def test_error_of_a_large_group_is_small() -> None:
    """14,042 items at 0.58 give 0.0042, never 0.1186."""
    counts = [Count(round(0.58 * n), n) for n in [246] * 56 + [266]]
    assert pool(counts).stderr == pytest.approx(0.0042, abs=0.0001)


def test_micro_and_macro_are_told_apart() -> None:
    """A mean over tasks is not the mean over items: each has its name."""
    pooled = pool([Count(1, 1), Count(0, 9)])
    assert (pooled.accuracy, pooled.macro, pooled.stderr) == (0.1, 0.5, None)


def test_single_items_have_no_error() -> None:
    assert Count(1, 1).stderr is None
    assert pooled_stderr([None], [1]) is None
    assert plus_minus(1.0, None) == "1.0000"
    with pytest.raises(ValueError, match="no count"):
        Count(3, 2)


@pytest.mark.parametrize("point", PUBLISHED)
def test_published_results_print_digit_for_digit(point: str, tmp_path: Path) -> None:
    """MMLU quick and GPQA diamond of four published models, from their counts alone."""
    folder = REFERENCE / "lm_eval"
    if not folder.is_dir():
        pytest.skip("the published receipts are not here")
    files = [folder / f"{point}-mmlu-quick.json", folder / f"{point}-gpqa-mc.json"]
    receipt = import_results(files, tmp_path / point, point)
    assert receipt == load_receipt(tmp_path / point)
    mmlu, gpqa = receipt.result("mmlu"), receipt.result("gpqa_diamond_zeroshot")
    assert mmlu is not None and gpqa is not None
    assert receipt.suite.entries == ["mmlu", "gpqa_diamond_zeroshot"]
    wide, narrow = PUBLISHED[point]
    assert mmlu.shown.startswith(wide) and gpqa.shown.startswith(narrow)
    stated = json.loads(files[0].read_text())
    for group, values in stated["groups"].items():
        ours = receipt.result(group)
        assert ours is not None and ours.n == values["sample_len"] and ours.correct == values["correct"]
        assert ours.value == pytest.approx(values["acc,none"], abs=1e-12)
        assert ours.stderr == pytest.approx(values["acc_stderr,none"], abs=1e-12)
    assert selection(receipt, "mmlu") == "57 x first 20"
    assert selection(receipt, "gpqa_diamond_zeroshot") == "all 198"


def results_file(path: Path, **change: object) -> Path:
    """A results file of lm-eval's own shape: two tasks in one group."""
    document = {
        "results": {
            "two": {"alias": "two", "sample_len": 4, "acc,none": 0.5, "acc_stderr,none": math.sqrt(0.25 / 3)},
            "one": {"alias": "one", "sample_len": 2, "acc,none": 1.0, "acc_stderr,none": 0.0},
            "both": {"alias": "both", "sample_len": 6, "acc,none": 4 / 6, "acc_stderr,none": math.sqrt(0.25)},
        },
        "groups": {"both": {"alias": "both", "acc,none": 4 / 6}},
        "group_subtasks": {"both": ["two", "one"]},
        "versions": {"two": 1.0},
        "n-shot": {"two": 0, "one": 0},
        "n-samples": {"two": {"original": 100, "effective": 4}, "one": {"original": 2, "effective": 2}},
        "config": {"model": "hf", "limit": 4.0, "random_seed": 0},
        "lm_eval_version": "0.4.13",
    }
    document["results"]["both"]["acc_stderr,none"] = pool([Count(2, 4), Count(2, 2)]).stderr
    document |= change
    path.write_text(json.dumps(document))
    return path


def test_lm_evals_own_file_is_read(tmp_path: Path) -> None:
    receipt = import_results([results_file(tmp_path / "results_x.json")], tmp_path / "run", "m")
    both = receipt.result("both")
    assert both is not None and (both.correct, both.n, both.tasks) == (4, 6, ["two", "one"])
    assert receipt.suite.entries == ["both"] and receipt.limit == {"both": 4}
    assert receipt.items_sha256 == "" and "no paired comparison" in receipt.notes[0]


def test_a_number_that_its_counts_do_not_give_is_refused(tmp_path: Path) -> None:
    results = {"two": {"sample_len": 4, "acc,none": 0.5, "acc_stderr,none": 0.1}}
    file = results_file(tmp_path / "results_x.json", results=results, groups={}, group_subtasks={})
    with pytest.raises(IncomparableError, match="two states acc_stderr 0.1, its counts give 0.28"):
        import_results([file], tmp_path / "run", "m")


def test_files_of_two_versions_do_not_mix(tmp_path: Path) -> None:
    """Results of two lm-eval versions are results of two benchmarks."""
    other = {"three": {"sample_len": 2, "acc,none": 0.5}}
    files = [
        results_file(tmp_path / "results_x.json"),
        results_file(tmp_path / "results_y.json", results=other, groups={}, group_subtasks={}, lm_eval_version="0.4.2"),
    ]
    with pytest.raises(IncomparableError, match="0.4.13 and 0.4.2"):
        import_results(files, tmp_path / "run", "m")


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "{"])
def test_other_files_are_refused_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match="x.json"):
        import_results([tmp_path / "x.json"], tmp_path / "run", "m")
