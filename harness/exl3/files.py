"""Which bytes are a model: the file that gives each tensor, what is left out, the config, and the digests of both.

Everything that reads a checkpoint asks here: digests, whole load, streaming, EXL3, inspection, tasks and exports; so
what ran is what was digested. The index file decides where there is one and its files are there; else
``model.safetensors``, else the numbered series, else all files. Other files are left out and named. Nothing outside
the folder is read, and two different copies of one tensor are refused: loaders disagree about which one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.digest import json_digest
from harness.errors import CheckpointError
from harness.exl3.headers import TensorHeader, read_exact, read_header
from harness.progress import Advance, phase

_NUMBERED = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<total>\d{5})\.safetensors$")
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
#: Bytes of one read of a digest.
_CHUNK = 1 << 22
#: Below this size a digest takes no time worth showing.
_SHOWN_FROM = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The shards of a checkpoint in order, its tensors by name, the weight files left out, and what is odd.

    ``superseded`` counts, by shard, tensors of which the index names another shard.
    """

    folder: Path
    shards: tuple[Path, ...]
    tensors: Mapping[str, TensorHeader]
    left_out: tuple[str, ...]
    superseded: Mapping[str, int]
    notes: tuple[str, ...]


def model_files(folder: Path) -> ModelFiles:
    """Find the weights of a checkpoint folder, EXL3 or plain.

    Raises:
        CheckpointError: no weights, a shard that is missing or damaged, a file outside the folder, two different copies
            of a tensor.
    """
    folder = Path(folder)
    present = _weight_files(folder)
    mapping = _weight_map(folder / INDEX)
    chosen, stale = chosen_files(folder, sorted(present), mapping)
    shards = tuple(present[name] for name in chosen)
    tensors: dict[str, TensorHeader] = {}
    superseded: dict[str, int] = {}
    for path in shards:
        found = read_header(path)
        decided = {name: mapping[name] for name in found if name in tensors and mapping and name in mapping}
        again = [
            name for name in found if name in tensors and decided.get(name) not in (path.name, tensors[name].shard)
        ]
        _same_copies(folder, again, tensors, found)
        for name, shard in decided.items():
            loser = tensors[name].shard if shard == path.name else path.name
            superseded[loser] = superseded.get(loser, 0) + 1
        tensors |= {name: h for name, h in found.items() if name not in tensors or decided.get(name) == path.name}
    beside = {name: read_header(path) for name, path in present.items() if name not in chosen}
    for name, found in beside.items():
        if _adds_to(tensors, found):
            shards, tensors = (*shards, present[name]), tensors | found
    left_out = tuple(name for name in sorted(beside) if present[name] not in shards)
    notes = [f"{name} is no part of the model and was left out" for name in left_out]
    notes += [
        f"{name} holds {count} tensors that the index takes from another file" for name, count in superseded.items()
    ]
    return ModelFiles(
        folder=folder,
        shards=shards,
        tensors=tensors,
        left_out=left_out,
        superseded=superseded,
        notes=(*stale, *notes, *check_complete(folder, chosen, tensors, mapping)),
    )


def _adds_to(tensors: Mapping[str, TensorHeader], found: Mapping[str, TensorHeader]) -> bool:
    """Whether a file that no index names only adds tensors of the same model, as converters ship prediction heads."""
    roots = {name.split(".")[0] for name in tensors} | {"mtp"}
    return bool(found) and all(name not in tensors and name.split(".")[0] in roots for name in found)


