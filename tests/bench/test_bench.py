"""The bench runs at tiny sizes, its figures have the shape they are published in, and its baselines are right.

No test asks for a speed: a busy machine must not make the suite fail.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.bench import TINY, Figure, bench_json, run_bench
from harness.bench.baselines import Chunked, llama_work, naive, naive_head
from harness.bench.made_up import made_up_logits
from harness.bench.scores import at_divergence, reference_kl
from harness.bench.timing import extra_megabytes, interleaved
from harness.errors import UsageError
from harness.store import write_json


def test_every_section_runs_and_its_json_holds(tmp_path: Path) -> None:
    done = list(run_bench(TINY))
    write_json(tmp_path / "bench.json", bench_json(done, TINY))
    told = json.loads((tmp_path / "bench.json").read_text())
    assert told["format"] == "exl3-fidelity/bench/1" and told["size"] == "tiny"
    names = [section["name"] for section in told["sections"]]
    assert names == [section.name for section in done] and len(names) == 10
    for section in told["sections"]:
        assert section["figures"], section["name"]
        for figure in section["figures"]:
            assert set(figure) == {"name", "value", "unit", "least", "most", "met", "note"}
            assert isinstance(figure["value"], float | int) and math.isfinite(figure["value"]), figure
            assert (figure["met"] is None) == (figure["least"] is None and figure["most"] is None)


def test_an_unknown_section_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no section 'speed'"):
        list(run_bench(TINY, ["speed"]))


def test_targets_compare_both_ways() -> None:
    assert Figure(name="a", value=1.0, unit="").met is None
    assert Figure(name="a", value=9.0, unit="", least=9.0).met is True
    assert Figure(name="a", value=8.9, unit="", least=9.0).met is False
    assert Figure(name="a", value=21.0, unit="", most=20.0).met is False
    assert Figure(name="a", value=float("nan"), unit="", most=20.0).met is False


def float64(teacher: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> list[np.ndarray]:
    p, q = teacher.double().log_softmax(1), candidate.double().log_softmax(1)
    at = targets[:, None]
    kl = (p.exp() * (p - q)).sum(1)
    return [x.numpy() for x in (kl, -p.gather(1, at)[:, 0], -q.gather(1, at)[:, 0], p.argmax(1) == q.argmax(1))]


def test_baselines_compute_what_they_are_compared_for() -> None:
    """A baseline that is wrong would make any ratio meaningless."""
    sides = made_up_logits(9, 1500)
    expected = float64(*sides)
    for method in (naive, Chunked(1500)):
        for got, right in zip(method(*sides), expected, strict=True):
            np.testing.assert_allclose(got.numpy().astype(float), right.astype(float), rtol=2e-3, atol=2e-5)


def test_the_llama_cpp_loop_is_as_close_as_its_16_bits_allow() -> None:
    sides = made_up_logits(9, 1500)
    kl, nll_p, nll_q, agree = float64(*sides)
    got = llama_work(*sides)()
    step = 16 / 65535
    np.testing.assert_allclose(got[:, 0], kl, atol=2e-3)
    reachable = nll_p < 15
    np.testing.assert_allclose(got[reachable, 1], nll_p[reachable], atol=step)
    np.testing.assert_allclose(got[:, 2], nll_q, atol=1e-5)
    assert np.array_equal(got[:, 3] == 1, agree)


def test_naive_head_multiplies_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 32, generator=generator).to(torch.bfloat16)
    teacher, candidate = (torch.randn(5, 32, generator=generator).to(torch.bfloat16) for _ in range(2))
    targets = torch.arange(5)
    wide = weight.double().T
    expected = float64(teacher.double() @ wide, candidate.double() @ wide, targets)
    got = naive_head(teacher, candidate, weight, targets)
    np.testing.assert_allclose(got[0].numpy(), expected[0], rtol=1e-4)


@pytest.mark.parametrize("target", [1e-9, 1e-3, 20.0])
def test_the_reference_divergence_is_the_one_asked_for(target: float) -> None:
    teacher, candidate, targets = at_divergence(target, 3, 800)
    exact = reference_kl(teacher.numpy(), candidate.numpy())
    assert exact.mean() == pytest.approx(target, rel=0.05)
    if target >= 1e-3:
        np.testing.assert_allclose(exact, float64(teacher, candidate, targets)[0], rtol=1e-9)


def test_works_take_turns() -> None:
    order: list[str] = []
    works = {name: (lambda name=name: order.append(name)) for name in "ab"}
    assert set(interleaved(works, 3, warm=False)) == {"a", "b"}
    assert order == ["a", "b"] * 3


def test_extra_memory_sees_what_is_allocated() -> None:
    def work() -> torch.Tensor:
        return torch.ones(20_000_000)

    assert 70 < extra_megabytes(work) < 110
