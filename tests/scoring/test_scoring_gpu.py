"""The GPU's path: its torch form on the CPU, its Triton kernels in Triton's interpreter, and both on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from harness.scoring import gpu, score, score_hidden, score_logits
from harness.scoring import state as slot
from tests.scoring.scoring_oracle import head_logits, oracle_scores
from tests.scoring.test_scoring_heads import HEADS, near, states
from tests.scoring.test_scoring_properties import assert_scores, pairs

CPU = torch.device("cpu")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's path, run where there is none."""
    monkeypatch.setattr(gpu, "device", lambda: CPU)


@given(pairs())
@settings(max_examples=80, deadline=None)
def test_logits_against_float64(pair: tuple[torch.Tensor, torch.Tensor, np.ndarray]) -> None:
    """Rows summed whole in torch operations, one row a piece: the same accuracy."""
    teacher, candidate, targets = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "device", lambda: CPU)
        patch.setattr(gpu, "BLOCK", 512)
        patch.setattr(gpu, "PIECE_BYTES", 1)
        found = score_logits(teacher, candidate, targets)
    assert_scores(found, oracle_scores(teacher, candidate, targets))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", HEADS)
def test_through_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three positions; the second pass is on by default."""
    head, teacher = HEADS[name], states(2, 10)
    monkeypatch.setattr(gpu, "STRIP_BYTES", 3 * 8 * 2300)
    candidate, targets = near(teacher, 3, 0.1), np.arange(10)
    found = score_hidden(teacher, candidate, targets, teacher_head=head, candidate_head=head)
    wanted = oracle_scores(head_logits(teacher, head), head_logits(candidate, head), targets, head.vocab_size)
    assert_scores(found, wanted, kl_rel=5e-5)


@pytest.mark.usefixtures("on_cpu")
def test_nonfinite_and_itself() -> None:
    teacher = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1))
    candidate = teacher.clone()
    candidate[1, 2500], candidate[2, 7] = torch.nan, torch.inf
    scores = score_logits(teacher, candidate, np.zeros(4, int))
    assert_scores(scores, oracle_scores(teacher, candidate, np.zeros(4, int)))
    assert (scores.kl[[0, 3]] == 0.0).all() and (scores.tv[[0, 3]] == 0.0).all()


@pytest.mark.usefixtures("on_cpu")
def test_logits_far_below_all_others_add_nothing() -> None:
    """A mask of -1e9 on one side only: finite, without probability, and no NaN from a difference that large."""
    teacher = torch.randn(3, 900, generator=torch.Generator().manual_seed(1))
    candidate = teacher + 0.1
    teacher[0, 5], candidate[1, 5] = -1e9, -1e9
    scores = score_logits(teacher, candidate, np.ones(3, int))
    wanted = oracle_scores(teacher, candidate, np.ones(3, int))
    assert np.isfinite(scores.kl).all()
    np.testing.assert_allclose(scores.kl, wanted.kl, rtol=5e-6, atol=2e-15)
    np.testing.assert_allclose(scores.tv, wanted.tv, rtol=2e-6, atol=2e-7)


INTERPRETED = """
import numpy as np, torch
from harness.scoring import gpu, score_logits, triton_rows
from tests.scoring.scoring_oracle import oracle_scores
from tests.scoring.test_scoring_properties import assert_scores
gpu.device = lambda: torch.device("cpu")
gpu._triton = lambda side: True
rng = np.random.default_rng(0)
cases = (5, 0.3, 0, 0), (2048, 3e-5, 0, 0), (4100, 0.3, 0, 0.2), (3001, 0.02, 37.3, 0), (3001, 3, -300, 0)
for width, sigma, offset, share in cases:
    t = (rng.standard_normal((2, width)) * 3).astype(np.float32)
    t[:, rng.integers(width)] += 8
    c = (t + offset + rng.standard_normal(t.shape) * sigma).astype(np.float32)
    t[rng.random(t.shape) < share] = -np.inf
    c[rng.random(t.shape) < share] = -np.inf
    targets = rng.integers(0, width, 2)
    assert_scores(score_logits(torch.from_numpy(t), torch.from_numpy(c), targets), oracle_scores(t, c, targets))
    c[0, width // 2] = np.nan
    assert_scores(score_logits(torch.from_numpy(t), torch.from_numpy(c), targets), oracle_scores(t, c, targets))
assert triton_rows.BLOCK == gpu.BLOCK
print("interpreted")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_interpreted() -> None:
    """The kernels' own text, run by Triton's interpreter on the CPU."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "interpreted", run.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_kernels_compile_for_hopper() -> None:
    """Compiled to machine code for sm_90 without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from harness.scoring import triton_rows

    floats, ints = ("t_ptr", "c_ptr", "tops_ptr", "own_ptr"), ("t_stride", "c_stride", "vocab", "blocks")
    kinds = {name: "*fp32" for name in floats} | {name: "i32" for name in ints}
    kinds |= {"state_ptr": "*fp64", "out_ptr": "*fp64", "target_ptr": "*i64", "reach": "fp32"}
    for kernel in (triton_rows.score_kernel, triton_rows.second_kernel):
        signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
        constants = {"SLOTS": slot.SLOTS, "BLOCK": triton_rows.BLOCK}
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["cubin"]


def test_the_kernels_store_in_the_slots_order() -> None:
    """`triton_rows` writes by position; the names must stay there."""
    sums = ("TOP_T", "TOP_C", "C0", "SUM_S", "SUM_Q", "SUM_M", "SUM_N", "SUM_A", "SUM_B", "SUM_E", "SUM_F")
    others = ("ID_T", "ID_C", "TIES_T", "TIES_C", "JOINT", "BAD_T", "BAD_C", "LOST_T", "LOST_C", "AT_T", "AT_C")
    names = sums + others
    assert [getattr(slot, name) for name in names] == list(range(slot.CALM)) and slot.CALM == slot.SLOTS - 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("second", [True, False])
def test_on_a_gpu(second: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as the CPU to 1e-6 from logits, and to the products' rounding through a head."""
    teacher = torch.randn(64, 40_000, generator=torch.Generator().manual_seed(1)) * 3
    candidate = teacher + 0.1 * torch.randn(teacher.shape, generator=torch.Generator().manual_seed(2))
    targets = np.arange(64)
    fast = score_logits(teacher, candidate, targets, second_pass=second)
    hidden = states(3, 64)
    kwargs = {"teacher_head": HEADS["bf16"], "candidate_head": HEADS["bf16"], "second_pass": second}
    fast_head = score_hidden(hidden, near(hidden, 4, 0.1), targets, **kwargs)
    monkeypatch.setattr(gpu, "device", lambda: None)
    assert_scores(fast, score_logits(teacher, candidate, targets, second_pass=second), kl_rel=1e-6)
    assert_scores(fast_head, score_hidden(hidden, near(hidden, 4, 0.1), targets, **kwargs), kl_rel=5e-5)
    assert score.gpu is gpu
