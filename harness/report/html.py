"""One self-contained HTML file of a run or a comparison: sortable tables, pictures inside, worst positions expanded.

It loads nothing: styles, script and pictures are in the file, so that it opens anywhere and stays what it was.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from harness.compare import Comparison, load_comparison
from harness.compare.load import find_runs
from harness.compare.model import COMPARISON_FILE, Pair, Position, Slice
from harness.measure.receipt import Measurement, load_measurement
from harness.numbers import count, number
from harness.panel import load_tokenizer, tokenizer_digest
from harness.report import comparison_tables as compared
from harness.report import style, tables
from harness.report.basis import Basis, cannot_tell, how_measured, of_comparison, of_measurement
from harness.report.card import Part
from harness.report.card_pictures import drawings
from harness.report.comparison_report import Decoder, require_panels_tokenizer, with_texts
from harness.report.plots import Picture
from harness.report.run_report import NOT_FINITE, run_tables, started
from harness.report.style import DARK, LIGHT, Theme
from harness.report.table import Table, render
from harness.report.words import pair_headline, warnings
from harness.store import write_text

WORST = 20
#: Token ids shown in front of a position.
CONTEXT = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A picture as data URIs, for a light and a dark page."""

    title: str
    caption: str
    light: str
    dark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """One position: its heading, figures, and the text or ids before it."""

    heading: str
    figures: Sequence[tuple[str, str]]
    context: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    title: str
    lead: str
    labels: Sequence[str]
    tables: Sequence[Table]
    pictures: Sequence[Shown]
    details: Sequence[Table]
    worst: Sequence[Expanded]
    how: Sequence[str]
    cannot: Sequence[str]


def write_html(
    folder: Path, file: Path | None = None, *, runs: Sequence[Path] = (), tokenizer: str | None = None
) -> Path:
    """Write the report of a run folder or a comparison folder; returns the file.

    Args:
        folder: what `fidelity measure` or `fidelity compare` wrote.
        file: where to write; else ``report.html`` in the folder.
        runs: run folders behind a comparison; those beside it are found by their keys.
        tokenizer: the panel's tokenizer, to show text in place of ids.
    """
    target = file or folder / "report.html"
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    if (folder / COMPARISON_FILE).is_file():
        c = load_comparison(folder)
        if loaded is not None:
            require_panels_tokenizer(c.panel.tokenizer_sha256, tokenizer_digest(loaded))
            c = with_texts(c, loaded)
        found = find_runs(folder, runs)
        page = comparison_page(c, [found[arm.key] for arm in c.arms if arm.key in found])
    else:
        if loaded is not None:
            require_panels_tokenizer(load_measurement(folder).panel.tokenizer_sha256, tokenizer_digest(loaded))
        page = run_page(folder, loaded)
    write_text(target, render("report.html.j2", page=page))
    return target


def data_uri(draw: Callable[[Theme], Figure], theme: Theme) -> str:
    """A picture as a PNG data URI."""
    with style.drawing(theme):
        return "data:image/png;base64," + base64.b64encode(style.rendered(draw(theme), "png")).decode("ascii")


def shown(picture: Picture, draw: Callable[[Theme], Figure]) -> Shown:
    """A picture drawn for both pages."""
    light, dark = data_uri(draw, LIGHT), data_uri(draw, DARK)
    return Shown(title=picture.title, caption=picture.caption, light=light, dark=dark)


def labels_of(basis: Basis, label: str) -> list[str]:
    """The small marks under the title: partial, exploratory, lower bound, lane."""
    bound = ["lower bound"] if basis.estimator == "lower_bound" else []
    failed = ["failed checks"] if basis.failed_checks else []
    return [*([label] if label else []), basis.standing.status, *bound, *failed, f"{basis.lane} lane"]


def context_text(ids: Sequence[int], decoder: Decoder | None) -> str:
    """The text before a position, or its token ids where no tokenizer is at hand."""
    if decoder is None:
        return "token ids before it: " + (" ".join(str(token) for token in ids) or "none")
    return decoder.decode(list(ids))


# ---- a run -----------------------------------------------------------------------------------------------------------


def run_page(folder: Path, decoder: Decoder | None = None) -> Page:
    """All that report.md says, and the worst positions one by one."""
    m, frame = load_measurement(folder), tables.load_positions(folder)
    found, basis = run_tables(m, frame), of_measurement(m, started=started(folder))
    part = Part(comparison=None, measurement=m, runs=(folder,))
    every_row = found.rows.choose(*(name for name in found.rows.header if name != NOT_FINITE))
    return Page(
        title=f"{m.candidate.model} against {m.teacher.described}",
        lead=f"Measurement {m.name}, key {m.key[:12]}. KL(teacher‖candidate) in nats.",
        labels=labels_of(basis, m.label),
        tables=[found.headline, *([found.bound] if found.bound else []), found.counts],
        pictures=[shown(d.picture, d.draw) for d in drawings(part, m.name) if d.draw],
        details=[every_row, found.domains, found.tenths, found.confidence, found.checks, found.identity],
        worst=list(_worst_of_run(m, frame, decoder)),
        how=how_measured(basis),
        cannot=cannot_tell(basis),
    )


