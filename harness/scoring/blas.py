"""Which fp32 matrix product to use: numpy's BLAS or torch's, whichever a short probe finds faster.

The product of two fp32 matrices is the bulk of the work through a head, and the two libraries differ by up to half
on some processors. They also round differently, so the choice is part of what a number depends on: `blas_choice` says
it, and ``FIDELITY_BLAS=numpy`` or ``torch`` fixes it. torch is taken only when clearly faster, so that the choice does
not flicker between runs.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from threadpoolctl import ThreadpoolController

from harness.errors import UsageError

#: Positions sit at multiples of it in a product, so that a position's digits do not depend on which side it is on.
GROUP = 12
CLEARLY_FASTER = 1.1
VARIABLE = "FIDELITY_BLAS"

Multiply = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blas:
    """A way to write ``states [R, H] @ tile [W, H].T`` into ``out [R, W]``, all fp32.

    ``stacks``: rows a multiple of ``GROUP`` apart get the same digits, so both sides may share one product.
    """

    name: str
    library: str
    gflops: float
    stacks: bool
    multiply: Multiply


def _numpy_multiply(states: np.ndarray, tile: np.ndarray, out: np.ndarray) -> None:
    np.matmul(states, tile.T, out=out)


def _torch_multiply(states: np.ndarray, tile: np.ndarray, out: np.ndarray) -> None:
    torch.mm(torch.from_numpy(states), torch.from_numpy(tile).T, out=torch.from_numpy(out))


PRODUCTS: dict[str, Multiply] = {"numpy": _numpy_multiply, "torch": _torch_multiply}


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


@contextmanager
def single_threaded() -> Iterator[None]:
    """One thread in each product: the tiles are what runs in parallel, so digits do not depend on the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _controller().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


@functools.cache
def blas_choice() -> Blas:
    """The product used through a head in this process, found once; takes a few hundredths of a second."""
    forced = os.environ.get(VARIABLE)
    if forced is not None and forced not in PRODUCTS:
        raise UsageError(f"{VARIABLE}={forced} names no matrix product", f"set it to one of {', '.join(PRODUCTS)}")
    with single_threaded():
        found = _probe()
    if forced is not None:
        return found[forced]
    fast = found["torch"].gflops > CLEARLY_FASTER * found["numpy"].gflops
    return found["torch" if fast else "numpy"]


def _probe() -> dict[str, Blas]:
    rng = np.random.default_rng(0)
    half = rng.standard_normal((16 * GROUP, 1024), np.float32)
    states, tile = np.concatenate([half, half]), rng.standard_normal((256, 1024), np.float32)
    out = np.empty((len(states), len(tile)), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in PRODUCTS}
    stacks: dict[str, bool] = {}
    for _ in range(6):
        for name, multiply in PRODUCTS.items():
            start = time.thread_time()  # CPU time: other work on the machine must not decide
            multiply(states, tile, out)
            seconds[name].append(time.thread_time() - start)
            stacks[name] = np.array_equal(out[: len(half)], out[len(half) :])
    work = 2e-9 * states.shape[0] * states.shape[1] * len(tile)
    return {
        name: Blas(
            name=name,
            library=_library(name),
            gflops=work / min(seconds[name]),
            stacks=stacks[name],
            multiply=multiply,
        )
        for name, multiply in PRODUCTS.items()
    }


def _library(name: str) -> str:
    """The library behind a product, as far as it can be told."""
    if name == "torch":
        return "mkl" if torch.backends.mkl.is_available() else "torch"
    for info in _controller().info():
        if info["user_api"] == "blas" and "numpy" in info["filepath"]:
            return f"{info['internal_api']} {info['version']} {info.get('architecture', '')}".strip()
    return "numpy"
