"""The capture store: bytes a position, and reading a row in place against an array that is in memory already."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from harness.bench.made_up import made_up_head, made_up_identity, made_up_panel, made_up_stats
from harness.bench.timing import Figure, Work, interleaved, one_thread
from harness.capture import CaptureWriter, open_capture
from harness.capture.rowfile import read_array
from harness.types import Hidden


def run(folder: Path, width: int, length: int, rounds: int) -> list[Figure]:
    """One row of ``length`` tokens, bf16 states of ``width``."""
    panel, head = made_up_panel(1, length, 256), made_up_head(256, width, digest=True)
    states = torch.randn(length, width, generator=torch.Generator().manual_seed(23)).to(torch.bfloat16)
    stats = made_up_stats(length - 1)
    store, array = folder / "capture", folder / "array.npy"

    def write() -> None:
        shutil.rmtree(store, ignore_errors=True)
        with CaptureWriter(store, made_up_identity(head), panel, head) as writer:
            writer.write_row(panel.rows[0], Hidden(states_TH=states), stats)
            writer.finish()

    def save() -> None:
        np.save(array, states.view(torch.int16).numpy())

    with one_thread():
        written = interleaved({"capture": write, "np.save": save}, rounds)
        read = interleaved(_reads(store, states[:-1].clone()), 4 * rounds)
    size = (store / "row-0000.parquet").stat().st_size / (length - 1)
    return _figures(width, (length - 1) * width * 2 / 1e6, size, written, read)


def _reads(store: Path, plain: torch.Tensor) -> dict[str, Work]:
    """Every read ends in float32 states, which is what a score needs."""
    wide = torch.empty(plain.shape)
    capture, path = open_capture(store), store / "row-0000.parquet"
    return {
        "plain array": lambda: wide.copy_(plain),
        "mapped states": lambda: wide.copy_(read_array(path, "states", torch.bfloat16)),
        "mapped states and statistics": lambda: wide.copy_(capture.row(0, check=False).states_TH),
        "the same, digest checked": lambda: wide.copy_(open_capture(store).row(0).states_TH),
    }


def _figures(
    width: int, megabytes: float, size: float, written: dict[str, float], read: dict[str, float]
) -> list[Figure]:
    share = 100 * read["plain array"] / read["mapped states"]
    return [
        Figure(name="bytes a position", value=size, unit="B", most=width * 2 + 64),
        Figure(name="write, with digests and sync", value=megabytes / written["capture"], unit="MB/CPU-s"),
        Figure(name="np.save", value=megabytes / written["np.save"], unit="MB/CPU-s"),
        *(
            Figure(name=f"read to float32: {name}", value=megabytes / value, unit="MB/CPU-s")
            for name, value in read.items()
        ),
        Figure(name="mapped states, of a plain array", value=share, unit="%", least=80.0),
    ]
