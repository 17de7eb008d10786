"""The built-in example: a genuine EXL3 checkpoint of SmolLM2-135M-Instruct, made on the spot from its own weights.

It is what it is: a 135 M model, a few layers' MLPs at 3 bits by round-to-nearest trellis search without
calibration, everything else left in bf16. It shows the whole job on real weights; it is no quant to deploy.
Its bytes are the same on every machine, so that its answer is known.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.engines.models import locate
from harness.exl3.files import read_json
from harness.exl3.package import MANIFEST
from harness.exl3.quantize import ENCODER, quantize_checkpoint
from harness.exl3.quantize_plan import QuantizeSettings
from harness.measure.teacher import MODELS, read_spec
from harness.names import teacher_source

TEACHER = "smollm2-135m.toml"
#: As many layers' MLPs as let the whole `make panel` end within a minute and a half on two cores.
LAYERS = tuple(range(10, 16))
BITS = 3


def example_candidate() -> str:
    """Folder of the example's candidate; it is made when it is not there yet, and again where an older encoder was."""
    spec = read_spec(Path(teacher_source(TEACHER)))
    source = locate(spec.model, spec.revision, cache=MODELS, weights_dtype=spec.weights_dtype)
    target = MODELS / f"SmolLM2-135M-exl3-{BITS}bit-mlp{LAYERS[0]}-{LAYERS[-1]}"
    manifest = target / MANIFEST
    if manifest.is_file() and read_json(manifest)["identity"]["encoder"] != ENCODER:
        shutil.rmtree(target)
    settings = QuantizeSettings(bits=BITS, modules="mlp", layers=LAYERS)
    quantize_checkpoint(source.path, target, settings)
    return str(target)
