"""report.md of a comparison, and what the terminal shows of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from harness.compare.model import Comparison, Pair, Position, save_comparison
from harness.compare.task_model import TaskComparisons, save_task_comparisons
from harness.errors import IncomparableError
from harness.numbers import count
from harness.report import comparison_tables as tables
from harness.report import task_tables
from harness.report.basis import registration_text
from harness.report.table import Table, cell
from harness.report.words import pair_headline, warnings, worded, worded_tasks
from harness.store import folder_lock, write_text

REPORT_FILE = "report.md"


def write(folder: Path, comparison: Comparison, tasks: Sequence[TaskComparisons] = ()) -> Path:
    """Write report.md, then comparison.json (and task-comparison.json); returns the report's path."""
    with folder_lock(folder):
        write_text(folder / REPORT_FILE, "\n".join(filter(None, [markdown(comparison), task_tables.markdown(tasks)])))
        if tasks:
            save_task_comparisons(folder, [worded_tasks(found) for found in tasks])
        save_comparison(folder, worded(comparison))
    return folder / REPORT_FILE


def markdown(comparison: Comparison) -> str:
    """The whole report; the same comparison gives the same text."""
    blocks = [f"# {' against '.join(_names(comparison))}"]
    blocks += [f"**{cell(pair_headline(comparison, pair))}**" for pair in comparison.pairs]
    blocks += [registration_text(comparison), *_bullets("Deviations from the registration", comparison.deviations)]
    blocks += _bullets("Before reading the numbers", warnings(comparison))
    blocks += [tables.summary(comparison, pair).section for pair in comparison.pairs]
    blocks += ["\\* the primary metric. Differences are *candidate - baseline*, paired on the same positions."]
    blocks += [tables.bars(comparison).section] if comparison.bars else []
    blocks += [tables.arms(comparison).section]
    for pair in comparison.pairs:
        blocks += [table.section for table in _details(comparison, pair)]
    blocks += [table.section for table in _positions(comparison)]
    blocks += [*_bullets("How it was made", how(comparison))]
    return "\n\n".join(blocks) + "\n"


def _names(comparison: Comparison) -> list[str]:
    arms = [cell(arm.name) for arm in comparison.arms]
    return [", ".join(arms[1:]), arms[0]]


def _details(comparison: Comparison, pair: Pair) -> Iterator[Table]:
    named = f"{pair.other} - {pair.baseline}: "
    found = [tables.verdicts(comparison, pair), tables.resolution(comparison, pair)]
    found += [tables.tails_table(pair, pair.tails)] if pair.tails else []
    found += [tables.slices(f"{comparison.kl} by domain", pair, pair.domains)] if len(pair.domains) > 1 else []
    found += [tables.slices(f"{comparison.kl} by position in the row", pair, pair.deciles)] if pair.deciles else []
    found += (
        [tables.slices(f"{comparison.kl} by the teacher's largest probability", pair, pair.confidence)]
        if pair.confidence
        else []
    )
    found += [tables.rows_table(comparison, pair)]
    for table in found:
        yield table.under(named + table.title)


def _positions(comparison: Comparison) -> list[Table]:
    found = [tables.flips(comparison), tables.agreement_flips(comparison.pairs), tables.worst(comparison)]
    return [table for table in found if table.rows]


def _bullets(title: str, lines: list[str]) -> list[str]:
    return [f"### {title}\n\n" + "\n".join(f"- {cell(line)}" for line in lines)] if lines else []


def how(comparison: Comparison) -> list[str]:
    """What the numbers are and how their intervals were made."""
    s, on, panel = comparison.settings, comparison.paired_on, comparison.panel
    bound = " Every KL here is a lower bound." if comparison.estimator == "lower_bound" else ""
    interval = "Student t on influence values" if s.interval == "t" else f"{s.interval} bootstrap"
    lines = [
        f"{comparison.direction}.{bound}",
        f"Estimator {comparison.estimator.replace('_', ' ')}, lane {comparison.lane}.",
        f"Panel {panel.name}, SHA-256 {panel.sha256}; {len(on.rows)} rows, {count(on.positions)} positions a side, "
        f"compared by {'position' if on.basis == 'positions' else 'published row means'}.",
        f"Teacher {comparison.teacher.described} at {comparison.teacher.revision or 'unknown revision'}.",
        f"Intervals of differences: {interval} over {s.units} {s.unit}s, {s.confidence:.0%}. Beside them the expanded "
        f"percentile bootstrap: {s.resamples} paired resamples from one matrix, seed {s.seed}.",
        "Better or worse: the interval leaves 0. Equivalent: the 90% interval lies inside the margin. Else undecided.",
    ]
    if on.excluded_nonfinite:
        lines.append(
            f"{count(on.excluded_nonfinite)} positions are not finite in some arm; they are left out of all arms."
        )
    if on.rows_excluded_by_registration:
        lines.append(f"Rows left out as registered: {', '.join(map(str, on.rows_excluded_by_registration))}.")
    return lines


# ---- texts, where a tokenizer is at hand: not every panel's text may be published ------------------------------------


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...


def with_texts(comparison: Comparison, tokenizer: Decoder) -> Comparison:
    """The comparison with decoded contexts, targets and top choices of its worst positions."""
    return comparison.model_copy(update={"worst": [_readable(p, tokenizer) for p in comparison.worst]})


def require_panels_tokenizer(wanted: str, found: str) -> None:
    """Refuse another tokenizer's words for a panel's ids; both are digests, and an unknown one is let through."""
    if wanted and found != wanted:
        raise IncomparableError(
            f"this tokenizer is {found[:12]}, the panel's is {wanted[:12]}", "name the panel's own tokenizer"
        )


def _readable(position: Position, tokenizer: Decoder) -> Position:
    texts = {
        "context": str(tokenizer.decode(position.context)),
        "target": str(tokenizer.decode([position.target])),
        "teacher": str(tokenizer.decode([position.top1_teacher])),
    }
    texts |= {name: str(tokenizer.decode([token])) for name, token in position.top1.items()}
    return position.model_copy(update={"texts": texts})
