"""The teacher: which model it is, its capture over a panel, and the proof that the capture is still its own.

A `Yardstick` is what candidates of both lanes are held against: rows of a panel, and the teacher's outputs for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.capture import Capture, CaptureWriter, open_capture
from harness.capture.manifest import Form
from harness.digest import json_digest
from harness.engines.hf import ComputeDType
from harness.engines.models import DType, ModelFolder, locate
from harness.engines.open import NO_TOKENIZER, MemoryBudget, digests_of, open_engine
from harness.environment import environment, source_digest
from harness.errors import CaptureError, EngineError, UsageError
from harness.exl3.files import config_differences, config_digest, read_json, require_known_model, vocabulary_of
from harness.measure.preflight import check_echo
from harness.measure.rows import one_sided, targets_of
from harness.panel import ensure_built
from harness.progress import phase
from harness.records import Strict, load_toml
from harness.store import folder_lock, write_json
from harness.types import Check, Engine, Panel, Row, RowOutputs

MODELS = Path("teachers/models")
CAPTURES = Path("teachers/captures")
#: Largest |change of NLL| of a re-run teacher that is still the same teacher on another build or device.
NLL_TOLERANCE = 0.01
#: The teacher's config, in its folder and beside its capture.
CONFIG = "config.json"
#: What a receipt says of the capture: rows that were there before are run again, or the run refuses.
REPRODUCED = f"made by these weights, or reproduced by them: every top-1, and each NLL within {NLL_TOLERANCE:g} nats"
NOT_REPRODUCED = "its weights are not here: the capture is taken as it is"
_COMPARE = "compare it with teachers/smollm2-135m.toml"


class TeacherSpec(Strict):
    """teachers/<name>.toml. ``model`` is a Hub id, a folder, or ``package:NAME`` (a GGUF file in a package)."""

    name: str
    model: str
    revision: str | None = None
    weights_dtype: DType = "bfloat16"
    compute_dtype: ComputeDType = "auto"
    capture_dtype: str = "as_computed"
    vocab_size: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A few rows of the teacher run again and held against its capture."""

    rows: tuple[int, ...]
    positions: int
    top1_exact: bool
    max_nll_change: float

    def line(self) -> str:
        flips = "top1_exact_all_rows" if self.top1_exact else "top-1 differs"
        return f"rows {list(self.rows)}: {flips}, max |change of NLL| {self.max_nll_change:.3g} nats"


def load_teacher(argument: str | None, candidate: ModelFolder | None) -> TeacherSpec | Path:
    """What ``--teacher`` names: a TOML file, a model, a capture folder, or what the candidate's card says."""
    if argument is None:
        return _from_card(candidate)
    path = Path(argument).expanduser()
    if path.suffix == ".toml":
        return read_spec(path)
    if (path / "manifest.json").is_file():
        return path
    return TeacherSpec(name=argument.rstrip("/").split("/")[-1].removeprefix("package:"), model=argument)


def read_spec(path: Path) -> TeacherSpec:
    """Parse a teacher's TOML file; an unknown key is an error."""
    return load_toml(path, TeacherSpec, _COMPARE, UsageError)


def _from_card(candidate: ModelFolder | None) -> TeacherSpec:
    card = candidate.path / "README.md" if candidate else None
    if candidate is None or card is None or not card.is_file():
        raise UsageError("no teacher is named, and the candidate has no model card", "give --teacher (TEACHER=...)")
    from huggingface_hub import ModelCard

    data = ModelCard.load(card).data.to_dict()
    base = data.get("base_model")
    base = base[0] if isinstance(base, list) and base else base
    if not isinstance(base, str):
        raise UsageError(f"the card of {candidate.name} names no base_model", "give --teacher (TEACHER=...)")
    if (relation := data.get("base_model_relation")) != "quantized":
        said = f"says base_model_relation {relation}" if relation else "does not say base_model_relation: quantized"
        raise UsageError(
            f"the card of {candidate.name} names {base} and {said}: a fine-tune's base is not its teacher",
            "give --teacher (TEACHER=...): the unquantised model that this one was made from",
        )
    revision = data.get("base_model_revision")
    return TeacherSpec(name=base.split("/")[-1], model=base, revision=revision and str(revision))


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherModel:
    """A teacher found on this disk, before anything of it is loaded."""

    spec: TeacherSpec
    located: ModelFolder
    weights_sha256: str
    tokenizer_sha256: str

    def capture_key(self, panel: Panel) -> str:
        """What a capture depends on, apart from the machine that makes it."""
        chosen = self.spec.model_dump(include={"weights_dtype", "compute_dtype", "capture_dtype", "vocab_size"})
        identity = {"weights": self.weights_sha256, "config": config_digest(self.located.path)}
        return json_digest(identity | {"panel": panel.sha256} | chosen)

    def folder(self, panel: Panel, root: Path = CAPTURES) -> Path:
        return root / f"{self.spec.name}-{panel.name}-{self.capture_key(panel)[:8]}"


