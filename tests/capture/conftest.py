"""A tiny teacher of four rows."""

from __future__ import annotations

import pytest
import torch

from tests.capture.made_captures import H, T, Tiny, make_head, make_identity, make_panel


@pytest.fixture
def tiny() -> Tiny:
    panel, head = make_panel([T] * 4), make_head()
    generator = torch.Generator().manual_seed(5)
    states = {i: torch.randn(T, H, generator=generator).to(torch.bfloat16) for i in range(4)}
    return Tiny(panel=panel, head=head, identity=make_identity(head.sha256), states=states)
