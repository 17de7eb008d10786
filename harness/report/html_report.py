"""One self-contained HTML file of a run or a comparison: sortable tables, pictures inside, worst positions expanded.

It loads nothing: styles, script and pictures are in the file, so that it opens anywhere and stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.compare import Comparison, load_comparison, parts
from harness.compare import tables as compared
from harness.compare.model import FILE as COMPARISON_FILE
from harness.compare.model import Pair, Position, Slice
from harness.compare.texts import check_is_the_panels, with_texts
from harness.compare.words import headline
from harness.errors import IncomparableError
from harness.panel import load_tokenizer, tokenizer_digest
from harness.receipt import load_measurement
from harness.report.basis import of_comparison
from harness.report.card_pictures import drawings
from harness.report.card_sources import Part
from harness.report.caveats import cannot_tell, how_measured
from harness.report.html_page import Expanded, Page, Table, context_text, labels_of, shown
from harness.report.html_run import run_page
from harness.report.numbers import number
from harness.report.render import render
from harness.store import write_text
from harness.verify.comparison import find_runs


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
            check_is_the_panels(c, tokenizer_digest(loaded))
            c = with_texts(c, loaded)
        found = find_runs(folder, runs)
        page = comparison_page(c, [found[arm.key] for arm in c.arms if arm.key in found])
    else:
        if loaded is not None:
            _require_tokenizer(load_measurement(folder).panel.tokenizer_sha256, tokenizer_digest(loaded))
        page = run_page(folder, loaded)
    write_text(target, render("report.html.j2", page=page))
    return target


def _require_tokenizer(wanted: str, found: str) -> None:
    if wanted and wanted != found:
        raise IncomparableError(
            f"this tokenizer is {found[:12]}, the panel's is {wanted[:12]}", "name the panel's own tokenizer"
        )


def comparison_page(c: Comparison, runs: Sequence[Path] = ()) -> Page:
    """Every table of the comparison's report, its pictures, and its worst positions one by one."""
    basis, names = of_comparison(c), [arm.name for arm in c.arms]
    part = Part(comparison=c, measurement=None, runs=tuple(runs) if len(runs) == len(c.arms) else ())
    summaries = [compared.summary(c, pair) for pair in c.pairs]
    details = [compared.arms(c)] + ([compared.bars(c)] if c.bars else [])
    for pair in c.pairs:
        details += [compared.verdicts(c, pair), compared.resolution(c, pair)]
        details += [parts.slices(f"{pair.other}: {title}", pair, found) for title, found in _slices(pair) if found]
        details.append(parts.rows_table(c, pair))
    return Page(
        title=f"{', '.join(names[1:])} against {names[0]}",
        lead=" ".join(headline(c, pair) for pair in c.pairs),
        labels=labels_of(basis, "" if basis.status == "complete" else f"partial {basis.rows_measured} rows"),
        tables=[_table(t) for t in summaries],
        pictures=[shown(d.picture, d.draw) for d in drawings(part, names[-1]) if d.draw],
        details=[_table(t) for t in details],
        worst=[_of_position(p) for p in c.worst],
        how=how_measured(basis),
        cannot=[*cannot_tell(basis), *c.warnings],
    )


def _slices(pair: Pair) -> list[tuple[str, list[Slice]]]:
    return [("KL by domain", pair.domains), ("KL by position", pair.deciles), ("KL by confidence", pair.confidence)]


def _table(t: compared.Table) -> Table:
    return Table(title=t.title, header=t.header, rows=t.rows)


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
