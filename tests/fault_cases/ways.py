"""What ran is what is written down, in each way that a model runs, in tasks and in runs that were killed."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from harness.cli import main
from harness.measure import run as run_module
from harness.measure.receipt import Measurement, load_measurement
from tests.fault_cases.entry import Fault
from tests.tasks.made_data import write_gpqa, write_suite
from tests.tasks.made_models import save_tiny

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]
#: Each way a model runs here, and what it needs.
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dense whole": ("dense", ()),
    "dense streamed": ("dense", ("--memory-budget", "auto")),
    "EXL3 whole": ("quant", ()),
    "EXL3 packed": ("quant", ("--packed",)),
    "EXL3 streamed": ("quant", ("--memory-budget", "auto")),
}


def fidelity(home: Path, *arguments: object) -> tuple[int, str]:
    """Exit code and all text of a command line run in ``home``."""
    out = io.StringIO()
    with (
        contextlib.chdir(home),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        mock.patch.object(sys, "argv", ["fidelity", *map(str, arguments)]),
    ):
        try:
            main()
        except SystemExit as done:
            return int(done.code or 0), out.getvalue()
    return 0, out.getvalue()


def refused(home: Path, words: str, *arguments: object) -> None:
    """One line with a repair, no traceback, nothing run."""
    code, text = fidelity(home, *arguments)
    assert code in (2, 3) and words in text and "repair:" in text and "Traceback" not in text, text
    assert "tokens/s" not in text, "something was run before it was refused"


def measured(home: Path, out: str, candidate: str, *more: str, teacher: str = "teacher") -> Measurement:
    code, text = fidelity(home, "measure", candidate, "--teacher", teacher, "--panel", "panel", "--out", out, *more)
    assert code == 0, text
    return load_measurement(home / out)


def workplace(home: Path, teacher: Path, panel: Path, exl3: Path | None = None) -> Path:
    """A teacher, a dense candidate with other MLPs, an EXL3 one and a panel, free to be changed."""
    shutil.copytree(teacher, home / "teacher")
    shutil.copytree(panel, home / "panel")
    shutil.copytree(teacher, home / "dense")
    write(home / "dense", noisy(load_file(home / "teacher/model.safetensors"), 0.05))
    if exl3 is not None:
        shutil.copytree(exl3, home / "quant")
    return home


def noisy(tensors: Tensors, size: float) -> Tensors:
    """The tensors with noise on every MLP weight."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (t.float() + size * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
        if ".mlp." in name and t.dtype == torch.bfloat16
        else t
        for name, t in tensors.items()
    }


def write(folder: Path, tensors: Tensors, name: str = "model.safetensors") -> None:
    (folder / name).unlink(missing_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / name, metadata={"format": "pt"})


