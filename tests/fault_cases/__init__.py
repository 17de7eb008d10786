"""The checks behind tests/test_fault_log.py: one function an entry of the list, in a module a class of fault."""

import pytest

CLASSES = (
    "identity",
    "models",
    "support",
    "numeric",
    "state",
    "aggregate",
    "storage",
    "stats",
    "report",
    "card",
    "tasks",
    "serving",
    "statements",
    "command",
    "placement",
    "heads",
    "ways",
    "sent",
    "intervals",
)
pytest.register_assert_rewrite(*(f"tests.fault_cases.{name}" for name in CLASSES))
