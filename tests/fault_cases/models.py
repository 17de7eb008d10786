"""Which model it is: what ran is what was digested, and a receipt shows it. Each case goes through the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.fault_cases.command import copy_with, measured, refused
from tests.fault_cases.entry import Fault
from tests.fault_cases.statements import fidelity

WHOLE: tuple[str, ...] = ()
STREAMED = ("--memory-budget", "auto")


def other_rope(teacher: Path, target: Path, theta: float = 1e6) -> Path:
    """The same weights under a config that turns positions otherwise."""
    file = teacher / "config.json"
    rope = {**json.loads(file.read_text())["rope_parameters"], "rope_theta": theta}
    return copy_with(teacher, target, rope_parameters=rope)


def config_of_a_candidate(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """Another config is another key, and the report says in what it differs: dense and EXL3, whole and streamed."""
    for number, (source, how) in enumerate(
        [(teacher, WHOLE), (teacher, STREAMED), (exl3, WHOLE), (exl3, ("--packed",))]
    ):
        plain = measured(folder, source, teacher, panel, f"plain{number}", *how)
        turned = measured(folder, other_rope(source, folder / f"turned{number}"), teacher, panel, f"run{number}", *how)
        assert turned["key"] != plain["key"] and turned["summary"]["kl_mean"] > plain["summary"]["kl_mean"]
        assert turned["candidate"]["config_sha256"] != plain["candidate"]["config_sha256"]
        assert plain["differs"] == {} and list(turned["differs"].values()) == [[1e4, 1e6]]
        line = "differs from the teacher in: rope_parameters.rope_theta 1e4 -&gt; 1e6"
        report = (folder / f"run{number}" / "report.md").read_text()
        assert line in report or line.replace("&gt;", ">") in report


def config_of_a_teacher(folder: Path, teacher: Path, panel: Path) -> None:
    """A teacher with another config is another teacher: a capture of its own, and no comparison with the first."""
    turned = other_rope(teacher, folder / "turned")
    first = measured(folder, teacher, teacher, panel, "first")
    second = measured(folder, teacher, turned, panel, "second")
    assert first["summary"]["kl_mean"] == 0 and second["summary"]["kl_mean"] > 0.001
    code, said = fidelity(folder, "compare", "first", "second")
    assert code == 3 and "teacher" in said


def a_run_resumed_under_another_config(folder: Path, teacher: Path, panel: Path) -> None:
    """The folder of a finished run answers no question about an edited model."""
    candidate = copy_with(teacher, folder / "candidate")
    measured(folder, candidate, teacher, panel, "run")
    shutil.rmtree(candidate)
    other_rope(teacher, candidate)
    code, said = fidelity(folder, "measure", candidate, "--teacher", teacher, "--panel", panel, "--out", "run")
    assert code == 3 and "holds the measurement" in said


def labels_in_a_config(folder: Path, teacher: Path, panel: Path) -> None:
    """Names, versions and generation settings are no part of a model."""
    named = copy_with(
        teacher, folder / "named", transformers_version="0", _name_or_path="/x", temperature=0.1, use_cache=False
    )
    plain, other = (measured(folder, m, teacher, panel, m.name + "-run") for m in (teacher, named))
    assert plain["candidate"]["config_sha256"] == other["candidate"]["config_sha256"]
    assert plain["summary"] == other["summary"] and other["differs"] == {}


def backup_beside_the_model(folder: Path, teacher: Path, exl3: Path, panel: Path) -> None:
    """A backup changes no digest and no number, and is named: dense and EXL3, whole, streamed and packed."""
    for source in (teacher, exl3):
        kept = shutil.copytree(source, folder / f"{source.name}-backup")
        old = {name: torch.zeros_like(tensor) for name, tensor in load_file(source / "model.safetensors").items()}
        save_file(old, kept / "model_old.safetensors", metadata={"format": "pt"})
        for how in (WHOLE, STREAMED, *((("--packed",),) if source is exl3 else ())):
            name = f"{source.name}{'-'.join(how)}"
            clean, dirty = (measured(folder, m, teacher, panel, f"{m.name}{name}", *how) for m in (source, kept))
            assert clean["candidate"]["weights_sha256"] == dirty["candidate"]["weights_sha256"]
            assert clean["summary"] == dirty["summary"]
            assert any("model_old.safetensors beside the model: left out" in note for note in dirty["notes"])


def two_copies(folder: Path, teacher: Path, panel: Path) -> None:
    """Different copies of a tensor in two shards are refused, whole and streamed, candidate and teacher."""
    torn = shutil.copytree(teacher, folder / "torn")
    tensors = load_file(torn / "model.safetensors")
    (torn / "model.safetensors").rename(torn / "model-00001-of-00002.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(
        {name: torch.zeros_like(tensors[name])}, torn / "model-00002-of-00002.safetensors", metadata={"format": "pt"}
    )
    for how in (WHOLE, STREAMED):
        assert "with other contents" in refused(folder, torn, teacher, panel, *how)
        assert "with other contents" in refused(folder, teacher, torn, panel, *how)


def outside_the_folder(folder: Path, teacher: Path, panel: Path) -> None:
    """An index or a link that leaves the folder is refused."""
    index = copy_with(teacher, folder / "index")
    names = load_file(teacher / "model.safetensors")
    weight_map = dict.fromkeys(names, f"../{teacher.name}/model.safetensors")
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    link = shutil.copytree(teacher, folder / "link")
    (link / "model.safetensors").unlink()
    (link / "model.safetensors").symlink_to(teacher / "model.safetensors")
    for model in (index, link):
        assert "outside the folder" in refused(folder, model, teacher, panel)


def base_of_a_fine_tune(folder: Path, teacher: Path, panel: Path) -> None:
    """A card's base_model is the teacher only of a quant."""
    quant = copy_with(teacher, folder / "quant")
    for relation, code in (("", 2), ("base_model_relation: finetune\n", 2), ("base_model_relation: quantized\n", 0)):
        (quant / "README.md").write_text(f"---\nbase_model: {teacher}\n{relation}---\n# x\n")
        ended, said = fidelity(folder, "measure", quant, "--panel", panel, "--out", f"run{len(relation)}")
        assert ended == code, said
        assert code == 0 or "a fine-tune's base is not its teacher" in said


