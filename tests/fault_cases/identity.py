"""Whose tokens, whose text, whose template, whose weights."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.compare import compare
from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.open import open_engine
from harness.errors import CheckpointError, EngineError, IncomparableError, PanelError, ScoreError
from harness.measure.preflight import check_echo, check_not_degenerate
from harness.measure.result import SAME_MODEL
from harness.panel import build_panel, check_tokenizer, load_tokenizer, tokenizer_digest
from harness.panel.chat import clock_at
from harness.panel.contamination import quoted_rows
from harness.report.words import warnings
from harness.scoring import teacher_stats
from harness.types import Hidden, Logits, Panel, RowOutputs
from tests.compare.fake_arms import World
from tests.fault_cases import made
from tests.fault_cases.entry import Fault
from tests.panel.made_panels import TEMPLATE, make_panel, make_tokenizer, words

TEXT = '[[sources]]\nkind = "text"\ndomain = "a"\nrows = 1\nlicense = "none"\nfiles = ["0.txt"]\n'
CHAT = '[[sources]]\nkind = "chat"\ndomain = "chat"\nrows = 1\nlicense = "none"\nfiles = ["c.json"]\n'
CLOCK = (
    "{% if date_string is defined %}{{ date_string }}{% else %}{{ strftime_now('%d %b %Y') }}{% endif %}\n"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def build(folder: Path, tokenizer: Path, text: str | bytes = "", **keys: str | bool) -> Panel:
    """A panel of one text, built and sealed."""
    body = str(keys.pop("body", TEXT))
    return build_panel(
        make_panel(folder, files={"0.txt": text or words(60, 0)}, body=body, tokenizer=str(tokenizer), **keys)
    )


def chat(folder: Path, tokenizer: Path, extra: str = "", **keys: str | bool) -> Panel:
    """A panel of one conversation, built and sealed."""
    messages = [{"role": "user", "content": words(14, 1)}, {"role": "assistant", "content": words(16, 2)}]
    text = json.dumps({"messages": messages})
    files: dict[str, str | bytes] = {"c.json": text}
    return build_panel(make_panel(folder, files=files, body=CHAT + extra, tokenizer=str(tokenizer), rows=1, **keys))


def echo(ids: list[int]) -> RowOutputs:
    nothing = Logits(logits_TV=torch.zeros(len(ids), 9))
    return RowOutputs(index=0, echoed_ids_T=np.array(ids, np.int32), outputs=nothing)


def engine_of(folder: Path) -> TransformersEngine:
    located = ModelFolder(path=folder, name=folder.name, revision="local")
    return open_engine(located, weights_sha256="w" * 64, tokenizer_sha256="t" * 64)


def bos_missing(folder: Path) -> None:
    """What an engine ran is held against [bos, 5, 6, 7]; a panel without the BOS it should have is not built."""
    row = made.row([2, 5, 6, 7])
    check_echo(row, echo([2, 5, 6, 7]))
    with pytest.raises(EngineError, match="row 0: the engine ran token 9 at index 2, the panel has 6"):
        check_echo(row, echo([2, 5, 9, 7]))
    with pytest.raises(EngineError, match="row 0: the engine ran 3 tokens, the panel has 4"):
        check_echo(row, echo([5, 6, 7]))
    tokenizer = make_tokenizer(folder / "t", add_bos=True)
    with pytest.raises(PanelError, match=r"missing BOS at row 0 \(0\.txt\): the tokenizer adds 0"):
        build(folder / "never", tokenizer, bos="never")
    assert build(folder / "right", tokenizer, bos="tokenizer").rows[0].ids_T[0] == 0


def bos_twice(folder: Path) -> None:
    """The template writes a BOS and the policy adds one: refused, unless the recipe says that it is meant."""
    tokenizer = make_tokenizer(folder / "t", add_bos=True, template=TEMPLATE)
    with pytest.raises(PanelError, match=r"double BOS at row 0 \(c\.json\): it starts with \[0, 0\]"):
        chat(folder / "p", tokenizer, bos="always")
    meant = chat(folder / "q", tokenizer, bos="always", allow_double_bos=True)
    assert list(meant.rows[0].ids_T[:2]) == [0, 0]
    assert list(chat(folder / "r", tokenizer, bos="tokenizer").rows[0].ids_T[:2]).count(0) == 1


def template_drift(folder: Path) -> None:
    """A template that reads the clock is refused; a fixed date gives one panel on two days; an edit breaks the seal."""
    tokenizer = make_tokenizer(folder / "t", template=CLOCK)
    with pytest.raises(PanelError, match="chat template reads the clock"):
        chat(folder / "clock", tokenizer)
    fixed = 'template_kwargs = { date_string = "26 Jul 2024" }\n'
    found = []
    for day in (datetime(2025, 1, 1), datetime(2026, 8, 8)):
        with clock_at(day):
            found.append(chat(folder / f"{day:%Y}", tokenizer, fixed))
    assert found[0].sha256 == found[1].sha256
    make_tokenizer(folder / "t", template=CLOCK + "{# edited upstream #}")
    with pytest.raises(PanelError, match="different: tokenizer"):
        build_panel(folder / "2025")


def other_text(folder: Path) -> None:
    """One trailing space: another panel where a row holds it, a broken seal where none does."""
    tokenizer = make_tokenizer(folder / "t")
    text = "amber basin\n" + words(60, 0)
    a = build(folder / "a", tokenizer, text)
    b = build(folder / "b", tokenizer, text.replace("basin\n", "basin \n"))
    assert a.sha256 != b.sha256
    (folder / "a" / "0.txt").write_text(text + " ")
    with pytest.raises(PanelError, match="what was built is not what is sealed .different: sources"):
        build_panel(folder / "a")
    worlds = [World(rows=4, length=20, panel_sha256=panel.sha256) for panel in (a, b)]
    runs = [world.run(folder / n, n, world.columns(0.3, 2)) for world, n in zip(worlds, "xy", strict=True)]
    with pytest.raises(IncomparableError) as refused:
        compare(runs)
    assert a.sha256[:16] in refused.value.what and b.sha256[:16] in refused.value.what


def other_tokenizer(folder: Path, teacher_folder: Path) -> None:
    """Ids go in and are echoed: what the engine's own tokenizer would make of the text moves nothing."""
    changed = folder / "changed"
    shutil.copytree(teacher_folder, changed)
    parts = json.loads((changed / "tokenizer.json").read_text())
    vocab = parts["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (changed / "tokenizer.json").write_text(json.dumps(parts))
    row = made.row(load_tokenizer(teacher_folder)("a bad bell").input_ids)
    assert load_tokenizer(changed)("a bad bell").input_ids != row.ids_T.tolist()
    ours, theirs = (next(iter(engine_of(f).run([row]))) for f in (teacher_folder, changed))
    assert np.array_equal(theirs.echoed_ids_T, row.ids_T)
    assert isinstance(ours.outputs, Hidden) and isinstance(theirs.outputs, Hidden)
    assert torch.equal(ours.outputs.states_TH, theirs.outputs.states_TH)


def crlf(folder: Path) -> None:
    """CR LF is refused with its line, or normalised as the recipe says, and the seal records that."""
    tokenizer = make_tokenizer(folder / "t")
    text = "a\nb\n" + words(60, 0)
    windows = text.replace("\n", "\r\n").encode()
    with pytest.raises(PanelError, match=r"0\.txt, line 1: carriage return"):
        build(folder / "crlf", tokenizer, windows)
    plain = build(folder / "lf", tokenizer, text)
    fixed = build(folder / "fixed", tokenizer, windows, body=TEXT + 'newlines = "normalise"\n')
    assert fixed.rows[0].sha256 == plain.rows[0].sha256
    sources = [json.loads((folder / n / "panel.lock.json").read_text())["sources"][0] for n in ("lf", "fixed")]
    assert [source["newlines"] for source in sources] == ["lf", "normalised"]
    assert sources[0]["sha256"] != sources[1]["sha256"]
    attributes = (Path(__file__).parents[2] / ".gitattributes").read_text()
    assert re.search(r"^panels/\*\* +-text$", attributes, flags=re.MULTILINE)


def truncation(folder: Path, teacher_folder: Path) -> None:
    """A row of 4,097 ids in an engine of 4,096: an error that names it, before the rows in front of it run."""
    shutil.copytree(teacher_folder, folder / "m")
    config = json.loads((folder / "m" / "config.json").read_text())
    (folder / "m" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    rows = [made.row([1, 2, 3], 0), made.row([7] * 4097, 1)]
    with pytest.raises(EngineError, match=r"takes 4096 tokens; rows \[1\] are longer"):
        next(iter(engine_of(folder / "m").run(rows)))


def wrong_weights(folder: Path, teacher_folder: Path) -> None:
    """Uniform output, a parameter that no file holds, and a candidate that is the teacher."""
    uniform = teacher_stats(torch.zeros(2, 154_880), np.array([5, 99], np.int32)).nll
    assert uniform == pytest.approx([11.950406] * 2, abs=1e-6)
    with pytest.raises(ScoreError, match="that of a uniform output .ln 154880 = 11.9504.*\n.*weights are not loaded"):
        check_not_degenerate(uniform, 154_880)
    shutil.copytree(teacher_folder, folder / "m")
    weights = load_file(folder / "m" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match="1 parameters of LlamaForCausalLM are not in the checkpoint, first lm_head.weight"
    ):
        engine_of(folder / "m")
    p = made.logits((0.5, 0.3, 0.2), (0.2, 0.3, 0.5))
    assert SAME_MODEL in made.receipt(folder / "same", [made.row([0, 1])], [p], [p]).notes
    assert SAME_MODEL not in made.receipt(folder / "other", [made.row([0, 1])], [p], [p.flip(1)]).notes


def tokenizer_in_key(folder: Path) -> None:
    """Two tokenizers of one class are two; saving, padding and truncation do not make another of one."""
    first, second = (make_tokenizer(folder / f"t{seed}", words_seed=seed) for seed in (0, 5))
    a, b = (build(folder / f.name.replace("t", "p"), f) for f in (first, second))
    assert type(load_tokenizer(first)) is type(load_tokenizer(second))
    assert a.tokenizer_sha256 != b.tokenizer_sha256
    with pytest.raises(PanelError, match=b.tokenizer_sha256):
        check_tokenizer(a, second)
    loaded = load_tokenizer(first)
    loaded.pad_token = loaded.eos_token
    loaded(["amber", "amber basin copper"], padding=True, truncation=True, max_length=2)
    loaded.save_pretrained(folder / "again")
    assert tokenizer_digest(loaded) == tokenizer_digest(folder / "again") == a.tokenizer_sha256


def label_and_content(folder: Path) -> None:
    """Another revision of equal content is the same teacher, with a note; another tokenizer is another panel."""
    base, renamed = World(rows=4, length=20), World(rows=4, length=20, teacher={"revision": "v2"})
    other = World(rows=4, length=20, tokenizer_sha256="f" * 64)
    a = base.run(folder / "a", "A", base.columns(0.3, 2))
    found = compare([a, renamed.run(folder / "b", "B", base.columns(0.2, 3))])
    assert "the teacher's revision is named main and v2; its contents are equal" in warnings(found)
    with pytest.raises(
        IncomparableError, match="do not have the same tokenizer: eeeeeeeeeeeeeeee and ffffffffffffffff"
    ):
        compare([a, other.run(folder / "c", "C", base.columns(0.2, 3))])


def contamination(folder: Path) -> None:
    """A quotation of 13 words from a calibration file flags its row, one of 12 does not."""
    tokenizer = make_tokenizer(folder / "t")
    panel = build(folder / "p", tokenizer)
    start = load_tokenizer(tokenizer).decode(panel.rows[0].ids_T).split()
    for count, expected in ((12, {}), (13, {0: 1})):
        quoting = "Something else. " + ", ".join(start[1 : 1 + count]).upper() + "\nand more"
        assert quoted_rows(panel, load_tokenizer(tokenizer), [quoting]) == expected


ROWS = [
    Fault(id="A1-bos-missing", title="BOS missing", check=bos_missing),
    Fault(id="A2-bos-twice", title="BOS twice", check=bos_twice),
    Fault(id="A5-template-drift", title="a template that drifts by date or upstream edit", check=template_drift),
    Fault(id="A6-other-text", title="same text file, other text", check=other_text),
    Fault(
        id="A7-other-tokenizer",
        title="same text, another tokenizer's ids",
        check=other_tokenizer,
        needs=("teacher_folder",),
    ),
    Fault(id="A8-crlf", title="line endings", check=crlf),
    Fault(id="A10-truncation", title="input cut in silence", check=truncation, needs=("teacher_folder",)),
    Fault(
        id="A45-wrong-weights", title="wrong weights loaded, no error", check=wrong_weights, needs=("teacher_folder",)
    ),
    Fault(id="A52-tokenizer-in-key", title="tokenizer missing from the key", check=tokenizer_in_key),
    Fault(id="B14-label-and-content", title="identity by label", check=label_and_content),
    Fault(id="B54-contamination", title="panel text that is calibration text", check=contamination),
]
