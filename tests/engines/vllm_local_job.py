"""Run by the Python of the vLLM environment: rows through `harness.engines.open`, states into an npz file.

Usage: python vllm_local_job.py JOB.json OUT.npz, with JOB as `test_vllm_local_real` writes it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from harness.engines.models import ModelFolder
from harness.engines.open import open_engine
from harness.types import Row


def main(job: Path, out: Path) -> None:
    asked = json.loads(job.read_text())
    located = ModelFolder(path=Path(asked["folder"]), name="served", revision="local")
    rows = [
        Row(index=index, ids_T=np.array(ids, dtype=np.int32), document="d", domain="d", sha256="")
        for index, ids in enumerate(asked["rows"])
    ]
    engine = open_engine(
        located,
        engine="vllm-local",
        row_tokens=max(len(row.ids_T) for row in rows),
        compute=asked["compute"],
        weights_sha256="0",
        tokenizer_sha256="0",
    )
    found: dict[str, np.ndarray] = {}
    for answer in engine.run(rows, "hidden"):
        found[f"ids{answer.index}"] = answer.echoed_ids_T
        found[f"states{answer.index}"] = answer.outputs.states_TH.float().numpy()
    assert engine.head is not None
    found["identity"] = np.array(json.dumps(asdict(engine.identity)))
    found["deviation"] = np.array(engine.head_deviation)
    np.savez(out, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
