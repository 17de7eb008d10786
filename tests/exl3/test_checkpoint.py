"""The checkpoint reader: sharding, sorting, accounting, and one clear line for every damage."""

import json

import numpy as np
import pytest
import torch

from harness.errors import CheckpointError
from harness.exl3.checkpoint import has_trellis, open_checkpoint
from harness.exl3.claims import spot_of
from harness.exl3.files import weights_digest
from harness.exl3.tensors import Exl3Linear
from tests.exl3.made_folders import packed, write

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.1.up_proj"
NORM, EMBED = "model.norm.weight", "model.embed_tokens.weight"


def tensors() -> dict[str, torch.Tensor]:
    plain = {NORM: torch.ones(128).bfloat16(), EMBED: torch.arange(1280.0).reshape(10, 128).bfloat16()}
    return packed(Q, bits=4, codebook="mul1") | packed(UP, columns=256, bits=2) | plain


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "quant", tensors())


def test_tensors_are_sorted_by_shape_and_marker(folder):
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.modules) == {Q, UP} and set(checkpoint.plain) == {NORM, EMBED}
    q, up = checkpoint.modules[Q], checkpoint.modules[UP]
    assert (q.bits, q.codebook, q.padded_in, q.padded_out) == (4, "mul1", 128, 128)
    assert (up.bits, up.codebook, up.padded_in, up.padded_out) == (2, "mcg", 128, 256)
    assert q.bytes == 128 * 128 * 4 // 8 + 2 * 256 + 4 and not q.has_bias
    assert has_trellis(folder) and checkpoint.name == "quant"


def test_linears_and_plain_tensors_are_read_as_stored(folder):
    checkpoint, expected = open_checkpoint(folder), tensors()
    layer = checkpoint.linear(UP, in_features=120, out_features=250)
    made = Exl3Linear.from_tensors(UP, {k.removeprefix(f"{UP}."): v for k, v in expected.items() if k.startswith(UP)})
    assert torch.equal(layer.trellis, made.trellis) and torch.equal(layer.suh, made.suh)
    assert (layer.in_features, layer.out_features, layer.codebook) == (120, 250, "mcg")
    assert checkpoint.tensor(EMBED).dtype == torch.bfloat16 and torch.equal(checkpoint.tensor(EMBED), expected[EMBED])
    meta = checkpoint.modules[UP].meta_parts()
    assert {k: (v.dtype, tuple(v.shape), v.device.type) for k, v in meta.items()} == {
        "trellis": (torch.int16, (8, 16, 32), "meta"),
        "suh": (torch.float16, (128,), "meta"),
        "svh": (torch.float16, (256,), "meta"),
        "mcg": (torch.int32, (), "meta"),
    }


def test_unknown_names_are_refused(folder):
    checkpoint = open_checkpoint(folder)
    for read in (checkpoint.linear, checkpoint.tensor):
        with pytest.raises(CheckpointError, match="quant has no .* lm_head"):
            read("lm_head")


def test_legacy_signs_bias_and_slices(tmp_path):
    name = "model.layers.0.mlp.up_proj.slice.0"
    made = packed(name, legacy_signs=True, codebook="3inst") | {f"{name}.bias": torch.ones(128).half()}
    checkpoint = open_checkpoint(write(tmp_path / "old", made))
    module = checkpoint.modules[name]
    assert module.codebook == "3inst" and module.has_bias and set(module.meta_parts()) == {"trellis", "su", "sv"}
    assert set(checkpoint.linear(name).suh.tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("new", [True, False])
def test_a_file_beside_the_model_adds_to_it_and_never_overrides_it(tmp_path, new):
    folder = write(tmp_path / "quant", tensors())
    other = {"mtp.fc.weight": torch.zeros(2, 2)} | ({} if new else {NORM: torch.full((128,), 2.0)})
    write(tmp_path / "extra", other)
    (tmp_path / "extra/model.safetensors").rename(folder / "mtp.safetensors")
    checkpoint = open_checkpoint(folder)
    assert torch.equal(checkpoint.tensor(NORM), tensors()[NORM])
    assert ("mtp.fc.weight" in checkpoint.tensors) is new
    assert checkpoint.notes == ([] if new else ["mtp.safetensors is no part of the model and was left out"])


def test_two_copies_of_a_tensor_that_differ_are_refused(tmp_path):
    """Loaders take one or the other; equal copies are one tensor."""
    folder = write(tmp_path / "quant", tensors())
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    for value, refused in ((tensors()[NORM], False), (torch.full((128,), 2.0), True)):
        write(tmp_path / "extra", {NORM: value})
        (tmp_path / "extra/model.safetensors").replace(folder / "model-00002-of-00002.safetensors")
        if refused:
            with pytest.raises(CheckpointError, match="with other contents"):
                open_checkpoint(folder)
        else:
            assert open_checkpoint(folder).tensors.keys() == tensors().keys()


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/model.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(tmp_path, name):
    folder = write(tmp_path / "quant", tensors())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NORM: name}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        open_checkpoint(folder)


