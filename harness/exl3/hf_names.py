"""Where each checkpoint tensor goes in a transformers model, by the library's own renaming rules.

transformers renames checkpoint keys per model class and merges per-expert tensors into stacks. Those rules are
replayed here on names alone, so that every tensor has a known place, or `harness.exl3.hf_rules` a reason for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.errors import CheckpointError
from harness.exl3.ranked import rank_of

#: Linears that some model classes hold as one; EXL3 always stores them apart. Order = order of the rows.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
#: Linears that EXL3 stores as one for some classes that hold them apart. Order = order of the output columns.
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "in_proj_qkv": ("q_proj", "k_proj", "v_proj")}
_EXPERT = re.compile(r"^(?P<stack>.*experts)\.(?P<index>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj)$")
_SLICE = re.compile(r"^(?P<module>.*)\.slice\.(?P<index>\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """The place of one packed linear: slot ``slot`` of ``slots`` in the rows of ``param`` (of one expert's, if any).

    ``columns``: the slots divide the input columns instead. ``taken``: the linear is the one that is divided, and
    ``param`` gets its part ``slot``. ``rank``: which of ``ranks`` tensor-parallel slices of the slot it is.
    """

    param: str
    slot: int = 0
    slots: int = 1
    expert: int | None = None
    columns: bool = False
    taken: bool = False
    rank: int = 0
    ranks: int = 1

    @property
    def whole(self) -> bool:
        return self.slots == 1 and self.expert is None and self.ranks == 1


class Names:
    """The renaming rules of one model, which lies on the meta device."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.state: dict[str, torch.Tensor] = model.state_dict()
        # Some rules remember what they have seen: work on copies.
        rules = deepcopy(get_model_conversion_mapping(model))
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._by_pattern = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    def resolve(self, key: str) -> tuple[str, Any, str]:
        """``(renamed key, converter or None, source pattern)`` exactly as the library's loader finds them."""
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        renamed, pattern = rename_source_key(key, self._renamings, self._converters, prefix, self.state)
        if renamed not in self.state and key in self.state:
            renamed, pattern = rename_source_key(key, [], [], prefix, self.state)
        return renamed, None if pattern is None else self._by_pattern[pattern], pattern or ""

    def destination(self, key: str) -> tuple[list[str], Any, str]:
        """``(targets, converter or None, source pattern)`` of the tensor ``key``; no targets where it has no place."""
        renamed, converter, pattern = self.resolve(key)
        if renamed not in self.state:
            return [], None, ""
        if converter is None:
            return [renamed], None, ""
        first, *others = converter.target_patterns
        return [renamed, *(renamed.replace(first, other) for other in others)], converter, pattern

    def filled_by(self, key: str) -> list[str]:
        """Parameters or buffers of the model that the tensor ``key`` fills, alone or with others."""
        return self.destination(key)[0]

    def path_beside(self, module: str, neighbour: str) -> str:
        """The renamed path of ``module`` in the same part of the model as the existing path ``neighbour``."""
        from transformers.core_model_loading import apply_renamings

        prefix = self.model.base_model_prefix
        renamed = apply_renamings(f"{module}.trellis", self._renamings).removesuffix(".trellis")
        home = neighbour.rpartition(".")[0]
        for path in (renamed, f"{prefix}.{renamed}", renamed.removeprefix(f"{prefix}.")):
            if path.startswith(f"{home}."):
                return path
        raise CheckpointError(
            f"{module}: transformers renames it to {renamed}, away from {neighbour}, where its weight belongs",
            "report this architecture",
        )

    def landings(self, module: str, slices: Mapping[str, int]) -> list[Landing]:
        """Places of the packed linear ``module``; empty where the model has none.

        Args:
            slices: number of stored slices, or ranks, of each module that is stored so.
        """
        if (found := rank_of(module)) is not None:
            linear, rank = found
            return [replace(landing, rank=rank, ranks=slices[linear]) for landing in self.landings(linear, slices)]
        param, converter, pattern = self.resolve(f"{module}.weight")
        if param in self.state:
            if converter is None:
                return [Landing(param=param)]
            return [self.converted(f"{module}.weight", param, converter, pattern)]
        return self._sliced(module, slices) or self._expert(module) or self._merged(module) or self._split(module)

    def converted(self, key: str, param: str, converter: Any, pattern: str) -> Landing:
        """The place that ``converter`` gives the tensor ``key`` in ``param``.

        Raises:
            CheckpointError: it does more than stack and join.
        """
        operations = {type(operation).__name__ for operation in converter.operations}
        if not operations <= {"MergeModulelist", "Concatenate", "Transpose"} or len(converter.target_patterns) > 1:
            raise CheckpointError(
                f"{key}: transformers builds {param} with {', '.join(sorted(operations))}, which is not supported",
                "report this architecture",
            )
        from transformers.core_model_loading import apply_renamings

        renamed = apply_renamings(key, self._renamings)
        found = re.search(pattern.replace("*.", r"(?P<expert>\d+)\.", 1), renamed) if "*." in pattern else None
        return Landing(
            param=param,
            slot=converter.source_patterns.index(pattern),
            slots=len(converter.source_patterns),
            expert=None if found is None else int(found["expert"]),
        )

    def _sliced(self, module: str, slices: Mapping[str, int]) -> list[Landing]:
        found = _SLICE.match(module)
        if found is None:
            return []
        whole = found["module"]
        param, _, _ = self.resolve(f"{whole}.weight")
        if param not in self.state:
            return []
        index, count = int(found["index"]), slices[whole]
        return [Landing(param=param, slot=index, slots=count, columns=whole.endswith("down_proj"))]

    def _expert(self, module: str) -> list[Landing]:
        """Per-expert tensors of a class that holds stacks and has no rule for them."""
        found = _EXPERT.match(module)
        if found is None:
            return []
        leaf, expert = found["leaf"], int(found["index"])
        gate_up = leaf != "down_proj"
        param, _, _ = self.resolve(f"{found['stack']}.{'gate_up_proj' if gate_up else 'down_proj'}")
        if param not in self.state:
            return []
        slot = MERGED["gate_up_proj"].index(leaf) if gate_up else 0
        return [Landing(param=param, slot=slot, slots=2 if gate_up else 1, expert=expert)]

    def _merged(self, module: str) -> list[Landing]:
        parent, _, leaf = module.rpartition(".")
        for merged, parts in MERGED.items():
            param, converter, _ = self.resolve(f"{parent}.{merged}.weight")
            if leaf in parts and param in self.state and converter is None:
                return [Landing(param=param, slot=parts.index(leaf), slots=len(parts))]
        return []

    def _split(self, module: str) -> list[Landing]:
        parent, _, leaf = module.rpartition(".")
        parts = FUSED.get(leaf, ())
        params = [self.resolve(f"{parent}.{part}.weight")[0] for part in parts]
        if not all(param in self.state for param in params):
            return []
        return [Landing(param=param, slot=slot, slots=len(parts), taken=True) for slot, param in enumerate(params)]