def find_teacher(spec: TeacherSpec, panel: Panel) -> TeacherModel:
    """Locate the teacher's files and refuse one whose tokenizer is not the panel's."""
    located = locate(spec.model, spec.revision, cache=MODELS, weights_dtype=spec.weights_dtype)
    require_known_model(located.path)
    weights_sha256, tokenizer_sha256 = digests_of(located)
    if tokenizer_sha256 not in (panel.tokenizer_sha256, NO_TOKENIZER):
        raise CaptureError(
            f"panel {panel.name} is sealed for tokenizer {panel.tokenizer_sha256[:12]}, "
            f"teacher {located.name} has {tokenizer_sha256[:12]}",
            f"seal it for this teacher: fidelity panel seal panels/{panel.name} --tokenizer {spec.model}",
        )
    return TeacherModel(spec=spec, located=located, weights_sha256=weights_sha256, tokenizer_sha256=tokenizer_sha256)


def ensure_capture(
    teacher: TeacherModel,
    panel: Panel,
    rows: Sequence[Row],
    *,
    device: str | None = None,
    memory_budget: MemoryBudget = None,
    root: Path = CAPTURES,
) -> tuple[Capture, Reproduction | None]:
    """The capture of ``rows``, made where it is missing; what was there is first reproduced on two rows.

    Returns:
        The capture, and the reproduction where there was something to reproduce.
    """
    folder = teacher.folder(panel, root)
    with folder_lock(folder):
        had = open_capture(folder) if any(folder.glob("row-*.parquet")) else None
        engine = open_engine(
            teacher.located,
            compute=teacher.spec.compute_dtype,
            device=device,
            memory_budget=memory_budget,
            vocab_size=teacher.spec.vocab_size,
            weights_sha256=teacher.weights_sha256,
            tokenizer_sha256=teacher.tokenizer_sha256,
        )
        form: Form = "logits" if engine.head is None else "hidden"
        again = ends(had, panel) if had else []
        missing = [row for row in rows if had is None or row.index not in had.rows]
        outputs = engine.run([*again, *missing], form)
        reproduction = reproduce(had, engine, again, outputs) if had else None
        if missing:
            _store(folder, engine, panel, missing, outputs, teacher.spec)
    keep_config(folder, teacher.located)
    return open_capture(folder), reproduction


def keep_config(folder: Path, located: ModelFolder) -> None:
    """Put the teacher's config.json beside its capture, for those who have the capture and not the weights."""
    if not (folder / CONFIG).is_file():
        write_json(folder / CONFIG, read_json(located.path / CONFIG))


def _store(
    folder: Path, engine: Engine, panel: Panel, rows: Sequence[Row], outputs: Iterator[RowOutputs], spec: TeacherSpec
) -> None:
    """Store each row as it comes. The caller holds the folder's lock."""
    form: Form = "logits" if engine.head is None else "hidden"
    # Logits are float32 whatever the states are: the head is multiplied in float32.
    computed = engine.identity.compute_dtype if form == "hidden" else "float32"
    dtype = computed if spec.capture_dtype == "as_computed" else spec.capture_dtype
    with (
        CaptureWriter(folder, engine.identity, panel, engine.head, form, dtype, lock=False) as writer,
        phase(f"teacher {spec.name}", total=len(rows), unit="tokens") as advance,
    ):
        for row, out in zip(rows, outputs, strict=True):
            check_echo(row, out)
            stats = one_sided(out.outputs, engine.head, targets_of(row)) if form == "hidden" else None
            writer.write_row(row, out.outputs, stats)
            advance(1, len(row.ids_T))
        writer.finish()


def ends(capture: Capture, panel: Panel) -> list[Row]:
    """The first and the last captured row: what is run again."""
    present = sorted(capture.rows)
    return [panel.rows[index] for index in sorted({present[0], present[-1]})]


