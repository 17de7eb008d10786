"""``fidelity bench``: what this machine and this code do, with the project's targets beside the values."""

from harness.bench.run import FULL, TINY, Sizes, bench_json, run_bench
from harness.bench.timing import Figure, Section

__all__ = ["FULL", "TINY", "Figure", "Section", "Sizes", "bench_json", "run_bench"]
