"""The teacher: which model it is, its capture over a panel, and the proof that the capture is still its own."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from harness.capture import Capture, CaptureWriter, open_capture
from harness.digest import json_digest
from harness.engines.hf import ComputeDType
from harness.engines.models import DType, ModelFolder, locate
from harness.engines.open import digests_of, open_engine
from harness.errors import CaptureError, EngineError, UsageError
from harness.progress import phase
from harness.scoring import teacher_stats
from harness.store import folder_lock, require_space
from harness.types import Engine, Hidden, Panel, Row

MODELS = Path("teachers/models")
CAPTURES = Path("teachers/captures")
#: Largest |change of NLL| of a re-run teacher that is still the same teacher on another build or device.
NLL_TOLERANCE = 0.01


class TeacherSpec(BaseModel):
    """teachers/<name>.toml. ``model`` is a Hub id, a folder, or ``package:NAME`` (a GGUF file in a package)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    model: str
    revision: str | None = None
    weights_dtype: DType = "bfloat16"
    compute_dtype: ComputeDType = "auto"
    capture_dtype: str = "as_computed"
    vocab_size: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A few rows of the teacher run again and held against its capture."""

    rows: tuple[int, ...]
    positions: int
    top1_exact: bool
    max_nll_change: float

    def line(self) -> str:
        flips = "top1_exact_all_rows" if self.top1_exact else "top-1 differs"
        return f"rows {list(self.rows)}: {flips}, max |change of NLL| {self.max_nll_change:.3g} nats"


def load_teacher(argument: str | None, candidate: ModelFolder | None) -> TeacherSpec | Path:
    """What ``--teacher`` names: a TOML file, a model, a capture folder, or what the candidate's card says."""
    if argument is None:
        return _from_card(candidate)
    path = Path(argument).expanduser()
    if path.suffix == ".toml":
        return read_spec(path)
    if (path / "manifest.json").is_file():
        return path
    return TeacherSpec(name=argument.rstrip("/").split("/")[-1].removeprefix("package:"), model=argument)


def read_spec(path: Path) -> TeacherSpec:
    """Parse a teacher's TOML file; an unknown key is an error."""
    try:
        return TeacherSpec.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError as error:
        raise UsageError(f"there is no {path}", "see teachers/ for those that ship, or give a model id") from error
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        detail = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
        ) if isinstance(error, ValidationError) else str(error)
        raise UsageError(f"{path.name} is not a teacher file: {detail}", "compare with teachers/smollm2-135m.toml") from error


def _from_card(candidate: ModelFolder | None) -> TeacherSpec:
    card = candidate.folder / "README.md" if candidate else None
    if candidate is None or card is None or not card.is_file():
        raise UsageError("no teacher is named, and the candidate has no model card", "give --teacher (TEACHER=...)")
    from huggingface_hub import ModelCard

    data = ModelCard.load(card).data.to_dict()
    base = data.get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    if not isinstance(base, str):
        raise UsageError(f"the card of {candidate.name} names no base_model", "give --teacher (TEACHER=...)")
    revision = data.get("base_model_revision")
    return TeacherSpec(name=base.split("/")[-1], model=base, revision=revision and str(revision))


def ensure_capture(
    spec: TeacherSpec, panel: Panel, rows: Sequence[Row], *, device: str | None = None, root: Path = CAPTURES
) -> tuple[Capture, Reproduction | None]:
    """The capture of ``rows``: made where it is missing; where it was there, first reproduced on two rows.

    Returns:
        The capture, and the reproduction check where there was something to reproduce.
    """
    located = locate(spec.model, spec.revision, cache=MODELS, weights_dtype=spec.weights_dtype)
    weights_sha256, tokenizer_sha256 = digests_of(located)
    if tokenizer_sha256 not in (panel.tokenizer_sha256, "absent"):
        raise CaptureError(
            f"panel {panel.name} is sealed for tokenizer {panel.tokenizer_sha256[:12]}, "
            f"teacher {located.name} has {tokenizer_sha256[:12]}",
            f"seal it for this teacher: fidelity panel seal panels/{panel.name} --tokenizer {spec.model}",
        )
    folder = root / f"{spec.name}-{panel.name}-{capture_key(spec, panel, weights_sha256)[:8]}"
    with folder_lock(folder):
        had = _rows_present(folder)
        missing = [row for row in rows if row.index not in had]
        if not missing:
            return open_capture(folder), None
        engine = open_engine(
            located, compute=spec.compute_dtype, device=device, vocab_size=spec.vocab_size,
            weights_sha256=weights_sha256, tokenizer_sha256=tokenizer_sha256,
        )
        reproduction = reproduce(open_capture(folder), engine, panel) if had else None
        capture_rows(folder, engine, panel, missing, spec)
    return open_capture(folder), reproduction


def capture_key(spec: TeacherSpec, panel: Panel, weights_sha256: str) -> str:
    """What a capture depends on, apart from the machine that makes it."""
    chosen = spec.model_dump(include={"weights_dtype", "compute_dtype", "capture_dtype", "vocab_size"})
    return json_digest({"weights": weights_sha256, "panel": panel.sha256} | chosen)
