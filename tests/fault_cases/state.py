"""Caches, order, batches, engines, devices, noise: what must not move a number, or must be seen when it does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from harness.capture import Capture, CaptureWriter, open_capture
from harness.compare import compare
from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.environment import current_source_digest, source_digest
from harness.errors import CaptureError, IncomparableError, Refused, ScoreError
from harness.measure.repeat import difference_of
from harness.measure.rows import finished_rows, write_row
from harness.measure.run import Candidate, Request, measurement_key
from harness.measure.teacher import Reproduction, Yardstick, ends, reproduce
from harness.report.comparison_report import markdown
from harness.report.words import reason, warnings
from harness.scoring import score_logits, teacher_stats
from harness.types import Hidden, Logits, Panel, Row
from tests.compare.fake_arms import World, side
from tests.engines.toy import ToyEngine
from tests.fault_cases import made
from tests.fault_cases.entry import Fault
from tests.fault_cases.identity import engine_of
from tests.measure.checked import check_engine

COUNTING = made.row([i % 16 for i in range(40)])


def states(engine: TransformersEngine, rows: list[Row]) -> list[torch.Tensor]:
    outputs = [out.outputs for out in engine.run(rows)]
    assert all(isinstance(out, Hidden) for out in outputs)
    return [out.states_TH for out in outputs if isinstance(out, Hidden)]


def random_row(length: int, seed: int, start: np.ndarray | None = None) -> Row:
    ids = np.random.default_rng(seed).integers(0, 256, length)
    if start is not None:
        ids[: len(start)] = start
    return made.row(ids.tolist(), seed)


class Changed(ToyEngine):
    """The toy engine with its outputs changed on the way out; ``change`` also gets the number of the request."""

    def __init__(self, change: object, **options: float) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._change = change

    def run(self, rows, want="logits"):  # type: ignore[no-untyped-def]
        for number, out in enumerate(super().run(rows, want)):
            logits = self._change(out.outputs.logits_TV, number)  # type: ignore[operator]
            yield replace(out, outputs=Logits(logits_TV=logits))


class Remembering(Changed):
    """A prefix cache gone wrong: a row changes where another row with its first eight tokens ran before it."""

    def run(self, rows, want="logits"):  # type: ignore[no-untyped-def]
        seen: dict[bytes, bytes] = {}
        for row, out in zip(rows, super().run(rows, want), strict=True):
            before = seen.get(row.ids_T[:8].tobytes(), row.ids_T.tobytes())
            seen[row.ids_T[:8].tobytes()] = row.ids_T.tobytes()
            off = 0.01 * torch.arange(16) * (before != row.ids_T.tobytes())
            yield replace(out, outputs=Logits(logits_TV=out.outputs.logits_TV + off))


def world_runs(folder: Path, noise: dict[str, float], world: World | None = None) -> list[Path]:
    world = world or World(rows=20, length=40)
    return [world.run(folder / n, n, world.columns(level, 2 + i)) for i, (n, level) in enumerate(noise.items())]


def with_mean(columns: dict[str, np.ndarray], mean: float) -> dict[str, np.ndarray]:
    """The same columns with KL scaled to a given mean."""
    return columns | {"kl": columns["kl"] * (mean / columns["kl"].mean())}


def prefix_cache(folder: Path, teacher_folder: Path) -> None:
    """r0, r1 (64 tokens in common), r0 again: equal bits; an engine that remembers is found out."""
    r0 = random_row(96, 1)
    r1 = random_row(96, 2, r0.ids_T[:64])
    first, _, again = states(engine_of(teacher_folder), [r0, r1, r0])
    assert torch.equal(first, again)
    honest = {check.name: check for check in check_engine(ToyEngine(), COUNTING)}
    assert honest["the same row twice"].passed and honest["the same row twice"].figure == "max |difference| 0"
    remembering = Remembering(lambda logits, number: logits)
    found = {check.name: check for check in check_engine(remembering, COUNTING)}["the same row twice"]
    assert not found.passed and found.figure.startswith("max |difference| 0.1") and "noise" in found.note


def speculative(folder: Path) -> None:
    """An engine whose log-probabilities are all 0.0."""
    with pytest.raises(ScoreError, match="NLL = 0 on 100% of positions\n.*turn off speculative decoding"):
        check_engine(ToyEngine(p=1.0), COUNTING)


def off_by_one(folder: Path) -> None:
    """P(next = current + 1) = 0.9: NLL 0.105 where aligned, above 2 where shifted, and shifted is refused."""
    out = next(iter(ToyEngine().run([COUNTING]))).outputs
    assert isinstance(out, Logits)
    aligned = teacher_stats(out.logits_TV[:-1], COUNTING.ids_T[1:]).nll
    assert aligned == pytest.approx([0.105361] * 39, abs=1e-6)
    assert teacher_stats(out.logits_TV[1:], COUNTING.ids_T[1:]).nll.mean() > 2
    for by in (-1, 1):
        with pytest.raises(ScoreError, match="outputs are off by one: mean NLL shift -1"):
            check_engine(Changed(lambda logits, _, by=by: logits.roll(by, dims=0)), COUNTING)
    assert check_engine(ToyEngine(), COUNTING)


def batch_composition(folder: Path, teacher_folder: Path) -> None:
    """A row alone and among seven longer ones: largest difference 0; batch 1 and no cache stand in the identity."""
    engine = engine_of(teacher_folder)
    row, longer = random_row(40, 1), [random_row(60 + i, 2 + i) for i in range(7)]
    (alone,), among = states(engine, [row]), states(engine, [*longer[:4], row, *longer[4:]])[4]
    assert float((alone - among).abs().max()) == 0.0
    assert engine.identity.settings["batch"] == 1 and engine.identity.settings["kv_cache"] is False
    head, moved = engine.head, alone + 0.02 * torch.arange(alone.shape[1])
    near = difference_of(Hidden(states_TH=alone), Hidden(states_TH=moved), head, row.ids_T[1:])
    assert not near.equal and near.largest > 1e-3


def engine_floor(folder: Path) -> None:
    """A floor of 0.0115 and an 8-bit candidate of 0.0124: at the floor, printed, not ranked."""
    world = World(rows=20, length=40)
    b = with_mean(world.columns(0.3, 2), 0.0124)
    more = 0.0016 + 0.0004 * np.random.default_rng(0).standard_normal(len(b["kl"]))
    a = b | {"kl": b["kl"] + more}  # surely worse than B, by more than the margin
    floor = world.run(folder / "floor", "teacher", with_mean(world.columns(0.3, 2), 0.0115))
    found = compare([world.run(folder / "a", "A", a), world.run(folder / "b", "B", b)], floor=floor)
    assert [arm.at_floor for arm in found.arms] == [True, True]
    first = found.pairs[0].primary
    assert first.verdict == "undecided" and "at the floor" in reason(found, found.pairs[0], first)
    text = markdown(found)
    assert "B is at the floor" in text and "teacher (floor)" in text and "0.01150" in text
    bare = compare([folder / "a", folder / "b"])
    assert bare.pairs[0].primary.verdict == "better" and "no floor was measured" in markdown(bare)


def foreign_floor(folder: Path) -> None:
    """Another lane's or panel's floor says nothing here."""
    runs = world_runs(folder, {"A": 0.3, "B": 0.25})
    world, other = World(rows=20, length=40), World(rows=20, length=40, panel_sha256="b" * 64)
    served = world.run(folder / "served", "floor", world.columns(0.1, 4), lane="served")
    with pytest.raises(IncomparableError, match="same lane: 'weights' and 'served'"):
        compare(runs, floor=served)
    with pytest.raises(IncomparableError, match="same panel: aaaaaaaaaaaaaaaa and bbbbbbbbbbbbbbbb"):
        compare(runs, floor=other.run(folder / "other", "floor", other.columns(0.1, 4)))


def launch_noise(folder: Path) -> None:
    """One engine twice differs by 8.7e-4: a difference of 5e-4 is not claimed, one of 2e-3 is."""
    world = World(rows=20, length=40)
    base = with_mean(world.columns(0.3, 2), 0.004)
    shifts = {"small": -5e-4, "large": -2e-3}
    runs = {n: world.run(folder / n, n, base | {"kl": base["kl"] + d}) for n, d in shifts.items()}
    a = world.run(folder / "a", "A", base)
    floor = world.run(folder / "floor", "again", with_mean(world.columns(0.1, 5), 8.7e-4))
    found = {name: compare([a, run], floor=floor) for name, run in runs.items()}
    assert found["small"].references[0].kl.estimate == pytest.approx(8.7e-4)
    small = found["small"].pairs[0].primary
    told = reason(found["small"], found["small"].pairs[0], small)
    assert small.verdict == "undecided" and "smaller than the floor of 0.00087 nats" in told
    assert found["large"].pairs[0].primary.verdict == "better"
    assert compare([a, runs["small"]]).pairs[0].primary.verdict == "better", "without a floor nobody knows"


def other_device(folder: Path) -> None:
    """A100 against H200: said beside the difference, and part of the key."""
    world = World(rows=20, length=40)
    runs = [
        world.run(folder / n, n, world.columns(0.3, 2), candidate=side("X", device=device))
        for n, device in (("a", "NVIDIA A100"), ("b", "NVIDIA H200"))
    ]
    found = compare(runs)
    assert "a and b ran with another device (NVIDIA A100 and NVIDIA H200): part of the difference" in warnings(found)
    row = made.row([1, 2])
    stored = made.capture(folder / "c", [row], [made.logits((0.5, 0.2, 0.3), (0.5, 0.2, 0.3))], None)
    keys = [key(stored, [row], device=device) for device in ("cpu", "cuda")]
    assert keys[0] != keys[1]


def key(
    stored: object, rows: list[Row], *, weights: str = "w" * 64, device: str | None = None, **options: object
) -> str:
    """The key of a measurement of these rows."""
    request = Request(candidate="x", panel=Path("p"), device=device, **options)  # type: ignore[arg-type]
    candidate = Candidate(
        located=ModelFolder(path=Path("m.gguf"), name="m", revision="local"),
        weights_sha256=weights,
        tokenizer_sha256="t",
    )  # type: ignore[arg-type]
    yardstick = Yardstick(folder=Path("p"), panel=made.panel(rows), rows=rows, teacher=stored)  # type: ignore[arg-type]
    return measurement_key(request, candidate, yardstick)


def run_again(stored: Capture, engine: made.Replay, panel: Panel) -> Reproduction:
    """The first and the last captured row once more, held against the store."""
    rows = ends(stored, panel)
    return reproduce(stored, engine, rows, engine.run(rows))


def arithmetic_lane(folder: Path) -> None:
    """Every argmax equal and yet 0.05 nats off: both are told, and the tolerance stays."""
    p = made.logits(*[(0.6, 0.3, 0.1)] * 9)
    row = made.row([1] * 9)
    stored = made.capture(folder, [row], [p], None)
    low = 0.3 * np.exp(-0.05)
    drifted = made.logits(*[(0.6 * (1 - low) / 0.7, low, 0.1 * (1 - low) / 0.7)] * 9)
    with pytest.raises(CaptureError, match=r"top1_exact_all_rows, max \|change of NLL\| 0.05 nats"):
        run_again(stored, made.Replay(Logits(logits_TV=drifted)), made.panel([row]))
    found = run_again(stored, made.Replay(Logits(logits_TV=p)), made.panel([row]))
    assert found.top1_exact and found.max_nll_change < 1e-6 and found.positions == 8


def mutable_code(folder: Path) -> None:
    """Our own source is read again before the receipt is written."""
    assert len(current_source_digest()) == 64
    p, rows = made.logits((0.5, 0.5), (0.5, 0.5)), [made.row([0, 1])]
    with pytest.raises(Refused, match="own code was changed while it ran"):
        made.receipt(folder / "a", rows, [p], [p], source_at_end=lambda: "another")
    assert not (folder / "a" / "run" / "measurement.json").exists()
    assert made.receipt(folder / "b", rows, [p], [p]).environment["source_sha256"] == source_digest()


def teacher_first(folder: Path) -> None:
    """A stored teacher with one flipped argmax, or an NLL 1 % off, stops before the candidate."""
    generator = torch.Generator().manual_seed(3)
    through = made.head(torch.randn(40, 16, generator=generator))
    row, inputs = made.row(list(range(30))), 0.3 * torch.randn(30, 16, generator=generator)
    right = teacher_stats(inputs[:-1], row.ids_T[1:], through)
    flipped = right.top1.copy()
    flipped[11] = (flipped[11] + 1) % 40
    changed = {"same": right, "flip": replace(right, top1=flipped), "nll": replace(right, nll=right.nll * 1.01)}
    engine, whole = made.Replay(Hidden(states_TH=inputs), through), made.panel([row])
    for name, stored in changed.items():
        with CaptureWriter(folder / name, engine.identity, whole, through, "hidden", "float32") as writer:
            writer.write_row(row, Hidden(states_TH=inputs), stored)
            writer.finish()
    assert run_again(open_capture(folder / "same"), engine, whole).top1_exact
    with pytest.raises(CaptureError, match="the teacher does not reproduce its capture: .* top-1 differs"):
        run_again(open_capture(folder / "flip"), engine, whole)
    with pytest.raises(CaptureError, match=r"top1_exact_all_rows, max \|change of NLL\| 0.0684 nats"):
        run_again(open_capture(folder / "nll"), engine, whole)


def response_cache(folder: Path) -> None:
    """A's rows in the same folder do not answer for B; everything that can move a number is in the key."""
    p = made.logits(*[(0.5, 0.2, 0.3)] * 3)
    row = made.row([1, 2, 0])
    stored = made.capture(folder / "c", [row], [p], None)
    base = key(stored, [row])
    assert base == key(stored, [row])
    others = [
        key(stored, [row], weights="v" * 64),
        key(stored, [made.row([1, 2, 1])]),
        key(stored, [row], compute="bfloat16"),
        key(stored, [row], packed=True),
        key(made.capture(folder / "d", [row], [p.flip(1)], None), [row]),
    ]
    with mock.patch("harness.measure.teacher.environment", lambda: {"torch": "another"}):
        others.append(key(stored, [row]))
    with mock.patch("harness.measure.teacher.source_digest", lambda: "another"):
        others.append(key(stored, [row]))
    assert len({base, *others}) == 1 + len(others)
    scores = score_logits(p[:2], p[:2], row.ids_T[1:])
    write_row(folder / "rows", base, row, scores)
    assert finished_rows(folder / "rows", base) == {0}
    with pytest.raises(Refused, match="holds rows of another measurement that was begun there"):
        finished_rows(folder / "rows", others[0])


ROWS = [
    Fault(
        id="A34-prefix-cache",
        title="results that depend on what ran before",
        check=prefix_cache,
        needs=("teacher_folder",),
    ),
    Fault(id="A35-speculative", title="logprob 0.0 for every token", check=speculative),
    Fault(id="A37-off-by-one", title="shifted log-probabilities", check=off_by_one),
    Fault(
        id="A40-batch-composition",
        title="batch composition changes logits",
        check=batch_composition,
        needs=("teacher_folder",),
    ),
    Fault(id="A41-engine-floor", title="the engine's own floor is not zero", check=engine_floor),
    Fault(id="A51-response-cache", title="a cache not keyed by the model", check=response_cache),
    Fault(id="B20-foreign-floor", title="another lane's floor subtracted", check=foreign_floor),
    Fault(id="B28-launch-noise", title="noise between launches of one engine", check=launch_noise),
    Fault(id="B30-other-device", title="numbers differ between GPUs", check=other_device),
    Fault(id="B33-arithmetic-lane", title="argmax parity and drift are two things", check=arithmetic_lane),
    Fault(id="B38-mutable-code", title="code replaced while it runs", check=mutable_code),
    Fault(id="B41-teacher-first", title="reproduce the teacher first", check=teacher_first),
]
