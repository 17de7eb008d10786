"""Where every tensor of a checkpoint goes in a transformers model: packed, plain, or left out by a named rule.

Shapes and markers in the shard headers decide; config.json is never asked for bits or codebooks. Nothing is read
but headers and nothing is changed but the ties of a head that the checkpoint stores.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.core_model_loading import dot_natural_key

from harness.errors import CheckpointError
from harness.exl3.checkpoint import Checkpoint, PackedModule
from harness.exl3.hf_names import Landing, Names
from harness.exl3.hf_place import PackedPlace, places
from harness.exl3.hf_rules import Rules
from harness.exl3.ranked import rank_of
from harness.exl3.scaled import Scaled
from harness.exl3.tensors import GROUP, RowTable

WRONG_MODEL = "use the config.json that belongs to these shards, or fetch the missing shard"

#: Formats of plain tensors that are codes, not numbers.
_CODES = ("F8", "F6", "F4", "I", "U")


@dataclass(slots=True)
class Accounting:
    """What became of every tensor of the checkpoint: ``used`` names, and ``skipped`` name -> rule."""

    used: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, int]:
        """Number of tensors skipped by each rule."""
        return dict(Counter(self.skipped.values()))


@dataclass(slots=True, kw_only=True)
class Plain:
    """Plain tensors that together fill ``targets``, by transformers' ``converter`` or one alone without.

    ``sources``: ``(checkpoint key, pattern of the converter)`` in the order that the loader takes them.
    """

    targets: list[str]
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Layout:
    """Parameter or buffer name -> what fills it; every name of the model is in one of the mappings, or tied."""

    packed: dict[str, list[PackedPlace]]
    biases: dict[str, list[PackedPlace]]
    tables: dict[str, RowTable]
    plain: dict[str, Plain]
    accounting: Accounting


def plan_layout(names: Names, checkpoint: Checkpoint) -> Layout:
    """Give every tensor its place, or the rule that leaves it out.

    Raises:
        CheckpointError: a tensor without a place or a rule, two for one place, or a parameter that nothing fills.
    """
    accounting = Accounting()
    untie_head(names, checkpoint)
    rules = Rules(names, checkpoint)
    packed = _packed(names, checkpoint, rules, accounting)
    layout = Layout(
        packed=packed,
        biases=dict(_biases(names, packed)),
        tables=_tables(names, checkpoint, rules, accounting),
        plain=_plain(names, checkpoint, rules, accounting),
        accounting=accounting,
    )
    checkpoint.account(accounting.used, accounting.skipped)
    _check_filled(names, layout)
    return layout


def untie_head(names: Names, checkpoint: Checkpoint) -> None:
    """A head that the checkpoint stores is not the embedding, whatever ``tie_word_embeddings`` says."""
    tied, config = names.model.all_tied_weights_keys, names.model.config
    leaves = {target.rsplit(".", 2)[-2] for target in tied if target.endswith(".weight")}
    modules = [*checkpoint.modules, *checkpoint.tables, *(key.removesuffix(".weight") for key in checkpoint.plain)]
    stored = [module for module in modules if module.rpartition(".")[2] in leaves]
    own = {target for module in stored for target in names.filled_by(f"{module}.weight") if target in tied}
    for target in own:
        tied.pop(target)
    if own:
        for holder in {id(c): c for c in (config, config.get_text_config())}.values():
            holder.tie_word_embeddings = False


def wanted_dtype(model: Any, name: str, meta: torch.Tensor) -> torch.dtype:
    """The dtype that the loader gives the parameter ``name``: its own, but for modules kept in float32."""
    for pattern, dtype in model._get_dtype_plan(model.config.dtype).items():
        if re.search(pattern.replace("*", ".*"), name):
            return dtype
    return meta.dtype


def _packed(names: Names, checkpoint: Checkpoint, rules: Rules, accounting: Accounting) -> dict[str, list[PackedPlace]]:
    slices = Counter(name.rpartition(".slice.")[0] for name in checkpoint.modules if ".slice." in name)
    slices.update(found[0] for name in checkpoint.modules if (found := rank_of(name)) is not None)
    landed: dict[str, list[tuple[Landing, PackedModule]]] = defaultdict(list)
    for name in sorted(checkpoint.modules, key=dot_natural_key):
        module = checkpoint.modules[name]
        keys = [part.name for part in module.parts.values()]
        landings = names.landings(name, slices)
        for landing in landings:
            landed[landing.param].append((landing, module))
        if landings:
            accounting.used += keys
        else:
            rule = _rule(names, rules, f"{name}.trellis", f"{name} is quantised, and ")
            accounting.skipped |= dict.fromkeys(keys, rule)
    accounting.used = list(dict.fromkeys(accounting.used))  # experts name the scales that they share
    state, model = names.state, names.model
    return {
        param: places(param, entries, model.get_submodule(param.rpartition(".")[0]), state, model.config)
        for param, entries in landed.items()
    }


def _biases(names: Names, packed: Mapping[str, Sequence[PackedPlace]]) -> Iterator[tuple[str, list[PackedPlace]]]:
    for param, found in packed.items():
        biased = [place for place in found if place.module.has_bias]
        if not biased:
            continue
        bias = f"{param.removesuffix('.weight')}.bias" if param.endswith(".weight") else f"{param}_bias"
        first = biased[0]
        if bias not in names.state or len(biased) != len(found) or first.columns != slice(None):
            raise CheckpointError(f"{first.module.name} has a bias, and the model has no place for it", WRONG_MODEL)
        yield bias, biased


def _tables(names: Names, checkpoint: Checkpoint, rules: Rules, accounting: Accounting) -> dict[str, RowTable]:
    found = {}
    for name, table in checkpoint.tables.items():
        keys = [part.name for part in table.parts.values()]
        param = names.resolve(f"{name}.weight")[0]
        if param not in names.state:
            rule = _rule(names, rules, f"{name}.trellis", f"{name} is a row-wise table, and ")
            accounting.skipped |= dict.fromkeys(keys, rule)
            continue
        _check_table(table, names.state[param])
        if param in names.model.all_tied_weights_keys.values():
            raise CheckpointError(f"{name} is a row-wise table and the head has no tensor of its own", WRONG_MODEL)
        found[param] = table
        accounting.used += keys
    return found


def _check_table(table: RowTable, weight: torch.Tensor) -> None:
    bits, rows, columns = table.bits, table.parts["trellis"].shape[0], table.parts["signs"].shape[0] * GROUP
    if rows < weight.shape[0] or not 0 <= columns - weight.shape[1] < GROUP:
        raise CheckpointError(
            f"{table.name}: a {bits}-bit table of {rows} rows of {columns} does not hold {list(weight.shape)}",
            WRONG_MODEL,
        )


def _plain(names: Names, checkpoint: Checkpoint, rules: Rules, accounting: Accounting) -> dict[str, Plain]:
    found: dict[str, Plain] = {}
    lost: dict[str, str] = {}
    for key in sorted(checkpoint.plain, key=dot_natural_key):
        targets, converter, pattern = names.destination(key)
        scaled = checkpoint.scaled.get(key)
        keys = [key] if scaled is None else [key, scaled.scale.name]
        if not targets:
            rule = rules.excuse(key)
            if rule is None:
                lost[key] = rules.why_not(key)
            accounting.skipped |= dict.fromkeys(keys, rule or "")
            continue
        _check_numbers(checkpoint, key, scaled, names.state[targets[0]])
        accounting.used += keys
        group = found.setdefault(targets[0], Plain(targets=targets, converter=converter))
        if converter is None:
            _check_alone(key, checkpoint.plain[key].shape, names.state[targets[0]], group)
        group.sources.append((key, pattern))
    if lost:
        raise _no_place(names, lost)
    return found


def _no_place(names: Names, lost: Mapping[str, str]) -> CheckpointError:
    """Names the tensors that have no place, and what to do about the first."""
    first, *others = lost
    more = f" (and {len(others)} more: {', '.join(others[:3])}{' ...' if len(others) > 3 else ''})" if others else ""
    return CheckpointError(
        f"{first}{more}: {type(names.model).__name__} has no place for it, and no rule skips it", lost[first]
    )


def _check_numbers(checkpoint: Checkpoint, key: str, scaled: Scaled | None, wanted: torch.Tensor) -> None:
    """Refuse codes where the model wants numbers, unless their scales are known; EXL3 packs have no such tensors."""
    header = checkpoint.plain[key]
    codes = header.dtype.startswith(_CODES) and wanted.is_floating_point()
    if codes and (scaled is None or checkpoint.modules or checkpoint.tables):
        raise CheckpointError(
            f"{key} is {header.dtype}: codes without their scales, which are not read here"
            if scaled is None
            else f"{key} is {header.dtype} with a scale, beside EXL3 tensors: a mixture that is not read here",
            "use a checkpoint whose other weights are bf16 or fp16",
        )


def _check_alone(key: str, shape: Sequence[int], wanted: torch.Tensor, group: Plain) -> None:
    """A tensor that fills one parameter by itself has its shape, and no rival."""
    if tuple(shape) != tuple(wanted.shape):
        raise CheckpointError(f"{key} is {list(shape)}, the model wants {list(wanted.shape)}", WRONG_MODEL)
    if group.sources:
        raise CheckpointError(
            f"{key} and {group.sources[0][0]} are both {group.targets[0]}", "ask the maker which one counts"
        )


def _rule(names: Names, rules: Rules, key: str, start: str) -> str:
    rule = rules.excuse(key)
    if rule is None:
        what = f"{start}{type(names.model).__name__} has no place for it, and no rule skips it"
        raise CheckpointError(what, rules.why_not(key))
    return rule


def _check_filled(names: Names, layout: Layout) -> None:
    plain = [target for group in layout.plain.values() for target in group.targets]
    filled = Counter([*layout.packed, *layout.biases, *layout.tables, *plain])
    if double := sorted(target for target, count in filled.items() if count > 1):
        raise CheckpointError(f"{double[0]} is stored both packed and plain", "ask the maker which one counts")
    unfilled = sorted(set(names.state) - set(filled) - _tied_to(names.model, filled))
    if unfilled:
        raise CheckpointError(
            f"{len(unfilled)} parameters of {type(names.model).__name__} are not in the checkpoint, "
            f"first {unfilled[0]}",
            "they would be random numbers; fetch the missing shard or the right revision",
        )


def _tied_to(model: Any, filled: Mapping[str, int]) -> set[str]:
    """Parameters that are the same tensor as one that the checkpoint fills."""
    pairs = model.all_tied_weights_keys.items()
    return {a for pair in pairs for a, b in (pair, pair[::-1]) if b in filled}
