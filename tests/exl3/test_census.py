"""The census counts headers; a config's claims are held against it. Known answer: the 12L pack of GLM-5.3-Flash."""

import json
import math
import sys

import pytest
import torch
from typer.testing import CliRunner

from harness.cli import app, main
from harness.exl3.census import sizes, take_census
from harness.exl3.checkpoint import Checkpoint, open_checkpoint
from harness.exl3.claims import mismatches
from harness.exl3.headers import TensorHeader
from tests.exl3.made_folders import packed, write

THREE_BIT_LAYERS = (3, 4, 5, 6, 24, 27, 30, 33, 36, 39, 42, 44)


def headers(name: str, bits: float, rows: int, columns: int, marker: str = "mcg") -> list[TensorHeader]:
    """The quadruple of one packed linear, shapes only."""
    parts = {"trellis": ("I16", (rows // 16, columns // 16, int(16 * bits)), 2), "suh": ("F16", (rows,), 2)}
    parts |= {"svh": ("F16", (columns,), 2), marker: ("I32", (), 4)}
    return [
        TensorHeader(name=f"{name}.{s}", dtype=d, shape=shape, shard="a", start=0, bytes=math.prod(shape) * size)
        for s, (d, shape, size) in parts.items()
    ]


def plain(name: str, *shape: int, dtype: str = "BF16", size: int = 2) -> TensorHeader:
    return TensorHeader(name=name, dtype=dtype, shape=shape, shard="b", start=0, bytes=math.prod(shape) * size)


def of_headers(found: list[TensorHeader], quantization: dict, layers: int = 45) -> Checkpoint:
    config = {"text_config": {"num_hidden_layers": layers}, "quantization_config": quantization}
    return Checkpoint(name="pack", tensors={header.name: header for header in found}, config=config)


def glm_12l(claims: dict) -> Checkpoint:
    """43 MoE layers (3-44 and the MTP layer 45) of 288 experts, 12 of them at K=3."""
    found = [plain("lm_head.weight", 154880, 4096), plain("model.language_model.embed_tokens.weight", 154880, 4096)]
    found.append(plain("model.language_model.layers.45.eh_proj.weight", 4096, 8192))
    for layer in range(3, 46):
        bits = 3 if layer in THREE_BIT_LAYERS else 2
        for expert in range(288):
            stem = f"model.language_model.layers.{layer}.mlp.experts.{expert}"
            for leaf, shape in (("gate_proj", (4096, 1024)), ("up_proj", (4096, 1024)), ("down_proj", (1024, 4096))):
                found += headers(f"{stem}.{leaf}", bits, *shape)
    return of_headers(found, claims)


CLAIMS_12L = {
    "quant_method": "exl3",
    "bits": 2,
    "codebook": "mcg",
    "head_bits": 16,
    "scope": "glm53_routed_experts_only",
    "layer_bits": {str(layer): 3 for layer in THREE_BIT_LAYERS},
}


@pytest.fixture(scope="module")
def twelve() -> Checkpoint:
    return glm_12l(CLAIMS_12L)


def test_12l_known_answer(twelve):
    """Two agreeing derivations said 2.31; the tensors say 2.279."""
    census = take_census(twelve)
    assert census.counts("routed experts") == {2: 26784, 3: 10368}
    assert census.routed is not None and census.routed.tensors == 37152
    assert census.routed.mean_k == pytest.approx((26784 * 2 + 10368 * 3) / 37152, abs=1e-12)
    assert f"{census.routed.mean_k:.3f}" == "2.279"
    overhead = 8 * (2 * (4096 + 1024) + 4) / (4096 * 1024)  # scales and marker
    assert census.routed.bits_per_weight == pytest.approx(census.routed.mean_k + overhead, abs=1e-12)
    assert census.codebooks == {"mcg": 37152} and census.head == "BF16"
    assert census.mismatches == []
    assert {group.section for group in census.groups if group.layer == 45} == {"mtp"}
    apart = {name: (rate.tensors, rate.mean_k) for name, rate in census.scopes.items() if name.startswith("routed")}
    assert apart == {
        "routed experts, without MTP": (42 * 864, pytest.approx((30 * 2 + 12 * 3) / 42)),
        "routed experts, MTP alone": (864, 2.0),
        "routed experts": (37152, pytest.approx((31 * 2 + 12 * 3) / 43)),
    }


def test_a_layer_that_config_forgets_is_a_line_for_every_projection():
    wrong = {**CLAIMS_12L, "layer_bits": {k: v for k, v in CLAIMS_12L["layer_bits"].items() if k != "24"}}
    assert mismatches(glm_12l(wrong)) == [
        f"layer 24 {leaf}: config says K=2, 288 tensors are K=3" for leaf in ("down_proj", "gate_proj", "up_proj")
    ]


def dense(bits: dict[int, float], claims: dict, marker: str = "mul1", head: float | None = None) -> Checkpoint:
    found = [plain("model.embed_tokens.weight", 256, 128)]
    for layer, k in bits.items():
        for leaf in ("up_proj", "down_proj"):
            found += headers(f"model.layers.{layer}.mlp.{leaf}", k, 128, 128, marker)
    if head:
        found += headers("lm_head", head, 128, 256, marker)
    return of_headers(found, {"quant_method": "exl3", **claims}, layers=len(bits))


def test_a_single_tensor_is_named():
    checkpoint = dense({0: 2, 1: 2}, {"bits": 2, "layer_bits": {}})
    odd = headers("model.layers.1.mlp.up_proj", 3, 128, 128, "mul1")
    changed = Checkpoint(name="x", tensors={**checkpoint.tensors, **{h.name: h for h in odd}}, config=checkpoint.config)
    assert mismatches(changed) == ["layer 1 up_proj: config says K=2, tensor is K=3"]


@pytest.mark.parametrize(
    "bits, claims, expected",
    [
        ({0: 2, 1: 3}, {"bits": 2.5}, []),
        ({0: 2, 1: 2}, {"bits": 2.03}, []),
        ({0: 2, 1: 3}, {"bits": 2.05}, ["config says 2.05 bits on average, the tensors hold 2.500"]),
        (
            {0: 2, 1: 3},
            {"bits": 2},
            [
                "config says 2 bits on average, the tensors hold 2.500",
                "layer 1 down_proj: config says K=2, tensor is K=3",
                "layer 1 up_proj: config says K=2, tensor is K=3",
            ],
        ),
        ({0: 2, 1: 3}, {"bits": 2, "layer_bits": {"1": 3}}, []),
        ({0: 2, 1: 2}, {}, []),
        ({0: 2, 1: 2}, {"bits": "two", "layer_bits": [3]}, []),
        ({0: 2}, {"bits": 2, "codebook": "mul1"}, []),
        (
            {0: 2},
            {"bits": 2, "codebook": "mcg"},
            ["config says codebook mcg, 2 of 2 modules are mul1, first model.layers.0.mlp.up_proj"],
        ),
    ],
)
def test_claims_of_an_average_of_layers_and_of_a_codebook(bits, claims, expected):
    assert mismatches(dense(bits, claims)) == expected


@pytest.mark.parametrize(
    "head, claims, expected",
    [
        (6, {"head_bits": 6}, []),
        (8, {"head_bits": 6}, ["lm_head: config says head_bits=6, tensor is K=8"]),
        (6, {"head_bits": 16}, ["lm_head: config says head_bits=16, tensor is K=6"]),
        (6, {}, []),
        (None, {"head_bits": 6}, []),
    ],
)
def test_claims_of_the_head(head, claims, expected):
    assert mismatches(dense({0: 2}, {"bits": 2, **claims}, head=head)) == expected


def test_a_native_head_where_bits_are_claimed():
    checkpoint = of_headers(
        [plain("lm_head.weight", 256, 128), *headers("model.layers.0.mlp.up_proj", 2, 128, 128)], {}
    )
    checkpoint.config["quantization_config"] = {"head_bits": 6}
    assert mismatches(checkpoint) == ["lm_head.weight: config says head_bits=6, tensor is BF16"]


def test_claims_of_dense_layers_beside_routed_experts():
    found = [
        *headers("model.layers.0.self_attn.q_proj", 5, 128, 128),
        *headers("model.layers.0.self_attn.o_proj", 4, 128, 128),
        *headers("model.layers.0.mlp.experts.0.up_proj", 2, 128, 128),
    ]
    claims = {"bits": 2, "non_routed_exl3": {"layers": {"model.layers.0.self_attn": {"bits": 4}}}}
    assert mismatches(of_headers(found, claims)) == ["layer 0 q_proj: config says K=4, tensor is K=5"]
    claims = {"bits": 2, "layer_bits": {}, "non_routed_exl3": {"modules": ["*"], "bits": 5, "layer_bits": {"0": 4}}}
    assert mismatches(of_headers(found, claims)) == ["layer 0 q_proj: config says K=4, tensor is K=5"]


def test_claims_of_quantization_config_json():
    checkpoint = dense({0: 2}, {"bits": 2})
    checkpoint.tensor_storage = {
        "model.layers.0.mlp.up_proj": {"quant_format": "exl3", "bits_per_weight": 2},
        "model.layers.0.mlp.down_proj": {"quant_format": "exl3", "bits_per_weight": 3},
        "model.layers.7.mlp.down_proj": {"quant_format": "exl3", "bits_per_weight": 3},
        "model.norm": {"stored_tensors": {}},
    }
    assert mismatches(checkpoint) == [
        "model.layers.0.mlp.down_proj: quantization_config.json says 3 bits, tensor is K=2",
        "quantization_config.json lists 1 modules that no shard holds, first model.layers.7.mlp.down_proj",
    ]


def test_half_rates_are_weighed_by_weights():
    found = headers("model.layers.0.mlp.up_proj", 1.5, 128, 384, "mul1") + headers("lm_head", 6, 128, 128, "mul1")
    census = take_census(of_headers(found, {}))
    assert census.quantised is not None and census.quantised.mean_k == pytest.approx((3 * 1.5 + 6) / 4)
    assert census.routed is None and census.head == "K=6"


# ---- folders and the command --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    made = packed("model.layers.0.self_attn.q_proj", bits=4) | packed("model.layers.1.self_attn.q_proj", bits=4)
    made |= packed("model.layers.2.self_attn.q_proj", bits=2.5, codebook="mul1")
    made |= {"model.embed_tokens.weight": torch.zeros(64, 128).bfloat16(), "model.norm.weight": torch.zeros(128)}
    config = {"num_hidden_layers": 3, "quantization_config": {"quant_method": "exl3", "bits": 4.0, "codebook": "mcg"}}
    return write(tmp_path / "quant", made, config=config)


def test_sizes_of_a_folder_are_its_bytes(folder):
    found = sizes(folder)
    header = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    assert found.bytes == (folder / "model.safetensors").stat().st_size - header
    weights = 3 * 128 * 128 + 64 * 128 + 128
    assert found.bits_per_weight == pytest.approx(8 * found.bytes / weights)
    assert found.quantised_bits_per_weight == pytest.approx(3.5 + 8 * (2 * 256 + 4) / 128**2)
    assert found.routed_bits_per_weight is None


def test_sizes_of_a_plain_folder(tmp_path):
    found = sizes(write(tmp_path / "plain", {"lm_head.weight": torch.zeros(64, 128).bfloat16()}))
    assert (found.bytes, found.bits_per_weight, found.quantised_bits_per_weight) == (16384, 16.0, None)


def test_inspect_prints_the_census(folder):
    result = CliRunner().invoke(app, ["exl3", "inspect", str(folder)], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.replace("│", " ").split()) for line in result.output.splitlines()]
    assert "all quantised 3 49,152 23,052 3.500 3.752" in lines
    assert "0-1 4" in lines and "2 2.5" in lines
    assert "codebooks (modules): mcg 2, mul1 1; head: tied" in lines
    assert "embedding BF16 1 8,192 16,384" in lines
    assert "config says 4 bits on average, the tensors hold 3.500" in lines
    assert "layer 2 q_proj: config says K=4, tensor is K=2.5" in lines


def test_inspect_as_json(folder):
    result = CliRunner().invoke(app, ["exl3", "inspect", str(folder), "--json"])
    value = json.loads(result.stdout)
    assert value["scopes"]["quantised"]["mean_k"] == 3.5 and value["scopes"]["routed_experts"] is None
    assert value["codebooks"] == {"mcg": 2, "mul1": 1} and value["config_claims"]["bits"] == 4.0
    assert len(value["groups"]) == 3 and len(value["mismatches"]) == 3


def test_long_lists_are_cut_on_the_screen_only():
    from rich.console import Console

    from harness.report.census import census_tables

    census = take_census(dense(dict.fromkeys(range(30), 3), {"bits": 2}))
    console = Console(width=100, record=True, file=open("/dev/null", "w"))
    for part in census_tables(census):
        console.print(part)
    assert "and 41 more (--json shows all)" in console.export_text() and len(census.mismatches) == 61


@pytest.mark.parametrize(
    "source, code, message",
    [
        ("nowhere-at-all", 2, "is neither a checkpoint folder nor a Hub id"),
        ("/no/such/folder", 2, "is neither a checkpoint folder nor a Hub id"),
        ("EMPTY", 3, "holds no *.safetensors file"),
        ("BROKEN", 3, "is truncated"),
    ],
)
def test_bad_input_is_one_line_with_its_exit_code(folder, tmp_path, monkeypatch, capsys, source, code, message):
    if source == "EMPTY":
        source = str(tmp_path)
    if source == "BROKEN":
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        source = str(folder)
    monkeypatch.setattr(sys, "argv", ["fidelity", "exl3", "inspect", source])
    with pytest.raises(SystemExit) as exit_:
        main()
    complaint = capsys.readouterr().err.strip().splitlines()
    assert exit_.value.code == code and message in complaint[0]
    assert len(complaint) == 2 and complaint[1].startswith("  repair:")


def test_census_of_a_folder_equals_that_of_its_headers(folder):
    """No weight is read: the same headers without the files give the same census."""
    opened = open_checkpoint(folder)
    bare = Checkpoint(name=opened.name, tensors=opened.tensors, config=opened.config)
    assert take_census(bare).as_json() == take_census(opened).as_json()