def an_edited_receipt(folder: Path, teacher: Path, panel: Path) -> None:
    """A receipt that was changed is printed by nobody; its positions and comparisons likewise."""
    measured(folder, teacher, teacher, panel, "a")
    measured(folder, copy_with(teacher, folder / "other", rms_norm_eps=1e-2), teacher, panel, "b")
    code, said = fidelity(folder, "compare", "a", "b", "--out", "c")
    assert code == 0, said
    for file, number in ((folder / "b" / "measurement.json", "bytes"), (folder / "c" / "comparison.json", "key")):
        whole = file.read_text()
        record = json.loads(whole)
        side = record["candidate"] if number == "bytes" else record
        side[number] = side[number] // 100 if number == "bytes" else "0" * 64
        file.write_text(json.dumps(record, indent=1))
        name = file.parent.name
        for words in (["card", name, "-o", "card"], ["report", name], ["compare", "a", "b", "--out", "d"]):
            if words[0] == "compare" and name == "c":
                continue
            code, said = fidelity(folder, *words)
            assert code == 3 and "seal does not hold" in said, (words, said)
        code, said = fidelity(folder, "verify", name)
        assert code == 1 and "seal of" in said
        file.write_text(whole)


def edited_positions(folder: Path, teacher: Path, panel: Path) -> None:
    """Positions of another run beside a receipt are found wherever the receipt is read."""
    measured(folder, teacher, teacher, panel, "a")
    measured(folder, copy_with(teacher, folder / "other", rms_norm_eps=1e-2), teacher, panel, "b")
    shutil.copy(folder / "a" / "positions.parquet", folder / "b" / "positions.parquet")
    for words in (["card", "b", "-o", "card"], ["report", "b"], ["compare", "a", "b"]):
        code, said = fidelity(folder, *words)
        assert code == 3 and "is not what its measurement.json was made from" in said, (words, said)


def other_labels(folder: Path, teacher: Path, panel: Path) -> None:
    """The same bytes under another folder name are the same teacher: one table."""
    again = shutil.copytree(teacher, folder / "another-name")
    quant = copy_with(teacher, folder / "quant", rms_norm_eps=1e-2)
    measured(folder, teacher, teacher, panel, "a")
    measured(folder, quant, again, panel, "b")
    code, said = fidelity(folder, "compare", "a", "b")
    assert code == 0, said


BOTH = ("teacher_folder", "panel_folder")
ALL = ("teacher_folder", "exl3_folder", "panel_folder")
ROWS = [
    Fault(id="C1-config-of-a-candidate", title="rope and eps in no identity", check=config_of_a_candidate, needs=ALL),
    Fault(
        id="C1-config-of-a-teacher", title="a teacher's config in no identity", check=config_of_a_teacher, needs=BOTH
    ),
    Fault(
        id="C1-resumed", title="resumed under an edited config", check=a_run_resumed_under_another_config, needs=BOTH
    ),
    Fault(id="C1-labels", title="names in a config are labels", check=labels_in_a_config, needs=BOTH),
    Fault(id="C2-backup-beside", title="a backup decides what is digested", check=backup_beside_the_model, needs=ALL),
    Fault(id="C2-two-copies", title="two copies of a tensor", check=two_copies, needs=BOTH),
    Fault(id="C2-outside", title="an index out of the folder is followed", check=outside_the_folder, needs=BOTH),
    Fault(id="C6-base-of-a-fine-tune", title="a copied card names the teacher", check=base_of_a_fine_tune, needs=BOTH),
    Fault(id="C8-edited-receipt", title="edited receipts are printed", check=an_edited_receipt, needs=BOTH),
    Fault(id="C8-edited-positions", title="foreign positions are compared", check=edited_positions, needs=BOTH),
    Fault(id="C13-other-labels", title="the same bytes by another name", check=other_labels, needs=BOTH),
]
