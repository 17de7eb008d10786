"""The committed runs of one candidate through a real vLLM server, its own kernels, llama.cpp and our exact engine."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from harness.measure.receipt import Measurement, load_measurement

SERVED = Path(__file__).parents[1] / "reports" / "examples" / "served"
KS = (20, 64, 256, 1000)


@pytest.fixture(scope="module")
def runs() -> dict[str, Measurement]:
    return {folder.name: load_measurement(folder) for folder in SERVED.iterdir() if folder.is_dir()}


def test_bounds_rise_towards_the_exact_number(runs: dict[str, Measurement]) -> None:
    bounds = [runs[f"k{k}"].summary for k in KS]
    exact = runs["exact"].summary["kl_mean"]
    assert all(a["kl_mean"] < b["kl_mean"] for a, b in pairwise(bounds)) and bounds[-1]["kl_mean"] < exact
    assert all(a["captured_teacher_mass_mean"] < b["captured_teacher_mass_mean"] for a, b in pairwise(bounds))
    assert all(s["kl_mean"] <= s["kl_capped_mean"] < exact for s in bounds)
    # What a bound lacks is the tail's own divergence times the tail's mass: about the same divergence for each k.
    lacks = [(exact - s["kl_mean"]) / (1 - s["captured_teacher_mass_mean"]) for s in bounds]
    assert max(lacks) < 1.1 * min(lacks)


def test_engines_agree_on_one_model(runs: dict[str, Measurement]) -> None:
    """Same weights, three ways: NLL and top-1 are exact in all of them; the served states give the exact KL."""
    exact, local = runs["exact"].summary, runs["vllm-local"].summary
    assert local["kl_mean"] == pytest.approx(exact["kl_mean"], abs=1e-6)
    for name in ("vllm-local", *(f"k{k}" for k in KS)):
        found = runs[name].summary
        assert found["nll_candidate"] == pytest.approx(exact["nll_candidate"], abs=1e-4)
        assert found["top1_agree_count"] == exact["top1_agree_count"]
    floor = runs["floor-k256"]
    assert floor.role == "floor" and floor.summary["kl_mean"] < 1e-6
    assert runs["k256"].scoring["floor"]["kl_mean"] == floor.summary["kl_mean"]


def test_all_are_whole_and_of_one_question(runs: dict[str, Measurement]) -> None:
    assert len(runs) == 8 and {m.status for m in runs.values()} == {"complete"}
    assert len({m.panel.sha256 for m in runs.values()}) == 1
    assert all(check.passed for m in runs.values() for check in m.preflight)
    assert {m.lane for name, m in runs.items() if name != "exact"} == {"served"}


def test_the_table_says_what_the_receipts_say(runs: dict[str, Measurement]) -> None:
    text = (SERVED / "estimators.md").read_text()
    for k in KS:
        (line,) = re.findall(rf"^\| top-k, k = {k} \|.*$", text, flags=re.MULTILINE)
        s = runs[f"k{k}"].summary
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[1] == f"{100 * s['captured_teacher_mass_mean']:.2f} %"
        assert cells[2] == f"{s['kl_mean']:.4g}"
        assert cells[3] == f"{100 * s['kl_mean'] / runs['vllm-local'].summary['kl_mean']:.2f} %"
