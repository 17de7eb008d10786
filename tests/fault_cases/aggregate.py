"""Windows, padding, weights of positions, duplicates, units of perplexity."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError

from harness.compare import compare
from harness.errors import EngineError, IncomparableError, PanelError
from harness.measure.preflight import check_echo
from harness.measure.receipt import Measurement, load_measurement, save_measurement
from harness.measure.rows import score_row
from harness.measure.text_size import TextSize, per_text
from harness.panel import build_panel, load_recipe
from harness.panel.rows import Bos, Document, check_near_duplicates, windows_of
from harness.report import tables
from harness.report.run_report import report_text, slope_sentence
from harness.report.tables import load_positions
from harness.types import Logits, RowOutputs
from tests.compare.fake_arms import World
from tests.fault_cases import made
from tests.fault_cases.entry import Fault
from tests.panel.made_panels import make_panel, make_tokenizer, words


def last_window(folder: Path) -> None:
    """n = 4096, L = 2048 gives two rows; n = 2047 says "0 full windows"; other scored positions are not compared."""
    recipe = load_recipe(make_panel(folder / "r", files={"0.txt": "x"}, length=2048))
    for tokens, starts in ((4096, [0, 2048]), (2047, []), (2048, [0]), (6143, [0, 2048])):
        document = Document(name="d", ids_T=np.arange(tokens, dtype=np.int32))
        found = windows_of(document, recipe, Bos(token_id=None, added=False))
        assert [window.start for window in found] == starts
        assert all(len(window.ids_T) == 2048 for window in found)
    tokenizer = make_tokenizer(folder / "t")
    short = make_panel(folder / "s", files={"0.txt": words(20, 0)}, tokenizer=str(tokenizer), length=2048)
    with pytest.raises(PanelError, match=r"gives 0 .*0\.txt: 0 full windows in \d+ tokens"):
        build_panel(short)
    every, half = World(rows=4, length=40), World(rows=4, length=20)
    runs = [world.run(folder / n, n, world.columns(0.3, 2)) for n, world in (("all", every), ("half", half))]
    with pytest.raises(IncomparableError, match="row 0: positions is 40 in all and 20 in half"):
        compare(runs)


def perplexity_units(folder: Path) -> None:
    """10 nats over 5 tokens, 4 words, 20 bytes: e^2, e^2.5, 0.7213 bits; a perplexity without a unit is refused."""
    per = per_text(np.full(5, 2.0), np.full(5, 2.0), TextSize(bytes=20, words=4))
    assert per["ppl_word_candidate"] == pytest.approx(np.exp(2.5), rel=1e-12)
    assert per["bits_per_byte_candidate"] == pytest.approx(0.7213, abs=5e-5)
    q = made.logits(*[(np.exp(-2), 1 - np.exp(-2))] * 6)
    found = made.receipt(folder, [made.row([1, 0, 0, 0, 0, 0])], [q.flip(1)], [q])
    assert found.positions == 5 and found.summary["nll_candidate"] * 5 == pytest.approx(10, rel=1e-6)
    assert found.summary["ppl_token_candidate"] == pytest.approx(np.exp(2), rel=1e-6)
    named = [name for name in found.summary if "ppl" in name or "perplexity" in name]
    assert named and all(name.startswith("ppl_token_") for name in named)
    for bare in ("ppl", "ppl_candidate", "perplexity"):
        summary = found.summary | {bare: 7.39}
        with pytest.raises(ValidationError, match="names no unit"):
            Measurement.model_validate(found.model_dump() | {"summary": summary})


def position_trend(folder: Path) -> None:
    """KL that grows linearly along the row: ten lines by position, and the slope is called out."""
    rows, length = 8, 200
    position = np.tile(np.arange(length), rows)
    noise = np.random.default_rng(0).exponential(1, rows * length)
    frame = pd.DataFrame({"row": np.repeat(np.arange(rows), length), "position": position, "agree": True})
    frame["top1_candidate"] = 0
    units = frame["row"].to_numpy()
    for kl, rising in ((noise * (0.01 + 0.001 * position), True), (0.1 * noise, False)):
        some = frame.assign(kl=kl)
        tenths = tables.by_position(some, units, "row")
        found = tables.slope(some, units, "row")
        assert [t.label for t in tenths] == [f"{20 * i}-{20 * i + 19}" for i in range(10)]
        assert found is not None and found.rising is rising
        assert slope_sentence(found).startswith("**KL rises along the row" if rising else "No rise along the row")
    # One more nat a thousand positions, found within its interval.
    assert tables.slope(frame.assign(kl=0.001 * position), units, "row").estimate.estimate == pytest.approx(1.0)


def padding_scored(folder: Path) -> None:
    """Rows of 3 and 5 tokens: padding to 5 changes no mean; an engine that says it ran padding is refused."""
    generator = torch.Generator().manual_seed(0)
    p3, q3, p5, q5 = (torch.randn(n, 6, generator=generator) for n in (3, 3, 5, 5))
    rows = [made.row([1, 2, 3], 0), made.row([1, 2, 3, 4, 5], 1)]
    plain = made.receipt(folder / "plain", rows, [p3, p5], [q3, q5])
    filled = torch.cat([q3, torch.full((2, 6), 9.0)])
    padded = made.receipt(folder / "padded", rows, [p3, p5], [filled, q5])
    assert plain.positions == padded.positions == 2 + 4
    assert plain.summary == padded.summary
    stored = made.capture(folder / "c", rows, [p3, p5], None)
    each = [score_row(stored, stored.row(i), Logits(logits_TV=q), None, rows[i]).kl for i, q in enumerate((q3, q5))]
    assert plain.summary["kl_mean"] == pytest.approx(np.concatenate(each).mean(), rel=1e-12)
    out = RowOutputs(index=0, echoed_ids_T=np.array([1, 2, 3, 0, 0], np.int32), outputs=Logits(logits_TV=filled))
    with pytest.raises(EngineError, match="row 0: the engine ran 5 tokens, the panel has 3"):
        check_echo(rows[0], out)


def few_tokens(folder: Path) -> None:
    """A row with 2 scored tokens beside one of 2,046: shown with its count, weighted by its tokens."""
    high, low = (made.logits((np.exp(-nll), 1 - np.exp(-nll))) for nll in (9.0, 1.0))
    rows = [made.row([0] * 3, 0), made.row([0] * 2047, 1)]
    p = [made.logits((0.5, 0.5)).repeat(len(r.ids_T), 1) for r in rows]
    found = made.receipt(folder, rows, p, [high.repeat(3, 1), low.repeat(2047, 1)])
    assert [row.positions for row in found.per_row] == [2, 2046]
    assert found.summary["ppl_token_candidate"] == pytest.approx(np.exp((2 * 9 + 2046 * 1) / 2048), rel=1e-6)
    text = report_text(found, load_positions(folder / "run"), [])
    line = next(line for line in text.splitlines() if line.startswith("| 0 ") and "d0" in line)
    assert "| 2 |" in line


def duplicates(folder: Path) -> None:
    """A row twice in a result, a position twice, two equal rows in a panel: errors; near-duplicates: named."""
    world = World(rows=9, length=20)
    a = world.run(folder / "a", "A", world.columns(0.3, 2))
    b = world.run(folder / "b", "B", world.columns(0.2, 3))
    found = load_measurement(b)
    save_measurement(b, found.model_copy(update={"per_row": [*found.per_row, found.per_row[7]]}))
    with pytest.raises(IncomparableError, match="b: a row is listed twice"):
        compare([a, b])
    again = World(rows=9, length=20)
    again.position_N = again.position_N.copy()
    again.position_N[7 * 20 + 1] = 0
    with pytest.raises(IncomparableError, match="c: row 7, position 0 is there twice"):
        compare([a, again.run(folder / "c", "C", again.columns(0.2, 3))])
    tokenizer = make_tokenizer(folder / "t")
    files: dict[str, str | bytes] = {"a.txt": words(60, 0), "b.txt": words(60, 1), "c.txt": words(60, 0)}
    with pytest.raises(PanelError, match=r"rows \d \([ac]\.txt\) and \d \([ac]\.txt\) are identical"):
        build_panel(make_panel(folder / "p", files=files, tokenizer=str(tokenizer)))
    one = list(range(32))
    near = [made.row(one, 0), made.row([*range(200, 232)], 1), made.row([*one[:24], *range(100, 108)], 2)]
    with pytest.raises(PanelError, match=r"rows 0 \(d0\) and 2 \(d2\): 68%"):
        check_near_duplicates(near, 0.2)
    assert check_near_duplicates([replace(near[0]), near[1]], 0.2) == 0.0


ROWS = [
    Fault(id="A11-last-window", title="the last exact window dropped", check=last_window),
    Fault(id="A12-perplexity-units", title="three perplexities of one model", check=perplexity_units),
    Fault(id="A43-position-trend", title="a fault that grows with the position", check=position_trend),
    Fault(id="A47-padding-scored", title="padding scored", check=padding_scored),
    Fault(id="A49-few-tokens", title="few scored tokens make wild rows", check=few_tokens),
    Fault(id="A50-duplicates", title="duplicated rows", check=duplicates),
]