def reproduce(capture: Capture, engine: Engine, rows: Sequence[Row], outputs: Iterator[RowOutputs]) -> Reproduction:
    """Take the outputs of ``rows`` and hold them against what is stored: every top-1 equal, and the NLL nearly so.

    Raises:
        CaptureError: they are not the captured teacher's.
    """
    capture.require_teacher(engine.identity)
    positions, exact, worst = 0, True, 0.0
    with phase("teacher again", total=len(rows), unit="tokens") as advance:
        for row in rows:
            stored, out = capture.row(row.index), next(outputs)
            again = one_sided(out.outputs, engine.head, targets_of(row))
            exact &= bool(np.array_equal(again.top1, stored.top1))
            worst = max(worst, float(np.max(np.abs(again.nll - stored.nll))))
            positions += len(stored.nll)
            advance(1, len(row.ids_T))
    indices = tuple(row.index for row in rows)
    result = Reproduction(rows=indices, positions=positions, top1_exact=exact, max_nll_change=worst)
    if not exact or worst > NLL_TOLERANCE:
        raise CaptureError(
            f"the teacher does not reproduce its capture: {result.line()}",
            "the capture is of other weights, another build or another device: delete its folder and capture again",
        )
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardstick:
    """What a candidate is held against: some rows of a panel, and a teacher before anything of it is loaded.

    ``folder`` is the panel's; ``teacher`` is a capture where only that is here, and not the teacher's weights.
    """

    folder: Path
    panel: Panel
    rows: Sequence[Row]
    teacher: TeacherModel | Capture

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.ids_T) for row in self.rows)

    @property
    def partial(self) -> str:
        """``-rows4`` where these are not all rows of the panel; ends the name of a run's folder."""
        return "" if len(self.rows) == len(self.panel.rows) else f"-rows{len(self.rows)}"

    def key(self) -> dict[str, Any]:
        """All that decides a number besides the candidate; names, places and times are no part of it."""
        teacher = self.teacher.sha256 if isinstance(self.teacher, Capture) else self.teacher.capture_key(self.panel)
        return {
            "panel": self.panel.sha256,
            "panel_seal": self.panel.seal_sha256,
            "rows": [row.index for row in self.rows],
            "registration": self.panel.registration_sha256,
            "teacher": teacher,
            "source": source_digest(),
            "environment": environment(),
        }

    def differences(self, candidate: ModelFolder | None) -> dict[str, tuple[Any, Any]]:
        """What of the forward pass the candidate's config has otherwise than the teacher's, which no quant changes."""
        home = self.teacher.folder if isinstance(self.teacher, Capture) else self.teacher.located.path
        if candidate is None or candidate.path.is_file() or not (home / CONFIG).is_file():
            return {}
        return config_differences(home, candidate.path)

    def captured(self, device: str | None = None, memory_budget: MemoryBudget = None) -> tuple[Capture, Check, str]:
        """The teacher's outputs of these rows, made where they are missing.

        Returns:
            The capture; the receipt's line about it, the same whether this run made the capture or found it; and for
            run.json which of the two it was.
        """
        if isinstance(self.teacher, Capture):
            self.teacher.require_panel(self.panel)
            return self.teacher, _teacher_check(NOT_REPRODUCED), NOT_REPRODUCED
        capture, reproduction = ensure_capture(
            self.teacher, self.panel, self.rows, device=device, memory_budget=memory_budget
        )
        return capture, _teacher_check(REPRODUCED), reproduction.line() if reproduction else "captured in this run"


def _teacher_check(figure: str) -> Check:
    return Check(name="the teacher reproduces its capture", passed=True, figure=figure)


def panel_for(folder: Path, tokenizer_sha256: str) -> Panel:
    """The panel as sealed for a model's tokenizer; its default seal where the model has none."""
    return ensure_built(folder, tokenizer=None if tokenizer_sha256 == NO_TOKENIZER else tokenizer_sha256)


def first_rows(panel: Panel, count: int | None) -> Sequence[Row]:
    """The first ``count`` rows of a panel, or all."""
    if count is not None and not 1 <= count <= len(panel.rows):
        raise UsageError(f"--rows {count}: panel {panel.name} has {len(panel.rows)} rows", "ask for 1 up to that many")
    return panel.rows[:count]


def find_yardstick(
    folder: Path, rows: int | None, teacher: str | None, candidate: ModelFolder | None, tokenizer_sha256: str
) -> Yardstick:
    """Find the panel's rows and the teacher that a candidate is held against.

    Args:
        folder: the panel's.
        rows: only the first so many.
        teacher: what the user names, as `load_teacher` takes it; without it the candidate's card says.
        tokenizer_sha256: the candidate's, for which the panel must be sealed.
    """
    named = load_teacher(teacher, candidate)
    panel = panel_for(folder, tokenizer_sha256)
    found = open_capture(named) if isinstance(named, Path) else find_teacher(named, panel)
    chosen = first_rows(panel, rows)
    for model in (candidate, found.located if isinstance(found, TeacherModel) else None):
        require_known_ids(model, chosen)
    return Yardstick(folder=folder, panel=panel, rows=chosen, teacher=found)


def require_known_ids(model: ModelFolder | None, rows: Sequence[Row]) -> None:
    """Refuse rows with ids that a model of a folder has no embedding for.

    Raises:
        EngineError: it names the first such row and its largest id.
    """
    if model is None or not model.path.is_dir():
        return
    size = vocabulary_of(read_json(model.path / CONFIG))
    for row in rows:
        if size is not None and (largest := int(row.ids_T.max())) >= size:
            raise EngineError(
                f"row {row.index} holds token {largest}, and {model.name} has a vocabulary of {size:,}",
                "its config.json or its tokenizer is another model's; seal the panel for a tokenizer that fits",
            )