def _worst_of_run(m: Measurement, frame: pd.DataFrame, decoder: Decoder | None) -> Iterator[Expanded]:
    named = {row.row: row for row in m.per_row}
    for p in tables.worst_positions(frame, WORST).to_dict("records"):
        row, place = named[int(p["row"])], int(p["position"])
        near = frame[(frame["row"] == row.row) & frame["position"].between(place - CONTEXT, place - 1)]
        teacher, candidate = _token(p["top1_teacher"], decoder), _token(p["top1_candidate"], decoder)
        figures = [
            ("next token", _token(p["target"], decoder)),
            ("teacher's choice", f"{teacher}, p = {number(p['p_top1_teacher'], 3)}"),
            ("candidate's choice", candidate),
            ("rank of the teacher's choice in the candidate", count(p["rank"] if p["rank"] > 0 else None)),
            ("NLL teacher / candidate", f"{number(p['nll_teacher'], 3)} / {number(p['nll_candidate'], 3)}"),
            ("entropy teacher / candidate", f"{_told(p['entropy_teacher'])} / {_told(p['entropy_candidate'])}"),
            ("total variation", _told(p["tv"])),
        ]
        heading = f"KL {number(p['kl'])} at row {row.row}, position {place} ({row.domain}, {row.document})"
        yield Expanded(heading=heading, figures=figures, context=context_text(near["target"].tolist(), decoder))


def _told(value: float) -> str:
    """A position's number, or that it is not there: a server's answer holds some of them only."""
    return number(None if math.isnan(value) else value)


def _token(token: float, decoder: Decoder | None) -> str:
    if token < 0:
        return "not known"
    return f"{int(token)}" if decoder is None else f"{decoder.decode([int(token)])!r} ({int(token)})"


# ---- a comparison ----------------------------------------------------------------------------------------------------


def comparison_page(c: Comparison, runs: Sequence[Path] = ()) -> Page:
    """Every table of the comparison's report, its pictures, and its worst positions one by one."""
    basis, names = of_comparison(c), [arm.name for arm in c.arms]
    part = Part(comparison=c, measurement=None, runs=tuple(runs) if len(runs) == len(c.arms) else ())
    summaries = [compared.summary(c, pair) for pair in c.pairs]
    details = [compared.arms(c)] + ([compared.bars(c)] if c.bars else [])
    for pair in c.pairs:
        details += [compared.verdicts(c, pair), compared.resolution(c, pair)]
        details += [compared.slices(f"{pair.other}: {title}", pair, found) for title, found in _slices(pair) if found]
        details.append(compared.rows_table(c, pair))
    return Page(
        title=f"{', '.join(names[1:])} against {names[0]}",
        lead=" ".join(pair_headline(c, pair) for pair in c.pairs),
        labels=labels_of(basis, "" if basis.status == "complete" else f"partial {basis.rows_measured} rows"),
        tables=summaries,
        pictures=[shown(d.picture, d.draw) for d in drawings(part, names[-1]) if d.draw],
        details=details,
        worst=[_of_position(p) for p in c.worst],
        how=how_measured(basis),
        cannot=[*cannot_tell(basis), *warnings(c)],
    )


def _slices(pair: Pair) -> list[tuple[str, list[Slice]]]:
    return [("KL by domain", pair.domains), ("KL by position", pair.deciles), ("KL by confidence", pair.confidence)]


def _of_position(p: Position) -> Expanded:
    def named(token: int, key: str) -> str:
        return f"{p.texts[key]!r} ({token})" if p.texts else str(token)

    figures = [
        ("next token", named(p.target, "target")),
        ("teacher's choice", f"{named(p.top1_teacher, 'teacher')}, p = {number(p.p_top1_teacher, 3)}"),
        ("NLL of the teacher", number(p.nll_teacher, 3)),
    ]
    for name, kl in p.kl.items():
        choice = named(p.top1[name], name)
        figures.append((name, f"KL {number(kl)}, NLL {number(p.nll[name], 3)}, choice {choice}"))
    heading = f"KL {number(max(p.kl.values()))} at row {p.row}, position {p.position} ({p.domain}, {p.document})"
    context = p.texts["context"] if p.texts else context_text(p.context, None)
    return Expanded(heading=heading, figures=figures, context=context)
