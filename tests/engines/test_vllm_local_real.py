"""The real vLLM in process, in its own environment, against our reference engine in float32."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.engines.head import head_of_folder
from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.measure.rows import one_sided, targets_of
from harness.panel import ensure_built
from harness.types import Hidden, Row
from tests.served.real_vllm import require_vllm

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "teachers/models/SmolLM2-135M-Instruct.Q4_1-0.1.2-bfloat16"
#: Two implementations in float32; 2.7e-5 nats was the most seen on 430 tokens.
NLL_TOLERANCE = 1e-4


@pytest.mark.vllm
def test_exact_numbers_of_the_example_model(tmp_path: Path) -> None:
    """Every NLL to 1e-4 nats and every top-1, from states that vLLM gave to its head."""
    python = require_vllm()
    if not MODEL.is_dir():
        pytest.skip("the example's teacher is not unpacked: make panel")
    panel = ensure_built(ROOT / "panels/example")
    rows = [
        Row(index=number, ids_T=row.ids_T[:length], document=row.document, domain=row.domain, sha256="")
        for number, (row, length) in enumerate(zip(panel.rows, (130, 300), strict=False))
    ]
    found = _run(python, rows, tmp_path)
    located = ModelFolder(path=MODEL, name="example", revision="local")
    reference = TransformersEngine(located, compute="float32", device="cpu", weights_sha256="w", tokenizer_sha256="t")
    head = head_of_folder(MODEL)
    for row, theirs in zip(rows, reference.run(rows), strict=True):
        assert np.array_equal(found[f"ids{row.index}"], row.ids_T)
        served = Hidden(states_TH=torch.from_numpy(found[f"states{row.index}"]))
        a = one_sided(served, head, targets_of(row))
        b = one_sided(theirs.outputs, reference.head, targets_of(row))
        assert np.abs(a.nll - b.nll).max() < NLL_TOLERANCE
        assert np.array_equal(a.top1, b.top1)
    assert float(found["deviation"]) < 1e-3
    identity = json.loads(str(found["identity"]))
    assert identity["compute_dtype"] == "float32" and identity["settings"]["prefix_cache"] is False
    assert identity["head_sha256"] == head.sha256 and str(ROOT) not in str(found["identity"])


def _run(python: Path, rows: list[Row], folder: Path) -> dict[str, np.ndarray]:
    """Let the other environment's Python run the rows; returns what it wrote."""
    job, out = folder / "job.json", folder / "out.npz"
    ids = [row.ids_T.tolist() for row in rows]
    job.write_text(json.dumps({"folder": str(MODEL), "compute": "float32", "rows": ids}))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [str(python), str(ROOT / "tests/served/vllm_local_job.py"), str(job), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as file:
        return dict(file)
