"""The built-in example: a genuine EXL3 checkpoint of SmolLM2-135M-Instruct, made on the spot from its own weights.

It is what it is: a 135 M model, a few layers' MLPs at 3 bits by round-to-nearest trellis search without
calibration, everything else left in bf16. It shows the whole job on real weights; it is no quant to deploy.
"""

from __future__ import annotations

from pathlib import Path

from harness.engines.models import locate
from harness.errors import UsageError
from harness.exl3.quantize import quantize_checkpoint
from harness.exl3.quantize_plan import QuantizeSettings
from harness.measure.teacher import MODELS, read_spec

TEACHER = Path("teachers/smollm2-135m.toml")
#: As many layers' MLPs as let the whole `make panel` end within five minutes on two cores.
LAYERS = tuple(range(10, 16))
BITS = 3


def example_candidate() -> str:
    """Folder of the example's candidate; it is made when it is not there yet."""
    if not TEACHER.is_file():
        raise UsageError(f"{TEACHER} is not here", "run this in the project's folder, or name a candidate")
    spec = read_spec(TEACHER)
    source = locate(spec.model, spec.revision, cache=MODELS, weights_dtype=spec.weights_dtype)
    target = MODELS / f"SmolLM2-135M-exl3-{BITS}bit-mlp{LAYERS[0]}-{LAYERS[-1]}"
    settings = QuantizeSettings(bits=BITS, modules="mlp", layers=LAYERS)
    quantize_checkpoint(source.path, target, settings)
    return str(target)
