"""The teacher, altered and measured as a candidate is: anchors give a quant's KL a scale, floors its noise.

An anchor is the teacher rounded to a well-known format. Every linear weight of the decoder layers is rounded to nearest
in its group and made dense again, in memory; nothing is calibrated and no model is written. Embeddings, norms, routers
and the head stay the teacher's, as in the usual checkpoints of these formats. Activations are not rounded: an engine
that also computes in 8 bits adds to this.

A floor is the teacher against its own capture. ``repeat`` runs it once more as it was. ``bf16`` computes it in the
other precision: bfloat16 against a float32 capture, float32 against any other. ``perturb`` multiplies what each decoder
layer gives by seeded noise of at most one unit roundoff of bfloat16, as if every layer had been rounded once more. A
floor is shown beside a KL, and never subtracted from one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from harness.digest import json_digest
from harness.engines.hf import Alter, ComputeDType, default_device, dtype_of
from harness.engines.models import locate
from harness.engines.open import tokenizer_of
from harness.engines.stream_weights import decoder_layers
from harness.errors import EngineError, UsageError
from harness.measure.run import Candidate, Request, Result, measure_against
from harness.measure.teacher import (
    MODELS,
    TeacherModel,
    Yardstick,
    find_teacher,
    first_rows,
    load_teacher,
    panel_for,
)
from harness.progress import phase

#: Part of the digest of an anchor's weights: raise it when the numbers of a scheme change.
VERSION = 1
SCALE_BITS = 32
#: Routers decide by small differences and are never quantised in practice.
ROUTER = re.compile(r"(^|\.)(gate|router|shared_expert_gate)(\.|$)")
#: The 16 levels of NormalFloat4: quantiles of a normal distribution, zero among them, scaled to [-1, 1].
#: Dettmers et al., QLoRA, arXiv 2305.14314, appendix E.
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A format: each group's largest magnitude is scaled to ``top``, and ``nearest`` rounds what is scaled.

    ``group`` counts weights along the input dimension; None is a whole output channel.
    """

    label: str
    bits: int
    top: float
    nearest: Callable[[torch.Tensor], torch.Tensor]
    group: int | None = None

    @property
    def grouping(self) -> str:
        return f"{self.group} weights along the input" if self.group else "output channel"


def _nearest_e4m3(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.to(torch.float8_e4m3fn).float()


def _nearest_nf4(scaled: torch.Tensor) -> torch.Tensor:
    levels = torch.tensor(NF4_LEVELS, device=scaled.device)
    return levels[torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2)]


SCHEMES = {
    "int8": Scheme(label="int8", bits=8, top=127.0, nearest=torch.round),
    "fp8": Scheme(label="fp8-e4m3", bits=8, top=448.0, nearest=_nearest_e4m3),
    "nf4": Scheme(label="nf4", bits=4, top=1.0, nearest=_nearest_nf4, group=64),
    "q4-rtn": Scheme(label="q4-rtn", bits=4, top=7.0, nearest=torch.round, group=128),
}
Q4_GROUPS = (64, 128)

FloorKind = Literal["repeat", "bf16", "perturb"]
KINDS: tuple[str, ...] = get_args(FloorKind)
#: Half the distance from 1 to the next bfloat16: the largest relative error of one rounding.
UNIT_ROUNDOFF = 2.0**-8
SEED = 1234


def anchor(
    scheme: str,
    teacher: str,
    *,
    panel: Path,
    rows: int | None = None,
    out: Path | None = None,
    device: str | None = None,
    group: int | None = None,
) -> Result:
    """Measure the teacher rounded to ``scheme`` against its own capture.

    Args:
        scheme: ``int8``, ``fp8``, ``nf4`` or ``q4-rtn``.
        teacher: a teacher's TOML file or a model, as `harness.measure.teacher.load_teacher` takes it.
        group: weights that share a scale in ``q4-rtn``: 64 or 128.
    """
    chosen = scheme_of(scheme, group)
    yardstick, model = teacher_on(teacher, panel, rows)
    candidate = Candidate(
        located=replace(model.located, name=f"{chosen.label} anchor of {model.spec.name}"),
        weights_sha256=rounded_digest(model.weights_sha256, chosen),
        tokenizer_sha256=model.tokenizer_sha256,
        role="anchor",
        alter=lambda loaded: round_model(loaded, chosen),
        variant={"anchor": chosen.label, "group": chosen.grouping},
        notes=(
            f"anchor: the linear weights of the decoder layers rounded to nearest {chosen.label}, one scale for each "
            f"{chosen.grouping}; activations, embeddings, norms, routers and head are the teacher's",
        ),
    )
    request = Request(
        candidate=teacher, panel=panel, rows=rows, out=out, compute=model.spec.compute_dtype, device=device
    )
    return measure_against(request, candidate, yardstick)


def scheme_of(name: str, group: int | None = None) -> Scheme:
    """The scheme that a user names."""
    if name not in SCHEMES:
        raise UsageError(f"there is no anchor {name}", f"choose one of {', '.join(SCHEMES)}")
    scheme = SCHEMES[name]
    if group is None and name != "q4-rtn":
        return scheme
    if name != "q4-rtn" or group not in (None, *Q4_GROUPS):
        raise UsageError(f"--group {group} with {name}", "a group of 64 or 128 is for q4-rtn; the others fix theirs")
    size = group or scheme.group
    return replace(scheme, group=size, label=f"{scheme.label}-g{size}")


