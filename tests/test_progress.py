"""Progress where there is no terminal: lines at the start, regularly, and at the end; no other library's bars."""

from __future__ import annotations

import subprocess
import sys
import time

from harness import progress


def test_a_phase_that_does_nothing_for_long_still_says_so(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    with progress.phase("teacher", total=2, unit="tokens") as advance:
        advance(1, 10)
        time.sleep(0.2)
        advance(1, 10)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "teacher: 2 rows" and lines[-1].startswith("teacher: row 2/2, ")
    assert 2 <= sum(line.startswith("teacher: row 1/2, ") for line in lines) <= 6


def test_a_quick_phase_of_many_items_is_two_lines(capsys):
    with progress.phase("candidate", total=500, unit="tokens") as advance:
        for _ in range(500):
            advance(1, 1)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_bars_of_other_libraries_are_silent():
    code = "from harness.start import settle; settle()\nimport tqdm\nlist(tqdm.tqdm(range(3)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
