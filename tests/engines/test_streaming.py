"""Layer by layer over all rows against the whole model, bit for bit; and what it reads and holds meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.stream_weights import Weights
from harness.engines.streaming import EARLY, StreamingEngine
from harness.errors import EngineError
from harness.types import Row
from tests.exl3 import made_packs
from tests.exl3.made_packs import Pack, Spec


def mixed(name: str) -> Spec | None:
    return Spec(bits=2 + sum(map(ord, name)) % 3) if made_packs.every_linear(name) else None


def routed_experts(name: str) -> Spec | None:
    return Spec(bits=3 if ".layers.2." in name or ".layers.4." in name else 2) if ".mlp.experts." in name else None


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[str], Spec | None], Any]] = {
    "llama": (lambda: made_packs.llama(192, 3, 320, bias=True), mixed, None),
    "tied": (lambda: made_packs.llama(tied=True), mixed, None),
    "mixtral": (made_packs.mixtral, mixed, None),
    "phi3": (made_packs.phi3, mixed, made_packs.split_fused),
    "glm5-next": (made_packs.glm5_next, routed_experts, None),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pack]:
    cache: dict[str, Pack] = {}

    def make(family: str) -> Pack:
        if family not in cache:
            model, choose, split = FAMILIES[family]
            cache[family] = made_packs.pack(model(), tmp_path_factory.mktemp(family), choose, split=split)
        return cache[family]

    return make


def panel_rows(count: int, length: int = 64) -> list[Row]:
    """Rows of two lengths."""
    rng = np.random.default_rng(7)
    return [
        Row(
            index=index,
            ids_T=rng.integers(0, made_packs.VOCAB, length - 9 * (index % 2)).astype(np.int32),
            document=f"d{index}",
            domain="x",
            sha256="",
        )
        for index in range(count)
    ]


def engine(kind: Any, folder: Path, compute: str = "float32", **more: Any) -> Any:
    located = ModelFolder(path=folder, name="tiny", revision="local")
    return kind(located, compute=compute, device="cpu", weights_sha256="w", tokenizer_sha256="t", **more)


def same_outputs(one: Any, other: Any, rows: list[Row]) -> None:
    for want in ("hidden", "logits"):
        for ours, theirs, row in zip(one.run(rows, want), other.run(rows, want), rows, strict=True):
            name = "states_TH" if want == "hidden" else "logits_TV"
            assert torch.equal(getattr(ours.outputs, name), getattr(theirs.outputs, name)), (want, row.index)
            assert ours.index == row.index and np.array_equal(ours.echoed_ids_T, row.ids_T)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_streamed_equals_whole_bit_for_bit(family: str, kind: str, made: Any) -> None:
    folder = getattr(made(family), kind)
    streamed, whole = engine(StreamingEngine, folder), engine(TransformersEngine, folder)
    same_outputs(streamed, whole, panel_rows(3))
    assert streamed.identity == whole.identity
    assert torch.equal(streamed.head.weight_VH, whole.head.weight_VH) and streamed.head.sha256 == whole.head.sha256


@pytest.mark.parametrize("family", ["mixtral", "glm5-next"])
def test_in_bfloat16_too(family: str, made: Any) -> None:
    folder = made(family).packed
    same_outputs(
        engine(StreamingEngine, folder, "bfloat16"), engine(TransformersEngine, folder, "bfloat16"), panel_rows(2)
    )


@pytest.mark.parametrize("family", ["mixtral", "glm5-next"])
@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_each_weight_is_read_once_and_a_vision_tower_never(
    family: str, kind: str, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    streamed = engine(StreamingEngine, getattr(made(family), kind))
    reads: Counter[str] = Counter()
    read = Weights._read
    monkeypatch.setattr(Weights, "_read", lambda self, header: reads.update([header.name]) or read(self, header))
    list(streamed.run(panel_rows(3)))
    stored = {name for name in streamed._weights._checkpoint.tensors if "visual" not in name and "lm_head" not in name}
    assert set(reads) == stored
    assert set(reads.values()) == {1}


def test_memory_holds_one_layer_and_a_quarter(made: Any) -> None:
    streamed = engine(StreamingEngine, made("mixtral").packed)
    list(streamed.run(panel_rows(3)))
    layer, rows = streamed.largest_layer_bytes, streamed.activation_bytes
    others = streamed._weights.of("model.norm")[0].bytes
    assert layer < streamed.peak_weight_bytes <= layer + EARLY * (layer + rows) + others
    # Two residual tensors a row (the layer's input and the embeddings) and two rotary tables.
    tokens = sum(len(row.ids_T) for row in panel_rows(3))
    assert rows == pytest.approx(tokens * 4 * (2 * 128 + 2 * 32), rel=0.05)


def test_the_next_layer_is_filled_while_this_one_runs_where_there_is_room(made: Any) -> None:
    folder, rows = made("mixtral").packed, panel_rows(2)
    tight = engine(StreamingEngine, folder)
    list(tight.run(rows))
    needed = tight.largest_layer_bytes + tight.activation_bytes
    norm = tight._weights.of("model.norm")[0].bytes
    for budget, most in ((needed, 1), (needed + tight.largest_layer_bytes, 2)):
        streamed = engine(StreamingEngine, folder, memory_budget=budget)
        same_outputs(streamed, tight, rows)
        assert streamed.peak_weight_bytes <= most * tight.largest_layer_bytes + norm
        assert (streamed.peak_weight_bytes > tight.largest_layer_bytes + norm) == (most == 2)


def test_budget_that_is_too_small_is_refused_with_the_sizes(made: Any) -> None:
    streamed = engine(StreamingEngine, made("mixtral").packed, memory_budget=100_000)
    with pytest.raises(EngineError, match=r"largest layer and .* for the rows; the budget is 0.00") as caught:
        list(streamed.run(panel_rows(2)))
    assert "--memory-budget" in caught.value.repair


def test_nothing_stays_and_a_second_run_is_the_same(made: Any) -> None:
    streamed = engine(StreamingEngine, made("llama").packed)
    rows = panel_rows(3)
    first = [out.outputs.states_TH.clone() for out in streamed.run(rows)]
    assert all(parameter.is_meta for parameter in streamed._model.parameters())
    again = [out.outputs.states_TH for out in streamed.run(rows[::-1])][::-1]
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert list(streamed.run([])) == []


def test_a_run_that_is_given_up_leaves_the_engine_whole(made: Any) -> None:
    streamed, rows = engine(StreamingEngine, made("llama").packed), panel_rows(3)
    begun = streamed.run(rows)
    first = next(begun).outputs.states_TH.clone()
    begun.close()
    assert all(parameter.is_meta for parameter in streamed._model.parameters())
    assert torch.equal(next(streamed.run(rows)).outputs.states_TH, first)


def test_an_error_in_a_layer_comes_out_and_leaves_the_engine_whole(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    streamed, rows = engine(StreamingEngine, made("llama").packed), panel_rows(3)
    broken = streamed._layers[1].mlp.down_proj

    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(broken, "forward", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            list(streamed.run(rows))
    assert len(list(streamed.run(rows))) == 3


def test_a_shard_that_shrinks_meanwhile_is_one_clear_error(made: Any, tmp_path: Path) -> None:
    pack = made_packs.pack(made_packs.llama(), tmp_path, mixed)
    streamed = engine(StreamingEngine, pack.packed)
    shard = pack.packed / "model.safetensors"
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size // 2)
    from harness.errors import CheckpointError

    with pytest.raises(CheckpointError, match="ended early"):
        list(streamed.run(panel_rows(1)))


def test_rows_that_are_too_long(made: Any) -> None:
    with pytest.raises(EngineError, match="256 tokens"):
        list(engine(StreamingEngine, made("llama").packed).run(panel_rows(1, 400)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "mixtral", "glm5-next"])
def test_on_a_gpu(family: str, made: Any) -> None:
    located = ModelFolder(path=made(family).packed, name="tiny", revision="local")
    options: dict[str, Any] = {"compute": "bfloat16", "device": "cuda", "weights_sha256": "w", "tokenizer_sha256": "t"}
    same_outputs(StreamingEngine(located, **options), TransformersEngine(located, **options), panel_rows(3))
