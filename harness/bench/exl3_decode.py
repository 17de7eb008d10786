"""Packed EXL3 weights to dense bf16: millions of weights a CPU second."""

from __future__ import annotations

import numpy as np
import torch

from harness.bench.figure import Figure
from harness.bench.timing import Work, interleaved, one_thread
from harness.exl3.codebook import MARKERS
from harness.exl3.decode import dense_weight
from harness.exl3.tensors import Exl3Linear

RATES = (2, 3, 4)


def made_up_linear(features: int, bits: int) -> Exl3Linear:
    """A square layer of random bits: every bit pattern is a valid trellis."""
    generator = np.random.default_rng(bits)
    tiles = features // 16
    words = generator.integers(-(1 << 15), 1 << 15, (tiles, tiles, 16 * bits), dtype=np.int16)
    scales = torch.ones(features, dtype=torch.float16)
    marker = torch.tensor(np.uint32(MARKERS["mcg"]).astype(np.int32))
    parts = {"trellis": torch.from_numpy(words), "suh": scales, "svh": scales, "mcg": marker}
    return Exl3Linear.from_tensors(f"bench K={bits}", parts)


def run(features: int, rounds: int) -> list[Figure]:
    """One thread, both Hadamard transforms and scales included."""
    out = torch.empty(features, features, dtype=torch.bfloat16)

    def decode(linear: Exl3Linear) -> Work:
        return lambda: dense_weight(linear, torch.bfloat16, out=out)

    with one_thread():
        works = {f"K={bits}": decode(made_up_linear(features, bits)) for bits in RATES}
        seconds = interleaved(works, rounds)
    return [
        Figure(
            name=f"EXL3 decode to dense bf16, {name}, {features} x {features}",
            value=features**2 / value / 1e6,
            unit="M weights/CPU-s",
            least=60.0,
        )
        for name, value in seconds.items()
    ]