def teacher_on(argument: str, panel: Path, rows: int | None) -> tuple[Yardstick, TeacherModel]:
    """Rows of a panel as sealed for the teacher's tokenizer, and the teacher, whose weights must be here."""
    spec = load_teacher(argument, None)
    if isinstance(spec, Path):
        raise UsageError(
            f"{spec.name} is a capture: it holds outputs, and this needs the teacher's weights",
            "name the teacher's TOML file or the model; its capture is found by itself",
        )
    located = locate(spec.model, spec.revision, cache=MODELS, weights_dtype=spec.weights_dtype)
    sealed = panel_for(panel, tokenizer_of(located))
    model = find_teacher(spec, sealed)
    return Yardstick(folder=panel, panel=sealed, rows=first_rows(sealed, rows), teacher=model), model


def rounded_digest(weights_sha256: str, scheme: Scheme) -> str:
    """Digest of the rounded weights, derived: of what they are made from and how."""
    made = {"teacher": weights_sha256, "scheme": scheme.label, "group": scheme.group, "version": VERSION}
    return json_digest(made)


# ---- rounding --------------------------------------------------------------------------------------------------------


def round_weight(weight_OI: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """``weight_OI`` ``[out, in]`` rounded to nearest in each group, float32; the last group of a row may be short."""
    out_features, in_features = weight_OI.shape
    size = scheme.group or in_features
    padded = nn.functional.pad(weight_OI.float(), (0, -in_features % size))
    groups = padded.reshape(out_features, -1, size)
    scale = groups.abs().amax(dim=-1, keepdim=True) / scheme.top
    scale = scale.masked_fill(scale == 0, 1.0)
    rounded = scheme.nearest(groups / scale) * scale
    return rounded.reshape(out_features, -1)[:, :in_features]


@torch.no_grad()
def round_model(model: Any, scheme: Scheme) -> dict[str, str | int | float]:
    """Round a loaded model's decoder linears in place; returns what the receipt says of it."""
    weights = list(linear_weights(model))
    count = bits = 0
    with phase(f"round to {scheme.label}", total=len(weights), unit="weights", item="matrix") as advance:
        for weight_OI in weights:
            weight_OI.copy_(round_weight(weight_OI, scheme))
            groups = -(-weight_OI.shape[1] // (scheme.group or weight_OI.shape[1]))
            count += weight_OI.numel()
            bits += scheme.bits * weight_OI.numel() + SCALE_BITS * groups * weight_OI.shape[0]
            advance(1, weight_OI.numel())
    return {
        "anchor": scheme.label,
        "group": scheme.grouping,
        "scales": "float32",
        "rounded_matrices": len(weights),
        "rounded_weights": count,
        "bits_per_rounded_weight": round(bits / count, 4),
    }


def linear_weights(model: Any) -> Iterator[torch.Tensor]:
    """Every linear weight of the decoder layers as a writable view ``[out, in]``; each expert is one.

    Raises:
        EngineError: the layers have none, or stack experts in an order that is not declared.
    """
    any_weight = False
    path, layers = decoder_layers(model)
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if ROUTER.search(name):
                continue
            for weight_OI in _weights_of(f"{path}.{index}.{name}", module):
                any_weight = True
                yield weight_OI
    if not any_weight:
        raise EngineError(
            f"{type(model).__name__} has no linear weights in its decoder layers", "report the architecture"
        )


def _weights_of(name: str, module: nn.Module) -> Iterator[torch.Tensor]:
    if isinstance(module, nn.Linear):
        yield module.weight.data
        return
    stacks = [p.data for p in module.parameters(recurse=False) if p.dim() == 3]
    if not stacks or isinstance(module, nn.modules.conv._ConvNd):
        return
    transposed = getattr(module, "is_transposed", None)
    if transposed is None:
        raise EngineError(
            f"{name} stacks its experts, and transformers does not say which dimension is the input",
            "measure a checkpoint of this format instead of an anchor",
        )
    for stack in stacks:
        yield from (expert.T if transposed else expert for expert in stack)


# ---- floors ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Alteration:
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
        teacher: a teacher's TOML file or a model, as `harness.measure.teacher.load_teacher` takes it.
        kind: ``repeat``, ``bf16`` or ``perturb``.
        seed: of the noise of ``perturb``.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no floor {kind}", f"choose one of {', '.join(KINDS)}")
    yardstick, model = teacher_on(teacher, panel, rows)
    changed = alteration_of(kind, model, device, seed)
    candidate = Candidate(
        located=replace(model.located, name=f"{kind} floor of {model.spec.name}"),
        weights_sha256=model.weights_sha256,
        tokenizer_sha256=model.tokenizer_sha256,
        role="floor",
        alter=changed.alter,
        variant=changed.settings,
        notes=(changed.note,),
    )
    request = Request(candidate=teacher, panel=panel, rows=rows, out=out, compute=changed.compute, device=device)
    return measure_against(request, candidate, yardstick)


def alteration_of(kind: str, teacher: TeacherModel, device: str | None, seed: int) -> Alteration:
    """What makes this floor differ from the teacher's capture."""
    compute = teacher.spec.compute_dtype
    settings: dict[str, str | int | float] = {"floor": kind}
    if kind == "perturb":
        settings |= {"noise": UNIT_ROUNDOFF, "seed": seed}
        note = f"floor: each decoder layer's output times 1 + u, u uniform in +-{UNIT_ROUNDOFF:g} (seed {seed})"
        return Alteration(
            compute=compute, settings=settings, alter=lambda model: perturb(model, seed) | settings, note=note
        )
    if kind == "repeat":
        note = "floor: the teacher run again as it was captured; 0 says that this engine repeats itself, no more"
        return Alteration(compute=compute, settings=settings, alter=lambda model: settings, note=note)
    captured = dtype_of(compute, device or default_device())
    other: ComputeDType = "bfloat16" if captured == torch.float32 else "float32"
    note = f"floor: the teacher computed in {other} against its capture in {str(captured).removeprefix('torch.')}"
    return Alteration(compute=other, settings=settings, alter=lambda model: settings, note=note)


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
