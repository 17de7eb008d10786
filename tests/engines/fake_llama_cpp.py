"""A small llama-cpp-python: the part of its API that the engine uses, on a transformers model.

As the real one it answers in a buffer that the next row overwrites, keeps what lies before its position until `reset`,
and cuts what it is given into pieces of ``n_batch``.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from harness.engines.hf import load_model


class Llama:
    """``models`` maps a file's name to the folder of the model that stands for it."""

    models: dict[str, Path] = {}

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int,
        n_ctx: int,
        n_batch: int,
        n_ubatch: int,
        n_threads: int,
        n_threads_batch: int,
        logits_all: bool,
        flash_attn: bool,
        type_k: int,
        type_v: int,
        verbose: bool,
    ) -> None:
        if Path(model_path).name not in self.models:
            raise ValueError(f"Failed to load model from file: {model_path}")
        assert logits_all and not verbose and n_batch <= n_ctx and n_ubatch <= n_batch
        self._model = load_model(self.models[Path(model_path).name], torch.float32, "cpu")
        self.n_batch, self.asked = n_batch, {"type_k": type_k, "flash_attn": flash_attn, "n_gpu_layers": n_gpu_layers}
        self.n_tokens = 0
        self.input_ids = np.zeros(n_ctx, dtype=np.intc)
        self.scores = np.full((n_ctx, self.n_vocab()), np.nan, dtype=np.single)
        self.decodes = 0

    def n_vocab(self) -> int:
        return int(self._model.config.vocab_size)

    def reset(self) -> None:
        self.n_tokens = 0

    def eval(self, tokens: list[int]) -> None:
        for start in range(0, len(tokens), self.n_batch):
            piece = tokens[start : start + self.n_batch]
            past, self.n_tokens = self.n_tokens, self.n_tokens + len(piece)
            if self.n_tokens > len(self.input_ids):
                raise RuntimeError("llama_decode returned 1")
            self.input_ids[past : self.n_tokens] = piece
            ids = torch.from_numpy(self.input_ids[: self.n_tokens].astype(np.int64))[None]
            with torch.inference_mode():
                logits = self._model(input_ids=ids, use_cache=False).logits[0]
            self.scores[past : self.n_tokens] = logits[past:].numpy()
            self.decodes += 1


def package(gpu: bool = False) -> ModuleType:
    """A module that can stand in ``sys.modules`` under the name llama_cpp."""
    fake = ModuleType("llama_cpp")
    values: dict[str, Any] = {
        "__version__": "0.3.36",
        "Llama": Llama,
        "llama_supports_gpu_offload": lambda: gpu,
        "llama_print_system_info": lambda: b"CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | REPACK = 1 | ",
        "GGML_TYPE_F32": 0,
        "GGML_TYPE_F16": 1,
        "GGML_TYPE_Q8_0": 8,
        "GGML_TYPE_BF16": 30,
    }
    fake.__dict__.update(values)
    return fake
