"""Front matter: one model-index entry, plain values, other people's lines untouched, and read back as written."""

from __future__ import annotations

import math

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import Refused, UsageError
from harness.report.card_write import BEGIN, END, merged_readme, stale_lines
from harness.report.frontmatter import (
    IndexResult,
    PanelResult,
    dump,
    merged_front,
    our_keys,
    panel_results,
    parse,
    require_plain,
    split_readme,
    task_results,
)


def result(**changes: object) -> PanelResult:
    fields: dict[str, object] = {
        "panel": "open-32x2048",
        "panel_sha256": "12345678901234567890",
        "lane": "weights",
        "estimator": "exact",
        "values": {"kl_divergence": 0.0446, "top1_agreement": 0.91, "perplexity_per_token": 4.25},
        "args": {"positions": 65504, "lane": "weights"},
    }
    return PanelResult(**{**fields, **changes})  # type: ignore[arg-type]


def keys(*results: PanelResult) -> dict[str, object]:
    found = [r for one in results or (result(),) for r in panel_results(one)]
    return our_keys(model_name="quant", base_model="org/teacher", results=found, tags=["exl3"])


EXISTING = """---
# who made it
license: mit   # carried over
base_model: org/teacher
tags:
  - foo
model-index:
- name: their-name
  results:
  - task: {type: text-generation}
    dataset: {name: MMLU, type: cais/mmlu}
    metrics:
    - {type: accuracy, value: 0.5, x_extra: kept}
x_custom: {a: 1}
---

# My model

Some text with --- in it.
"""


def test_round_trip_is_deep_equal() -> None:
    """Render, read with the Hub's own reader, compare."""
    readme = merged_readme(None, "block", keys())
    front, _ = split_readme(readme)
    read = ModelCard(readme).data.to_dict()
    assert read == yaml.safe_load(front)
    assert read["model-index"] == keys()["model-index"]
    assert read["base_model_relation"] == "quantized" and read["base_model"] == "org/teacher"


def test_two_panels_and_a_bound_stay_apart_in_one_entry() -> None:
    """The Hub merges results by task, dataset type, config, split and revision, so these must differ."""
    bound = result(estimator="lower_bound", lane="served", values={"kl_divergence_lower_bound": 0.3})
    index = keys(result(), result(panel="other"), bound)["model-index"]
    assert len(index) == 1  # type: ignore[arg-type]
    results = index[0]["results"]  # type: ignore[index]
    assert len(results) == 3
    assert {r["dataset"]["split"] for r in results} == {"weights", "served-lower-bound"}
    assert all(m["args"]["positions"] == 65504 for r in results for m in r["metrics"])


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        (None, "None"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (np.float64(0.5), "float64"),
        (np.int32(3), "int32"),
        ([None], "None"),
        ((1, 2), "tuple"),
        ({"deep": [{"x": np.bool_(True)}]}, "bool"),
    ],
)
def test_what_yaml_would_spoil_fails_the_render(bad: object, name: str) -> None:
    """None, NaN and numpy scalars never reach a README."""
    with pytest.raises(Refused, match=name):
        require_plain({"results": [1, "a", bad]})
    with pytest.raises(Refused):
        keys(result(args={"value": bad}))


def test_a_nonfinite_kl_cannot_be_carded() -> None:
    with pytest.raises(Refused, match="cannot hold"):
        keys(result(values={"kl_divergence": math.nan}))


@pytest.mark.parametrize(
    "text", ["12345678901234567890", "1e5", "0x1f", "true", "null", "1_000", "2026-01-01", "12e34"]
)
def test_text_stays_text_in_any_yaml_reader(text: str) -> None:
    """A digits-only revision must not become a number."""
    written = dump({"revision": text})
    assert yaml.safe_load(written) == {"revision": text}
    assert written.strip() == f"revision: '{text}'"


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=4), st.text(max_size=12), max_size=4))
def test_any_text_survives_the_dump(value: dict[str, str]) -> None:
    assert yaml.safe_load(dump(value)) == value


def test_an_existing_readme_keeps_every_other_byte() -> None:
    merged = merged_readme(EXISTING, "new block", keys())
    front, body = split_readme(merged)
    for line in ("# who made it", "license: mit   # carried over", "base_model: org/teacher", "x_custom: {a: 1}"):
        assert line in front.splitlines()
    assert body.startswith(split_readme(EXISTING)[1])
    data = parse(front)
    assert data["tags"] == ["foo", "exl3"]
    assert data["model-index"][0]["name"] == "their-name"
    theirs, ours = data["model-index"][0]["results"]
    assert theirs == parse(split_readme(EXISTING)[0])["model-index"][0]["results"][0], "their unknown keys are kept"
    assert ours["dataset"]["type"] == "fidelity-panel"


def test_a_second_render_replaces_our_part_only() -> None:
    first = merged_readme(EXISTING, "old block", keys())
    first = first.replace("# My model", "# My better model")
    second = merged_readme(first, "new block", keys(result(values={"kl_divergence": 0.05})))
    assert "old block" not in second and "new block" in second and "# My better model" in second
    results = parse(split_readme(second)[0])["model-index"][0]["results"]
    assert [m["value"] for m in results[1]["metrics"]] == [0.05]
    assert second.count(BEGIN) == second.count(END) == 1
    assert merged_readme(second, "new block", keys(result(values={"kl_divergence": 0.05}))) == second


def test_windows_line_ends_stay() -> None:
    merged = merged_readme(EXISTING.replace("\n", "\r\n"), "block\nof lines", keys())
    assert "\n" not in merged.replace("\r\n", "")


@pytest.mark.parametrize(
    ("readme", "what"),
    [
        ("---\nmodel-index:\n- name: a\n  results: []\n- name: b\n  results: []\n---\n", "2 entries"),
        ("---\nbase_model: other/model\n---\n", "base_model: other/model"),
        ("---\n{a: 1}\n---\nx", "read back"),
        ("---\n- a\n---\n", "not a mapping"),
        ("---\na: [\n---\n", "not YAML"),
        (f"text\n{BEGIN}\nno end", "markers begin"),
        (f"{END}\n{BEGIN}", "markers end, begin"),
    ],
)
def test_a_readme_that_cannot_be_merged_is_refused_with_a_repair(readme: str, what: str) -> None:
    """Two model-index entries collapse on the Hub; they are refused here."""
    with pytest.raises((UsageError, Refused), match=what) as error:
        merged_readme(readme, "block", keys())
    assert error.value.repair


def test_merged_front_adds_at_the_end_and_keeps_comments_of_neighbours() -> None:
    front = "tags:\n- a\n\n# about the licence\nlicense: mit\n"
    merged = merged_front(front, {"tags": ["exl3"]})
    assert merged == "tags:\n- a\n- exl3\n\n# about the licence\nlicense: mit\n"


def test_stale_lines_name_both_sides() -> None:
    assert stale_lines("a\nb 1\n", "a\nb 2\n") == ["-b 1", "+b 2"]
    assert stale_lines("a\n", "a\n") == []
    assert stale_lines(None, "a") == ["README.md is not there"]


def test_task_results_carry_their_setup() -> None:
    task = IndexResult(
        task="gpqa", dataset="Idavidrein/gpqa", config="gpqa_diamond", split="train", value=0.43, args={}
    )
    written = our_keys(model_name="q", base_model=None, results=task_results([task]))
    assert "base_model_relation" not in written and "base_model" not in written
    [entry] = written["model-index"][0]["results"]
    assert entry["dataset"]["config"] == "gpqa_diamond"
    assert entry["metrics"][0]["args"] == {"measured_by": "exl3-fidelity"}
