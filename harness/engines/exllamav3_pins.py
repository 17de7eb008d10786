"""The environment variables that pin exllamav3's kernels: set before its import, and recorded with every number."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from typing import Any

from packaging.version import Version

from harness.errors import EngineError

OLDEST = "1.6"
#: Defaults of a measurement; one that is set already keeps its value, and either way the value is recorded.
#: Sums in float32 on GeForce cards too; no int8 activations for rows of a few tokens; one way of making weights dense
#: for all rows longer than 144 tokens; and no addition left pending between modules, which streaming cannot carry.
PINS = {
    "EXL3_HGEMM_F16ACC": "0",
    "EXL3_INT8_GEMV": "0",
    "EXL3_NO_FUSED_RECONSTRUCT": "1",
    "EXL3_HC_FOLD": "0",
}
#: What streaming cannot do: experts in a helper process.
FORBIDDEN = ("EXL3_MOE_CPU_OFFLOAD", "EXL3_MOE_CPU_SPLIT")
#: A value that can be shown: a number or a word, never a path.
_PLAIN = re.compile(r"[\w.+-]{0,32}")

HOW = (
    "on a machine with CUDA, nvcc and a compiler: pip install torch, then pip install exllamav3==1.6.5 "
    "(or a prebuilt wheel of its GitHub releases)"
)


def pins() -> dict[str, str]:
    """The pinned variables and every other ``EXL3_*`` one, as an import now would find them."""
    found = PINS | {name: value for name, value in os.environ.items() if name.startswith("EXL3_")}
    return {name: value if _PLAIN.fullmatch(value) else "set" for name, value in sorted(found.items())}


def installed_version() -> str:
    """The version of the installed exllamav3, without importing it.

    Raises:
        EngineError: it is not installed.
    """
    try:
        return importlib.metadata.version("exllamav3")
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineError("exllamav3 is not installed", HOW) from error


def import_pinned() -> tuple[Any, dict[str, str]]:
    """Import exllamav3 with its kernels pinned.

    Returns:
        The package, and the variables to record.

    Raises:
        EngineError: it is missing, cannot be imported here, was imported before with other pins, or is told to
            compute experts on the CPU.
    """
    asked = [name for name in FORBIDDEN if os.environ.get(name, "0") not in ("", "0")]
    if asked:
        raise EngineError(f"{asked[0]} is set, and modules that are streamed one by one run on the GPU", "unset it")
    unpinned = [name for name, value in PINS.items() if os.environ.get(name) is None]
    if "exllamav3" in sys.modules and unpinned:
        raise EngineError(
            f"exllamav3 was imported before {unpinned[0]} was set, and it reads it once",
            "start a fresh process, or set the variable before the import",
        )
    for name, value in PINS.items():
        os.environ.setdefault(name, value)
    try:
        return _recent(importlib.import_module("exllamav3")), pins()
    except ModuleNotFoundError as error:
        if error.name != "exllamav3":
            raise EngineError(f"exllamav3 cannot be imported: {error}", f"pip install {error.name}") from error
        raise EngineError("exllamav3 is not installed", HOW) from error
    except (ImportError, OSError, RuntimeError) as error:
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise EngineError(f"exllamav3 cannot be imported here: {first}", HOW) from error


def _recent(package: Any) -> Any:
    """Refuse a version whose modules are loaded in another way than this project's streaming does."""
    if Version(package.__version__) < Version(OLDEST):
        raise EngineError(f"exllamav3 {package.__version__} is too old: {OLDEST} or newer is needed", HOW)
    return package
