"""A small exllamav3 for Llama on a CPU: its modules, its rules for loading them, and what they share through params.

It computes a real model (transformers' layers, one at a time), with the habits that a driver must cope with: weights
are there only between load and unload, loading is deferred, blocks answer in a buffer that they use again, the last
norm and the logits are float16, the head is padded with noise, and the second block reads from ``params`` what the
first one published there for this row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.engines.hf import load_model

PAD = 128


class Collection:
    """Stands for ``config.stc``: begin, then end or abort; closed only outside of both."""

    def __init__(self) -> None:
        self.deferred = False
        self.aborted = self.closed = self.released = 0

    def begin_deferred_load(self, arena: bool = True) -> None:
        assert not self.deferred
        self.deferred = True

    def end_deferred_load(self) -> None:
        assert self.deferred
        self.deferred = False

    def abort_deferred_load(self) -> None:
        self.deferred = False
        self.aborted += 1

    def release_arena(self) -> None:
        self.released += 1

    def close(self) -> None:
        assert not self.deferred
        self.closed += 1


class Config:
    """Config of a folder; ``loaded`` are the keys of modules whose weights are in memory now."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.values = json.loads((Path(directory) / "config.json").read_text())
        architectures = self.values["architectures"]
        assert architectures == ["LlamaForCausalLM"], f"Unknown architecture {architectures[0]} in {directory}"
        self.architecture = architectures[0]
        self.vocab_size = self.values["vocab_size"]
        self.max_position_embeddings = self.values["max_position_embeddings"]
        self.stc = Collection()
        self.loaded: set[str] = set()
        self.most_loaded = 0
        self.dynamic_seq_len: int | None = None

    @staticmethod
    def from_directory(directory: str) -> Config:
        return Config(directory)

    def override_dynamic_seq_len(self, length: int) -> None:
        self.dynamic_seq_len = length


class Module:
    def __init__(self, config: Config, key: str, caps: dict[str, bool] | None = None) -> None:
        self.config, self.key, self.caps = config, key, caps or {}
        self.device: torch.device | None = None
        self.source: Any = None

    def can_defer_load(self) -> bool:
        return not self.caps.get("prefer_cpu")

    def load(self, device: torch.device) -> None:
        assert self.config.stc.deferred == self.can_defer_load(), "loaded outside of its deferred load"
        self.device = device
        self.config.loaded.add(self.key)
        self.config.most_loaded = max(self.config.most_loaded, len(self.config.loaded))

    def unload(self) -> None:
        self.device = None
        self.config.loaded.discard(self.key)

    def prepare_for_device(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        assert self.device is not None, f"{self.key} is not loaded"
        return x.to(self.device)


class Embedding(Module):
    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        assert self.device is not None
        return self.source(x).float()


class TransformerBlock(Module):
    """``publishes`` leaves the rotary table of this row in params; the other block has none of its own."""

    buffers: dict[torch.Size, torch.Tensor] = {}

    def __init__(self, config: Config, key: str, publishes: Any) -> None:
        super().__init__(config, key)
        self.publishes = publishes

    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        assert self.device is not None
        assert params["attn_mode"] == "flash_attn_nc"
        if self.publishes is not None:
            positions = torch.arange(params["input_ids"].shape[1])[None]
            params["rotary"] = self.publishes(x, position_ids=positions)
        out = self.source(x, position_embeddings=params["rotary"], attention_mask=causal(x.shape[1]))
        out = out[0] if isinstance(out, tuple) else out
        buffer = self.buffers.setdefault(out.shape, torch.empty_like(out))
        buffer.copy_(out)
        return buffer


class RMSNorm(Module):
    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        assert self.device is not None
        y = self.source(x).half()
        if self.key in params.get("export_state_norm_keys", ()):
            params.setdefault("export_states", []).append(y)
        return y


class Linear(Module):
    """The head: float16 weights padded to a multiple of 128 with noise, float16 logits."""

    def __init__(self, config: Config, key: str, source: Any) -> None:
        super().__init__(config, key, {"logits_output": True})
        self.source, self.alt_key = source, None
        self.softcap, self.pre_scale, self.post_scale, self.weight_scale = 0.0, 1.0, 1.0, 1.0
        self.out_features_unpadded, self.in_features_unpadded = source.weight.shape

    def forward(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        assert self.device is not None
        logits = x.float() @ self.source.weight.half().float().T * self.pre_scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        noise = torch.full((*logits.shape[:-1], -logits.shape[-1] % PAD), 99.0)
        return torch.cat([logits * self.post_scale, noise], -1).half()


class Model:
    def __init__(self, config: Config) -> None:
        whole = load_model(Path(config.directory), torch.float32, "cpu")
        inner = whole.model
        embedding = Embedding(config, "model.embed_tokens", {"prefer_cpu": True})
        embedding.source = inner.embed_tokens
        self.modules: list[Module] = [embedding]
        for index, layer in enumerate(inner.layers):
            block = TransformerBlock(config, f"model.layers.{index}", inner.rotary_emb if index == 0 else None)
            block.source = layer
            self.modules.append(block)
        norm = RMSNorm(config, "model.norm")
        norm.source = inner.norm
        self.modules += [norm, Linear(config, "lm_head", whole.lm_head)]
        self.caps: dict[str, bool] = {}

    @staticmethod
    def from_config(config: Config) -> Model:
        return Model(config)

    def prepare_inputs(self, input_ids: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        assert params.get("attn_mode") == "flash_attn_nc"
        return input_ids


def causal(length: int) -> torch.Tensor:
    """Additive mask ``[1, 1, T, T]``."""
    return torch.full((length, length), float("-inf")).triu(1)[None, None]


def package(version: str = "1.6.5") -> ModuleType:
    """A module that can stand in ``sys.modules`` under the name exllamav3, with what the real package has.

    The real one has no ``__version__``; that lies in ``exllamav3.version``, which is put into ``sys.modules`` here.
    """
    fake, told = ModuleType("exllamav3"), ModuleType("exllamav3.version")
    fake.__dict__.update(Config=Config, Model=Model, __path__=[])
    told.__dict__.update(__version__=version)
    sys.modules["exllamav3.version"] = told
    return fake