def edit(folder: Path, **change: Any) -> None:
    """Change entries of config.json; ``...`` removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | change
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def new_theta(folder: Path, theta: float = 1e6) -> None:
    """Another rope, written as this config writes it."""
    config = json.loads((folder / "config.json").read_text())
    old = config.get("rope_parameters")
    edit(folder, **({"rope_parameters": old | {"rope_theta": theta}} if old else {"rope_theta": theta}))


# ---- C1: config.json decides the forward pass ------------------------------------------------------------------------


def config_of_candidate(way: str, home: Path, teacher: Path, panel: Path, exl3: Path) -> None:
    """Only the rope is edited: another key and another KL, the old answer is refused, and report and card say so."""
    name, more = WAYS[way]
    home = workplace(home, teacher, panel, exl3)
    before = measured(home, "before", name, *more)
    assert before.differs == {}
    new_theta(home / name)
    refused(home, "holds the measurement", "measure", name, "--teacher", "teacher", "--panel", "panel", "--out",
            "before", *more)  # fmt: skip
    after = measured(home, "after", name, *more)
    assert after.candidate.weights_sha256 == before.candidate.weights_sha256
    assert after.candidate.config_sha256 != before.candidate.config_sha256 and after.key != before.key
    assert abs(after.summary["kl_mean"] - before.summary["kl_mean"]) > 1e-4
    line = "differs from the teacher in: "
    assert any(line in note and "rope_theta 1e4 -> 1e6" in note for note in after.notes)
    assert line in (home / "after/report.md").read_text()
    code, text = fidelity(home, "card", "after", "--out", "card")
    assert code == 0 and line in (home / "card/README.md").read_text(), text


def config_of_a_begun_run(home: Path, teacher: Path, panel: Path) -> None:
    """A run that was killed, config.json edited, the same command: refused, so no run mixes two models."""
    home = workplace(home, teacher, panel)
    real, calls = run_module.write_row, []

    def killed(*args: Any) -> None:
        calls.append(args)
        if len(calls) > 2:
            raise KeyboardInterrupt
        real(*args)

    command = ("measure", "dense", "--teacher", "teacher", "--panel", "panel", "--out", "run")
    with mock.patch.object(run_module, "write_row", killed):
        assert fidelity(home, *command)[0] == 130
    kept = (home / "dense/config.json").read_text()
    new_theta(home / "dense")
    code, text = fidelity(home, *command)
    assert code == 3 and "rows of another measurement" in text and not (home / "run/measurement.json").exists()
    (home / "dense/config.json").write_text(kept)
    assert fidelity(home, *command)[0] == 0
    assert measured(home, "whole", "dense").positions_sha256 == load_measurement(home / "run").positions_sha256


def config_of_tasks(home: Path) -> None:
    """The same for a suite of tasks: the old answers are not given for the edited model."""
    save_tiny(home / "model")
    write_gpqa(home / "data")
    write_suite(home / "suite")
    command = ("tasks", "model", "--suite", "suite/small.toml", "--data", "data", "--limit", "2", "--out", "run")
    code, text = fidelity(home, *command)
    assert code == 0, text
    new_theta(home / "model")
    refused(home, "holds the", *command)
    assert fidelity(home, *command[:-1], "other")[0] == 0
    model = [json.loads((home / out / "tasks.json").read_text())["model"] for out in ("run", "other")]
    assert model[0]["weights_sha256"] == model[1]["weights_sha256"]
    assert model[0]["config_sha256"] != model[1]["config_sha256"]


# ---- C2: one resolver says which bytes are the model -----------------------------------------------------------------


def backup_beside(way: str, home: Path, teacher: Path, panel: Path, exl3: Path) -> None:
    """Files whose names sort after or before the model's own, with other values: not read, not digested, and named."""
    name, more = WAYS[way]
    home = workplace(home, teacher, panel, exl3)
    alone = measured(home, "alone", name, *more)
    tensors = load_file(home / name / "model.safetensors")
    stale = {k: v + 1 if v.dtype == torch.bfloat16 else v for k, v in tensors.items()}
    for other in ("model_old.safetensors", "a-backup.safetensors", "model-00001-of-00003.safetensors"):
        write(home / name, stale, other)
    write(home / name, {"norm.weight": torch.ones(3)}, "consolidated.safetensors")
    found = measured(home, "beside", name, *more)
    assert found.key == alone.key and found.positions_sha256 == alone.positions_sha256
    for other in ("model_old", "a-backup", "model-00001-of-00003", "consolidated"):
        assert any(f"{other}.safetensors" in note for note in found.notes)
    write(home / name, noisy(tensors, 1.0) if name == "dense" else {**tensors, "lm_head.weight": 0.3 * head(tensors)})
    replaced = measured(home, "replaced", name, *more)
    assert replaced.key != alone.key and replaced.summary["kl_mean"] > 1.5 * alone.summary["kl_mean"]


def head(tensors: Tensors) -> torch.Tensor:
    return tensors["lm_head.weight"]


def teacher_backup(home: Path, teacher: Path, panel: Path) -> None:
    """The teacher is replaced and its backup stays: it is captured anew, and its numbers are those of the new file."""
    home = workplace(home, teacher, panel)
    tensors = load_file(home / "teacher/model.safetensors")
    write(home / "teacher", tensors, "model_backup.safetensors")
    first = measured(home, "first", "dense")
    write(home / "teacher", noisy(tensors, 1.0))
    second = measured(home, "second", "dense")
    (home / "teacher/model_backup.safetensors").unlink()
    truth = measured(home, "truth", "dense")
    assert first.teacher.capture_sha256 != second.teacher.capture_sha256 == truth.teacher.capture_sha256
    assert second.key == truth.key and second.summary == truth.summary != first.summary


