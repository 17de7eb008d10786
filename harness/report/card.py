"""The model card: from receipts alone to the README's block and front matter.

Receipts that belong in one table stand together; those that do not (another panel, teacher, lane or estimator) get a
table each, and numbers are never mixed across them. The last receipt named is the card's subject, the first of its
table the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from harness.compare import Comparison, compare, load_comparison
from harness.compare.identity import require_comparable
from harness.compare.load import Arm
from harness.compare.model import COMPARISON_FILE
from harness.compare.task_pairing import TaskFolder
from harness.errors import IncomparableError, UsageError
from harness.measure.receipt import Measurement, SideIdentity, load_measurement
from harness.numbers import number, percent, with_interval
from harness.report.basis import Basis, cannot_tell, how_measured, of_comparison, of_measurement
from harness.report.card_tables import Quality, quality, single_quality, size_text
from harness.report.frontmatter import (
    HUB_ID,
    PanelResult,
    hub_files,
    index_results,
    our_keys,
    panel_results,
    task_results,
)
from harness.report.plots import Picture
from harness.report.table import Table, render
from harness.report.task_tables import TaskTable, task_table
from harness.report.words import bars_title, pair_headline, warnings

#: Folder beside README.md that holds receipts and pictures.
FOLDER = "fidelity"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the caller fixes: the subject, decimals of means, Hub ids of the teacher and of this model, what to add."""

    subject: str | None = None
    decimals: int | None = None
    base_model: str | None = None
    repo: str | None = None
    model_name: str | None = None
    pictures: bool = True
    positions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A rendered card: the block between the markers, front-matter keys, and other files by name."""

    block: str
    keys: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


# ---- its receipts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Receipts of one table: a comparison, or one measurement; ``runs`` are the run folders behind it.

    ``floor`` and ``anchors`` are run folders too; a comparison holds their numbers already.
    """

    comparison: Comparison | None
    measurement: Measurement | None
    runs: tuple[Path, ...]
    floor: Path | None = None
    anchors: tuple[Path, ...] = ()

    @property
    def names(self) -> list[str]:
        """The arms in order; the last is the subject unless another is asked for."""
        if self.comparison is not None:
            return [arm.name for arm in self.comparison.arms]
        return [self.measurement.name] if self.measurement else []

    @property
    def basis(self) -> Basis:
        """What the numbers rest on."""
        if self.comparison is not None:
            return of_comparison(self.comparison)
        assert self.measurement is not None
        return of_measurement(self.measurement, floor=load_measurement(self.floor) if self.floor else None)


def collect(
    paths: Sequence[Path], *, panel: Path | None = None, floor: Path | None = None, anchors: Sequence[Path] = ()
) -> list[Part]:
    """Read run folders and comparison folders, and put together what belongs in one table."""
    if not paths:
        raise UsageError("a card needs a receipt", "name run folders, or a folder that `fidelity compare` wrote")
    parts = [
        Part(comparison=load_comparison(path), measurement=None, runs=())
        for path in paths
        if (path / COMPARISON_FILE).is_file() or path.name == COMPARISON_FILE
    ]
    runs = [path for path in paths if not ((path / COMPARISON_FILE).is_file() or path.name == COMPARISON_FILE)]
    for group in group_runs(runs):
        beside = {"runs": tuple(group), "floor": floor, "anchors": tuple(anchors)}
        if len(group) == 1:
            _require_beside(group[0], [*([floor] if floor else []), *anchors])
            parts.append(Part(comparison=None, measurement=load_measurement(group[0]), **beside))  # type: ignore[arg-type]
        else:
            made = compare(group, panel=panel, floor=floor, anchors=anchors)
            parts.append(Part(comparison=made, measurement=None, **beside))  # type: ignore[arg-type]
    return parts


def _require_beside(run: Path, references: Sequence[Path]) -> None:
    """Refuse a floor or an anchor of another panel, teacher, lane or estimator."""
    first = _identity(run)
    for reference in references:
        require_comparable([first, _identity(reference)])


def _identity(path: Path) -> Arm:
    """What decides which table a run belongs to; its positions are not needed for that."""
    measurement = load_measurement(path)
    return Arm(name=measurement.name, measurement=measurement, columns=None, started=None)


def group_runs(paths: Sequence[Path]) -> list[list[Path]]:
    """Runs that may stand in one table, in the order in which they were named."""
    groups: list[tuple[Arm, list[Path]]] = []
    for path in paths:
        arm = _identity(path)
        for first, members in groups:
            if _comparable(first, arm):
                members.append(path)
                break
        else:
            groups.append((arm, [path]))
    return [members for _, members in groups]


def _comparable(a: Arm, b: Arm) -> bool:
    try:
        require_comparable([a, b])
    except IncomparableError:
        return False
    return True


# ---- the card --------------------------------------------------------------------------------------------------------


