"""An EXL3 checkpoint on disk, read by shape and marker; config.json is never asked.

`harness.exl3.files` says which files are the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from harness.errors import CheckpointError
from harness.exl3.codebook import MARKERS, Codebook
from harness.exl3.files import model_files, read_json
from harness.exl3.headers import TensorHeader, read_exact
from harness.exl3.layout import TILE, bits_of
from harness.exl3.ranked import check_ranks, lend_scales
from harness.exl3.scaled import Scaled, find_scaled
from harness.exl3.tensors import (
    PARTS,
    Exl3Linear,
    RowTable,
    check_trellis,
    codebook_of,
    require_parts,
)

_SCALES = ("suh", "svh", "su", "sv")
_FETCH = "fetch the missing shard, or the whole checkpoint again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedModule:
    """A quantised linear, or one rank of it, as the headers show it; ``parts`` by suffix (trellis, suh, svh, marker,
    bias), some of them ``lent``: scales that the experts of a layer share.
    """

    name: str
    parts: Mapping[str, TensorHeader]
    codebook: Codebook

    @property
    def bits(self) -> float:
        return bits_of(self.parts["trellis"].shape[-1])

    @property
    def padded_in(self) -> int:
        return self.parts["trellis"].shape[0] * TILE

    @property
    def padded_out(self) -> int:
        return self.parts["trellis"].shape[1] * TILE

    @property
    def weights(self) -> int:
        """Weights coded, padding included."""
        return self.padded_in * self.padded_out

    @property
    def lent(self) -> dict[str, TensorHeader]:
        """The parts that lie under another name, and belong to other modules too."""
        return {suffix: part for suffix, part in self.parts.items() if part.name != f"{self.name}.{suffix}"}

    @property
    def bytes(self) -> int:
        """Bytes of all parts, scales included, but those that are lent."""
        return sum(part.bytes for suffix, part in self.parts.items() if suffix not in self.lent)

    @property
    def has_bias(self) -> bool:
        return "bias" in self.parts

    def meta_parts(self) -> dict[str, torch.Tensor]:
        """Meta tensors of its own parts but the bias, by suffix, in the dtypes they are stored in."""
        own = self.parts.keys() - self.lent.keys() - {"bias"}
        return {suffix: part.as_meta() for suffix, part in self.parts.items() if suffix in own}


@dataclass(kw_only=True)
class Checkpoint:
    """The tensors of a checkpoint, sorted into packed linears, row-wise tables and plain tensors.

    Plain tensors that are 8-bit codes stand in ``scaled`` too, with the scales they are multiplied with.

    ``shards`` is empty where only headers are known (a Hub repository); `linear` and `tensor` then refuse.
    """

    name: str
    tensors: dict[str, TensorHeader]
    config: dict[str, Any]
    shards: list[Path] = field(default_factory=list)
    tensor_storage: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.modules, self.tables, self.plain = _sort(self.tensors)
        check_ranks(self.name, self.modules, self.config)
        self.scaled: dict[str, Scaled] = find_scaled(self.plain, self.quantization)
        for scaled in self.scaled.values():
            del self.plain[scaled.scale.name]
        self._open: dict[str, Any] = {}

    @property
    def quantization(self) -> dict[str, Any]:
        """What config.json says of the quantisation; advisory."""
        for holder in (self.config, self.config.get("text_config")):
            if isinstance(holder, dict) and isinstance(holder.get("quantization_config"), dict):
                return holder["quantization_config"]
        return {}

    def tensor(self, key: str) -> torch.Tensor:
        """A plain tensor, or any stored part, in its stored dtype.

        Raises:
            CheckpointError: no such tensor, or its shard cannot be read.
        """
        header = self.tensors.get(key)
        if header is None:
            raise CheckpointError(f"{self.name} has no tensor {key}", _FETCH)
        try:
            loaded: torch.Tensor = self._file(header.shard).get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{header.shard}: {key} cannot be read: {error}", _FETCH) from error
        return loaded

    def value(self, key: str) -> torch.Tensor:
        """A plain tensor as the numbers that it stands for: codes times their scales, in float32."""
        scaled = self.scaled.get(key)
        return self.tensor(key) if scaled is None else scaled.value(self.tensor(key), self.tensor(scaled.scale.name))

    def linear(self, name: str, *, in_features: int | None = None, out_features: int | None = None) -> Exl3Linear:
        """The packed linear ``name``, checked; sizes default to the padded ones.

        Raises:
            CheckpointError: no such packed linear, or one of its tensors is wrong.
        """
        module = self.modules.get(name)
        if module is None:
            raise CheckpointError(f"{self.name} has no packed linear {name}", _FETCH)
        parts = {suffix: self.tensor(part.name) for suffix, part in module.parts.items()}
        return Exl3Linear.from_tensors(name, parts, in_features=in_features, out_features=out_features)

    def account(self, used: Iterable[str], skipped: Mapping[str, str]) -> None:
        """Every tensor is used or skipped by a named rule, or this is an error.

        Raises:
            CheckpointError: tensors left over, used without being there, or skipped for no reason.
        """
        used = set(used)
        both = sorted(used & skipped.keys())
        unknown = sorted((used | skipped.keys()) - self.tensors.keys())
        left = sorted(self.tensors.keys() - used - skipped.keys())
        unnamed = sorted(key for key, rule in skipped.items() if not rule)
        for keys, what in (
            (unknown, "are not in the checkpoint"),
            (left, "are neither used nor skipped by a rule"),
            (unnamed, "are skipped without a rule"),
            (both, "are both used and skipped"),
        ):
            if keys:
                raise CheckpointError(f"{self.name}: {len(keys)} tensors {what}, first {keys[0]}", _FETCH)

    def _file(self, shard: str) -> Any:
        if not self.shards:
            raise CheckpointError(f"{self.name}: only its headers were read", "download it and give the folder")
        if shard not in self._open:
            path = next(path for path in self.shards if path.name == shard)
            self._open[shard] = safe_open(path, framework="pt")
        return self._open[shard]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers and codebook markers of a checkpoint folder, EXL3 or plain.

    Raises:
        CheckpointError: not a checkpoint, a damaged or missing shard, an impossible or incomplete module.
    """
    folder = Path(folder)
    files = model_files(folder)
    checkpoint = Checkpoint(
        name=folder.resolve().name,
        tensors=dict(files.tensors),
        config=read_json(folder / "config.json"),
        shards=list(files.shards),
        tensor_storage=read_json(folder / "quantization_config.json").get("tensor_storage") or {},
        notes=list(files.notes),
    )
    _check_markers(checkpoint)
    return checkpoint