def sharded(folder: Path, *, old: bool) -> None:
    """The folder's model in two shards; by the index the MLPs are in the first, and the second has other ones."""
    tensors = load_file(folder / "model.safetensors")
    mlp = {k: v for k, v in tensors.items() if ".mlp." in k}
    rest = {k: v for k, v in tensors.items() if k not in mlp}
    stale = {k: v + 1 if v.is_floating_point() else v for k, v in mlp.items()} if old else {}
    (folder / "model.safetensors").unlink()
    write(folder, mlp, "model-00001-of-00002.safetensors")
    write(folder, rest | stale, "model-00002-of-00002.safetensors")
    where = {k: f"model-0000{1 if k in mlp else 2}-of-00002.safetensors" for k in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))


def index_decides(way: str, home: Path, teacher: Path, panel: Path, exl3: Path) -> None:
    """Old copies in a listed shard: what the index names counts, or one line says why this way cannot."""
    name, more = WAYS[way]
    home = workplace(home, teacher, panel, exl3)
    alone = measured(home, "alone", name, *more)
    sharded(home / name, old=True)
    if way in ("EXL3 whole", "EXL3 packed"):
        code, text = fidelity(home, "measure", name, "--teacher", "teacher", "--panel", "panel", "--out", "x", *more)
        assert code == 3 and "the index takes from another file" in text and "--memory-budget auto" in text
        return
    found = measured(home, "found", name, *more)
    assert found.key == alone.key and found.positions_sha256 == alone.positions_sha256
    assert any("the index takes from another file" in note for note in found.notes)


def undecided_copies(home: Path, teacher: Path, panel: Path, exl3: Path) -> None:
    """Two copies that differ in files that are both the model's, and no index that says which: refused everywhere."""
    home = workplace(home, teacher, panel, exl3)
    for name, more in WAYS.values():
        folder = home / name
        if not (folder / INDEX).exists() and (folder / "model.safetensors").exists():
            sharded(folder, old=True)
            (folder / INDEX).unlink()
        measure = ("measure", name, "--teacher", "teacher", "--panel", "panel", "--out", "run", *more)
        refused(home, "with other contents", *measure)
    refused(home, "with other contents", "exl3", "inspect", "dense")
    refused(home, "with other contents", "exl3", "decode", "quant", "--out", "decoded")
    refused(home, "with other contents", "measure", "teacher", "--teacher", "dense", "--panel", "panel", "--out", "r")


def out_of_the_folder(home: Path, teacher: Path, panel: Path) -> None:
    """An index, a shard or a config that leads out of the folder is never followed."""
    home = workplace(home, teacher, panel)
    measure = ("measure", "dense", "--teacher", "teacher", "--panel", "panel", "--out", "run")
    sharded(home / "dense", old=False)
    index = json.loads((home / "dense" / INDEX).read_text())
    for place in ("../teacher/model.safetensors", str(home / "teacher/model.safetensors")):
        moved = {"weight_map": dict.fromkeys(index["weight_map"], place)}
        (home / "dense" / INDEX).write_text(json.dumps(moved))
        refused(home, "outside the folder", *measure)
    (home / "dense" / INDEX).write_text(json.dumps(index))
    for name in ("model-00001-of-00002.safetensors", "config.json"):
        kept = home / f"kept-{name}"
        (home / "dense" / name).rename(kept)
        (home / "dense" / name).symlink_to(kept)
        refused(home, "outside the folder", *measure)
        (home / "dense" / name).unlink()
        kept.rename(home / "dense" / name)
    assert fidelity(home, *measure)[0] == 0


# ---- C13, C17: which teacher, which revision ---------------------------------------------------------------------