def _weight_files(folder: Path) -> dict[str, Path]:
    """Every ``*.safetensors`` of a folder by its name; links may lead into the Hub cache's own store, not elsewhere."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder.name} is not a folder", "give a checkpoint folder")
    paths = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    if not paths:
        raise CheckpointError(
            f"{folder.name} is not a checkpoint: it holds no *.safetensors file", "give the folder with the shards"
        )
    for path in paths.values():
        require_inside(folder, path)
    return paths


def require_inside(folder: Path, path: Path) -> None:
    """Refuse a file that is none, or that a link takes out of the folder; the Hub cache keeps its files beside it.

    Raises:
        CheckpointError: with the name of the link.
    """
    home, real = folder.resolve(), path.resolve()
    cache = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if not (real.is_relative_to(home) or real.is_relative_to(cache)):
        raise CheckpointError(
            f"{folder.name}/{path.name} is a link to a file outside the folder",
            "put the file itself there, or name the folder that it lies in",
        )
    if not path.is_file():
        raise CheckpointError(f"{folder.name}/{path.name} is no file, or a link to nothing", "fetch it again")


def chosen_files(folder: Path, names: Sequence[str], mapping: Mapping[str, str] | None) -> tuple[list[str], list[str]]:
    """The weight files that are the model, and what is wrong with the index."""
    if mapping:
        named = set(mapping.values())
        for name in sorted(named):
            if Path(name).name != name:
                raise CheckpointError(
                    f"{folder.name}/{INDEX} names {name}, outside the folder", "give an index of plain file names"
                )
        if named <= set(names):
            series = {_series(name) for name in named} - {None}
            return [name for name in names if name in named or _series(name) in series], []
        stale = [f"{INDEX} is stale and was not followed: {sorted(named - set(names))[0]} is not there"]
    else:
        stale = []
    if _SINGLE in names:
        return [_SINGLE], stale
    numbered = [name for name in names if _series(name)]
    own = [name for name in numbered if name.startswith("model-")]
    return list(own or numbered or names), stale


def _series(name: str) -> tuple[str, str] | None:
    """``("model", "00005")`` of ``model-00002-of-00005.safetensors``."""
    found = _NUMBERED.match(name)
    return (found["stem"], found["total"]) if found else None


def _same_copies(
    folder: Path, names: Sequence[str], first: Mapping[str, TensorHeader], second: Mapping[str, TensorHeader]
) -> None:
    """Refuse tensors that stand in two shards with different contents."""
    for name in names:
        a, b = first[name], second[name]
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        if not same or _read_digest(folder / a.shard, a) != _read_digest(folder / b.shard, b):
            raise CheckpointError(
                f"{folder.name}: {name} is in {a.shard} and, with other contents, in {b.shard}",
                "loaders disagree about which one counts: remove the stale file",
            )


def check_complete(
    folder: Path, shards: Sequence[str], tensors: Collection[str], indexed: Mapping[str, str] | None
) -> list[str]:
    """Refuse a missing shard; say what is stale in the index file.

    A number that is absent from ``model-00002-of-00005`` names counts as missing unless the index file shows that
    nothing is lost: indices are often stale, so alone they prove nothing.
    """
    lost = sorted(key for key in indexed or () if key not in tensors)
    for stem, total, missing in _gaps(shards):
        name = f"{stem}-{missing:05d}-of-{total:05d}.safetensors"
        if indexed is None or any(indexed[key] == name for key in lost):
            raise CheckpointError(f"{folder.name}: shard {missing} of {total} is missing ({name})", "fetch it")
    notes = []
    if lost:
        notes.append(f"{INDEX} is stale: {len(lost)} of its tensors are in no shard, first {lost[0]}")
    if indexed is not None and (extra := sorted(set(tensors) - indexed.keys())):
        notes.append(f"{INDEX} is stale: it leaves out {len(extra)} tensors, first {extra[0]}")
    return notes


def _weight_map(path: Path) -> dict[str, str] | None:
    return weight_map(path.read_bytes()) if path.is_file() else None


def weight_map(content: bytes) -> dict[str, str]:
    """Which shard an index file names for each tensor.

    Raises:
        CheckpointError: it is no index file.
    """
    try:
        mapping = json.loads(content)["weight_map"]
        return {str(key): str(shard) for key, shard in mapping.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{INDEX} is damaged: {error}", "fetch it again, or delete it") from error


def _gaps(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """``(stem, total, first absent index)`` of every numbered series with a gap."""
    series: dict[tuple[str, int], set[int]] = {}
    for name in names:
        if found := _NUMBERED.match(name):
            series.setdefault((found["stem"], int(found["total"])), set()).add(int(found["index"]))
    gaps = []
    for (stem, total), present in series.items():
        if absent := sorted(set(range(1, total + 1)) - present):
            gaps.append((stem, total, absent[0]))
    return gaps


@contextmanager
def loading_view(files: ModelFiles) -> Iterator[Path]:
    """A folder that holds the model and nothing else, for loaders that choose files by a rule of their own.

    Links to the shards and the other files, and an index that names exactly the resolved tensors.

    Raises:
        CheckpointError: a shard holds old copies, which such a loader would read.
    """
    require_single_copies(files)
    with tempfile.TemporaryDirectory(prefix="fidelity-") as made:
        view = Path(made) / files.folder.resolve().name
        view.mkdir()
        for path in files.folder.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
                (view / path.name).symlink_to(path.resolve())
        for path in files.shards:
            (view / path.name).symlink_to(path.resolve())
        if [path.name for path in files.shards] != [_SINGLE]:
            index = {"metadata": {}, "weight_map": {name: header.shard for name, header in files.tensors.items()}}
            (view / INDEX).write_text(json.dumps(index))
        yield view


def require_single_copies(files: ModelFiles) -> None:
    """Refuse shards with old copies of tensors where a loader reads whole shards, and keeps the last copy.

    Raises:
        CheckpointError: with the shard, and the way that can read it.
    """
    for shard, count in files.superseded.items():
        raise CheckpointError(
            f"{files.folder.name}: {shard} holds {count} tensors that the index takes from another file, and "
            "transformers cannot skip them",
            "run it with --memory-budget auto, which can, or take them out of that shard",
        )


# ---- config.json: what of it the forward pass reads ------------------------------------------------------------------

#: Names of a text model's embedding, and parts of names of others.
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_NOT_TEXT = ("vision", "visual", "audio", "mtp")
_FETCH = "fetch it again, or use the config.json that belongs to these shards"
#: Keys of config.json that no forward pass over given ids reads: names, versions, generation, storage.
NOT_READ = frozenset(
    {
        "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "auto_map", "bad_words_ids",
        "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "decoder_start_token_id",
        "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label",
        "label2id", "length_penalty", "max_length", "max_new_tokens", "min_length", "name_or_path",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences", "output_attentions",
        "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type", "pruned_heads",
        "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
        "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p",
        "use_bfloat16", "use_cache",
    }
)  # fmt: skip


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says of the forward pass: every key but `NOT_READ`, and no EXL3 claims, which are advice.

    A block for the format of dense weights (fp8, awq, ...) stays: it says how to read them.

    Raises:
        CheckpointError: the file is no JSON object.
    """
    file = folder / "config.json"
    require_inside(folder, file)
    return _forward_part(read_json(file))


