"""A model's output head: of the loaded model or of its checkpoint, and how far a model's own logits are from it.

Engines that run a model in their own kernels give the input of the head; with the checkpoint's own head, multiplied in
float32, their outputs are scored exactly and no rounding of theirs to 16-bit logits is part of the number. That this is
the head which the engine itself applies is looked at on a few tokens, never assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.digest import head_digest
from harness.engines.models import ModelFolder
from harness.errors import EngineError
from harness.exl3.checkpoint import Checkpoint, open_checkpoint
from harness.exl3.decode import dense_weight
from harness.exl3.files import read_json
from harness.types import Head

#: Names of an untied head, and of the embedding it may be tied to, with the prefixes that wrappers put in front.
PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
#: Rows of a head that are converted at a time.
PIECE = 8192
#: Tokens on which a model's logits are held against those of its head.
PROBE = 8
#: Largest |logit - head(input)| that float32 arithmetic leaves of "the head is linear -> scale -> soft-cap".
SEPARABLE = 1e-3
#: Logits that a head is tried on: large enough for any soft-cap in use to show.
LARGEST = 50.0
#: Largest departure from 1 of the slope of an engine's 16-bit logits over ours: rounding averages out in it.
SLOPE = 2e-3


def head_of(model: Any, vocab_size: int | None = None) -> Head:
    """The model's output head with the soft-cap and scale of its config.

    Args:
        vocab_size: columns that are real tokens, where fewer than the config says.
    """
    config = model.config.get_text_config()
    linear = model.get_output_embeddings()
    dense = linear.dense_weight() if hasattr(linear, "dense_weight") else linear.weight
    weight = narrow(dense)
    bias = getattr(linear, "bias", None)
    bias = None if bias is None else bias.detach()
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = head_scale(getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None))
    return _digested(weight, bias, min(vocab_size or config.vocab_size, len(weight)), softcap, scale)


def head_of_folder(folder: Path, vocab_size: int | None = None) -> Head:
    """The head as config.json shapes it.

    Args:
        vocab_size: columns that are real tokens, where fewer than the config says.

    Raises:
        EngineError: the checkpoint holds no head under a known name.
    """
    config = text_config(folder)
    heads = [f"{prefix}lm_head" for prefix in PREFIXES]
    tied = [f"{prefix}embed_tokens" for prefix in PREFIXES]
    return head_at(
        folder,
        [*heads, *tied],
        width=int(config["hidden_size"]),
        columns=int(config["vocab_size"]),
        vocab_size=vocab_size,
        softcap=config.get("final_logit_softcapping"),
        scale=head_scale(config.get("logit_scale"), config.get("logits_scaling")),
    )


def head_at(
    folder: Path,
    names: Sequence[str],
    *,
    width: int,
    columns: int,
    vocab_size: int | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Head:
    """The head under the first of ``names`` that the checkpoint has.

    Args:
        width: hidden size.
        columns: the model's vocabulary size; what the checkpoint holds past it is padding.
        vocab_size: columns that are real tokens, where fewer than ``columns``.
    """
    checkpoint = open_checkpoint(folder)
    found = next((name for name in names if name in checkpoint.modules or f"{name}.weight" in checkpoint.plain), None)
    if found is None:
        raise EngineError(
            f"{checkpoint.name} has no output head under {names[0]}, and no embedding it could be tied to",
            "report the architecture; `fidelity exl3 census` lists its tensors",
        )
    weight, bias = _stored(checkpoint, found, width, columns)
    return _digested(narrow(weight.float()), bias, min(vocab_size or columns, columns, len(weight)), softcap, scale)


def _stored(checkpoint: Checkpoint, name: str, width: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[V, H]`` and bias of a linear, packed or plain."""
    if name in checkpoint.modules:
        linear = checkpoint.linear(name, in_features=width, out_features=columns)
        bias = None if linear.bias is None else linear.bias[:columns]
        return dense_weight(linear), bias
    has_bias = f"{name}.bias" in checkpoint.plain
    return checkpoint.value(f"{name}.weight"), checkpoint.tensor(f"{name}.bias") if has_bias else None


def _digested(
    weight: torch.Tensor, bias: torch.Tensor | None, support: int, softcap: float | None, scale: float
) -> Head:
    weight, softcap = weight.contiguous(), softcap or None
    sha256 = head_digest(weight, vocab_size=support, bias_V=bias, softcap=softcap, scale=scale)
    return Head(weight_VH=weight, vocab_size=support, sha256=sha256, bias_V=bias, softcap=softcap, scale=scale)


def narrow(weight: torch.Tensor) -> torch.Tensor:
    """The same numbers in bf16 where that loses nothing; so a head's digest does not depend on compute dtype.

    A piece at a time: a large head is not held a third time.
    """
    short = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    for low in range(0, len(weight), PIECE):
        piece = weight.detach()[low : low + PIECE]
        short[low : low + PIECE] = piece
        if not torch.equal(short[low : low + PIECE].to(piece.dtype), piece):
            return weight.detach()
    return short


def text_config(folder: Path) -> dict[str, Any]:
    """config.json with the entries of its ``text_config`` on top, where it has one."""
    config = read_json(folder / "config.json")
    nested = config.get("text_config")
    return config | nested if isinstance(nested, dict) else config


def head_scale(factor: float | None, divisor: float | None) -> float:
    """The factor on the logits: Cohere multiplies by ``logit_scale``, Granite divides by ``logits_scaling``."""
    return float(factor or 1.0 / float(divisor or 1.0))