def teacher_of_another_name(home: Path, teacher: Path, panel: Path) -> None:
    """The same bytes in a folder of another name, and under another name in a file: one teacher in a comparison."""
    home = workplace(home, teacher, panel)
    shutil.copytree(home / "teacher", home / "elsewhere/renamed", dirs_exist_ok=True)
    (home / "t.toml").write_text('name = "teacher"\nmodel = "elsewhere/renamed"\n')
    shutil.copytree(home / "dense", home / "worse")
    write(home / "worse", noisy(load_file(home / "dense/model.safetensors"), 0.5))
    first = measured(home, "a", "dense")
    for out, named in (("b", "elsewhere/renamed"), ("c", "t.toml")):
        other = measured(home, out, "worse", teacher=named)
        assert other.teacher.model == "renamed" or out == "c"
        assert other.teacher.capture_sha256 == first.teacher.capture_sha256
        code, text = fidelity(home, "compare", "a", out, "--out", f"compared-{out}")
        assert code == 0, text
    code, text = fidelity(home, "card", "a", "b", "--out", "card")
    assert code == 0 and (home / "card/README.md").read_text().count("### ") >= 1, text


def a_capture_goes_on_under_another_name(home: Path, teacher: Path, panel: Path) -> None:
    """Half a capture made under one label is continued under another: labels are notes."""
    home = workplace(home, teacher, panel)
    shutil.copytree(home / "teacher", home / "renamed")
    for name in ("teacher", "renamed"):
        (home / f"{name}.toml").write_text(f'name = "one"\nmodel = "{name}"\n')
    measured(home, "half", "dense", "--rows", "2", teacher="teacher.toml")
    whole = measured(home, "whole", "dense", teacher="renamed.toml")
    assert len(list((home / "teachers/captures").glob("one-*"))) == 1 and whole.status == "complete"


def revision_of_a_folder(home: Path, teacher: Path, panel: Path) -> None:
    """A folder has no revision; a receipt must not repeat one."""
    home = workplace(home, teacher, panel)
    refused(home, "--revision 8.0bpw", "measure", "dense", "--revision", "8.0bpw", "--teacher", "teacher", "--panel",
            "panel", "--out", "run")  # fmt: skip
    refused(home, "--revision 8.0bpw", "exl3", "inspect", "dense", "--revision", "8.0bpw")
    write_gpqa(home / "data")
    write_suite(home / "suite")
    refused(home, "--revision x", "tasks", "dense", "--suite", "suite/small.toml", "--data", "data", "--revision", "x")
    (home / "t.toml").write_text('name = "t"\nmodel = "teacher"\nrevision = "main"\n')
    refused(home, "--revision main", "measure", "dense", "--teacher", "t.toml", "--panel", "panel", "--out", "run")


# ---- C14, C40: what no model can be made of --------------------------------------------------------------------------


def odd_config(home: Path, teacher: Path, panel: Path) -> None:
    """A config of which no model can be made is one line before anything runs, on either side."""
    home = workplace(home, teacher, panel)
    changes: dict[str, dict[str, Any]] = {
        "names no model_type": {"model_type": ...},
        "text_config is no object": {"text_config": None},
        "vocab_size '259' is no number": {"vocab_size": "259"},
        "says vocab_size 300": {"vocab_size": 300},
        "config.json makes no model": {"max_position_embeddings": None},
        "qwen99": {"model_type": "qwen99"},
    }
    for side, measure in (
        ("dense", ("measure", "dense", "--teacher", "teacher")),
        ("teacher", ("measure", "dense", "--teacher", "teacher")),
    ):
        kept = (home / side / "config.json").read_text()
        for words, change in changes.items():
            edit(home / side, **change)
            refused(home, words, *measure, "--panel", "panel", "--out", "run")
            (home / side / "config.json").write_text(kept)
        (home / side / "config.json").write_text("{}")
        refused(home, "names no model_type", *measure, "--panel", "panel", "--out", "run")
        (home / side / "config.json").write_text(kept)


