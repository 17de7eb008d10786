"""GGUF models as llama.cpp takes them: the file itself, never converted.

`harness.engines.models.locate` makes a GGUF file a dense folder, which is right for a teacher. A GGUF quant that is
measured as a candidate goes to llama.cpp as it is.
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from harness.digest import file_digest, json_digest
from harness.engines.models import ModelFolder, package_gguf, refuse_revision, rounded_to
from harness.errors import UsageError
from harness.panel import tokenizer_digest

PACKAGE = "package:"
#: Names of the files of a split model; llama.cpp is given the first one and finds the others beside it.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")


def locate_gguf(source: str, revision: str | None) -> ModelFolder:
    """Find a GGUF model: a file, a folder with one model, or ``package:NAME``.

    Returns:
        A `ModelFolder` whose ``path`` is the (first) GGUF file.

    Raises:
        UsageError: there is none, or more than one.
    """
    if source.startswith(PACKAGE):
        package = source.removeprefix(PACKAGE)
        file = package_gguf(package, revision)
        installed = f"{package}=={importlib.metadata.version(package)}"
        return ModelFolder(path=file, name=file.stem, revision=installed, quantised=rounded_to(file))
    refuse_revision(source, revision)
    path = Path(source).expanduser()
    file = _only_model(path) if path.is_dir() else path
    if not file.is_file() or file.suffix != ".gguf":
        raise UsageError(f"there is no GGUF file {path.name}", "name a .gguf file; fetch one with `hf download`")
    first = gguf_parts(file)[0]
    part = _PART.fullmatch(first.stem)
    name = part["stem"] if part else first.stem
    return ModelFolder(path=first, name=name, revision="local", quantised=rounded_to(first))


def gguf_parts(file: Path) -> list[Path]:
    """Every file of a model, in order: one, or all parts of a split one.

    Raises:
        UsageError: parts are missing.
    """
    part = _PART.fullmatch(file.stem)
    if part is None:
        return [file]
    count = int(part["count"])
    parts = [file.with_name(f"{part['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1)]
    missing = [path.name for path in parts if not path.is_file()]
    if missing:
        raise UsageError(f"{len(missing)} of {count} parts are missing, first {missing[0]}", "fetch them all")
    return parts


def digests_of_gguf(located: ModelFolder) -> tuple[str, str]:
    """Content digests of a model's files and of the tokenizer inside them."""
    parts = [file_digest(path) for path in gguf_parts(located.path)]
    return parts[0] if len(parts) == 1 else json_digest(parts), tokenizer_digest(located.path)


def _only_model(folder: Path) -> Path:
    found = sorted(folder.glob("*.gguf"))
    models = {(_PART.fullmatch(path.stem) or {"stem": path.stem})["stem"] for path in found}
    if len(models) != 1:
        raise UsageError(f"{folder.name} holds {len(models)} GGUF models, not one", "name the .gguf file itself")
    return found[0]
