"""Manifests and sources through the command: folders, and a Hub on this machine of which only asked bytes travel."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.artifact.made import Hub, serving
from tests.exl3.made_packs import Spec, random_linear
from tests.fault_cases.statements import fidelity

NAMES = [
    f"model.layers.{layer}.mlp.experts.{e}.{leaf}"
    for layer in (0, 1, 2)
    for e in (0, 1)
    for leaf in ("gate_proj", "up_proj", "down_proj")
]


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def release(folder: Path, bits: int) -> Path:
    """A release of two shards: experts at K=bits, and norms that all releases share."""
    folder.mkdir()
    rng = np.random.default_rng(bits)
    shared = {f"model.layers.{layer}.input_layernorm.weight": torch.full((128,), float(layer)) for layer in (0, 1, 2)}
    for number, names in enumerate((NAMES[:9], NAMES[9:]), 1):
        tensors = dict(shared) if number == 1 else {}
        for name in names:
            tensors |= {f"{name}.{s}": part for s, part in random_linear(name, 128, 128, Spec(bits=bits), rng).items()}
        save_file(tensors, folder / f"model-{number:05d}-of-00002.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "model_type": "qwen3_moe"}))
    (folder / "README.md").write_text("# made\n")
    return folder


def mosaic(folder: Path, a: Path, b: Path, layers: tuple[int, ...]) -> Path:
    """Release A with the experts of some layers from B."""
    shutil.copytree(a, folder)
    for shard in sorted(a.glob("*.safetensors")):
        tensors, other = load_file(shard), load_file(b / shard.name)
        swap = {name: other[name] for name in tensors if ".experts." in name and int(name.split(".")[2]) in layers}
        save_file(tensors | swap, folder / shard.name, {"format": "pt"})
    return folder


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Path, Path, Path]:
    a, b = release(tmp_path / "a", 2), release(tmp_path / "b", 3)
    return a, b, mosaic(tmp_path / "mosaic", a, b, (1,))


CHANGED = "model.layers.2.mlp.experts.0.up_proj.suh"


def plan(tmp_path: Path, **change: object) -> Path:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"layers": [1], "source": "B"} | change))
    return file


def test_a_mosaic_is_explained_to_the_byte(releases: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, made = releases
    code, said = fidelity(
        tmp_path,
        "artifact",
        "equality",
        made,
        "--sources",
        a,
        "--sources",
        b,
        "--plan",
        plan(tmp_path),
        "--out",
        "e.json",
    )
    assert code == 0, said
    receipt = json.loads((tmp_path / "e.json").read_text())
    swapped = 2 * 3  # experts and projections of one layer
    assert receipt["counts"]["B"] + receipt["counts"]["both"] >= swapped and not receipt["neither"]
    assert receipt["expected_delta_bytes"] == swapped * 128 * 128 // 8
    files = sum(f.stat().st_size for f in made.glob("*.safetensors")) - sum(
        f.stat().st_size for f in a.glob("*.safetensors")
    )
    assert receipt["measured_delta_bytes"] == files
    assert receipt["drift_bytes"] == receipt["header_delta_bytes"] == files - receipt["expected_delta_bytes"]
    assert "is what its sources make" in said and len(receipt["seal"]) == 64


def test_the_published_mosaic_adds_up() -> None:
    """Twelve layers of 288 experts at K=3 instead of 2, and the five shards that they lie in."""
    assert 12 * 288 * 3 * 4 == 41_472
    grown = 2048 * 4096 // 8
    assert 288 * 3 * grown == 905_969_664 and 12 * 905_969_664 == 10_871_635_968
    shards = (905_969_668, 1_811_939_330, 1_811_939_330, 3_623_883_194, 2_717_915_152)
    assert sum(shards) == 10_871_646_674 and sum(shards) - 10_871_635_968 == 10_706
    assert 6 * 288 * 3 * 4 == 20_736 and 6 * 905_969_664 == 5_435_817_984


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda t: t.update({CHANGED: t[CHANGED] * 2}), "the plan says A, it is neither's"),
        (lambda t: t.update({"extra.weight": torch.zeros(4)}), "in no source: extra.weight"),
    ],
)
def test_a_foreign_tensor_is_named(releases: tuple[Path, Path, Path], tmp_path: Path, edit: object, line: str) -> None:
    a, b, made = releases
    shard = made / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    edit(tensors)  # type: ignore[operator]
    save_file(tensors, shard, {"format": "pt"})
    code, said = fidelity(
        tmp_path, "artifact", "equality", made, "--sources", a, "--sources", b, "--plan", plan(tmp_path)
    )
    assert code == 1 and line in said and "NOT what its sources make" in said


def test_a_layer_against_the_plan_is_named(releases: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, made = releases
    file = plan(tmp_path, layers=[1, 2])
    code, said = fidelity(tmp_path, "artifact", "equality", made, "--sources", a, "--sources", b, "--plan", file)
    assert code == 1 and "the plan says B, it is A's" in said


def test_a_sample_says_what_it_may_miss(releases: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, made = releases
    command = ["artifact", "equality", made, "--sources", a, "--sources", b, "--sample", "30"]
    code, said = fidelity(tmp_path, *command)
    total = len(NAMES) * 4 + 3
    assert code == 0 and f"30 of {total} tensors looked at" in said
    assert f"1 changed tensors would have been missed with probability {1 - 30 / total:.3g}" in said
    again = fidelity(tmp_path, *command)[1]
    assert again.splitlines()[-7:] == said.splitlines()[-7:]  # the draw is seeded


def test_hub_sources_send_only_the_bytes_asked_for(
    releases: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, made = releases
    hub = Hub(b)
    with serving(hub, monkeypatch):
        command = ["artifact", "equality", made, "--sources", a, "--sources", "someone/quant", "--sample", "4"]
        code, said = fidelity(tmp_path, *command, "--out", "e.json")
    assert code == 0, said
    headers = {}
    for shard in b.glob("*.safetensors"):
        length = int.from_bytes(shard.read_bytes()[:8], "little")
        headers[shard.name] = 8 + length
    looked = json.loads((tmp_path / "e.json").read_text())
    assert looked["sources"][1]["commit"] == "0123456789abcdef0123456789abcdef01234567"
    largest = 4 * max(tensor.nbytes for tensor in load_file(next(b.glob("*.safetensors"))).values())
    sent = sum(hub.sent[name] for name in headers)
    assert (
        sum(headers.values())
        <= sent
        <= sum(headers.values()) + largest
        < sum(f.stat().st_size for f in b.glob("*.safetensors"))
    )


@pytest.mark.parametrize("fault", ["cut", "no ranges"])
def test_a_hub_that_answers_otherwise(
    releases: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    a, _, _ = releases
    hub = Hub(a)
    hub.ranges, hub.cut = fault != "no ranges", 3 if fault == "cut" else 0
    with serving(hub, monkeypatch):
        code, said = fidelity(tmp_path, "artifact", "equality", a, "--sources", "someone/quant", "--sample", "5")
    if fault == "cut":
        assert code == 3 and "of 8 bytes" in said and "repair:" in said
    else:
        assert code == 0, said


def test_a_manifest_is_written_and_checked(
    releases: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, _ = releases
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    code, said = fidelity(tmp_path, "artifact", "manifest", a, "--write")
    assert code == 0, said
    lines = (a / "sha256-manifest.txt").read_text().splitlines()
    assert lines == sorted(lines, key=lambda line: line[66:]) and len(lines) == 4
    for line in lines:
        assert line[:64] == hashlib.sha256((a / line[66:]).read_bytes()).hexdigest() and line[64:66] == "  "
    stored = json.loads((a / "EXL3_MANIFEST.json").read_text())
    tensors = {k: v for shard in a.glob("*.safetensors") for k, v in load_file(shard).items()}
    assert stored["physical_tensor_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert stored["retained_tensor_bytes"] == 3 * 128 * 4
    assert fidelity(tmp_path, "artifact", "manifest", a)[0] == 0
    (a / "README.md").write_text("# other\n")
    (a / "new.txt").write_text("x")
    (a / "config.json").unlink()
    code, said = fidelity(tmp_path, "artifact", "manifest", a, "--check", a / "sha256-manifest.txt")
    assert code == 1
    found = {tuple(line.split()) for line in said.splitlines()}
    assert {("differs", "README.md"), ("missing", "config.json"), ("extra", "new.txt")} <= found


def test_a_repository_is_held_against_a_manifest_without_its_shards(
    releases: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _ = releases
    fidelity(tmp_path, "artifact", "manifest", a, "--write")
    for folder, wanted in ((a, 0), (b, 1)):
        hub = Hub(folder)
        with serving(hub, monkeypatch):
            code, said = fidelity(
                tmp_path, "artifact", "manifest", "someone/quant", "--check", a / "sha256-manifest.txt"
            )
        assert code == wanted, said
        assert not any(name.endswith(".safetensors") for name in hub.sent)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "names no file"),
        ("abc  README.md\n", "line 1 is no digest and path"),
        (f"{'0' * 64}  ../README.md\n", "which lies outside the artifact"),
        (f"{'0' * 64}  a\n{'0' * 64}  a\n", "names a twice"),
        ('{"files": 3}', "is no manifest: files"),
        ("\x00\xff", "line 1"),
    ],
)
def test_bad_manifests_are_one_line(releases: tuple[Path, Path, Path], tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "m.txt").write_text(text)
    code, said = fidelity(tmp_path, "artifact", "manifest", releases[0], "--check", tmp_path / "m.txt")
    assert code == 3 and line in said and "repair:" in said and "Traceback" not in said


def test_bad_sources_are_one_line(releases: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, made = releases
    empty = tmp_path / "empty"
    empty.mkdir()
    (tmp_path / "bad.json").write_text('{"layers": "all"}')
    for arguments, line in (
        ([made, "--sources", empty], "holds no *.safetensors file"),
        (
            [made, "--sources", a, "--plan", tmp_path / "bad.json", "--sources", b],
            "layers: Input should be a valid array",
        ),
        ([made, "--sources", a, "--plan", plan(tmp_path)], "a plan needs a source B"),
        ([made, "--sources", a, "--sample", "some"], "--sample some"),
        ([made, "--sources", a, "--sample", "0"], "--sample 0 of"),
        ([made, "--sources", tmp_path / "nowhere"], "neither a folder nor a Hub id"),
        ([made, "--sources", a, "--sources", b, "--sources", a], "3 sources"),
    ):
        code, said = fidelity(tmp_path, "artifact", "equality", *arguments)
        assert code in (2, 3) and line in said and "repair:" in said and "Traceback" not in said, said


def test_provenance_is_derived_again(releases: tuple[Path, Path, Path], tmp_path: Path) -> None:
    a, b, made = releases
    (made / "README.md").write_text(
        "---\nlicense: mit\nbase_model: org/base\nbase_model_relation: quantized\n---\n# m\n"
    )
    fidelity(
        tmp_path,
        "artifact",
        "equality",
        made,
        "--sources",
        a,
        "--sources",
        b,
        "--plan",
        plan(tmp_path),
        "--out",
        "e.json",
    )
    code, said = fidelity(tmp_path, "artifact", "provenance", made, "--equality", "e.json")
    assert code == 0, said
    stored = json.loads((made / "PROVENANCE.json").read_text())
    assert stored["base"]["repo"] == {"value": "org/base", "how": "stated", "evidence": "base_model of README.md"}
    assert stored["sources"][1]["how"] == "verified" and stored["codebooks"]["value"] == {"mcg": 18}
    assert stored["converter"]["how"] == "unknown"
    again = ["artifact", "provenance", made, "--equality", "e.json", "--check"]
    assert fidelity(tmp_path, *again)[0] == 0
    (made / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/base\n---\n")
    code, said = fidelity(tmp_path, *again)
    assert code == 1 and "DIFFERS: base" in said and "apache-2.0" in said
