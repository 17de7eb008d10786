"""Two or more measurements on one panel: paired differences, verdicts, and where the difference lies."""

from harness.compare.build import compare
from harness.compare.model import Comparison, load_comparison, save_comparison

__all__ = ["Comparison", "compare", "load_comparison", "save_comparison"]