def has_trellis(folder: Path) -> bool:
    """Whether any shard of the folder holds an EXL3 tensor."""
    return any(name.endswith(".trellis") for name in model_files(folder).tensors)


def _sort(
    tensors: Mapping[str, TensorHeader],
) -> tuple[dict[str, PackedModule], dict[str, RowTable], dict[str, TensorHeader]]:
    """Sort tensors into packed linears, row-wise tables and plain tensors."""
    groups: dict[str, dict[str, TensorHeader]] = defaultdict(dict)
    tables: dict[str, RowTable] = {}
    plain: dict[str, TensorHeader] = {}
    for key, header in tensors.items():
        owner, _, suffix = key.rpartition(".")
        trellis = tensors.get(f"{owner}.trellis")
        if trellis is not None and len(trellis.shape) == 2 and not any(f"{owner}.{p}" in tensors for p in _SCALES):
            tables.setdefault(owner, RowTable(name=owner, parts={})).parts[suffix] = header
        elif suffix in PARTS or trellis is not None:
            groups[owner][suffix] = header
        else:
            plain[key] = header
    return {name: _packed(name, parts) for name, parts in lend_scales(groups).items()}, tables, plain


def _packed(name: str, parts: dict[str, TensorHeader]) -> PackedModule:
    require_parts(name, parts.keys(), _FETCH)
    surplus = sorted(parts.keys() - {*PARTS, "bias"})
    if surplus:
        raise CheckpointError(
            f"{name}: {name}.{surplus[0]} lies beside {name}.trellis, and it is not known which one counts",
            "ask the maker of the quant; if the format has a new part, update this project",
        )
    codebook = codebook_of(name, {marker: MARKERS[marker] for marker in MARKERS if marker in parts})
    trellis = parts["trellis"]
    check_trellis(name, "int16" if trellis.dtype == "I16" else trellis.dtype, trellis.shape, codebook)
    return PackedModule(name=name, parts=parts, codebook=codebook)


def _check_markers(checkpoint: Checkpoint) -> None:
    """Read the value of every marker scalar: they lie side by side at the start of each shard."""
    by_shard: dict[str, list[TensorHeader]] = defaultdict(list)
    for module in checkpoint.modules.values():
        for marker in MARKERS:
            if marker in module.parts:
                by_shard[module.parts[marker].shard].append(module.parts[marker])
    for path in checkpoint.shards:
        with path.open("rb") as file:
            for header in by_shard.get(path.name, ()):
                owner, _, marker = header.name.rpartition(".")
                if header.bytes != 4 or header.elements != 1:
                    raise CheckpointError(
                        f"{owner}: marker {marker} is {header.dtype} {list(header.shape)}, not int32 []", _FETCH
                    )
                value = read_exact(file.fileno(), 4, header.start, path.name)
                codebook_of(owner, {marker: int.from_bytes(value, "little")})
