"""A plain Hugging Face checkpoint made into a genuine EXL3 one: resumable, the same bytes every time.

Rounding to the nearest path gives the same bytes on every processor too; calibration runs the model, whose digits are
the machine's.

It is for examples, tests and studies. Weights are rounded to the nearest path in rotated space or, with calibration
ids, by a plain form of LDLQ; the format's own converter does more and makes better quants at the same rate.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save

from harness.digest import ids_digest, json_digest, tensor_digest
from harness.errors import UsageError
from harness.exl3.calibrate import collect_hessians
from harness.exl3.checkpoint import Checkpoint, open_checkpoint
from harness.exl3.encode import encode_linear
from harness.exl3.package import MANIFEST, package
from harness.exl3.quantize_plan import Job, QuantizePlan, QuantizeSettings, make_plan
from harness.progress import phase
from harness.store import folder_lock, require_space, write_bytes

_PARTIAL = ".partial-"
#: Goes up when the same settings begin to give other bytes, so that a resumed run never mixes the two.
ENCODER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeResult:
    """What was made: linears, weights coded with padding, average bits a weight (head left out), and where."""

    folder: Path
    linears: int
    weights: int
    bits: float
    resumed: int
    was_complete: bool = False


def quantize_checkpoint(
    src: Path,
    dst: Path,
    settings: QuantizeSettings,
    *,
    calibration_RT: np.ndarray | None = None,
    threads: int | None = None,
) -> QuantizeResult:
    """Encode the linears of ``src`` that the settings choose, copy the rest, write a checkpoint to ``dst``.

    A killed run goes on with the first linear that is missing; finished ones are kept beside the result until it is
    whole. Progress counts weights.

    Args:
        src: folder with config.json and safetensors in BF16, FP16 or FP32.
        dst: an empty or new folder, or one that the same call left unfinished.
        settings: what to quantise and how.
        calibration_RT: token ids [rows, length] for LDLQ; None rounds to nearest.
        threads: of the search; all cores where None. The result does not depend on it.

    Raises:
        UsageError: ``dst`` holds something else, or the settings choose nothing.
        CheckpointError: the source is quantised, damaged or of an unknown layout.
        StorageError: too little space, or another run writes to ``dst``.
    """
    source = open_checkpoint(src)
    plan = make_plan(source, settings)
    identity = {
        "encoder": ENCODER,
        "settings": settings.as_json(),
        "source": source.name,
        "headers": _headers_digest(source),
        "calibration": None if calibration_RT is None else [*calibration_RT.shape, ids_digest(calibration_RT)],
    }
    with folder_lock(dst):
        partial = dst / f"{_PARTIAL}{json_digest(identity)[:12]}"
        if _is_complete(dst, partial, identity):
            return _result(dst, plan, resumed=len(plan.jobs), was_complete=True)
        require_space(dst, _bytes_needed(source, plan), "the quantised checkpoint")
        partial.mkdir(exist_ok=True)
        pending = [job for job in plan.jobs if not _is_finished(source, job, partial)]
        hessians: dict[str, np.ndarray] = {}
        if pending and calibration_RT is not None:
            hessians = collect_hessians(src, calibration_RT, plan.jobs)
        _encode_all(source, pending, hessians, partial, threads)
        package(source, dst, plan, settings, partial, identity)
        shutil.rmtree(partial)
    return _result(dst, plan, resumed=len(plan.jobs) - len(pending))


def _encode_all(
    source: Checkpoint,
    pending: list[Job],
    hessians: Mapping[str, np.ndarray],
    partial: Path,
    threads: int | None,
) -> None:
    with phase("quantise", total=sum(job.weights for job in pending), unit="weights", item="weight") as advance:
        for job in pending:
            weight = read_weight(source, job)
            parts = encode_linear(
                job.module,
                weight.float().numpy(),
                job.rate,
                job.signs,
                bias=None if job.bias is None else source.tensor(job.bias)[job.start : job.stop].float().numpy(),
                hessian=hessians.get(job.signs.input),
                threads=threads,
                report=lambda weights: advance(weights, weights),
            )
            named = {f"{job.module}.{suffix}": array for suffix, array in parts.items()}
            metadata = {"format": "pt", "source_sha256": tensor_digest(weight)}
            write_bytes(_finished(partial, job), save(named, metadata=metadata))


def read_weight(source: Checkpoint, job: Job) -> torch.Tensor:
    """The job's matrix [out, in] in its stored dtype, without reading the rest of a stack of experts."""
    header = source.plain[job.source]
    path = next(path for path in source.shards if path.name == header.shard)
    with safe_open(path, framework="pt") as file:
        view = file.get_slice(job.source)
        rows = view[job.start : job.stop] if job.expert is None else view[job.expert, job.start : job.stop]
    part: torch.Tensor = rows
    return part.reshape(job.stop - job.start, job.in_features).contiguous()


def _finished(partial: Path, job: Job) -> Path:
    return partial / f"{job.module}.safetensors"


def _is_finished(source: Checkpoint, job: Job, partial: Path) -> bool:
    """Whether the job's linear is there, made from the weight that the source holds now."""
    if not _finished(partial, job).is_file():
        return False
    with safe_open(_finished(partial, job), framework="np") as file:
        made_from = (file.metadata() or {}).get("source_sha256")
    return bool(made_from == tensor_digest(read_weight(source, job)))


def _is_complete(dst: Path, partial: Path, identity: dict[str, Any]) -> bool:
    """Whether ``dst`` holds this very result; refuses a folder that holds anything else."""
    manifest = dst / MANIFEST
    if manifest.is_file():
        if json.loads(manifest.read_text())["identity"] == json.loads(json.dumps(identity)):
            return True
        raise UsageError(
            f"{dst.name} holds a quant made with other settings or of another source", "choose another DST"
        )
    others = [path for path in dst.glob(f"{_PARTIAL}*") if path != partial]
    if others:
        raise UsageError(
            f"{dst.name} holds a quant begun with other settings or of another source ({others[0].name})",
            "choose another DST, finish that run, or delete the folder",
        )
    if not partial.exists() and any(dst.glob("*.safetensors")):
        raise UsageError(f"{dst.name} already holds a checkpoint", "choose another DST, or delete it")
    return False


def _headers_digest(source: Checkpoint) -> str:
    return json_digest({key: [header.dtype, list(header.shape)] for key, header in source.tensors.items()})


def _bytes_needed(source: Checkpoint, plan: QuantizePlan) -> int:
    """The result, and its linears once more: they lie beside it until it is whole."""
    coded = sum(int(job.weights * job.rate.bits / 8) + (1 << 16) for job in plan.jobs)
    return 2 * coded + sum(source.plain[key].bytes for key in plan.copied)


def _result(dst: Path, plan: QuantizePlan, *, resumed: int, was_complete: bool = False) -> QuantizeResult:
    return QuantizeResult(
        folder=dst,
        linears=len(plan.jobs),
        weights=sum(job.weights for job in plan.jobs),
        bits=plan.bits,
        resumed=resumed,
        was_complete=was_complete,
    )
