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
    heads,
    identity,
    intervals,
    models,
    numeric,
    placement,
    report,
    sent,
    served,
    serving,
    state,
    statements,
    stats,
    storage,
    support,
    tasks,
    ways,
)
from tests.fault_cases.entry import Fault

CLASSES = (
    identity,
    ways,
    support,
    numeric,
    state,
    aggregate,
    storage,
    stats,
    report,
    card,
    tasks,
    serving,
    served,
    statements,
    placement,
    models,
    heads,
    sent,
    intervals,
)
ROWS: list[Fault] = [row for module in CLASSES for row in module.ROWS]

FAULTS = Path(__file__).parents[1] / "../shared/FAULTS.md"
FAULTS_2 = FAULTS.with_name("FAULTS_2.md")
#: Entries of list C that nobody has mended yet, by the issue that will.
OPEN = {
    12: (*range(21, 36), 37, 39),
    13: (41, 42, 43, 45, 46, 47, 49, 50, 51),
}


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


def entries_of_list_c() -> list[str]:
    """The numbers of FAULTS_2.md: an entry begins with ``C7 `` at the start of a line or of a sentence."""
    if not FAULTS_2.is_file():
        pytest.skip("FAULTS_2.md is not here")
    found = re.findall(r"(?:^|\. )C(\d+) ", FAULTS_2.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [f"C{number}" for number in dict.fromkeys(found)]


def test_every_entry_is_a_row() -> None:
    known = entries()
    assert len(known) == len(set(known)) > 90
    assert sorted({row.key for row in ROWS if row.key[0] in "AB"}) == sorted(known)


def test_every_entry_of_list_c_is_a_row_or_still_open() -> None:
    """A mended entry has one row or more (one a path); it leaves ``OPEN`` when all of it is mended."""
    known = entries_of_list_c()
    assert known == [f"C{number}" for number in range(1, 61)]
    still = {f"C{number}" for numbers in OPEN.values() for number in numbers}
    mended = {row.key for row in ROWS if row.key[0] == "C"}
    assert mended | still == set(known)


def test_rows_are_named_after_their_entry() -> None:
    assert len({row.id for row in ROWS}) == len({row.check for row in ROWS}) == len(ROWS)
    assert all(re.fullmatch(r"[ABC]\d+(-[a-z0-9]+)+", row.id) and row.title for row in ROWS)