def ids_beyond_the_vocabulary(home: Path, teacher: Path, panel: Path) -> None:
    """A model with fewer tokens than its tokenizer, whole and consistent in itself: refused before anything runs."""
    home = workplace(home, teacher, panel)
    for side in ("dense", "teacher"):
        kept = load_file(home / side / "model.safetensors")
        small = {k: v[:64] if k in ("model.embed_tokens.weight", "lm_head.weight") else v for k, v in kept.items()}
        write(home / side, small)
        edit(home / side, vocab_size=64)
        refused(home, "has a vocabulary of 64", "measure", "dense", "--teacher", "teacher", "--panel", "panel", "--out",
                "run")  # fmt: skip
        write(home / side, kept)
        edit(home / side, vocab_size=259)


def branches_without_weights(home: Path, teacher: Path, panel: Path) -> None:
    """A repository whose main holds a README alone: its branches are named, on the Hub and in a clone."""
    home = workplace(home, teacher, panel)
    repository = home / "hub/models--org--tiny"
    main_commit, other = "a" * 40, "b" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(main_commit)
    (repository / "refs/4.0bpw").write_text(other)
    (repository / "snapshots" / main_commit).mkdir(parents=True)
    (repository / "snapshots" / main_commit / "README.md").write_text("# [4.0bpw](tree/4.0bpw)\n")
    shutil.copytree(home / "dense", repository / "snapshots" / other)
    rest = ("--teacher", "teacher", "--panel", "panel", "--out", "run")
    with (
        mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub")),
    ):
        refused(home, "4.0bpw", "measure", "org/tiny", *rest)
        code, text = fidelity(home, "measure", "org/tiny", "--revision", "4.0bpw", *rest)
        assert code == 0 and load_measurement(home / "run").candidate.revision == other, text
    clone = home / "clone"
    (clone / ".git/refs/heads").mkdir(parents=True)
    (clone / ".git/packed-refs").write_text(f"# pack-refs\n{other} refs/remotes/origin/5.0bpw\n")
    (clone / "README.md").write_text("# x\n")
    refused(home, "git checkout 5.0bpw", "measure", "clone", *rest)


_SESSION = ("teacher_folder", "panel_folder")
_ALL = (*_SESSION, "exl3_folder")


def _each_way(entry: str, what: str, title: str, check: Callable[..., None]) -> list[Fault]:
    return [
        Fault(
            id=f"{entry}-{what}-{way.lower().replace(' ', '-')}",
            title=f"{title}, {way}",
            check=partial(check, way),
            needs=_ALL,
        )  # fmt: skip
        for way in WAYS
    ]


ROWS = [
    *_each_way("C1", "config-of-candidate", "config.json in no identity", config_of_candidate),
    Fault(id="C1-begun-run", title="config.json edited in mid-run", check=config_of_a_begun_run, needs=_SESSION),
    Fault(id="C1-tasks", title="config.json of a suite's model", check=config_of_tasks),
    *_each_way("C2", "backup", "what ran is not what was digested", backup_beside),
    Fault(id="C2-teacher-backup", title="a backup in the teacher's folder", check=teacher_backup, needs=_SESSION),
    *_each_way("C2", "index-decides", "old copies in a listed shard", index_decides),
    Fault(id="C2-undecided-copies", title="two copies, no index", check=undecided_copies, needs=_ALL),
    Fault(id="C2-out-of-the-folder", title="an index out of the folder", check=out_of_the_folder, needs=_SESSION),
    Fault(id="C13-other-name", title="one teacher, two names", check=teacher_of_another_name, needs=_SESSION),
    Fault(
        id="C13-capture-goes-on",
        title="a capture under another name",
        check=a_capture_goes_on_under_another_name,
        needs=_SESSION,
    ),
    Fault(id="C14-odd-config", title="config.json that makes no model", check=odd_config, needs=_SESSION),
    Fault(id="C14-beyond-vocabulary", title="ids past the vocabulary", check=ids_beyond_the_vocabulary, needs=_SESSION),
    Fault(id="C17-revision-of-a-folder", title="--revision of a folder", check=revision_of_a_folder, needs=_SESSION),
    Fault(id="C40-branches", title="main without weights", check=branches_without_weights, needs=_SESSION),
]
