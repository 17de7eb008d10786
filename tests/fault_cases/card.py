"""What a published card may say, and what becomes of it on the Hub."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from harness.compare import compare
from harness.errors import Refused, UsageError
from harness.measure.receipt import load_measurement
from harness.registration import Registration
from harness.report.card_tables import quality
from harness.report.card_write import merged_readme, stale_lines
from harness.report.frontmatter import PanelResult, dump, our_keys, panel_results, parse, split_readme
from harness.report.run_report import report_text
from harness.report.tables import load_positions
from harness.store import write_receipt
from harness.verify.run import verify_run
from tests.compare.fake_arms import World
from tests.fault_cases.entry import Fault
from tests.fault_cases.report import card_of
from tests.fault_cases.state import with_mean
from tests.report.fake_run import make_frame, write_run


def card_metadata(folder: Path) -> None:
    """What is written is what the Hub's reader finds; None, NaN and numpy scalars fail before it is written."""
    keys = our_keys(model_name="quant", base_model="org/teacher", results=results(), tags=["exl3"])
    (folder / "README.md").write_text(merged_readme(None, "the block", keys))
    read = ModelCard.load(folder / "README.md").data.to_dict()
    assert read["model-index"] == keys["model-index"] and read["base_model"] == "org/teacher"
    for bad in (None, math.nan, math.inf, np.float64(0.1)):
        with pytest.raises(Refused, match="which a model card cannot hold"):
            our_keys(model_name="quant", base_model=None, results=results(kl_divergence=bad))
    with pytest.raises(ValueError, match="model_name"):
        our_keys(model_name=None, base_model=None, results=results())  # type: ignore[arg-type]


def results(revision: str = "1" * 64, **values: Any) -> list[Any]:
    return panel_results(
        PanelResult(
            panel="p",
            panel_sha256=revision,
            lane="weights",
            estimator="exact",
            values={"kl_divergence": 0.1219, "top1_agreement": 0.8877} | values,
            args={"floor": "not measured", "positions": 65504, "kl_interval_95": [0.1, 0.14]},
        )
    )


def selective_reporting(folder: Path) -> None:
    """Every registered bar is listed, 14 of 20 where 16 were to be met too; a larger maximum is marked as worse."""
    plan = Registration.model_validate(
        {
            "primary": {"metric": "kl_mean", "margin": 0.1, "margin_kind": "relative"},
            "bars": [
                {"name": "16 of 20 samples", "metric": "tasks.samples", "relation": ">=", "value": 16},
                {"name": "KL below the base", "metric": "kl_mean", "relation": "<", "reference": "baseline"},
                {"name": "never run", "metric": "tasks.other", "relation": ">", "value": 0.5},
            ],
        }
    )
    block = {"sha256": plan.sha256, "content": plan.model_dump(mode="json"), "commit": None, "committed": None}
    world = World(rows=12, length=40, registration=block)
    base = with_mean(world.columns(0.3, 2), 0.1)
    base["kl"][7], lower = 13.73, base | {"kl": 0.5 * base["kl"]}
    lower["kl"][7] = 14.23
    a = world.run(folder / "a", "A", base)
    summary = load_measurement(a).summary | {"tasks.samples": 14.0, "kl_mean": float(lower["kl"].mean())}
    found = compare([a, world.run(folder / "b", "B", lower, summary=summary)])
    table = quality(found, "B")
    assert table.bars is not None
    assert [(row[0], row[-1]) for row in table.bars.rows] == [
        ("16 of 20 samples", "**not met**"),
        ("KL below the base", "met"),
        ("never run", "not known"),
    ]
    largest = next(row for row in table.rows if row.name == "KL max")
    assert largest.values == ("13.73", "14.23") and largest.worse
    assert "KL max (13.73 to 14.23)" in table.got_worse


def metadata_loss(folder: Path) -> None:
    """Render, parse, deep equal: args stay, a revision of digits stays text, two entries are refused."""
    digits = "12345678" * 8
    keys = our_keys(model_name="quant", base_model="org/teacher", results=results(revision=digits))
    readme = merged_readme("---\nlicense: mit\n---\nText.\n", "the block", keys)
    read = parse(split_readme(readme)[0])
    assert {key: read[key] for key in keys} == keys and read["license"] == "mit"
    result = read["model-index"][0]["results"][0]
    assert result["dataset"]["revision"] == digits and result["metrics"][0]["args"]["positions"] == 65504
    # Digits with one "e" are a number to other readers of YAML: they are quoted.
    power = our_keys(model_name="quant", base_model=None, results=results(revision="1234e567"))
    assert "revision: '1234e567'" in merged_readme(None, "the block", power)
    bound = results()
    for one in bound:
        one.dataset_split = "served-lower-bound"
    both = our_keys(model_name="quant", base_model=None, results=[*results(), *bound])
    assert len(both["model-index"][0]["results"]) == 2, "a bound is not merged with an exact value"
    twice = {"model-index": [*keys["model-index"], *keys["model-index"]]}
    with pytest.raises(UsageError, match="model-index has 2 entries and the Hub keeps only the last"):
        merged_readme("---\n" + dump(twice) + "---\n", "the block", keys)


def dead_evidence(folder: Path) -> None:
    """No path or host in what is published, or it is not written; edited numbers and stale cards are found."""
    for leak in (
        f"{Path.home()}/models/x",
        "/home/somebody/x.safetensors",
        "/Users/me/quants/y",
        str(Path.cwd() / "z"),
    ):
        with pytest.raises(Refused, match="measurement.json would tell the path .* of this machine"):
            write_receipt(folder / "measurement.json", {"teacher": {"model": leak}})
    assert not (folder / "measurement.json").exists()
    write_receipt(folder / "fine.json", {"model": "org/home-grown", "url": "https://host/home/x", "file": "text/a.txt"})
    found = write_run(folder, make_frame(rows=4, length=40))
    report = report_text(found, load_positions(folder), [])
    (folder / "report.md").write_text(report)
    for text in (report, card_of([folder]), (folder / "measurement.json").read_text()):
        for secret in (str(folder), str(Path.home()) + "/", socket.gethostname(), str(Path.cwd())):
            assert secret not in text
    assert not [f.where for f in verify_run(folder).findings if f.where.startswith("summary")]
    raw = json.loads((folder / "measurement.json").read_text())
    raw["summary"]["kl_mean"] *= 0.99
    (folder / "measurement.json").write_text(json.dumps(raw))
    assert any(f.where == "summary.kl_mean" for f in verify_run(folder).findings)
    keys = our_keys(model_name="quant", base_model=None, results=results())
    card = merged_readme(None, "KL 0.3838", keys)
    assert stale_lines(card, card) == []
    assert stale_lines(card, merged_readme(None, "KL 0.3841", keys)) == ["-KL 0.3838", "+KL 0.3841"]


ROWS = [
    Fault(id="A71-card-metadata", title="model-card metadata", check=card_metadata),
    Fault(id="B48-selective-reporting", title="failures left out of a card", check=selective_reporting),
    Fault(id="B50-metadata-loss", title="what the Hub merges and drops", check=metadata_loss),
    Fault(id="B51-dead-evidence", title="host paths and stale cards", check=dead_evidence),
]