def build_card(
    parts: Sequence[Part],
    options: Options,
    *,
    pictures: Sequence[Picture],
    tasks: Sequence[TaskFolder] = (),
    artifact: dict[str, Any] | None = None,
) -> Card:
    """Render the card of one subject; ``artifact`` is `harness.report.artifact_section.artifact_section`'s."""
    home, subject = find_subject(parts, options.subject)
    teacher = (home.basis.teacher.model, home.basis.teacher.weights_sha256)
    benchmarks = task_table(tasks, _arms(home), subject, teacher=teacher)
    ordered = [home, *(part for part in parts if part is not home)]
    sections = [_section(part, subject if part is home else part.names[-1], options) for part in ordered]
    side, basis = _side_of(home, subject), home.basis
    base_model = options.base_model or (basis.teacher.model if HUB_ID.fullmatch(basis.teacher.model) else None)
    block = render(
        "card.md.j2",
        glance=_glance(home, subject, side, sections[0]["quality"], benchmarks),
        sections=sections,
        pictures=pictures,
        tasks=benchmarks,
        artifact=artifact,
        checking=_checking(options),
    )
    name = options.model_name or _model_name(options.repo or side.model, subject)
    keys = our_keys(
        model_name=name,
        base_model=base_model,
        results=[*panel_results(_panel_result(home, subject, side)), *_task_index(benchmarks)],
        tags=["exl3"] if "exl3" in (side.weights_dtype, side.engine) or "exl3" in side.model.lower() else [],
    )
    warnings = [] if base_model else [f"{basis.teacher.model} is no Hub id: base_model is left out (--base-model)"]
    files = hub_files(benchmarks.subject, options.repo) if benchmarks else {}
    return Card(block=block, keys=keys, files=files, warnings=warnings)


def _checking(options: Options) -> list[str]:
    """How a stranger checks the card: where its receipts are, and the command."""
    where = f"`{FOLDER}/` beside this file"
    fetch = [f"hf download {options.repo} --include 'README.md' '{FOLDER}/*' --local-dir card"] if options.repo else []
    held = (
        "with every scored position (positions.parquet), from which all numbers are computed again"
        if options.positions
        else "without positions.parquet: its SHA-256 is in each receipt, and who has the file can compute all again"
    )
    return [
        f"The receipts lie in {where}, {held}. With the exl3-fidelity harness:",
        "",
        "```",
        *fetch,
        "fidelity verify " + ("card" if options.repo else "FOLDER_OF_THIS_FILE"),
        "```",
        "",
        "A receipt's seal shows that it was changed after it was written; it says nothing of who wrote it. Where "
        "signatures (`*.sig`) lie beside the receipts, `fidelity verify --signers FILE` does.",
    ]


def _arms(part: Part) -> list[tuple[str, str]]:
    """Name and weights digest of every arm of a table."""
    if part.comparison is not None:
        return [(arm.name, arm.candidate.weights_sha256) for arm in part.comparison.arms]
    m = part.measurement
    return [(m.name, m.candidate.weights_sha256)] if m else []


def _task_index(table: TaskTable | None) -> list[EvalResult]:
    return task_results(index_results(table.subject)) if table else []


def _model_name(model: str, subject: str) -> str:
    return model.rsplit("/", 1)[-1] if HUB_ID.fullmatch(model) else subject


def find_subject(parts: Sequence[Part], wanted: str | None) -> tuple[Part, str]:
    """The part and the name of the arm that the card is about; it must be a complete measurement."""
    names = [(part, name) for part in parts for name in part.names]
    if wanted is None:
        part, name = next((part, part.names[-1]) for part in parts)
    else:
        found = [(part, name) for part, name in names if name == wanted]
        if not found:
            known = ", ".join(name for _, name in names)
            raise UsageError(f"no receipt is called {wanted}", f"--subject takes one of: {known}")
        part, name = found[0]
    if part.comparison is not None and name == part.names[0]:
        raise UsageError(f"{name} is the baseline of its table", "name the subject's run after the baseline's")
    _require_whole(part, name)
    return part, name


def _require_whole(part: Part, name: str) -> None:
    if part.basis.status != "complete":
        raise UsageError(
            f"{name} is {part.basis.status}: {part.basis.rows_measured} of {part.basis.panel.rows} rows",
            "a card needs the whole panel: measure the rest",
        )


def _section(part: Part, subject: str, options: Options) -> dict[str, Any]:
    c, m = part.comparison, part.measurement
    table = quality(c, subject, decimals=options.decimals) if c else _single_table(part, options)
    basis = part.basis
    lane = f"{basis.lane} lane, {basis.estimator.replace('_', ' ')}"
    return {
        "title": f"{basis.panel.name}, {lane}",
        "quality": table,
        "warnings": warnings(c) if c else (m.notes if m else []),
        "bound": basis.estimator == "lower_bound",
        "how": how_measured(basis),
        "cannot": cannot_tell(basis),
        "receipts": _receipt_lines(part),
    }


def _single_table(part: Part, options: Options) -> Quality:
    assert part.measurement is not None
    beside = [("floor", load_measurement(part.floor))] if part.floor else []
    beside += [("anchor", load_measurement(path)) for path in part.anchors]
    return single_quality(part.measurement, decimals=options.decimals, beside=beside)


