"""Statistics and statements through the command: families, shares, power, unequal documents, bounds, cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from harness.panel import load_panel
from tests.compare.fake_arms import World
from tests.fault_cases.command import measured
from tests.fault_cases.entry import Fault
from tests.fault_cases.statements import done, fidelity
from tests.panel.made_panels import make_tokenizer, words
from tests.served.mock_numbers import Faults, Numbers
from tests.served.mock_vllm import MockVllm, serving

_TINY = ("teacher_folder", "exl3_folder", "panel_folder")


def compared(folder: Path, arms: int, documents: int) -> dict[str, Any]:
    """comparison.json of equal candidates against an equal baseline."""
    world = World(rows=documents, length=60, documents=documents)
    runs = [world.run(folder / f"r{i}", f"r{i}", world.columns(0.3, 10 + i)) for i in range(arms + 1)]
    code, said = fidelity(folder, "compare", *runs, "--out", "c")
    assert code == 0, said
    found: dict[str, Any] = json.loads((folder / "c" / "comparison.json").read_text())
    return found


def primary(pair: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = next(line for line in pair["differences"] if line["metric"] == "kl_mean")
    return first


def family(folder: Path) -> None:
    """Five candidates on eight documents: each band is as wide as Bonferroni's t makes it."""
    for pair in compared(folder, 5, 8)["pairs"]:
        line = primary(pair)
        single, band = (line[name]["high"] - line[name]["low"] for name in ("difference", "band"))
        factor = stats.t.ppf(1 - 0.025 / 5, 7) / stats.t.ppf(0.975, 7)
        assert abs(band / single / factor - 1) < 1e-6


def power(folder: Path) -> None:
    """The difference that a panel resolves is found with 80 % power, by the noncentral t."""
    for documents in (6, 16):
        line = primary(compared(folder / str(documents), 1, documents)["pairs"][0])["resolution"]
        df, shift = documents - 1, line["detectable"] / line["deviation"] * documents**0.5
        limit = stats.t.ppf(0.975, df)
        found = stats.nct.sf(limit, df, shift) + stats.nct.cdf(-limit, df, shift)
        assert abs(found - 0.8) < 0.002


