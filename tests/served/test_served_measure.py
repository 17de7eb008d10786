"""The main job through a server that answers in its documented form from the candidate's real numbers.

The same weights are measured exactly in our own engine beside it, so every number of the served run has its truth.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM

from harness.errors import EngineError, IncomparableError, Refused
from harness.exl3.package import decode_checkpoint
from harness.measure.run import Request, Result, measure
from harness.served.measure import ServedRequest, floor_request, measure_served
from tests.served.mock_numbers import Faults, Numbers
from tests.served.mock_sglang import MockSglang
from tests.served.mock_vllm import MockVllm, serving


@pytest.fixture(scope="session")
def dense(exl3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The EXL3 candidate's decoded weights: what a server without EXL3 kernels can serve."""
    return decode_checkpoint(exl3_folder, tmp_path_factory.mktemp("dense") / "tiny-dense")


@pytest.fixture(scope="session")
def model(dense: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(dense).eval()


@pytest.fixture
def ask(dense: Path, panel_folder: Path, teacher_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes requests about the dense candidate; captures and runs land in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def request(url: str, name: str, **changes: Any) -> ServedRequest:
        settings: dict[str, Any] = {"server": "vllm", "candidate": str(dense), "teacher": str(teacher_folder)}
        return ServedRequest(
            url=url, panel=panel_folder, out=tmp_path / "runs" / name, **{**settings, "k": 16, **changes}
        )

    return request


@pytest.fixture
def exact(ask: Any, dense: Path, panel_folder: Path, teacher_folder: Path, tmp_path: Path) -> Result:
    out = tmp_path / "exact"
    return measure(Request(candidate=str(dense), teacher=str(teacher_folder), panel=panel_folder, out=out))


def columns(result: Result) -> dict[str, np.ndarray]:
    table = pq.read_table(result.folder / "positions.parquet")
    return {name: table[name].to_numpy() for name in table.column_names}


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_top_k_gives_a_lower_bound(server: str, ask: Any, exact: Result, model: Any) -> None:
    """Both wire forms: exact NLL and top-1, a bound below the exact KL that grows with k."""
    means = []
    for k in (4, 16, 64):
        mock = MockSglang(numbers=Numbers(model)) if server == "sglang" else MockVllm(
            numbers=Numbers(model), fixed_ids=403
        )  # fmt: skip
        with serving(mock) as url:
            run = measure_served(ask(url, f"k{k}", k=k, server=server))
        ours, served = columns(exact), columns(run)
        assert np.abs(served["nll_candidate"] - ours["nll_candidate"]).max() < 1e-4
        assert np.array_equal(served["top1_candidate"], ours["top1_candidate"])
        assert np.array_equal(served["agree"], ours["agree"])
        assert (served["kl"] <= ours["kl"] + 1e-6).all() and (served["kl_capped"] <= ours["kl"] + 1e-6).all()
        assert (served["kl_capped"] >= served["kl"] - 1e-6).all()
        means.append(served["kl"].mean())
        assert run.measurement.estimator == "lower_bound" and run.measurement.summary["tv_mean"] is None
    assert means == sorted(means) and means[-1] > 0.5 * columns(exact)["kl"].mean()


def test_fixed_ids_give_an_unbiased_estimate(ask: Any, exact: Result, model: Any) -> None:
    """The teacher's own top ids and ids drawn from its tail: the estimate lies within its interval of the exact KL."""
    with serving(MockVllm(numbers=Numbers(model))) as url:
        run = measure_served(ask(url, "fixed", k=8, tail_samples=16))
    s, truth = run.measurement.summary, exact.measurement.summary["kl_mean"]
    assert run.measurement.scoring["way"] == "fixed ids" and run.measurement.scoring["tail_samples"] == 16
    assert s["kl_mean"] < truth and abs(s["kl_tail_estimate_mean"] - truth) < 3 * s["kl_tail_estimate_se"]
    assert s["kl_tail_estimate_se"] < 0.2 * truth
    served, ours = columns(run), columns(exact)
    z = (served["kl_tail_estimate"] - ours["kl"]) / np.maximum(served["kl_tail_se"], 1e-6)
    assert abs(z.mean()) < 0.3 and np.mean(np.abs(z) < 3) > 0.9


def test_seeds_decide_the_digits(ask: Any, model: Any) -> None:
    with serving(MockVllm(numbers=Numbers(model))) as url:
        runs = [measure_served(ask(url, name, k=8, seed=seed)) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    sums = [run.measurement.positions_sha256 for run in runs]
    assert sums[0] == sums[1] != sums[2]
    assert runs[0].measurement.key == runs[1].measurement.key != runs[2].measurement.key


def test_a_server_that_dies_is_gone_on_with(ask: Any, model: Any) -> None:
    """Rows that came are kept, nothing is scored of the rest, and the digits are the same."""
    with serving(MockVllm(numbers=Numbers(model), fixed_ids=403)) as url:
        whole = measure_served(ask(url, "whole"))
    faults = Faults(delay=0.1)
    numbers = Numbers(model, faults)
    mock = MockVllm(numbers=numbers, fixed_ids=403)
    with serving(mock) as url:
        request = ask(url, "dies")
        rows = request.out / "rows"
        numbers._moved = _dies_once_there_are(1, rows, faults, numbers)  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="run the same command again"):
            measure_served(request)
        assert len(list(rows.glob("row-*.parquet"))) >= 1 and not (request.out / "measurement.json").exists()
        faults.dies_after = None
        del numbers._moved
        again = measure_served(request)
        reused = measure_served(request)
    assert again.measurement.positions_sha256 == whole.measurement.positions_sha256 and reused.reused


def _dies_once_there_are(count: int, rows: Path, faults: Faults, numbers: Numbers) -> Any:
    moved = numbers._moved

    def watching(*given: Any) -> Any:
        if len(list(rows.glob("row-*.parquet"))) >= count and faults.dies_after is None:
            faults.dies_after = 0
        return moved(*given)

    return watching


def test_the_floor_is_said(ask: Any, model: Any, teacher_folder: Path, tmp_path: Path) -> None:
    """The teacher behind the same server against itself; a floor of another question is refused."""
    teacher = AutoModelForCausalLM.from_pretrained(teacher_folder, dtype=model.dtype).eval()
    with serving(MockVllm(numbers=Numbers(teacher), fixed_ids=403)) as url:
        floor = measure_served(floor_request(ask(url, "floor")))
        other = measure_served(floor_request(ask(url, "floor-k4", k=4)))
    assert floor.measurement.role == "floor" and floor.measurement.summary["kl_mean"] < 1e-6
    with serving(MockVllm(numbers=Numbers(model), fixed_ids=403)) as url:
        run = measure_served(ask(url, "run", floor=floor.folder))
        found = measure_served(ask(url, "found"))
        with pytest.raises(IncomparableError, match="k 4, here 16"):
            measure_served(ask(url, "wrong", floor=other.folder))
    assert run.measurement.scoring["floor"]["run"] == "floor" == found.measurement.scoring["floor"]["run"]
    with serving(MockVllm(numbers=Numbers(model), fixed_ids=403)) as url:
        alone = measure_served(ask(url, "../elsewhere/alone"))
    assert "floor" not in alone.measurement.scoring
    from harness.report.run_report import write_report

    assert "is not known; the same row twice: max |difference| 0 nats" in write_report(alone.folder).read_text()


def test_nothing_of_the_host_is_in_a_receipt(ask: Any, model: Any, tmp_path: Path) -> None:
    """Keys hold what the server tells, "unknown" for what it does not, and no address, folder or user."""
    with serving(MockVllm(numbers=Numbers(model), dev_mode=True)) as url:
        run = measure_served(ask(url, "run", candidate=None))
    text = (run.folder / "measurement.json").read_text()
    assert not any(mark in text for mark in ("127.0.0.1", "localhost", "/models/", "/home/", str(tmp_path), "10.9.8.7"))
    told = json.loads(text)["candidate"]
    assert told["model"] == "tiny-candidate" and told["weights_sha256"] == told["tokenizer_sha256"] == "unknown"
    assert told["version"] == "0.33.0" and "unknown" in told["settings"].values()


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (Faults(off_by_one=True), "off by one|shift"),
        (Faults(cached_tokens=64), "no-enable-prefix-caching"),
        (Faults(adds_bos=256), "special tokens"),
        (Faults(cap=8), "max-logprobs"),
        (Faults(context=64), "context"),
        (Faults(leaks_temperature=True), "temperature"),
        (Faults(speculative=True), "speculative"),
    ],
)
def test_faults_are_refused_before_anything_is_scored(faults: Faults, said: str, ask: Any, model: Any) -> None:
    with serving(MockVllm(numbers=Numbers(model, faults), fixed_ids=403)) as url:
        request = ask(url, "faulty")
        with pytest.raises(Refused, match=said) as refusal:
            measure_served(request)
    assert refusal.value.repair and not list(request.out.glob("rows/*.parquet"))
