"""Amounts of memory as users write them."""

from __future__ import annotations

import pytest

from harness.engines.open import memory_budget_of
from harness.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("512M", 512 * 10**6),
        ("1.5 gb", 1_500_000_000),
        ("1000", 1000),
        ("1000B", 1000),
        ("2tib", 2**41),
        ("7KiB", 7168),
        (" auto ", "auto"),
        ("AUTO", "auto"),
        (None, None),
    ],
)
def test_sizes(text: str | None, size: int | str | None) -> None:
    assert memory_budget_of(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 cats", "-1G", "0", "0GiB", "1e9", "4GiB please"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="amount of memory"):
        memory_budget_of(text)
