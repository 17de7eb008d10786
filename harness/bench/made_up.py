"""Inputs of the bench: seeded random numbers in the shape of real ones, and identities that say so."""

from __future__ import annotations

import numpy as np
import torch

from harness.digest import head_digest, ids_digest
from harness.scoring import TeacherStats
from harness.types import EngineIdentity, Head, Panel, Row


def made_up_logits(positions: int, vocab: int, noise: float = 0.15) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Peaked teacher logits, a candidate with ``noise`` on each, and targets."""
    generator = torch.Generator().manual_seed(7)
    teacher = 2.5 * torch.randn(positions, vocab, generator=generator)
    top = torch.randint(vocab, (positions, 1), generator=generator)
    teacher.scatter_(1, top, 14 + 4 * torch.rand(positions, 1, generator=generator))
    candidate = teacher + noise * torch.randn(positions, vocab, generator=generator)
    return teacher, candidate, torch.randint(vocab, (positions,), generator=generator)


def made_up_head(vocab: int, width: int, *, digest: bool = False) -> Head:
    """A bf16 head whose logits have a spread of a few nats on states of unit variance.

    ``digest`` gives it its true digest, which a capture demands and which takes a second a gigabyte.
    """
    generator = torch.Generator().manual_seed(11)
    weight = torch.empty(vocab, width, dtype=torch.bfloat16)
    for low in range(0, vocab, 8192):
        part = weight[low : low + 8192]
        part.copy_(torch.randn(part.shape, generator=generator) * (2.5 / width**0.5))
    sha256 = head_digest(weight, vocab_size=vocab) if digest else f"made up {vocab} x {width}"
    return Head(weight_VH=weight, vocab_size=vocab, sha256=sha256)


def made_up_stats(positions: int) -> TeacherStats:
    """Statistics of no model: for storage alone."""
    ones, zeros = np.ones(positions), np.zeros(positions, np.int32)
    return TeacherStats(lse=ones, nll=ones, entropy=ones, p_top1=ones, top1=zeros, nonfinite=zeros)


def made_up_panel(rows: int, length: int, vocab: int) -> Panel:
    """Rows of random ids."""
    generator = np.random.default_rng(17)
    ids = generator.integers(0, vocab, (rows, length)).astype(np.int32)
    made = tuple(
        Row(index=i, ids_T=row, document=f"made up {i}", domain="bench", sha256=ids_digest(row))
        for i, row in enumerate(ids)
    )
    digest = ids_digest(ids.ravel())
    return Panel(
        name="bench",
        rows=made,
        sha256=digest,
        recipe_sha256=digest,
        tokenizer_sha256="none",
        tokenizer_name="none",
    )


def made_up_identity(head: Head) -> EngineIdentity:
    """An engine that made nothing: for storage alone."""
    return EngineIdentity(
        engine="bench",
        version="1",
        model="made-up",
        revision="none",
        weights_sha256="none",
        head_sha256=head.sha256,
        tokenizer_sha256="none",
        weights_dtype="bfloat16",
        compute_dtype="bfloat16",
        lane="weights",
        device="cpu",
    )