def shares(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """Four documents: the share's interval uses t, lies within 0..1, and report and receipt print the same ends."""
    receipt = measured(folder, exl3, teacher, panel, "run")
    found = receipt["intervals"]["top1_agreement"]
    assert "Student's t" in found["method"] and 0 <= found["low"] < found["high"] <= 1
    ends = f"{100 * found['low']:.2f}", f"{100 * found['high']:.2f}"
    line = next(x for x in (folder / "run" / "report.md").read_text().splitlines() if x.startswith("| top-1 agreement"))
    assert all(end.rstrip("0").rstrip(".")[:4] in line for end in ends), line


def unequal_documents(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """The report says that an interval is optimistic exactly where the documents' own spread says so."""
    receipt = measured(folder, exl3, teacher, panel, "run")
    table = pd.read_parquet(folder / "run" / "positions.parquet")
    spread = float(np.log(table.groupby("row")["kl"].mean()).std(ddof=1))
    said = [note for note in receipt["notes"] if "optimistic with documents this unequal" in note]
    assert bool(said) == (spread >= 0.7)
    world = World(rows=8, length=60, documents=8)
    world.difficulty = np.exp(1.0 * np.random.default_rng(3).standard_normal(8))[world.row_N]
    from harness.measure.result import unequal_note
    from harness.types import SCORE_DTYPES, Scores
    from tests.fault_cases import made

    columns = world.columns(0.3, 1)
    scores = Scores(**{name: np.asarray(columns.get(name, np.zeros(len(world.row_N)))) for name in SCORE_DTYPES})
    rows = [made.row([1, 2, 3], index, f"document {index}") for index in range(8)]
    assert unequal_note("made", scores, world.row_N, made.panel(rows))


def strict_bound(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """A served lower bound is at most the exact KL at every position, at any k."""
    exact = measured(folder, exl3, teacher, panel, "exact", "--compute-dtype", "float32")
    assert exact["estimator"] == "exact"
    done(folder, "exl3", "decode", exl3, "--out", "dense")
    numbers = Numbers(AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32).eval(), Faults())
    truth = pd.read_parquet(folder / "exact" / "positions.parquet")["kl"].to_numpy()
    for k in (8, 64, 259):
        with serving(MockVllm(numbers=numbers, fixed_ids=404, folder=exl3.name)) as url:
            measured(folder, exl3, teacher, panel, f"k{k}", "--engine", "vllm", "--k", str(k), "--url", url)
        table = pd.read_parquet(folder / f"k{k}" / "positions.parquet")
        for column in ("kl", "kl_capped"):
            assert (table[column].to_numpy() <= truth * (1 + 1e-6) + 1e-9).all(), (k, column)


NAMED = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"


def chat_panel(folder: Path, tokenizer: Path, rows: int = 1, bos: str = "never") -> Path:
    """A panel of one conversation of several turns, which gives ``rows`` rows of 16 tokens."""
    folder.mkdir()
    chat = [{"role": role, "content": words(30, n)} for n, role in enumerate(("user", "assistant") * 3)]
    (folder / "c.json").write_text(json.dumps({"messages": chat}))
    (folder / "panel.toml").write_text(
        f'name = "p"\ndescription = "chat"\nlicense = "MIT"\ntokenizer = "{tokenizer}"\nrows = {rows}\nlength = 16\n'
        f'seed = 1\nbos = "{bos}"\nnear_duplicates = 1.0\n[[sources]]\nkind = "chat"\ndomain = "chat"\n'
        f'rows = {rows}\nrows_per_document = 99\nlicense = "MIT"\nfiles = ["c.json"]\n'
    )
    return folder


def named_templates(folder: Path) -> None:
    """A tokenizer with several named templates renders by its default one, never plain."""
    for name, template in (
        ("one", NAMED),
        ("named", [{"name": "default", "template": NAMED}, {"name": "tool_use", "template": "T " + NAMED}]),
        ("other", "T " + NAMED),
    ):
        tokenizer = make_tokenizer(folder / f"t-{name}", template=NAMED)
        file = tokenizer / "tokenizer_config.json"
        (tokenizer / "chat_template.jinja").unlink(missing_ok=True)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
        done(folder, "panel", "build", chat_panel(folder / name, tokenizer))
    rows = {name: load_panel(folder / name).rows[0].sha256 for name in ("one", "named", "other")}
    assert rows["named"] == rows["one"] != rows["other"]


def bos_of_a_template(folder: Path) -> None:
    """BOS in every row of a document or in none, whatever the policy."""
    tokenizer = make_tokenizer(folder / "t", template="{{ bos_token }}" + NAMED)
    code, said = fidelity(folder, "panel", "build", chat_panel(folder / "never", tokenizer, rows=9))
    assert code == 3 and "starts with BOS and row" in said and "repair:" in said, said
    done(folder, "panel", "build", chat_panel(folder / "all", tokenizer, rows=9, bos="tokenizer"))
    assert len({int(row.ids_T[0]) for row in load_panel(folder / "all").rows}) == 1


def few_documents(folder: Path) -> None:
    """Two documents give no interval of a mean KL, anywhere; four give one that stays above 0."""
    for documents in (2, 4):
        found = compared(folder / str(documents), 1, documents)
        for arm in found["arms"]:
            interval = arm["metrics"]["kl_mean"]
            if documents == 2:
                assert interval["low"] is None and "fewer than 4 documents" in interval["note"]
            else:
                assert 0 < interval["low"] < interval["high"]


def base_model(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """--base-model fills metadata; the table names the measured teacher. Other people's keys stay as written."""
    measured(folder, exl3, teacher, panel, "run")
    (folder / "card").mkdir()
    (folder / "card" / "README.md").write_text("---\nlicense: mit\nrevision_note: 0012345\n---\n# mine\n")
    done(folder, "card", "run", "--out", "card", "--base-model", "org/other", "--no-pictures")
    text = (folder / "card" / "README.md").read_text()
    assert "base_model: org/other" in text and "revision_note: 0012345" in text
    assert "| **Teacher** | tiny-teacher at" in text


ROWS = [
    Fault(id="C52-family-of-five", title="bands that hardly adjust with few documents", check=family),
    Fault(id="C53-shares-by-t", title="z where t belongs, other ends in the report", check=shares, needs=_TINY),
    Fault(id="C54-unequal-documents", title="optimistic and silent", check=unequal_documents, needs=_TINY),
    Fault(id="C55-power-by-t", title="80 % power that is 61 %", check=power),
    Fault(id="C59-strict-bound", title="a lower bound above the KL", check=strict_bound, needs=_TINY),
    Fault(id="C16-named-templates", title="named chat templates taken for none", check=named_templates),
    Fault(id="C12-bos-of-a-template", title="BOS in a document's first window alone", check=bos_of_a_template),
    Fault(id="C18-few-documents", title="a mean KL of [-0.09, 0.22]", check=few_documents),
    Fault(id="C17-base-model", title="--base-model rewrites the teacher", check=base_model, needs=_TINY),
]
