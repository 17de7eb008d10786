"""The example's candidate, decoded to dense weights and served by a real vLLM, against our own exact engine.

Two engines, the same weights, float32 on both sides: NLL agree to a thousandth of a nat at every position and the
top-1 everywhere, the bound lies below the exact KL at every position, and what it lacks is in the tail.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from harness.errors import EngineError
from harness.exl3.package import decode_checkpoint
from harness.measure.run import Request, Result, measure
from harness.served.measure import ServedRequest, floor_request, measure_served
from tests.served.real_vllm import require_vllm, vllm_server

ROOT = Path(__file__).parents[2]
TEACHER, PANEL, ROWS = "teachers/smollm2-135m.toml", Path("panels/example"), 3

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def dense() -> Iterator[Path]:
    """The built-in example's candidate as a dense float32 folder."""
    require_vllm()
    from harness.measure.example import example_candidate

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        packed = Path(example_candidate())
        target = packed.with_name(packed.name + "-float32")
        yield target if target.is_dir() else decode_checkpoint(packed, target)


@pytest.fixture(scope="module")
def exact(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    out = tmp_path_factory.mktemp("exact") / "run"
    return measure(Request(candidate=str(dense), teacher=TEACHER, panel=PANEL, rows=ROWS, out=out))


@pytest.fixture(scope="module")
def ask(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ServedRequest]:
    folder = tmp_path_factory.mktemp("served")

    def request(url: str, name: str, **changes: Any) -> ServedRequest:
        settings: dict[str, Any] = {"candidate": str(dense), "teacher": TEACHER, "rows": ROWS, "k": 20} | changes
        return ServedRequest(server="vllm", url=url, panel=PANEL, out=folder / name, **settings)

    return request


@pytest.fixture(scope="module")
def url(dense: Path) -> Iterator[str]:
    with vllm_server(dense) as address:
        yield address


def columns(result: Result) -> dict[str, np.ndarray]:
    table = pq.read_table(result.folder / "positions.parquet")
    return {name: table[name].to_numpy() for name in table.column_names}


@pytest.mark.parametrize("k", [20, 256])
def test_bound_of_a_real_server(url: str, exact: Result, ask: Callable[..., ServedRequest], k: int) -> None:
    result = measure_served(ask(url, f"k{k}", k=k))
    served, ours = columns(result), columns(exact)
    assert np.array_equal(served["target"], ours["target"])
    assert np.abs(served["nll_candidate"] - ours["nll_candidate"]).max() < 1e-3
    assert np.array_equal(served["top1_candidate"], ours["top1_candidate"])
    gap = ours["kl"] - served["kl"]
    # The bound is of the server's numbers, which differ from ours by the rounding of two engines.
    assert gap.min() > -1e-4 and gap.mean() > 0
    # The bound lacks the tail's own divergence, weighted by the tail's mass: no more of one than of the other.
    tail = 1 - served["captured_teacher_mass"]
    assert np.corrcoef(np.log(gap.clip(1e-9)), np.log(tail.clip(1e-9)))[0, 1] > 0.6
    m = result.measurement
    assert m.estimator == "lower_bound" and m.lane == "served" and m.scoring["way"] == "top-k"
    assert m.summary["captured_teacher_mass_mean"] > (0.7 if k == 20 else 0.9)
    assert all(check.passed for check in m.preflight)
    assert any("403" in note for note in m.notes), "why ids of our choice are not scored is told"
    assert "floor" not in m.scoring and "127.0.0.1" not in m.model_dump_json() and str(ROOT) not in m.model_dump_json()


def test_floor_of_the_lane(url: str, dense: Path, exact: Result, ask: Callable[..., ServedRequest]) -> None:
    """The candidate's own dense weights through the server against themselves in our engine."""
    floor = measure_served(floor_request(ask(url, "floor", teacher=str(dense))))
    assert floor.measurement.role == "floor" and 0 <= floor.measurement.summary["kl_mean"] < 1e-5
    run = measure_served(ask(url, "with-floor", floor=floor.folder))
    assert run.measurement.scoring["floor"]["kl_mean"] == floor.measurement.summary["kl_mean"]


def kill_after_first_row(url: str, rows: Path) -> threading.Thread:
    """Kill the server and its workers, without a word, as soon as one row is stored."""
    port = httpx.URL(url).port
    (pid,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN" and c.pid}

    def wait_and_kill() -> None:
        while not list(rows.glob("row-*.parquet")):
            time.sleep(0.01)
        os.killpg(os.getpgid(pid), signal.SIGKILL)

    thread = threading.Thread(target=wait_and_kill, daemon=True)
    thread.start()
    return thread


def test_killed_and_restarted(dense: Path, url: str, ask: Callable[..., ServedRequest]) -> None:
    """The server dies mid-panel; the run ends with the digits of one whose server never died."""
    whole = measure_served(ask(url, "whole"))
    with vllm_server(dense) as dying:
        request = ask(dying, "resumed")
        assert request.out is not None
        killer = kill_after_first_row(dying, request.out / "rows")
        with pytest.raises(EngineError, match="run the same command again"):
            measure_served(request)
        killer.join(timeout=5)
    assert 1 <= len(list(request.out.glob("rows/row-*.parquet"))) < ROWS
    assert not (request.out / "measurement.json").exists()
    resumed = measure_served(ask(url, "resumed"))
    assert resumed.measurement.positions_sha256 == whole.measurement.positions_sha256
    assert resumed.measurement.summary == whole.measurement.summary


def test_a_server_without_the_v2_runner(dense: Path, ask: Callable[..., ServedRequest]) -> None:
    """Started with its token endpoint it refuses ids of our choice with 400: top k it is, and one line says why."""
    with vllm_server(dense, "--enable-scale-out") as address:
        result = measure_served(ask(address, "scale-out", rows=1))
    assert result.measurement.scoring["way"] == "top-k"
    assert any("400" in note for note in result.measurement.notes)
