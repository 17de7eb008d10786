"""The reference engines: a model in transformers, dense or EXL3, on any device PyTorch runs on.

Outputs are the inputs of the model's own ``lm_head`` where the head is separable (checked on real numbers,
not assumed), else logits. On a CPU bf16 and fp16 weights are computed in float32: exact, and faster there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from harness import __version__
from harness.engines.base import device_name, model_of, refuse_long_rows, stored_dtype
from harness.engines.head import PROBE, HeadProbe, head_of
from harness.engines.models import ModelFolder, quantised_as
from harness.engines.stream_weights import Weights, skeleton
from harness.errors import CheckpointError, EngineError
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.files import loading_view, model_files
from harness.exl3.foreign import Foreign, foreign_format
from harness.progress import quiet_transformers
from harness.types import EngineIdentity, Head, Hidden, Logits, Outputs, Row, RowOutputs, Want

ComputeDType = Literal["auto", "float32", "bfloat16", "float16"]
#: Changes a loaded model in place, and returns what its identity shall say of that.
Alter = Callable[[Any], Mapping[str, str | int | float | bool | None]]

_PLAIN = "give the BF16 checkpoint"


class _Cut(Exception):
    """Carries the head's input out of a forward pass, so that the head itself never runs."""

    def __init__(self, states: torch.Tensor) -> None:
        self.states = states


def default_device() -> str:
    """``cuda`` where there is one, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def is_exl3(folder: Path) -> bool:
    """True when any shard holds a trellis tensor: the config is never asked."""
    from harness.exl3.checkpoint import has_trellis

    return has_trellis(folder)


def dtype_of(compute: ComputeDType, device: str) -> torch.dtype:
    """``auto`` is float32 on a CPU and bfloat16 elsewhere."""
    if compute == "auto":
        compute = "float32" if device == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, compute)
    return dtype


def load_model(folder: Path, dtype: torch.dtype, device: str, *, packed: bool = False) -> Any:
    """Load a causal LM with every tensor of the checkpoint in its place and every parameter from it, or refuse.

    Args:
        packed: keep EXL3 weights packed and decode them when used (little memory) instead of once at load.

    Raises:
        CheckpointError: a tensor without a place or a rule, a parameter that nothing fills, a format that is not read.
    """
    quiet_transformers()
    checkpoint = open_checkpoint(folder)
    if checkpoint.modules or checkpoint.tables:
        from harness.exl3.hf import load_exl3

        return load_exl3(folder, dequantize=not packed, dtype=dtype, device=device)
    foreign = foreign_format(checkpoint)
    return _load_dense(folder, dtype, device) if foreign is None else _load_foreign(folder, foreign, dtype, device)


def _load_dense(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """The same parts as a run layer by layer fills, all at once: one rule for what goes where."""
    from transformers import GenerationConfig

    model = skeleton(folder, dtype, device)
    weights = Weights(model, folder, device)
    weights.fill()
    weights.close()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _load_foreign(folder: Path, foreign: Foreign, dtype: torch.dtype, device: str) -> Any:
    """A format that transformers reads with another package, where that is installed."""
    from transformers import AutoModelForCausalLM

    repair = f"pip install {foreign.package}, or give the BF16 checkpoint" if foreign.package else _PLAIN
    try:
        with loading_view(model_files(folder)) as view:
            model, info = AutoModelForCausalLM.from_pretrained(
                view,
                dtype=dtype,
                output_loading_info=True,
                use_safetensors=True,
                device_map=device,
                trust_remote_code=False,
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{folder.name} is {foreign.name} and cannot be loaded: {lines[0]}", repair) from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found := sorted(map(str, info.get(what) or ())):
            raise CheckpointError(
                f"{folder.name} is {foreign.name}: {len(found)} {what.replace('_', ' ')}, first {found[0]}", _PLAIN
            )
    return model.eval()


class TransformersEngine:
    """Runs one whole model, one row at a time, no padding, no cache: batch composition cannot move a number.

    Args:
        alter: applied to the model before it runs; its head is still the checkpoint's own.
    """

    def __init__(
        self,
        located: ModelFolder,
        *,
        compute: ComputeDType = "auto",
        device: str | None = None,
        packed: bool = False,
        vocab_size: int | None = None,
        alter: Alter | None = None,
        weights_sha256: str,
        tokenizer_sha256: str,
    ) -> None:
        self._device = device or default_device()
        self._dtype = dtype_of(compute, self._device)
        self._located = located
        self._model = load_model(located.path, self._dtype, self._device, packed=packed)
        altered = alter(self._model) if alter else {}
        self._limit = int(getattr(self._model.config.get_text_config(), "max_position_embeddings", 0) or 0)
        own = head_of(self._model, vocab_size)
        self._probe = HeadProbe(self._model.get_output_embeddings(), own)
        self.head_deviation = self._try(own)
        self._head = own if self._probe.is_separable(self.head_deviation) else None
        self.identity = identity_of(
            located,
            self._model,
            own,
            self._dtype,
            self._device,
            digests=(weights_sha256, tokenizer_sha256),
            altered=altered,
        )

    @property
    def head(self) -> Head | None:
        return self._head

    @property
    def model(self) -> Any:
        """The loaded model, for work that needs more than rows (tasks reuse its cache)."""
        return self._model

    def run(self, rows: Sequence[Row], want: Want = "hidden") -> Iterator[RowOutputs]:
        """Yield the outputs of each row in order; ``hidden`` falls back to logits without a separable head."""
        refuse_long_rows(self._located, rows, self._limit)
        for row in rows:
            ids = torch.from_numpy(np.asarray(row.ids_T, dtype=np.int64))[None].to(self._device)
            ran = ids[0].cpu().numpy().astype(np.int32)
            yield RowOutputs(index=row.index, echoed_ids_T=ran, outputs=self._one(ids, want))

    def _one(self, ids: torch.Tensor, want: Want) -> Outputs:
        if want == "hidden" and self._head is not None:
            return Hidden(states_TH=self._head_input(ids))
        with torch.inference_mode(), self._probe.exact():
            return Logits(logits_TV=self._model(input_ids=ids, use_cache=False).logits[0].float())

    def _head_input(self, ids: torch.Tensor) -> torch.Tensor:
        def cut(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            raise _Cut(inputs[0])

        handle = self._model.get_output_embeddings().register_forward_pre_hook(cut)
        try:
            with torch.inference_mode():
                self._model(input_ids=ids, use_cache=False)
        except _Cut as caught:
            return caught.states[0]
        finally:
            handle.remove()
        raise EngineError(f"{self._located.name} never called its output head", "report the architecture")

    def _try(self, head: Head) -> float:
        """How far the model's logits are from those of its head, in float32, on a few tokens and made-up logits."""
        ids = torch.arange(PROBE, device=self._device)[None] % head.vocab_size
        with torch.inference_mode(), self._probe.trying():
            return self._probe.deviation(self._model(input_ids=ids, use_cache=False).logits[0])