def linear_logits(head: Head, states_TH: torch.Tensor) -> torch.Tensor:
    """Float32 ``[..., V]``: what the head's linear gives, before scale and soft-cap."""
    states, weight = states_TH.float(), head.weight_VH
    pieces = [states @ weight[low : low + PIECE].float().T for low in range(0, len(weight), PIECE)]
    logits = torch.cat(pieces, -1)
    return logits if head.bias_V is None else logits + head.bias_V.float()


def shaped(head: Head, logits: torch.Tensor) -> torch.Tensor:
    """What the head makes of the outputs of its linear."""
    logits = logits * head.scale
    return head.softcap * torch.tanh(logits / head.softcap) if head.softcap else logits


def head_logits(head: Head, states_TH: torch.Tensor) -> torch.Tensor:
    """Float32 logits ``[T, V]`` of a few positions: for checks, not for scoring."""
    return shaped(head, linear_logits(head, states_TH))


def deviation(theirs_TV: torch.Tensor, head: Head, states_TH: torch.Tensor) -> float:
    """Largest |logit - head(input)| over the real tokens of a few positions."""
    return _largest(theirs_TV, head_logits(head, states_TH), head)


def _largest(theirs_TV: torch.Tensor, ours_TV: torch.Tensor, head: Head) -> float:
    support = slice(head.vocab_size)
    return float((theirs_TV.float()[..., support] - ours_TV[..., support]).abs().max())


# ---- a head of the reference: in float32, on the head alone ----------------------------------------------------------


class HeadProbe:
    """Puts float32 in place of what a model's output layer gives: its own product, or logits made up for a trial.

    So all that follows the layer in the model's ``forward`` (scales, soft-caps, masks) computes in float32, and an
    unknown part of a head cannot hide behind the rounding of 16-bit logits.
    """

    def __init__(self, layer: nn.Module, head: Head) -> None:
        self._layer, self._head = layer, head
        #: Largest |output of the layer - linear(input)|, and the rounding that its dtype explains.
        self._off, self._limit = 0.0, 0.0
        self._given: torch.Tensor | None = None

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Answer half of the positions with their product and half with a ramp of logits, and look at the layer."""
        with self._answering(self._trial):
            yield

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Answer with the product in float32, where the layer is linear; else leave it alone."""
        if not self.is_linear:
            yield
            return
        with self._answering(lambda states, _output: linear_logits(self._head, states)):
            yield

    @contextmanager
    def _answering(self, answer: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
        handle = self._layer.register_forward_hook(lambda _module, inputs, output: answer(inputs[0], output))
        try:
            yield
        finally:
            handle.remove()

    def _trial(self, states: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        given = linear_logits(self._head, states)
        columns = slice(min(given.shape[-1], output.shape[-1]))
        self._off = float((output.float()[..., columns] - given[..., columns]).abs().max())
        self._limit = float(given.abs().max()) * (4 * torch.finfo(output.dtype).eps + 1e-4) + 1e-6
        ramp = torch.linspace(-LARGEST, LARGEST, given.shape[-1], device=given.device)
        for position in range(given.shape[-2] // 2, given.shape[-2]):
            given[..., position, :] = ramp.roll(7 * position)
        self._given = given
        return given

    @property
    def is_linear(self) -> bool:
        """Whether the layer itself is linear, to the rounding of its dtype; NaN is not."""
        return self._off <= self._limit

    def deviation(self, theirs_TV: torch.Tensor) -> float:
        """Largest |logit - head(input)| of the trial, in float32.

        Raises:
            EngineError: the model never called its output layer.
        """
        if self._given is None:
            raise EngineError("the model never called its output head", "report the architecture")
        given = self._given.reshape(-1, self._given.shape[-1])
        return _largest(theirs_TV, shaped(self._head, given), self._head)

    def is_separable(self, deviation: float) -> bool:
        """Whether the model's logits are those of its head; NaN is not."""
        return self.is_linear and deviation <= SEPARABLE


# ---- the head of an engine with kernels of its own -------------------------------------------------------------------


def trial_states(head: Head, states_TH: torch.Tensor) -> torch.Tensor:
    """A few states, and the same again so large that their logits reach `LARGEST`: small ones hide a soft-cap."""
    top = float(linear_logits(head, states_TH).abs().max()) * abs(head.scale)
    return torch.cat([states_TH, states_TH * max(1.0, LARGEST / max(top, 1e-6))])


def require_own_head(
    located: ModelFolder, engine: str, theirs_TV: torch.Tensor, head: Head, states_TH: torch.Tensor, instead: str
) -> float:
    """Refuse an engine whose logits are not those of the checkpoint's head; returns the largest deviation.

    Each logit may be off by the rounding of ``theirs_TV``'s own dtype; a scale shows in the slope of all of them.

    Args:
        engine: its name in the message.
        instead: how the model can be measured meanwhile.
    """
    ours = head_logits(head, states_TH)[:, : head.vocab_size]
    theirs = theirs_TV.float()[:, : head.vocab_size]
    off = (theirs - ours).abs()
    rounding = max(4 * torch.finfo(theirs_TV.dtype).eps, 1e-4)
    slope = float((theirs * ours).sum() / ours.square().sum().clamp_min(1e-30))
    fits = bool((off <= rounding * ours.abs().amax(-1, keepdim=True) + 1e-5).all())
    if not (fits and abs(slope - 1) <= SLOPE):
        raise EngineError(
            f"{located.name}: {engine}'s logits differ by {float(off.max()):.3g} from those of the checkpoint's head "
            f"on the same states (slope {slope:.4f})",
            f"report the architecture; {instead}",
        )
    return float(off.max())