def _receipt_lines(part: Part) -> list[tuple[str, str, str]]:
    """Name, measurement key and digest of its positions: what a reader can search for."""
    if part.comparison is not None:
        arms = [(a.name, a.key, a.positions_sha256) for a in part.comparison.arms]
        return [*arms, ("comparison", part.comparison.key, "")]
    m = part.measurement
    return [(m.name, m.key, m.positions_sha256)] if m else []


def _side_of(part: Part, subject: str) -> SideIdentity:
    if part.comparison is not None:
        return next(arm.candidate for arm in part.comparison.arms if arm.name == subject)
    assert part.measurement is not None
    return part.measurement.candidate


def _glance(
    part: Part,
    subject: str,
    side: SideIdentity,
    table: Quality,
    tasks: TaskTable | None,
) -> Table:
    """The table At a glance."""
    basis = part.basis
    rate = "not in the receipt" if side.bits_per_weight is None else f"{number(side.bits_per_weight, 2)}"
    lines = [
        ("Model", side.model if side.model.endswith(subject) else f"{subject}: {side.model}"),
        ("Bits per weight, counted in the tensors", rate),
        ("Size", size_text(side.bytes)),
        ("Teacher", f"{basis.teacher.described} at {basis.teacher.revision or 'an unknown revision'}"),
        ("Distance from the teacher", _distance(part, subject)),
    ]
    if part.comparison is not None:
        pair = next(p for p in part.comparison.pairs if p.other == subject)
        lines.append(("Verdict", pair_headline(part.comparison, pair)))
        lines.append(("Got worse", "; ".join(table.got_worse) or "no metric"))
        own = [bar for bar in part.comparison.bars if bar.arm == subject]
        if own:
            missed = [bar.name for bar in own if bar.met is False]
            met = len(own) - len(missed)
            text = f"{met} of {len(own)} met" + (f"; not met: {', '.join(missed)}" if missed else "")
            lines.append((bars_title(part.comparison), text))
    if basis.failed_checks:
        lines.append(("Failed checks", "; ".join(basis.failed_checks)))
    if tasks is not None:
        shown = [f"{line.name}: {line.values[-1]}{f', {line.verdict}' * bool(line.verdict)}" for line in tasks.lines]
        lines.append(("Task benchmarks", "; ".join(shown)))
    status = basis.standing.status
    lines.append(("Panel", f"{basis.panel.name}, {basis.rows_measured} rows, {basis.positions:,} positions; {status}"))
    return Table("At a glance", ("", ""), [(f"**{name}**", text) for name, text in lines], sides="ll")


def _distance(part: Part, subject: str) -> str:
    """KL and top-1 agreement of the subject in one line."""
    basis = part.basis
    bound = "KL lower bound" if basis.estimator == "lower_bound" else "KL"
    if part.comparison is not None:
        arm = next(a for a in part.comparison.arms if a.name == subject)
        kl, agreement = arm.metrics["kl_mean"], arm.metrics["top1_agreement"].estimate
        value = with_interval(kl.estimate, kl)
    else:
        assert part.measurement is not None
        m = part.measurement
        value, agreement = with_interval(m.summary["kl_mean"], m.intervals.get("kl_mean")), m.summary["top1_agreement"]
    return f"{bound} {value} nats, same token as the teacher at {percent(agreement)} of positions"


def _panel_result(part: Part, subject: str, side: SideIdentity) -> PanelResult:
    """What goes into model-index: full precision, with the estimator, interval and panel beside it."""
    basis = part.basis
    if part.comparison is not None:
        arm = next(a for a in part.comparison.arms if a.name == subject)
        kl, low, high = arm.metrics["kl_mean"].estimate, arm.metrics["kl_mean"].low, arm.metrics["kl_mean"].high
        agreement, ppl, key = arm.metrics["top1_agreement"].estimate, arm.ppl_token.estimate, arm.key
    else:
        assert part.measurement is not None
        m = part.measurement
        interval = m.intervals.get("kl_mean")
        low, high = (interval.low, interval.high) if interval else (None, None)
        kl, agreement, ppl = m.summary["kl_mean"], m.summary["top1_agreement"], m.summary["ppl_token_candidate"]
        key = m.key
    args: dict[str, Any] = {
        "lane": basis.lane,
        "estimator": basis.estimator,
        "direction": "teacher_to_candidate",
        "positions": basis.positions,
        "panel_sha256": basis.panel.sha256,
        "measurement_key": key,
        "floor": basis.floor or "not measured",
    }
    if low is not None and high is not None:
        args["kl_interval_95"] = [low, high]
    args["registration"] = basis.standing.status
    if basis.failed_checks:
        args["failed_checks"] = list(basis.failed_checks)
    kl_name = "kl_divergence" if basis.estimator == "exact" else "kl_divergence_lower_bound"
    return PanelResult(
        panel=basis.panel.name,
        panel_sha256=basis.panel.sha256,
        lane=basis.lane,
        estimator=basis.estimator,
        values={kl_name: kl, "top1_agreement": agreement, "perplexity_per_token": ppl},
        args=args,
    )