def test_a_link_that_leaves_the_folder_is_refused_and_the_hub_cache_is_not(tmp_path):
    store = write(tmp_path / "blobs", tensors())
    for home, refused in ((tmp_path / "mine", True), (tmp_path / "snapshots" / "0123", False)):
        home.mkdir(parents=True)
        (home / "model.safetensors").symlink_to(store / "model.safetensors")
        if refused:
            with pytest.raises(CheckpointError, match="outside the folder"):
                open_checkpoint(home)
        else:
            assert open_checkpoint(home).tensors


def split() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    made = tensors()
    return {k: v for k, v in made.items() if k.startswith(Q)}, {k: v for k, v in made.items() if not k.startswith(Q)}


@pytest.mark.parametrize("index", [True, False])
def test_sharding_and_index_do_not_matter(tmp_path, index):
    folder = write(tmp_path / "quant", *split(), index=index)
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tensors) == set(tensors()) and checkpoint.notes == []
    assert torch.equal(checkpoint.linear(Q).trellis, tensors()[f"{Q}.trellis"])


def test_a_stale_index_is_noted_and_not_followed(tmp_path):
    folder = write(tmp_path / "quant", tensors())
    stale = {"weight_map": {NORM: "model.safetensors", "gone.weight": "model-00009-of-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(stale))
    notes = open_checkpoint(folder).notes
    assert "was not followed: model-00009-of-00009.safetensors is not there" in notes[0]
    assert "1 of its tensors are in no shard, first gone.weight" in notes[1]
    assert f"it leaves out {len(tensors()) - 1} tensors" in notes[2]


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_refused(tmp_path, index):
    folder = write(tmp_path / "quant", *split(), index=index)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"shard 2 of 2 is missing \(model-00002-of-00002.safetensors\)"):
        open_checkpoint(folder)


def test_a_number_left_out_is_fine_when_the_index_shows_nothing_lost(tmp_path):
    folder = write(tmp_path / "quant", *split(), {"old.weight": torch.zeros(2)}, index=True)
    (folder / "model-00003-of-00003.safetensors").unlink()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["old.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(open_checkpoint(folder).tensors) == set(tensors())


# ---- damage -----------------------------------------------------------------------------------------------------


def cut(size):
    return lambda data: data[:size]


def header_of(data: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(change):
    def apply(data):
        header, body = header_of(data)
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + body

    return apply


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
# The right name and the wrong bytes
DAMAGE = {
    "cut in the data": (lambda data: data[:-100], "model.safetensors is truncated: .* on disk"),
    "cut in the header": (cut(200), "model.safetensors is truncated: its header alone"),
    "4,096 bytes": (cut(4096), "model.safetensors is truncated"),
    "empty": (cut(0), "model.safetensors is empty"),
    "5 bytes": (cut(5), "no safetensors file"),
    "zeros": (lambda data: bytes(len(data)), "no safetensors file"),
    "web page": (lambda data: b"<!DOCTYPE html><html>404</html>", "is a web page"),
    "git lfs pointer": (lambda data: POINTER, "Git LFS pointer"),
    "bytes appended": (lambda data: data + b"xx", "has 2 bytes past its last tensor"),
    "header no JSON": (lambda data: data[:9] + b"#" + data[10:], "damaged header"),
    "shape against bytes": (
        with_header(lambda h: h[NORM].update(shape=[129])),
        "damaged header: model.norm.weight is BF16",
    ),
    "negative shape": (with_header(lambda h: h[NORM].update(shape=[-128])), "damaged header"),
    "overlap": (with_header(lambda h: h[NORM].update(data_offsets=h[EMBED]["data_offsets"], shape=[1280])), "overlap"),
    "no offsets": (with_header(lambda h: h[NORM].pop("data_offsets")), "damaged header: 'data_offsets'"),
    "a list": (lambda data: (2).to_bytes(8, "little") + b"[]", "damaged header"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_shard_is_one_clear_line(folder, case):
    change, message = DAMAGE[case]
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))
    for read in (open_checkpoint, weights_digest):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(folder)
        assert "\n" not in caught.value.what and caught.value.repair


MODULE_DAMAGE = {
    "suh missing": (lambda t: t.pop(f"{Q}.suh"), f"{Q}: the tensor {Q}.suh is missing"),
    "trellis missing": (lambda t: t.pop(f"{Q}.trellis"), f"{Q}: the tensor {Q}.trellis is missing"),
    "unknown marker": (
        lambda t: t.update({f"{Q}.mul1": torch.tensor(77, dtype=torch.int32)}),
        f"{Q}: unknown codebook marker mul1 = 0x0000004d, known is 0x83dcd12d",
    ),
    "marker of 8 bytes": (lambda t: t.update({f"{Q}.mul1": torch.tensor(77)}), f"{Q}: marker mul1 is I64"),
    "two markers": (lambda t: t.update({f"{Q}.mcg": torch.tensor(1, dtype=torch.int32)}), "both an mcg and a mul1"),
    "impossible trellis": (
        lambda t: t.update({f"{Q}.trellis": torch.zeros(8, 8, 70, dtype=torch.int16)}),
        rf"{Q}: impossible trellis shape \[8, 8, 70\]",
    ),
    "flat trellis": (
        lambda t: t.update({f"{Q}.trellis": torch.zeros(8, 512, dtype=torch.int16)}),
        rf"{Q}: impossible trellis shape \[8, 512\]",
    ),
    "dense weight beside it": (
        lambda t: t.update({f"{Q}.weight": torch.zeros(128, 128)}),
        f"{Q}.weight lies beside {Q}.trellis",
    ),
}


@pytest.mark.parametrize("case", MODULE_DAMAGE)
def test_an_impossible_module_is_one_clear_line(tmp_path, case):
    change, message = MODULE_DAMAGE[case]
    made = tensors()
    change(made)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(write(tmp_path / "bad", made))
    assert "\n" not in caught.value.what


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="holds no \\*.safetensors file"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize("text, message", [("{", "config.json is not JSON"), ("[]", "holds a list, not an object")])
def test_a_damaged_config_is_refused(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_a_damaged_index_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(CheckpointError, match="index.json is damaged"):
        open_checkpoint(folder)


def test_a_shard_that_shrinks_after_opening_is_noticed(folder):
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.tensor(NORM)


# ---- accounting ---------------------------------------------------------------------------------------------------


def test_every_tensor_is_used_or_skipped_by_a_named_rule(folder):
    """Nothing is dropped in silence."""
    checkpoint = open_checkpoint(folder)
    used, skipped = set(checkpoint.tensors) - {NORM}, {NORM: "final norm of another model"}
    checkpoint.account(used, skipped)
    for arguments, message in (
        ((used, {}), "1 tensors are neither used nor skipped by a rule, first model.norm.weight"),
        ((used | {"x.weight"}, skipped), "1 tensors are not in the checkpoint, first x.weight"),
        ((used, {NORM: ""}), "1 tensors are skipped without a rule, first model.norm.weight"),
        ((used | {NORM}, skipped), "1 tensors are both used and skipped, first model.norm.weight"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.account(*arguments)


@pytest.mark.parametrize(
    "tensor, section",
    [
        ("model.layers.44.mlp.experts.3.up_proj.trellis", "text"),
        ("model.layers.45.enorm.weight", "mtp"),
        ("model.language_model.layers.45.mlp.experts.3.up_proj.trellis", "mtp"),
        ("mtp.layers.0.self_attn.q_proj.suh", "mtp"),
        ("model.visual.blocks.50.attn.qkv.weight", "vision"),
        ("vision_tower.encoder.layers.3.mlp.fc1.weight", "vision"),
        ("lm_head.trellis", "text"),
        ("model.norm.weight", "text"),
    ],
)
def test_sections_of_tensors(tensor, section):
    assert spot_of(tensor.rpartition(".")[0], 45).section == section


# ---- digest -------------------------------------------------------------------------------------------------------


def test_digest_is_of_contents_not_of_files(tmp_path):
    one = weights_digest(write(tmp_path / "a", tensors()))
    two = weights_digest(write(tmp_path / "b", *split(), index=True))
    assert one == two and len(one) == 64
    renamed = write(tmp_path / "c", tensors())
    (renamed / "model.safetensors").rename(renamed / "other.safetensors")
    (renamed / "config.json").write_text('{"bits": 9}')
    assert weights_digest(renamed) == one


@pytest.mark.parametrize("change", ["value", "dtype", "shape", "name", "less", "more"])
def test_digest_changes_with_every_part_of_a_tensor(tmp_path, change):
    made = tensors()
    before = weights_digest(write(tmp_path / "a", made))
    norm = made.pop(NORM)
    if change == "value":
        norm = norm.clone()
        norm[127] = 1.0078125  # the next bf16 number
    if change != "less":
        made["other" if change == "name" else NORM] = {
            "dtype": norm.view(torch.float16),
            "shape": norm.reshape(2, 64),
        }.get(change, norm)
    if change == "more":
        made["extra"] = torch.zeros(0)
    assert weights_digest(write(tmp_path / "b", made)) != before


def test_digest_of_a_known_folder_stays(tmp_path):
    """Receipts hold these digests: the recipe must not drift."""
    import hashlib

    made = {"b": torch.arange(6, dtype=torch.float32).reshape(2, 3), "a": torch.tensor(7, dtype=torch.int32)}
    lines = b"".join(
        f"{name} {dtype} {shape} {hashlib.sha256(made[name].numpy().tobytes()).hexdigest()}\n".encode()
        for name, dtype, shape in (("a", "I32", "[]"), ("b", "F32", "[2, 3]"))
    )
    assert weights_digest(write(tmp_path / "k", made)) == hashlib.sha256(lines).hexdigest()


def test_digest_reads_tensors_longer_than_a_chunk(tmp_path, monkeypatch):
    from harness.exl3 import files as weights

    folder = write(tmp_path / "a", {"x": torch.from_numpy(np.arange(10_001, dtype=np.int16))})
    whole = weights_digest(folder)
    monkeypatch.setattr(weights, "_CHUNK", 4096)
    monkeypatch.setattr(weights, "_SHOWN_FROM", 0)
    assert weights_digest(folder) == whole
