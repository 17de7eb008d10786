"""Which tensors of a plain checkpoint become which EXL3 linears, and at what rate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from harness.errors import CheckpointError, UsageError
from harness.exl3.checkpoint import Checkpoint
from harness.exl3.claims import Kind, decoder_layers, spot_of
from harness.exl3.codebook import CODEBOOKS, Codebook
from harness.exl3.encode import Rate, SignNames
from harness.exl3.headers import TensorHeader
from harness.exl3.hf_names import MERGED
from harness.exl3.layout import WIDTHS
from harness.exl3.regularize import padded

Modules = Literal["all", "mlp", "routed-experts"]
#: ``head_bits`` that keeps the head as it is.
UNQUANTISED = 16

_KINDS: dict[Modules, set[Kind]] = {
    "all": {"attention", "mlp", "shared experts", "routed experts"},
    "mlp": {"mlp", "shared experts", "routed experts"},
    "routed-experts": {"routed experts"},
}
#: Linears that the format quantises (kv_b_proj, routers, gates and the like stay plain), by the input they share.
_INPUTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up": ("gate_proj", "up_proj", "w1", "w3"),
    "latent": ("q_a_proj", "kv_a_proj_with_mqa"),
    "own": ("o_proj", "out_proj", "down_proj", "w2", "q_b_proj", "wq_b", "in_proj_qkv", "in_proj_z", "fc1", "fc2"),
}
_INPUT_OF = {leaf: group for group, leaves in _INPUTS.items() for leaf in leaves}
_FLOATS = {"BF16", "F16", "F32"}
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """What to quantise and how; `head_bits` 16 leaves the head alone, `layers` None means every layer.

    Raises:
        UsageError: values that the format does not have.
    """

    bits: float
    codebook: Codebook = "mcg"
    modules: Modules = "all"
    layers: tuple[int, ...] | None = None
    layer_bits: Mapping[int, float] = field(default_factory=dict)
    head_bits: int = UNQUANTISED
    seed: int = 0

    def __post_init__(self) -> None:
        if self.codebook not in CODEBOOKS:
            raise UsageError(f"there is no codebook {self.codebook}", f"choose one of {', '.join(CODEBOOKS)}")
        if self.modules not in _KINDS:
            raise UsageError(f"there is no set of modules {self.modules}", f"choose one of {', '.join(_KINDS)}")
        if self.head_bits not in {*range(1, 9), UNQUANTISED}:
            raise UsageError(f"a head cannot have {self.head_bits} bits", "choose 1 to 8, or 16 to leave it alone")
        for bits in (self.bits, *self.layer_bits.values()):
            check_bits(bits, self.codebook)

    def as_json(self) -> dict[str, Any]:
        """Plain values, the same for equal settings."""
        plain = asdict(self)
        plain["layers"] = None if self.layers is None else sorted(self.layers)
        plain["layer_bits"] = {str(layer): float(self.layer_bits[layer]) for layer in sorted(self.layer_bits)}
        plain["bits"] = float(self.bits)
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One linear to be coded: rows ``start:stop`` of a source tensor, or of one expert of a stack of them."""

    module: str
    source: str
    expert: int | None
    start: int
    stop: int
    in_features: int
    rate: Rate
    signs: SignNames
    layer: int
    bias: str | None

    @property
    def weights(self) -> int:
        """Weights coded, padding included."""
        return padded(self.stop - self.start) * padded(self.in_features)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizePlan:
    """Jobs in the order of the source, tensors copied as they are, and the module name of a head (if coded)."""

    jobs: list[Job]
    copied: list[str]
    head: str | None

    @property
    def bits(self) -> float:
        """Average bits a weight, the head left out unless there is nothing else."""
        jobs = [job for job in self.jobs if job.module != self.head] or self.jobs
        return sum(job.rate.bits * job.weights for job in jobs) / sum(job.weights for job in jobs)


def check_bits(bits: float, codebook: Codebook) -> None:
    """Refuse a rate that the format, or this codebook, does not have."""
    if float(bits) not in WIDTHS:
        raise UsageError(
            f"there is no rate of {bits:g} bits: every tensor has one of {', '.join(f'{b:g}' for b in sorted(WIDTHS))}",
            "choose one of them; mix rates with --layer-bits to get another average",
        )
    if bits != int(bits) and codebook != "mul1":
        raise UsageError(
            f"{bits:g} bits exist only with the mul1 codebook", "add --codebook mul1, or choose whole bits"
        )


def make_plan(source: Checkpoint, settings: QuantizeSettings) -> QuantizePlan:
    """Sort every tensor of a plain checkpoint into jobs and copies.

    Raises:
        CheckpointError: a source that is quantised already, or a layout that is not known.
        UsageError: nothing would be quantised, or a layer is named that the model does not have.
    """
    _check_source(source, settings)
    jobs: list[Job] = []
    copied: list[str] = []
    for key in sorted(source.plain, key=_natural):
        found = _jobs_of(source, source.plain[key], settings)
        jobs += found
        if not found:
            copied.append(key)
    consumed = {job.bias for job in jobs}
    head = _head_job(source, settings)
    if head:
        jobs.append(head)
        # A tied head is coded from the embedding, which stays.
        consumed |= {head.bias, head.source if head.source == f"{head.module}.weight" else None}
    if not jobs:
        raise UsageError(
            f"nothing in {source.name} matches --modules {settings.modules} and --layers",
            "choose other modules or layers",
        )
    return QuantizePlan(
        jobs=jobs, copied=[key for key in copied if key not in consumed], head=head.module if head else None
    )


