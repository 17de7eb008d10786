"""``make fuzz``: thousands of damaged inputs through the command, each in a process of its own that began warm.

    python -m tests.fuzz.run [--count 2000] [--seed 1] [--workers 2]

Every input ends in a result, a refusal in one line, or is counted as what it must not be: a traceback or an unforeseen
error, a hang, or a changed record that `verify` takes for whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.inputs import KINDS, Kind, change, copy_of, make_base

#: Seconds after which a command hangs.
PATIENCE = 10.0
OUTCOMES = ("done", "a bar not met", "usage", "refused", "TRACEBACK", "HANG", "CHANGED BUT ACCEPTED")


@dataclass(frozen=True)
class Outcome:
    """What one input came to; ``said`` is the end of what was printed."""

    kind: str
    outcome: str
    command: str
    file: str
    how: str
    seed: int
    said: str


def one(base: Path, seed: int, folder: Path) -> Outcome:
    """Damage one file and run one command on it."""
    rng = random.Random(seed)
    kind = rng.choice(KINDS)
    work = copy_of(base, folder)
    files = sorted({file for pattern in kind.files for file in work.glob(pattern)})
    file = rng.choice(files)
    before = file.read_bytes()
    how = change(file, rng)
    command = rng.choice(kind.commands)
    code, said = run(command, work)
    outcome = judged(kind, code, said, before, file)
    name = file.relative_to(work).as_posix()
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(kind.name, outcome, " ".join(command), name, how, seed, said[-400:])


def judged(kind: Kind, code: int, said: str, before: bytes, file: Path) -> str:
    if code == -signal.SIGKILL:
        return "HANG"
    if "Traceback (most recent call last)" in said or "a fault of ours" in said or code < 0 or code not in (0, 1, 2, 3):
        return "TRACEBACK"
    if code == 0 and kind.sealed and file.is_file() and differs(before, file.read_bytes()):
        return "CHANGED BUT ACCEPTED"
    return ("done", "a bar not met", "usage", "refused")[code]


def differs(before: bytes, after: bytes) -> bool:
    """Whether a record says something else; blanks and the order of its keys do not count."""
    try:
        return bool(json.loads(before) != json.loads(after))
    except ValueError:
        return before != after


def run(command: tuple[str, ...], work: Path) -> tuple[int, str]:
    """The command in a forked process: its exit code, minus the signal that ended it, and what it printed."""
    output = work / "said.txt"
    child = os.fork()
    if child == 0:
        in_child(command, work, output)
    end, status = time.monotonic() + PATIENCE, None
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.01)
    else:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    said = output.read_text(errors="replace") if output.exists() else ""
    assert status is not None
    return (-os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)), said


def in_child(command: tuple[str, ...], work: Path, output: Path) -> None:
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    code = 70
    try:
        os.chdir(work)
        sys.argv = ["fidelity", *command]
        from harness.cli import main

        main()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0) if not isinstance(ended.code, str) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def campaign(count: int, seed: int, workers: int, base: Path, show: bool = False) -> list[Outcome]:
    """``count`` inputs, shared among forked workers; the same seed gives the same inputs."""
    folder = base.parent
    children = []
    for worker in range(workers):
        child = os.fork()
        if child == 0:
            work(range(seed * 1_000_000 + worker, seed * 1_000_000 + count, workers), base, folder, worker, show)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    found = []
    for worker in range(workers):
        lines = (folder / f"worker-{worker}.jsonl").read_text().splitlines()
        found += [Outcome(**json.loads(line)) for line in lines]
    return found


def work(seeds: range, base: Path, folder: Path, worker: int, show: bool) -> None:
    start = time.monotonic()
    with (folder / f"worker-{worker}.jsonl").open("w") as file:
        for number, seed in enumerate(seeds, 1):
            outcome = one(base, seed, folder / f"work-{worker}")
            file.write(json.dumps(outcome.__dict__) + "\n")
            file.flush()
            if show and worker == 0 and number % 50 == 0:
                each = (time.monotonic() - start) / number
                left = each * (len(seeds) - number)
                print(f"fuzz: input {number}/{len(seeds)}, {1 / each:.1f}/s, {left:.0f} s left", file=sys.stderr)


def table(found: list[Outcome]) -> str:
    """Inputs by kind and outcome, as Markdown."""
    counts = Counter((one.kind, one.outcome) for one in found)
    lines = ["| inputs | " + " | ".join(OUTCOMES) + " |", "|---|" + "---:|" * len(OUTCOMES)]
    for name in (*(kind.name for kind in KINDS), "all"):
        cells = [sum(n for (k, o), n in counts.items() if o == what and name in (k, "all")) for what in OUTCOMES]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def preload() -> None:
    """What the commands import, once for all of them."""
    import torch

    torch.set_num_threads(1)
    import harness.cli
    import harness.compare
    import harness.exl3.hf
    import harness.measure.run
    import harness.report.card_write
    import harness.report.html
    import harness.tasks.run
    import harness.verify  # noqa: F401


def bad(found: list[Outcome]) -> list[Outcome]:
    return [one for one in found if one.outcome in OUTCOMES[4:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory() as made:
        found = campaign(asked.count, asked.seed, asked.workers, make_base(Path(made)), show=True)
    print(table(found), end="")
    for one in bad(found):
        print(f"\n{one.outcome}: {one.kind}, seed {one.seed}: {one.command} after {one.how} in {one.file}\n{one.said}")
    sys.exit(1 if bad(found) else 0)


if __name__ == "__main__":
    main()
