"""``fidelity bench``: what this machine and this code do, with the project's targets beside the values."""

from harness.bench.figure import Figure, Section
from harness.bench.run import FULL, TINY, Sizes, bench_json, run_bench

__all__ = ["FULL", "TINY", "Figure", "Section", "Sizes", "bench_json", "run_bench"]