def _check_source(source: Checkpoint, settings: QuantizeSettings) -> None:
    claimed = source.quantization.get("quant_method")
    if source.modules or source.tables or claimed:
        raise CheckpointError(
            f"{source.name} is quantised already ({claimed or 'exl3'})", "give the BF16, FP16 or FP32 checkpoint"
        )
    layers = decoder_layers(source)
    named = {*(settings.layers or ()), *settings.layer_bits}
    if layers is not None and named and not 0 <= min(named) <= max(named) < layers:
        wrong = max(named) if max(named) >= layers else min(named)
        raise UsageError(f"layer {wrong} is named and {source.name} has layers 0 to {layers - 1}", "correct the layers")


def _jobs_of(source: Checkpoint, tensor: TensorHeader, settings: QuantizeSettings) -> list[Job]:
    """The linears that one tensor becomes; none where it is to be copied."""
    module = tensor.name.removesuffix(".weight")
    spot = spot_of(module, decoder_layers(source))
    stacked = len(tensor.shape) == 3 and module.endswith((".experts.gate_up_proj", ".experts.down_proj"))
    if not stacked and (module == tensor.name or len(tensor.shape) != 2):
        return []
    parent, _, leaf = module.rpartition(".")
    chosen = spot.section == "text" and spot.kind in _KINDS[settings.modules]
    if not chosen or (settings.layers is not None and spot.layer not in settings.layers):
        return []
    if leaf not in _INPUT_OF and leaf not in MERGED:
        return []
    _check_dtype(tensor)
    rate = Rate(bits=float(settings.layer_bits.get(spot.layer, settings.bits)), codebook=settings.codebook)
    rows, columns = tensor.shape[-2:]
    if stacked:
        _check_stack(source, tensor, leaf)
    jobs = []
    for expert in range(tensor.shape[0]) if stacked else (None,):
        owner = parent if expert is None else f"{parent}.{expert}"
        for name, start, stop in _row_parts(source, leaf, rows):
            full = f"{owner}.{name}"
            bias = f"{module}.bias" if not stacked and f"{module}.bias" in source.plain else None
            signs = SignNames(seed=settings.seed, input=_input_name(full), output=full)
            job = Job(
                module=full,
                source=tensor.name,
                expert=expert,
                start=start,
                stop=stop,
                in_features=columns,
                rate=rate,
                signs=signs,
                layer=spot.layer,
                bias=bias,
            )
            jobs.append(job)
    return jobs


def _head_job(source: Checkpoint, settings: QuantizeSettings) -> Job | None:
    if settings.head_bits == UNQUANTISED:
        return None
    own = [key for key in source.plain if key.endswith("lm_head.weight")]
    tied = [key for key in source.plain if key.endswith("embed_tokens.weight")]
    key = next(iter([*own, *tied]), None)
    if key is None:
        raise CheckpointError(f"{source.name} has no lm_head to quantise", "give --head-bits 16")
    _check_dtype(source.plain[key])
    prefix = re.sub(r"(model\.)?(language_model\.)?embed_tokens\.weight$", "", key)
    module = key.removesuffix(".weight") if own else f"{prefix}lm_head"
    rows, columns = source.plain[key].shape
    return Job(
        module=module,
        source=key,
        expert=None,
        start=0,
        stop=rows,
        in_features=columns,
        rate=Rate(bits=float(settings.head_bits), codebook=settings.codebook),
        signs=SignNames(seed=settings.seed, input=module, output=module),
        layer=-1,
        bias=f"{module}.bias" if f"{module}.bias" in source.plain else None,
    )


def _row_parts(source: Checkpoint, leaf: str, rows: int) -> list[tuple[str, int, int]]:
    """Name and row range of each linear in a source matrix of ``rows`` output features."""
    if leaf not in MERGED:
        return [(leaf, 0, rows)]
    if leaf == "gate_up_proj":
        sizes = [rows // 2, rows - rows // 2]
    else:
        text = source.config.get("text_config") or source.config
        heads = int(text["num_attention_heads"])
        size = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        sizes = [heads * size, *[int(text.get("num_key_value_heads") or heads) * size] * 2]
    if sum(sizes) != rows or len(set(sizes)) > 2:
        raise CheckpointError(
            f"{source.name}: {leaf} has {rows} rows and the config makes them {sizes}", "this layout is not supported"
        )
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(name, end - size, end) for name, size, end in zip(MERGED[leaf], sizes, ends, strict=True)]


def _check_stack(source: Checkpoint, tensor: TensorHeader, leaf: str) -> None:
    """Stacks are [experts, out, in]; one class stores them the other way round, with gate and up interleaved."""
    text = source.config.get("text_config") or source.config
    hidden = text.get("hidden_size")
    side = tensor.shape[2] if leaf == "gate_up_proj" else tensor.shape[1]
    if side != hidden or f"{tensor.name}_bias" in source.plain:
        raise CheckpointError(
            f"{tensor.name} {list(tensor.shape)} is not [experts, out, in] with hidden_size {hidden}",
            "experts laid out like this (gpt-oss) are not supported; leave them out with --modules or --layers",
        )


def _check_dtype(tensor: TensorHeader) -> None:
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{tensor.name} is {tensor.dtype}: the source is quantised already",
            "give the BF16, FP16 or FP32 checkpoint",
        )


def _input_name(module: str) -> str:
    """What the linears that share an input share: the same signs, as they would share a Hessian."""
    parent, _, leaf = module.rpartition(".")
    group = _INPUT_OF.get(leaf, "own")
    if group == "own":
        return module
    return f"{_EXPERT.sub('.experts.', parent + '.').rstrip('.')}.{group}"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
