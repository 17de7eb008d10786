"""Which fp32 matrix product to use: the project's own, numpy's BLAS or torch's, by a short probe of their speed.

The product of two fp32 matrices is the bulk of the work through a head, and libraries differ by up to half on some
processors. They also round differently, so the choice is part of what a number depends on: `blas_choice` says it, and
``FIDELITY_BLAS=own``, ``numpy`` or ``torch`` fixes it. A library is taken only when clearly faster, so that the choice
does not flicker between runs, and digits are the same on most machines.
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
from harness.scoring.packed import ROWS, Packed

#: Positions sit at multiples of it in a product, so that a position's digits do not depend on which side it is on.
GROUP = 12
CLEARLY_FASTER = 1.1
OWN = "own"
VARIABLE = "FIDELITY_BLAS"

Multiply = Callable[[np.ndarray, np.ndarray, np.ndarray], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blas:
    """A way to write ``states [R, H] @ tile [W, H].T`` into ``out [R, W]``, all fp32.

    ``stacks``: rows a multiple of ``group`` apart get the same digits, so both sides may share one product.
    ``multiply`` is None for the project's own, `packed.Packed`.
    """

    name: str
    library: str
    gflops: float
    stacks: bool
    multiply: Multiply | None

    @property
    def group(self) -> int:
        """A product's rows start at multiples of it, and are as many."""
        return ROWS if self.multiply is None else GROUP


def _numpy_multiply(states: np.ndarray, tile: np.ndarray, out: np.ndarray) -> None:
    np.matmul(states, tile.T, out=out)


def _torch_multiply(states: np.ndarray, tile: np.ndarray, out: np.ndarray) -> None:
    torch.mm(torch.from_numpy(states), torch.from_numpy(tile).T, out=torch.from_numpy(out))


PRODUCTS: dict[str, Multiply | None] = {OWN: None, "numpy": _numpy_multiply, "torch": _torch_multiply}


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
    """The product used through a head in this process, found once, in about a second."""
    forced = os.environ.get(VARIABLE)
    if forced is not None and forced not in PRODUCTS:
        raise UsageError(f"{VARIABLE}={forced} names no matrix product", f"set it to one of {', '.join(PRODUCTS)}")
    with single_threaded():
        found = _probe()
    if forced is not None:
        return found[forced]
    fastest = max(found.values(), key=lambda blas: blas.gflops)
    return fastest if fastest.gflops > CLEARLY_FASTER * found[OWN].gflops else found[OWN]


def _probe() -> dict[str, Blas]:
    rng = np.random.default_rng(0)
    half = rng.standard_normal((16 * GROUP, 1024), np.float32)
    states, tile = np.concatenate([half, half]), rng.standard_normal((256, 1024), np.float32)
    out = np.empty((len(states), len(tile)), np.float32)
    works = {name: _work(multiply, states, tile, out) for name, multiply in PRODUCTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in PRODUCTS}
    stacks: dict[str, bool] = {}
    for _ in range(6):
        for name, work in works.items():
            start = time.thread_time()  # CPU time: other work on the machine must not decide
            work()
            seconds[name].append(time.thread_time() - start)
            stacks[name] = np.array_equal(out[: len(half)], out[len(half) :])
    flops = 2.0 * states.shape[0] * states.shape[1] * len(tile)
    return {
        name: Blas(
            name=name,
            library=_library(name),
            gflops=1e-9 * flops / min(seconds[name]),
            stacks=stacks[name],
            multiply=multiply,
        )
        for name, multiply in PRODUCTS.items()
    }


def _work(multiply: Multiply | None, states: np.ndarray, tile: np.ndarray, out: np.ndarray) -> Callable[[], None]:
    if multiply is not None:
        return lambda: multiply(states, tile, out)
    packed = Packed(states)  # once for a whole vocabulary
    return lambda: packed.multiply(tile, False, out)


def _library(name: str) -> str:
    """The library behind a product, as far as it can be told."""
    if name == OWN:
        return "compiled by numba"
    if name == "torch":
        return "mkl" if torch.backends.mkl.is_available() else "torch"
    for info in _controller().info():
        if info["user_api"] == "blas" and "numpy" in info["filepath"]:
            return f"{info['internal_api']} {info['version']} {info.get('architecture', '')}".strip()
    return "numpy"
