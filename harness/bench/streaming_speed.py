"""Layer-outer streaming against the whole model in memory: time, and what it holds at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from harness.bench.made_up import made_up_panel
from harness.bench.timing import Figure, extra_megabytes, interleaved, one_thread
from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.streaming import StreamingEngine
from harness.progress import quiet_transformers
from harness.types import Panel

VOCAB = 4096


def made_up_model(folder: Path, width: int, layers: int) -> ModelFolder:
    """A Llama of random bf16 weights, saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    quiet_transformers()
    torch.manual_seed(43)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return ModelFolder(path=folder, name="made-up", revision="none")


def run(folder: Path, width: int, layers: int, rows: int, length: int, rounds: int) -> list[Figure]:
    """Both read the checkpoint and run the panel, on one thread; the whole model is freed in between."""
    model, panel = made_up_model(folder / "model", width, layers), made_up_panel(rows, length, VOCAB)
    streamed = StreamingEngine(model, device="cpu", weights_sha256="made up", tokenizer_sha256="none")

    def whole() -> None:
        _run(TransformersEngine(model, device="cpu", weights_sha256="made up", tokenizer_sha256="none"), panel)

    def stream() -> None:
        _run(StreamingEngine(model, device="cpu", weights_sha256="made up", tokenizer_sha256="none"), panel)

    with one_thread():
        seconds = interleaved({"whole": whole, "stream": stream}, rounds)
        extra = {name: extra_megabytes(work) for name, work in (("whole model", whole), ("streaming", stream))}
    _run(streamed, panel)
    base = streamed.largest_layer_bytes + streamed.activation_bytes
    held = streamed.peak_weight_bytes + streamed.activation_bytes
    return [
        Figure(name="whole model", value=rows * length / seconds["whole"], unit="tokens/CPU-s"),
        Figure(name="streaming", value=rows * length / seconds["stream"], unit="tokens/CPU-s"),
        Figure(name="streaming / whole: time", value=seconds["stream"] / seconds["whole"], unit="x", most=1.15),
        Figure(name="held / (largest layer + activations)", value=held / base, unit="x", most=1.25),
        Figure(name="largest layer + activations", value=base / 1e6, unit="MB"),
        Figure(name="whole model: extra resident memory", value=extra["whole model"], unit="MB"),
        Figure(name="streaming: extra resident memory", value=extra["streaming"], unit="MB", note=_beside(streamed)),
    ]


def _beside(engine: StreamingEngine) -> str:
    """What is resident beside a layer and the waiting rows, and no part of the ratio above."""
    head = 0 if engine.head is None else engine.head.weight_VH.nbytes
    early = engine.peak_weight_bytes - engine.largest_layer_bytes
    return (
        f"{early / 1e6:.1f} of the next layer, {head / 1e6:.1f} the head given out; the rest is one row's arrays "
        "inside a layer and what the C library keeps of them"
    )


def _run(engine: Any, panel: Panel) -> None:
    for _ in engine.run(panel.rows, "hidden"):
        pass