def check_config(folder: Path) -> dict[str, Any]:
    """config.json as it is, refused where no model can be made of it.

    Raises:
        CheckpointError: absent, empty, a block that is none, or a vocabulary that is not that of the embeddings.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder.name} is not a checkpoint: it has no config.json", "name the folder itself")
    require_inside(folder, file)
    config = read_json(file)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise CheckpointError(f"{folder.name}/config.json names no model_type", _FETCH)
    if not isinstance(config.get("text_config", {}), dict):
        raise CheckpointError(f"{folder.name}/config.json: text_config is no object", _FETCH)
    size = vocabulary_of(config)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise CheckpointError(f"{folder.name}/config.json: vocab_size {size!r} is no number of tokens", _FETCH)
    if size is not None and any(folder.glob("*.safetensors")):
        _check_vocabulary(folder, size)
    return config


def vocabulary_of(config: Mapping[str, Any]) -> Any:
    """``vocab_size`` of the text model; None where the config leaves it to its class."""
    text = config.get("text_config") or {}
    return text.get("vocab_size", config.get("vocab_size"))


def _check_vocabulary(folder: Path, size: int) -> None:
    for name, header in model_files(folder).tensors.items():
        text = name.endswith(_EMBEDDINGS) and not any(part in name for part in _NOT_TEXT)
        if text and len(header.shape) == 2 and header.shape[0] != size:
            raise CheckpointError(
                f"{folder.name}/config.json says vocab_size {size:,}, {name} has {header.shape[0]:,} rows",
                "use the config.json that belongs to these shards",
            )


def require_known_model(folder: Path) -> None:
    """Refuse a config of which transformers makes no model, before anything is run.

    Raises:
        CheckpointError: with the first line of what it says.
    """
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # its own checks raise classes of every kind
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{folder.name}/config.json makes no model: {said}", _FETCH) from error


def _forward_part(block: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in block.items() if key not in NOT_READ}
    claims = kept.get("quantization_config")
    if isinstance(claims, Mapping) and claims.get("quant_method") == "exl3":
        del kept["quantization_config"]
    return {key: _forward_part(value) if isinstance(value, Mapping) else value for key, value in kept.items()}


def config_digest(folder: Path) -> str:
    """SHA-256 of `read_config`; of a GGUF file none is needed, as its metadata are part of its weights digest."""
    return json_digest(read_config(folder)) if folder.is_dir() else ""


def config_differences(teacher: Path, candidate: Path) -> dict[str, tuple[Any, Any]]:
    """Fields of the forward pass in which two models differ, with both values; a format of weights is no difference.

    Defaults are filled in where transformers knows the architecture, so a field that one file leaves out is no
    difference where it has its default in the other.
    """
    sides = [_flat(_with_defaults(folder)) for folder in (teacher, candidate)]
    names = sorted(sides[0].keys() | sides[1].keys())
    return {
        name: (sides[0].get(name), sides[1].get(name)) for name in names if sides[0].get(name) != sides[1].get(name)
    }


def _with_defaults(folder: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config().to_dict()
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        whole = read_json(folder / "config.json")
        whole = whole | whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole
    return {key: value for key, value in _forward_part(whole).items() if key != "quantization_config"}


def _flat(block: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in block.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object beside the shards; empty where the file is absent.

    Raises:
        CheckpointError: the file is there and is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path.name} is not JSON: {error}", "fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} holds a {type(value).__name__}, not an object", "fetch it again")
    return value


# ---- the digest of a checkpoint's tensors: not of shards, names of files or dates ------------------------------------


def weights_digest(folder: Path) -> str:
    """SHA-256 over name, dtype, shape and SHA-256 of the bytes of every tensor, sorted by name.

    Works for EXL3 and plain safetensors folders.

    Raises:
        CheckpointError: not a checkpoint, or a damaged shard.
    """
    files = model_files(folder)
    total = sum(header.bytes for header in files.tensors.values())
    if total < _SHOWN_FROM:
        return _digest(files.shards, files.tensors.values(), lambda items, units: None)
    with phase(f"digest {Path(folder).name}", total=len(files.tensors), unit="MB", item="tensor") as advance:
        return _digest(files.shards, files.tensors.values(), advance)


def _read_digest(path: Path, header: TensorHeader) -> str:
    with path.open("rb") as file:
        return _content(file.fileno(), header)


def _digest(paths: Sequence[Path], tensors: Iterable[TensorHeader], advance: Advance) -> str:
    whole = hashlib.sha256()
    ordered = sorted(tensors, key=lambda header: header.name)
    with ExitStack() as stack:
        files = {path.name: stack.enter_context(path.open("rb")).fileno() for path in paths}
        pool = stack.enter_context(ThreadPoolExecutor(min(8, os.cpu_count() or 1)))
        batches = list(_batches(ordered))
        for batch, parts in zip(batches, pool.map(lambda batch: _contents(files, batch), batches), strict=True):
            for header, part in zip(batch, parts, strict=True):
                whole.update(f"{header.name} {header.dtype} {list(header.shape)} {part}\n".encode())
            advance(len(batch), sum(header.bytes for header in batch) / 1e6)
    return whole.hexdigest()


def _batches(ordered: list[TensorHeader]) -> Iterator[list[TensorHeader]]:
    """Runs of tensors that are worth a task: a pack of experts has 150,000 tensors, most of them small."""
    batch: list[TensorHeader] = []
    size = 0
    for header in ordered:
        batch.append(header)
        size += header.bytes
        if size >= _CHUNK:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _contents(files: Mapping[str, int], batch: list[TensorHeader]) -> list[str]:
    return [_content(files[header.shard], header) for header in batch]


def _content(descriptor: int, header: TensorHeader) -> str:
    digest = hashlib.sha256()
    for start in range(0, header.bytes, _CHUNK):
        size = min(_CHUNK, header.bytes - start)
        digest.update(read_exact(descriptor, size, header.start + start, header.shard))
    return digest.hexdigest()
