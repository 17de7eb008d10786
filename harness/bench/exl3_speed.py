"""EXL3: packed weights to dense bf16, and the encoder's search with the distortion that it reaches."""

from __future__ import annotations

import numpy as np
import torch

from harness.bench.timing import Figure, Work, interleaved, one_thread
from harness.exl3.codebook import MARKERS
from harness.exl3.decode import dense_weight
from harness.exl3.encode import Rate, decoded, search_matrix
from harness.exl3.regularize import best_rms
from harness.exl3.tensors import Exl3Linear

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


def run(features: int, tiles: int, rounds: int) -> list[Figure]:
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
    note = f"EXL3_FORMAT.md: {table}" if tiles >= SETTLED else f"{tiles} tiles: too few to compare"
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
