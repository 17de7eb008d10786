"""The capture store: bytes a position, reading a row in place, and the memory of scoring rows against it.

python -m harness.bench.capture_store ROWS LENGTH VOCAB WIDTH FOLDER      prints megabytes: one size, one process
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from harness.bench.made_up import made_up_head, made_up_identity, made_up_panel, made_up_stats
from harness.bench.timing import Figure, Work, extra_megabytes, interleaved, one_thread
from harness.capture import Capture, CaptureWriter, open_capture
from harness.capture.rowfile import read_array
from harness.measure.rows import score_row, write_row
from harness.types import Head, Hidden, Panel, Row


def capture_store(folder: Path, width: int, length: int, rounds: int) -> list[Figure]:
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
    return _store_figures(width, (length - 1) * width * 2 / 1e6, size, written, read)


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


def _store_figures(
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


# Memory of scoring: each size in a process of its own, and it must not grow with rows or the vocabulary.


def scoring_memory(rows: list[int], vocabularies: list[int], length: int, width: int) -> list[Figure]:
    """The first vocabulary at every number of rows, then the others at the first number."""
    cases = [(n, vocabularies[0]) for n in rows] + [(rows[0], v) for v in vocabularies[1:]]
    extras = {case: _child(case[0], length, case[1], width) for case in cases}
    figures = [
        Figure(name=f"{count} rows, V={vocab:,}: extra", value=extra, unit="MB")
        for (count, vocab), extra in extras.items()
    ]
    spread = max(extras.values()) - min(extras.values())
    note = "resident memory above the loaded process and its heads"
    return [*figures, Figure(name="largest minus smallest", value=spread, unit="MB", most=32.0, note=note)]


def _child(rows: int, length: int, vocab: int, width: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        sizes = [str(n) for n in (rows, length, vocab, width)]
        command = [sys.executable, "-m", "harness.bench.capture_store", *sizes, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the memory bench failed:\n{done.stderr}")
    return float(done.stdout.split()[-1])


def score_capture(rows: int, length: int, vocab: int, width: int, folder: Path) -> float:
    """Capture made-up states, then score others against them row by row, as a measurement does.

    Returns:
        Megabytes that the second step adds to the process, in which everything is loaded and compiled.
    """
    panel, head = made_up_panel(rows, length, vocab), made_up_head(vocab, width, digest=True)
    write_capture(folder / "capture", panel, head)
    capture = open_capture(folder / "capture")
    assert capture.head is not None
    _score(capture, head, panel.rows[:1], folder / "warm")
    return extra_megabytes(lambda: _score(capture, head, panel.rows, folder / "run"))


def write_capture(folder: Path, panel: Panel, head: Head) -> None:
    """Rows of random states with statistics that nobody reads."""
    generator = torch.Generator().manual_seed(29)
    with CaptureWriter(folder, made_up_identity(head), panel, head) as writer:
        for row in panel.rows:
            states = torch.randn(len(row.ids_T), head.weight_VH.shape[1], generator=generator).to(torch.bfloat16)
            writer.write_row(row, Hidden(states_TH=states), made_up_stats(len(row.ids_T) - 1))
        writer.finish()


def _score(capture: Capture, head: Head, rows: Sequence[Row], folder: Path) -> None:
    generator = torch.Generator().manual_seed(31)
    for row in rows:
        stored = capture.row(row.index)
        other = torch.cat([stored.states_TH.float(), torch.zeros(1, head.weight_VH.shape[1])])
        other += 0.05 * torch.randn(other.shape, generator=generator)
        outputs = Hidden(states_TH=other.to(torch.bfloat16))
        write_row(folder, "bench", row, score_row(capture, stored, outputs, head, row))


if __name__ == "__main__":
    row_count, row_length, columns, states_width = map(int, sys.argv[1:5])
    sys.stdout.write(f"{score_capture(row_count, row_length, columns, states_width, Path(sys.argv[5]))}\n")
