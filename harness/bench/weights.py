"""From a checkpoint to weights: EXL3 decoded and encoded, and a model's layers streamed one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.bench.made_up import made_up_panel
from harness.bench.timing import Figure, Work, extra_megabytes, interleaved, one_thread
from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.streaming import StreamingEngine
from harness.exl3.codebook import MARKERS
from harness.exl3.decode import dense_weight
from harness.exl3.encode import Rate, decoded, search_matrix
from harness.exl3.regularize import best_rms
from harness.exl3.tensors import Exl3Linear
from harness.progress import quiet_transformers
from harness.types import Panel

# EXL3: packed weights to dense bf16, and the encoder's search with the distortion that it reaches.

RATES = (2, 3, 4)
#: Thousands of weights a CPU second that the search should reach, and the format's distortion of mcg, by bits.
ENCODE = {3: 100.0, 2: 70.0}
DISTORTION = {3: 1.106, 2: 1.104}
#: Tiles that bring the distortion's sampling error under half a percent.
SETTLED = 256


def made_up_linear(features: int, bits: int) -> Exl3Linear:
    """A square layer of random bits: every bit pattern is a valid trellis."""
    generator = np.random.default_rng(bits)
    tiles = features // 16
    words = generator.integers(-(1 << 15), 1 << 15, (tiles, tiles, 16 * bits), dtype=np.int16)
    scales = torch.ones(features, dtype=torch.float16)
    marker = torch.tensor(np.uint32(MARKERS["mcg"]).astype(np.int32))
    parts = {"trellis": torch.from_numpy(words), "suh": scales, "svh": scales, "mcg": marker}
    return Exl3Linear.from_tensors(f"bench K={bits}", parts)


def exl3(features: int, tiles: int, rounds: int) -> list[Figure]:
    """One thread: decoding (both Hadamard transforms and scales included), and the exact search of the encoder."""
    out = torch.empty(features, features, dtype=torch.bfloat16)

    def decode(linear: Exl3Linear) -> Work:
        return lambda: dense_weight(linear, torch.bfloat16, out=out)

    with one_thread():
        works = {f"decode to dense bf16, K={bits}": decode(made_up_linear(features, bits)) for bits in RATES}
        seconds = interleaved(works, rounds)
        encoded = [figure for bits in DISTORTION for figure in _encode(bits, tiles, rounds)]
    return [
        Figure(name=name, value=features**2 / value / 1e6, unit="M weights/CPU-s", least=60.0)
        for name, value in seconds.items()
    ] + encoded


def _encode(bits: int, tiles: int, rounds: int) -> list[Figure]:
    """Speed of the search on Gaussian tiles, and its distortion as a multiple of the bound ``4**-bits``."""
    rate = Rate(bits=bits, codebook="mcg")
    rms = best_rms(bits, "mcg")
    weights = rms * np.random.default_rng(41).standard_normal((16, 16 * tiles)).astype(np.float32)
    search_matrix(weights[:, :16], rate, threads=1)
    found: list[np.ndarray] = []
    works = {"search": lambda: found.append(search_matrix(weights, rate, threads=1))}
    seconds = interleaved(works, rounds, warm=False)["search"]
    error = np.mean((decoded(found[0], "mcg") - weights) ** 2) / np.mean(weights**2)
    speed, table = ENCODE[bits], DISTORTION[bits]
    note = f"the format reaches {table}" if tiles >= SETTLED else f"{tiles} tiles: too few to compare"
    return [
        Figure(
            name=f"encode, exact search, K={bits}",
            value=weights.size / seconds / 1e3,
            unit="k weights/CPU-s",
            least=speed,
        ),
        Figure(
            name=f"its distortion x 4^{bits}",
            value=float(error) * 4**bits,
            unit="",
            most=1.01 * table if tiles >= SETTLED else None,
            note=note,
        ),
    ]


# Layer-outer streaming against the whole model in memory: time, and what it holds at once.

STREAMED_VOCAB = 4096


def made_up_model(folder: Path, width: int, layers: int) -> ModelFolder:
    """A Llama of random bf16 weights, saved."""
    from transformers import LlamaConfig, LlamaForCausalLM

    quiet_transformers()
    torch.manual_seed(43)
    config = LlamaConfig(
        vocab_size=STREAMED_VOCAB,
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


def streaming(folder: Path, width: int, layers: int, rows: int, length: int, rounds: int) -> list[Figure]:
    """Both read the checkpoint and run the panel, on one thread; the whole model is freed in between."""
    model, panel = made_up_model(folder / "model", width, layers), made_up_panel(rows, length, STREAMED_VOCAB)
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