def identity_of(
    located: ModelFolder,
    model: Any,
    head: Head,
    dtype: torch.dtype,
    device: str,
    *,
    digests: tuple[str, str],
    altered: Mapping[str, str | int | float | bool | None] | None = None,
) -> EngineIdentity:
    """What a reference engine says of itself, however it holds the model.

    Args:
        digests: of the weights and of the tokenizer.
        altered: what a change to the loaded model adds to the settings.
    """
    return EngineIdentity(
        **model_of(located, *digests),
        engine="exl3" if is_exl3(located.path) else "transformers",
        version=_version(),
        head_sha256=head.sha256,
        weights_dtype=stored_dtype(located.path),
        quantised=quantised_as(located),
        compute_dtype=str(dtype).removeprefix("torch."),
        lane="weights",
        device=device_name(device),
        settings={
            "attention": str(model.config._attn_implementation),
            "batch": 1,
            "kv_cache": False,
            "support": head.vocab_size,
            **_read_from(model, located.path),
            **(altered or {}),
        },
    )


def _read_from(model: Any, folder: Path) -> dict[str, str]:
    """What became of the tensors of a checkpoint, where that is more than "all are placed as they were stored"."""
    found: dict[str, str] = {}
    if skipped := model.accounting.summary():
        found["tensors_left_out"] = "; ".join(f"{count} {rule}" for rule, count in sorted(skipped.items()))
    kinds = Counter(scaled.kind for scaled in open_checkpoint(folder).scaled.values())
    if kinds:
        found["dequantised"] = "; ".join(f"{count} tensors of {kind}" for kind, count in sorted(kinds.items()))
    return found


def _version() -> str:
    import transformers

    return (
        f"exl3-fidelity {__version__}, transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    )
