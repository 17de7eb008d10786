"""Hessians for LDLQ: second moments of the inputs of linears, from the unquantised model on calibration text.

All layers are measured at once on the teacher's own activations. The format's converter instead measures each layer
behind the layers that it has quantised already, which is better and needs a pass per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.errors import UsageError
from harness.exl3.quantize_plan import Job
from harness.progress import phase

ROWS, LENGTH = 32, 512


def calibration_ids(file: Path, src: Path, *, rows: int = ROWS, length: int = LENGTH) -> np.ndarray:
    """Token ids int64 [rows, length] from a ``.npy`` array of ids, or from text with the source's tokenizer.

    Raises:
        UsageError: the file is not there, holds no ids, or is too short for one row.
    """
    if not file.is_file():
        raise UsageError(f"{file} is not a file", "give a text file, or a .npy array of token ids")
    if file.suffix == ".npy":
        ids = np.load(file, allow_pickle=False)
        if not np.issubdtype(ids.dtype, np.integer) or ids.ndim > 2:
            raise UsageError(f"{file.name} is {ids.dtype} {list(ids.shape)}", "give integers, [rows, length] or flat")
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(src, local_files_only=True)
        ids = np.array(tokenizer(file.read_text(), add_special_tokens=False)["input_ids"])
    if ids.ndim < 2:
        count = len(ids) // length
        if not count:
            raise UsageError(f"{file.name} has {len(ids)} tokens, a row needs {length}", "give more text")
        ids = ids[: count * length].reshape(count, length)
    return ids[:rows].astype(np.int64)


def collect_hessians(src: Path, ids_RT: np.ndarray, jobs: Sequence[Job]) -> dict[str, np.ndarray]:
    """Mean of ``x x^T`` over all tokens by the name of the shared input: float32 [in, in].

    Linears that the model class does not hold as a module of that name (experts in a stack, projections that it
    fuses) are left out, as are inputs with values that are not finite; both are then rounded to nearest.

    Raises:
        UsageError: ids that the model has no embedding for.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(src, dtype=torch.float32, local_files_only=True).eval()
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if ids_RT.min() < 0 or ids_RT.max() >= vocabulary:
        raise UsageError(
            f"calibration ids run from {ids_RT.min()} to {ids_RT.max()}, the model has {vocabulary} tokens",
            "make the ids with the model's own tokenizer",
        )
    modules = dict(model.named_modules())
    sums: dict[str, torch.Tensor] = {}
    for job in jobs:
        module = modules.get(job.module)
        if isinstance(module, torch.nn.Linear) and job.signs.input not in sums:
            sums[job.signs.input] = torch.zeros(job.in_features, job.in_features)
            module.register_forward_pre_hook(_adder(sums[job.signs.input]))
    with torch.inference_mode(), phase("calibrate", total=len(ids_RT), unit="tokens") as advance:
        for row in ids_RT:
            model(input_ids=torch.from_numpy(row)[None], use_cache=False, logits_to_keep=1)
            advance(1, len(row))
    means = {name: (total / ids_RT.size).numpy() for name, total in sums.items()}
    return {name: mean for name, mean in means.items() if np.isfinite(mean).all()}


def _adder(total: torch.Tensor) -> Callable[[Any, Any], None]:
    def add(module: Any, inputs: Any) -> None:
        tokens = inputs[0].reshape(-1, total.shape[0]).float()
        total.addmm_(tokens.T, tokens)

    return add
