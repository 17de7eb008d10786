"""The whole map in one page: what flows from a panel to a verdict.

Shape suffixes: T positions or tokens of one row, V vocabulary, H hidden size, K known ids.
Divergences are KL(teacher || candidate) in nats. Position ``t`` of a row predicts its token ``t + 1``,
so a row of ``T`` tokens has ``T - 1`` scored positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

import numpy as np
import torch

from harness.errors import CaptureError
from harness.records import Strict

Lane = Literal["weights", "served"]
Estimator = Literal["exact", "lower_bound"]
Want = Literal["hidden", "logits"]
#: What an engine or a server does not tell of itself; never a default in its place.
UNKNOWN = "unknown"


class Check(Strict):
    """One line of a preflight or a verification: its name, whether it passed, its figure, and what it means."""

    name: str
    passed: bool
    figure: str
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One context of a panel: ``ids_T`` int32 token ids cut from one document."""

    index: int
    ids_T: np.ndarray
    document: str
    domain: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """An ordered, sealed set of rows; ``sha256`` covers every token id in order."""

    name: str
    rows: tuple[Row, ...]
    sha256: str
    recipe_sha256: str
    tokenizer_sha256: str
    tokenizer_name: str
    unit: Literal["document", "row"] = "document"
    registration_sha256: str | None = None
    #: Of all that its seal says, `harness.panel.seal.Lock.fields_sha256`; ``sha256`` is of the token ids alone.
    seal_sha256: str = ""

    @property
    def positions(self) -> int:
        """Scored positions of all rows together."""
        return sum(len(row.ids_T) - 1 for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """``logits = softcap(scale * (h @ weight_VH.T + bias_V))`` on the first ``vocab_size`` columns.

    ``weight_VH`` keeps the dtype it is stored in (bf16, fp16 or fp32); products are made in fp32.
    Columns at and past ``vocab_size`` are padding: never part of a softmax, their mass is reported.
    ``sha256`` is the digest of the tensor contents (``harness.digest.head_digest``).
    """

    weight_VH: torch.Tensor
    vocab_size: int
    sha256: str
    bias_V: torch.Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """Inputs of the head, one per token (the last token's is there too): ``[T, H]``."""

    states_TH: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """Unnormalised log-probabilities, one row per token: ``[T, V]``."""

    logits_TV: torch.Tensor


Outputs = Hidden | Logits


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedRow:
    """One row; every array has an entry per scored position (``T - 1``), the outputs too. ``lse`` is of the logits.

    Nats throughout.
    """

    index: int
    outputs: Outputs
    target: np.ndarray
    top1: np.ndarray
    nll: np.ndarray
    p_top1: np.ndarray
    lse: np.ndarray
    entropy: np.ndarray

    @property
    def states_TH(self) -> torch.Tensor:
        """Hidden states [T-1, H] of a capture of the hidden form."""
        if not isinstance(self.outputs, Hidden):
            raise CaptureError(
                f"row {self.index} holds {type(self.outputs).__name__}, not hidden states",
                "score it by the function for that form",
            )
        return self.outputs.states_TH


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOutputs:
    """What an engine gave for one row, with the ids it says it ran."""

    index: int
    echoed_ids_T: np.ndarray
    outputs: Outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineIdentity:
    """All that could move a number. ``model`` is a Hub id or a folder's base name, never a path."""

    engine: str
    version: str
    model: str
    revision: str
    weights_sha256: str
    head_sha256: str
    tokenizer_sha256: str
    weights_dtype: str
    compute_dtype: str
    lane: Lane
    device: str
    settings: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    config_sha256: str = UNKNOWN
    #: The format that the weights were rounded to before they were read (``Q4_1``, ``FP8``); empty where none is known.
    quantised: str = ""


class Engine(Protocol):
    """Runs a model over rows. An iterator, so it may stream layer by layer or keep requests in flight."""

    @property
    def identity(self) -> EngineIdentity: ...

    @property
    def head(self) -> Head | None:
        """The model's own head where it is separable (outputs are then `Hidden`)."""
        ...

    @property
    def head_deviation(self) -> float | None:
        """Largest |logit - head(input)| on a few tokens of this run; None where the model gives logits alone."""
        ...

    def run(self, rows: Sequence[Row], want: Want) -> Iterator[RowOutputs]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Per-position results of one row (or several, concatenated); every array has ``T`` entries.

    KL, NLL and entropy in nats. ``agree`` counts a candidate choice that ties with the teacher's set of
    top tokens; ``agree_lowest_id`` compares the lowest top id of both. ``rank`` is the 1-based rank of the
    teacher's top-1 in the candidate. ``outside_*`` is the probability mass on padding columns.
    """

    kl: np.ndarray
    kl_reverse: np.ndarray
    nll_teacher: np.ndarray
    nll_candidate: np.ndarray
    entropy_teacher: np.ndarray
    entropy_candidate: np.ndarray
    top1_teacher: np.ndarray
    top1_candidate: np.ndarray
    agree: np.ndarray
    agree_lowest_id: np.ndarray
    tied_teacher: np.ndarray
    tied_candidate: np.ndarray
    p_top1_teacher: np.ndarray
    nonfinite_teacher: np.ndarray
    nonfinite_candidate: np.ndarray
    tv: np.ndarray
    top5_overlap: np.ndarray
    rank: np.ndarray
    outside_teacher: np.ndarray
    outside_candidate: np.ndarray

    def __len__(self) -> int:
        return len(self.kl)

    @classmethod
    def concatenate(cls, parts: Sequence[Scores]) -> Scores:
        """Join the scores of several rows in the order given."""
        return cls(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)})


#: dtype of each array of `Scores`, and so of the columns of positions.parquet.
SCORE_DTYPES: Mapping[str, str] = {
    "kl": "float64",
    "kl_reverse": "float64",
    "nll_teacher": "float64",
    "nll_candidate": "float64",
    "entropy_teacher": "float64",
    "entropy_candidate": "float64",
    "top1_teacher": "int32",
    "top1_candidate": "int32",
    "agree": "bool",
    "agree_lowest_id": "bool",
    "tied_teacher": "bool",
    "tied_candidate": "bool",
    "p_top1_teacher": "float64",
    "nonfinite_teacher": "int32",
    "nonfinite_candidate": "int32",
    "tv": "float64",
    "top5_overlap": "int8",
    "rank": "int32",
    "outside_teacher": "float64",
    "outside_candidate": "float64",
}
