"""A small vLLM: the part of ``vllm.LLM`` that the engine uses, on a transformers model.

As the real one it runs a request in steps of at most ``max_num_batched_tokens``, hands its model padded buffers that
the next step overwrites, generates a token, and reports what it took from its prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from harness.engines.hf import load_model

#: Steps are padded to a multiple of this many tokens.
STEP = 8


class CausalLM(nn.Module):
    """Takes flat ids, gives the states after the final norm; logits are another call."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.whole = load_model(folder, torch.float32, "cpu")
        self.attention = nn.Module()
        self.attention.attn_backend = SimpleNamespace(get_name=lambda: "CPU_ATTN")
        self.buffer = torch.zeros(4096, self.whole.config.hidden_size)
        self.scale = 1.0

    def forward(self, input_ids: torch.Tensor | None, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """The fake keeps what is past before ``positions`` in ``seen``, where vLLM has a KV cache."""
        assert input_ids is not None
        if int(positions[0]) == 0:
            self.seen: list[int] = []
        self.seen += input_ids[: len(positions)].tolist()
        with torch.inference_mode():
            states = self.whole.model(input_ids=torch.tensor([self.seen]), use_cache=False).last_hidden_state[0]
        out = self.buffer[: len(input_ids)]
        out[: len(positions)] = states[-len(positions) :]
        return out

    def compute_logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.whole.lm_head(states) * self.scale


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    detokenize: bool
    ignore_eos: bool


@dataclass
class TokensPrompt:
    prompt_token_ids: list[int]


class LLM:
    """``cached`` is what its prefix cache would answer for every request."""

    cached = 0

    def __init__(self, model: str, **asked: Any) -> None:
        if asked.get("quantization") == "exl3":
            raise ValueError(f"Unknown quantization method: exl3 in {model}")
        self.asked = asked
        self.model = CausalLM(Path(model))
        dtype = torch.float32 if asked["dtype"] == "auto" else getattr(torch, asked["dtype"])
        self.llm_engine = SimpleNamespace(vllm_config=_config(asked, dtype))
        self.ids = torch.zeros(4096, dtype=torch.int32)

    def apply_model(self, call: Callable[[nn.Module], Any]) -> list[Any]:
        return [call(self.model)]

    def generate(self, prompts: list[TokensPrompt], sampling: SamplingParams, use_tqdm: bool) -> list[Any]:
        assert sampling.max_tokens == 1 and not use_tqdm
        (prompt,) = prompts
        ids = prompt.prompt_token_ids
        assert len(ids) < self.asked["max_model_len"]
        for start in range(0, len(ids), self.asked["max_num_batched_tokens"]):
            piece = ids[start : start + self.asked["max_num_batched_tokens"]]
            padded = -(-len(piece) // STEP) * STEP
            self.ids[:padded] = 0
            self.ids[: len(piece)] = torch.tensor(piece, dtype=torch.int32)
            positions = torch.arange(start, start + len(piece))
            self.model(input_ids=self.ids[:padded], positions=positions, intermediate_tensors=None, inputs_embeds=None)
        return [SimpleNamespace(prompt_token_ids=ids, num_cached_tokens=self.cached)]


def _config(asked: Mapping[str, Any], dtype: torch.dtype) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=dtype,
            architectures=["LlamaForCausalLM"],
            quantization=None,
            max_model_len=asked["max_model_len"],
            enforce_eager=asked["enforce_eager"],
            seed=asked["seed"],
        ),
        cache_config=SimpleNamespace(
            cache_dtype=asked.get("kv_cache_dtype", "auto"),
            block_size=16,
            enable_prefix_caching=asked["enable_prefix_caching"],
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=asked["max_num_batched_tokens"], max_num_seqs=asked["max_num_seqs"]
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=asked["tensor_parallel_size"]),
        speculative_config=None,
    )


def package() -> ModuleType:
    """A module that can stand in ``sys.modules`` under the name vllm."""
    fake = ModuleType("vllm")
    fake.__dict__.update(__version__="0.32.0", LLM=LLM, SamplingParams=SamplingParams, TokensPrompt=TokensPrompt)
    return fake
