"""Floors: the teacher against its own capture, so that a KL can be told from the noise of what measured it.

``repeat`` runs it once more as it was. ``bf16`` computes it in the other precision: bfloat16 against a float32
capture, float32 against any other. ``perturb`` multiplies what each decoder layer gives by seeded noise of at most
one unit roundoff of bfloat16, as if every layer had been rounded once more. A floor is shown beside a KL, and never
subtracted from one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from harness.anchor import teacher_on
from harness.engines.hf import Alter, ComputeDType, default_device, dtype_of
from harness.engines.stream_weights import decoder_layers
from harness.errors import UsageError
from harness.measure import Candidate, Request, Result, measure_against
from harness.teacher import TeacherModel

Kind = Literal["repeat", "bf16", "perturb"]
KINDS: tuple[str, ...] = get_args(Kind)
#: Half the distance from 1 to the next bfloat16: the largest relative error of one rounding.
UNIT_ROUNDOFF = 2.0**-8
SEED = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one kind of floor runs: the compute dtype, what is done to the model, and what the receipt says."""

    compute: ComputeDType
    settings: Mapping[str, str | int | float]
    alter: Alter
    note: str


def floor(
    teacher: str,
    *,
    panel: Path,
    kind: str = "repeat",
    rows: int | None = None,
    out: Path | None = None,
    device: str | None = None,
    seed: int = SEED,
) -> Result:
    """Measure the teacher against itself.

    Args:
        teacher: a teacher's TOML file or a model, as `harness.teacher.load_teacher` takes it.
        kind: ``repeat``, ``bf16`` or ``perturb``.
        seed: of the noise of ``perturb``.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no floor {kind}", f"choose one of {', '.join(KINDS)}")
    found, sealed = teacher_on(teacher, panel)
    plan = plan_of(kind, found, device, seed)
    candidate = Candidate(
        located=replace(found.located, name=f"{kind} floor of {found.spec.name}"),
        weights_sha256=found.weights_sha256,
        tokenizer_sha256=found.tokenizer_sha256,
        role="floor",
        alter=plan.alter,
        variant=plan.settings,
        notes=(plan.note,),
    )
    request = Request(candidate=teacher, panel=panel, rows=rows, out=out, compute=plan.compute, device=device)
    return measure_against(request, candidate, found, sealed)


def plan_of(kind: str, teacher: TeacherModel, device: str | None, seed: int) -> Plan:
    """What makes this floor differ from the teacher's capture."""
    own = teacher.spec.compute_dtype
    settings: dict[str, str | int | float] = {"floor": kind}
    if kind == "perturb":
        settings |= {"noise": UNIT_ROUNDOFF, "seed": seed}
        note = f"floor: each decoder layer's output times 1 + u, u uniform in +-{UNIT_ROUNDOFF:g} (seed {seed})"
        return Plan(compute=own, settings=settings, alter=lambda model: perturb(model, seed) | settings, note=note)
    if kind == "repeat":
        note = "floor: the teacher run again as it was captured; 0 says that this engine repeats itself, no more"
        return Plan(compute=own, settings=settings, alter=lambda model: settings, note=note)
    captured = dtype_of(own, device or default_device())
    other: ComputeDType = "bfloat16" if captured == torch.float32 else "float32"
    note = f"floor: the teacher computed in {other} against its capture in {str(captured).removeprefix('torch.')}"
    return Plan(compute=other, settings=settings, alter=lambda model: settings, note=note)


# ---- noise -----------------------------------------------------------------------------------------------------------


def perturb(model: Any, seed: int) -> dict[str, str | int | float]:
    """Hook seeded noise onto every decoder layer; returns how many there are.

    The noise of a row depends on its tokens, the layer and the seed: so neither the order of rows nor a run that was
    interrupted changes it.
    """
    row = {"digest": b""}

    def note_row(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        row["digest"] = hashlib.sha256(ids.cpu().numpy().astype("<i4").tobytes()).digest()

    def noisy(index: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            states = output[0] if isinstance(output, tuple) else output
            changed = with_noise(states, noise_seed(seed, index, row["digest"]))
            return (changed, *output[1:]) if isinstance(output, tuple) else changed

        return hook

    model.register_forward_pre_hook(note_row, with_kwargs=True)
    _, layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        layer.register_forward_hook(noisy(index))
    return {"perturbed_layers": len(layers)}


def noise_seed(seed: int, layer: int, row: bytes) -> int:
    """A 63-bit seed of one layer's noise on one row."""
    digest = hashlib.sha256(f"{seed}:{layer}:".encode() + row).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def with_noise(states: torch.Tensor, seed: int) -> torch.Tensor:
    """``states`` times ``1 + u``, ``u`` uniform in +-`UNIT_ROUNDOFF`; drawn on the CPU, so equal on every device."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand(states.shape, generator=generator).to(states.device)
    return (states.float() * (1 + UNIT_ROUNDOFF * (2 * draw - 1))).to(states.dtype)
