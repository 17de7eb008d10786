"""The reference engines: a model in transformers, dense or EXL3, on any device PyTorch runs on.

Outputs are the inputs of the model's own ``lm_head`` where the head is separable (checked on real numbers,
not assumed), else logits. On a CPU bf16 and fp16 weights are computed in float32: exact, and faster there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from harness import __version__
from harness.digest import head_digest
from harness.engines.models import ModelFolder
from harness.errors import CheckpointError, EngineError
from harness.progress import quiet_transformers
from harness.types import EngineIdentity, Head, Hidden, Logits, Outputs, Row, RowOutputs, Want

ComputeDType = Literal["auto", "float32", "bfloat16", "float16"]
#: Changes a loaded model in place, and returns what its identity shall say of that.
Alter = Callable[[Any], Mapping[str, str | int | float | bool | None]]

#: Rows of a head that are converted at a time.
PIECE = 8192
#: Largest |logit - head(input)| that still counts as "the head is norm -> linear -> soft-cap".
SEPARABLE_TOLERANCE = {"float32": 1e-3, "float16": 0.25, "bfloat16": 1.0}


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
    """Load a causal LM whose every parameter comes from the checkpoint, or refuse.

    Args:
        packed: keep EXL3 weights packed and decode them when used (little memory) instead of once at load.
    """
    quiet_transformers()
    if is_exl3(folder):
        from harness.exl3.hf import load_exl3

        return load_exl3(folder, dequantize=not packed, dtype=dtype, device=device)
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, use_safetensors=True, device_map=device
        )
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{folder.name} cannot be loaded: {first}", "check that the download is whole") from error
    unfilled = sorted(info["missing_keys"]) + [str(key) for key in info.get("mismatched_keys", ())]
    if unfilled:
        raise CheckpointError(
            f"{folder.name}: {len(unfilled)} parameters are not in the checkpoint, first {unfilled[0]}",
            "they would be random numbers; fetch the missing shard or the right revision",
        )
    return model.eval()


def narrow(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers in bf16 where that loses nothing; so a head's digest does not depend on compute dtype.

    A piece at a time: a large head is not held a third time.
    """
    short = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    for low in range(0, len(weight), PIECE):
        piece = weight.detach()[low : low + PIECE]
        short[low : low + PIECE] = piece
        if not torch.equal(short[low : low + PIECE].to(piece.dtype), piece):
            return weight.detach()
    return short


def head_of(model: Any, vocab_size: int | None = None) -> Head:
    """The model's output head with the soft-cap and scale of its config.

    Args:
        vocab_size: columns that are real tokens, where fewer than the config says.
    """
    config = model.config.get_text_config()
    linear = model.get_output_embeddings()
    dense = linear.dense_weight() if hasattr(linear, "dense_weight") else linear.weight
    weight = narrow(dense).contiguous()
    bias = getattr(linear, "bias", None)
    bias = None if bias is None else bias.detach()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = float(getattr(config, "logit_scale", None) or 1.0 / float(getattr(config, "logits_scaling", None) or 1.0))
    support = min(vocab_size or config.vocab_size, weight.shape[0])
    sha256 = head_digest(weight, vocab_size=support, bias_V=bias, softcap=softcap, scale=scale)
    return Head(weight_VH=weight, vocab_size=support, sha256=sha256, bias_V=bias, softcap=softcap, scale=scale)


def head_logits(head: Head, states_TH: torch.Tensor) -> torch.Tensor:
    """Float32 logits ``[T, V]`` of a few positions: for checks, not for scoring."""
    states, weight = states_TH.float(), head.weight_VH
    pieces = [states @ weight[low : low + PIECE].float().T for low in range(0, len(weight), PIECE)]
    logits = torch.cat(pieces, -1)
    if head.bias_V is not None:
        logits = logits + head.bias_V.float()
    logits = logits * head.scale
    return head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits


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
        self.head_deviation = self._head_deviation(own)
        tolerance = SEPARABLE_TOLERANCE[str(self._dtype).removeprefix("torch.")]
        self._head = own if self.head_deviation <= tolerance else None
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
        if want == "topk":
            raise EngineError("a reference engine gives hidden states or logits, not top-k", "ask for `hidden`")
        self._refuse_long_rows(rows)
        for row in rows:
            ids = torch.from_numpy(np.asarray(row.ids_T, dtype=np.int64))[None].to(self._device)
            ran = ids[0].cpu().numpy().astype(np.int32)
            yield RowOutputs(index=row.index, echoed_ids_T=ran, outputs=self._one(ids, want))

    def _one(self, ids: torch.Tensor, want: Want) -> Outputs:
        if want == "hidden" and self._head is not None:
            return Hidden(states_TH=self._head_input(ids))
        with torch.inference_mode():
            return Logits(logits_TV=self._model(input_ids=ids, use_cache=False).logits[0])

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

    def _head_deviation(self, head: Head) -> float:
        """Largest difference between the model's logits and ours from its head's input, on eight tokens."""
        ids = torch.arange(8, device=self._device)[None] % head.vocab_size
        with torch.inference_mode():
            theirs = self._model(input_ids=ids, use_cache=False).logits[0].float()[:, : head.vocab_size]
            ours = head_logits(head, self._head_input(ids))[:, : head.vocab_size]
        return float((theirs - ours).abs().max())

    def _refuse_long_rows(self, rows: Sequence[Row]) -> None:
        long = [row.index for row in rows if self._limit and len(row.ids_T) > self._limit]
        if long:
            raise EngineError(
                f"{self._located.name} takes {self._limit} tokens; rows {long[:5]} of the panel are longer",
                "choose a panel with shorter rows: nothing is ever truncated",
            )


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
        engine="exl3" if is_exl3(located.path) else "transformers",
        version=_version(),
        model=located.name,
        revision=located.revision,
        weights_sha256=digests[0],
        head_sha256=head.sha256,
        tokenizer_sha256=digests[1],
        weights_dtype=stored_dtype(located.path),
        compute_dtype=str(dtype).removeprefix("torch."),
        lane="weights",
        device=device_name(device),
        settings={
            "attention": str(model.config._attn_implementation),
            "batch": 1,
            "kv_cache": False,
            "support": head.vocab_size,
            **(altered or {}),
        },
    )


def stored_dtype(folder: Path) -> str:
    """The dtype that config.json declares for the unquantised weights."""
    config = json.loads((folder / "config.json").read_text())
    for block in (config, config.get("text_config", {})):
        for key in ("dtype", "torch_dtype"):
            if block.get(key):
                return str(block[key])
    return "unknown"


def device_name(device: str) -> str:
    """``cpu`` or the accelerator's product name: kernels, and so digits, differ between them."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _version() -> str:
    import transformers

    return (
        f"exl3-fidelity {__version__}, transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    )
