"""The fault log: faults that really happened to people who measure how far a quantised model is from its teacher.

Each is one row, named after its entry in the project's list (FAULTS.md, which lies beside the repository where it is
developed): a list and a number, which a row's id keeps.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fault_cases import (
    aggregate,
    card,
    identity,
    numeric,
    report,
    served,
    serving,
    state,
    stats,
    storage,
    support,
    tasks,
)
from tests.fault_cases.entry import Fault

CLASSES = (identity, support, numeric, state, aggregate, storage, stats, report, card, tasks, serving, served)
ROWS: list[Fault] = [row for module in CLASSES for row in module.ROWS]

FAULTS = Path(__file__).parents[1] / "../shared/FAULTS.md"


@pytest.mark.parametrize("fault", ROWS, ids=lambda fault: fault.id)
def test_fault(fault: Fault, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    fault.check(tmp_path, *(request.getfixturevalue(name) for name in fault.needs))


def entries() -> list[str]:
    """The numbers of FAULTS.md with their list: ``**21.`` in list A, a line that begins with ``21. **`` in list B."""
    if not FAULTS.is_file():
        pytest.skip("FAULTS.md is not here")
    first, second = FAULTS.read_text(encoding="utf-8").split("# List B")
    a = re.findall(r"^\*\*(\d+)\.", first, flags=re.MULTILINE)
    b = re.findall(r"^(\d+)\. \*\*", second, flags=re.MULTILINE)
    return [f"A{number}" for number in a] + [f"B{number}" for number in b]


def test_every_entry_is_a_row() -> None:
    known = entries()
    assert len(known) == len(set(known)) > 90
    assert sorted(row.key for row in ROWS) == sorted(known)


def test_rows_are_named_after_their_entry() -> None:
    assert len({row.id for row in ROWS}) == len({row.check for row in ROWS}) == len(ROWS)
    assert all(re.fullmatch(r"[AB]\d+(-[a-z0-9]+)+", row.id) and row.title for row in ROWS)
