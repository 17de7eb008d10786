"""Output heads: what follows the linear, in which dtype it is judged, and models that wrap a language model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from harness.engines.head import head_logits, require_own_head, trial_states
from harness.engines.hf import TransformersEngine
from harness.engines.models import ModelFolder
from harness.engines.streaming import StreamingEngine
from harness.errors import EngineError
from harness.scoring import score_logits
from harness.types import Logits, Row
from tests.fault_cases import made
from tests.fault_cases.command import copy_with, measured, refused
from tests.fault_cases.entry import Fault


@contextmanager
def hidden_cap(cap: float = 30.0, scale: float = 1.0) -> Iterator[None]:
    """Llama with a soft-cap and a scale that no config names."""
    plain = LlamaForCausalLM.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        out = plain(self, *arguments, **named)
        out.logits = cap * torch.tanh(out.logits * scale / cap)
        return out

    with mock.patch.object(LlamaForCausalLM, "forward", forward):
        yield


def teacher_toml(folder: Path, model: Path, dtype: str) -> Path:
    file = folder / f"{dtype}.toml"
    file.write_text(f'name = "t-{dtype}"\nmodel = "{model}"\ncompute_dtype = "{dtype}"\n')
    return file


def in_bfloat16(folder: Path, teacher: Path, panel: Path) -> None:
    """A cap of 300 moves logits of 10 by 0.004, half a step of bf16 at 1: seen, captured as logits, at distance 0."""
    for cap, scale in ((30.0, 1.0), (300.0, 1.0), (1e9, 1.001)):
        for dtype in ("float32", "bfloat16", "float16"):
            with hidden_cap(cap, scale):
                name = f"{dtype}-{cap:g}"
                toml = teacher_toml(folder, teacher, dtype)
                receipt = measured(folder, teacher, toml, panel, name, "--compute-dtype", dtype)
                assert any(check["figure"] == "outputs are logits" for check in receipt["preflight"]), name
                assert receipt["summary"]["kl_mean"] == 0 and receipt["counts"]["zero_kl"] == receipt["positions"]
            for capture in folder.glob("teachers/captures/*/manifest.json"):
                stored = json.loads(capture.read_text())["key"]
                assert (stored["form"], stored["dtype"]) == ("logits", "float32")
                capture.rename(capture.with_suffix(".seen"))
                for row in capture.parent.glob("row-*"):
                    row.unlink()


def logits_at_distance_zero(folder: Path, teacher: Path, panel: Path) -> None:
    """Logits are stored minus their maximum, and so compared: a model is at distance 0 from itself, and not near it."""
    with hidden_cap():
        receipt = measured(folder, teacher, teacher, panel, "run")
        again = measured(folder, teacher, teacher, panel, "again", "--memory-budget", "auto")
    for found in (receipt, again):
        assert found["summary"]["kl_max"] == 0 and found["counts"]["zero_kl"] == found["positions"] == 380


def known_heads_stay(folder: Path, teacher: Path, panel: Path) -> None:
    """The same model without the cap is separable in every dtype, whole and streamed, and at distance 0 too."""
    for dtype in ("float32", "bfloat16", "float16"):
        toml = teacher_toml(folder, teacher, dtype)
        for how in ((), ("--memory-budget", "auto")):
            receipt = measured(folder, teacher, toml, panel, f"{dtype}{len(how)}", "--compute-dtype", dtype, *how)
            (figure,) = [c["figure"] for c in receipt["preflight"] if "logit - head" in c["figure"]]
            assert float(figure.split()[-1]) < 1e-4
            assert receipt["summary"]["kl_mean"] == 0


def streamed_logits(folder: Path, teacher: Path) -> None:
    """Logits of a head that is not separable are the same bits whole and layer by layer, and float32 in bf16."""
    located = ModelFolder(path=teacher, name="t", revision="local")
    row = Row(index=0, ids_T=np.arange(40, dtype=np.int32), document="d", domain="x", sha256="")
    digests = {"weights_sha256": "w", "tokenizer_sha256": "t"}
    with hidden_cap():
        found = []
        for kind in (TransformersEngine, StreamingEngine):
            engine = kind(located, compute="bfloat16", device="cpu", **digests)
            assert engine.head is None
            (out,) = engine.run([row], "hidden")
            assert isinstance(out.outputs, Logits) and out.outputs.logits_TV.dtype == torch.float32
            found.append(out.outputs.logits_TV)
    assert torch.equal(*found)
    assert not torch.equal(found[0], found[0].bfloat16().float())


def own_kernels(folder: Path) -> None:
    """An engine's 16-bit logits: rounding passes, a hidden cap of 100 and a scale of 1.01 do not, at any size."""
    generator = torch.Generator().manual_seed(2)
    head = made.head(torch.randn(500, 64, generator=generator))
    states = torch.randn(8, 64, generator=generator) / 20
    located = ModelFolder(path=folder, name="m", revision="local")
    few = trial_states(head, states)
    right = head_logits(head, few)
    assert float(right[:8].abs().max()) < 3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        require_own_head(located, "an engine", right.to(dtype), head, few, "")
        for wrong in (100 * torch.tanh(right / 100), 1.01 * right, right + 1.0):
            with pytest.raises(EngineError, match="logits differ by"):
                require_own_head(located, "an engine", wrong.to(dtype), head, few, "")


# ---- wrappers --------------------------------------------------------------------------------------------------------

TEXT = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
}
SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


def mistral3(tie: bool = False) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    text = {"model_type": "mistral", "head_dim": 32, "sliding_window": None, "tie_word_embeddings": tie} | TEXT
    vision = {"model_type": "pixtral", "image_size": 28, "patch_size": 14} | SMALL
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=5, tie_word_embeddings=tie)
    return Mistral3ForConditionalGeneration(config)


def qwen25_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10_000.0}
    text = TEXT | {"rope_parameters": rope, "rope_scaling": rope, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )


def cohere2_vision() -> Any:
    from transformers import Cohere2VisionConfig, Cohere2VisionForConditionalGeneration

    text = {"model_type": "cohere2", "logit_scale": 0.5, "sliding_window": 64} | TEXT
    vision = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
    vision |= {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Cohere2VisionForConditionalGeneration(Cohere2VisionConfig(text_config=text, vision_config=vision))


def wrappers(folder: Path, teacher: Path, panel: Path) -> None:
    """Multimodal wrappers load as dense models, whole and streamed, and give their own class's logits.

    The text model of Mistral 3 with the weights of a Llama is that Llama: so it is at distance 0 from it.
    """
    ids = torch.arange(1, 41)[None] * 5
    row = Row(index=0, ids_T=ids[0].numpy().astype(np.int32), document="d", domain="x", sha256="")
    for build in (mistral3, qwen25_vl, cohere2_vision):
        torch.manual_seed(3)
        model = build().to(torch.bfloat16).eval()
        path = folder / build.__name__
        model.save_pretrained(path)
        located = ModelFolder(path=path, name=path.name, revision="local")
        with torch.inference_mode():
            wanted = model.float()(input_ids=ids, use_cache=False).logits[0]
        for kind in (TransformersEngine, StreamingEngine):
            engine = kind(located, compute="float32", device="cpu", weights_sha256="w", tokenizer_sha256="t")
            # transformers' Cohere2Vision does not apply the logit_scale of its text config: captured as logits.
            assert (engine.head is None) == (build is cohere2_vision), build.__name__
            (out,) = engine.run([row], "logits")
            torch.testing.assert_close(out.outputs.logits_TV, wanted, rtol=1e-4, atol=1e-4)
    model = mistral3()
    weights = {name.removeprefix("model."): value for name, value in load_file(teacher / "model.safetensors").items()}
    model.lm_head.weight.data = weights.pop("lm_head.weight")
    model.model.language_model.load_state_dict(weights)
    wrapped = folder / "wrapped"
    model.to(torch.bfloat16).save_pretrained(wrapped)
    for file in teacher.glob("tokenizer*"):
        (wrapped / file.name).write_bytes(file.read_bytes())
    receipt = measured(folder, teacher, wrapped, panel, "run")
    assert receipt["summary"]["kl_mean"] < 1e-9


def huge_logits(folder: Path, teacher: Path, panel: Path) -> None:
    """Logits of 1e30: no digit of a difference is left, so they count as not finite, and such a model is refused."""
    t, c = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1))
    t[0, 1] = 1e30
    scores = score_logits(t, c, np.zeros(3, np.int32))
    assert (
        scores.nonfinite_teacher.tolist() == [40, 0, 0] and np.isnan(scores.kl[0]) and np.isfinite(scores.kl[1:]).all()
    )
    low = t.clone()
    low[0, 1] = -1e30
    assert np.isfinite(score_logits(low, c, np.zeros(3, np.int32)).kl).all()

    def grown(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {"lm_head.weight": tensors["lm_head.weight"] * 1e30}

    huge = copy_with(teacher, folder / "huge", grown)
    assert "NaN or infinite everywhere" in refused(folder, huge, teacher, panel)
    assert "logsumexp is nan" in refused(folder, teacher, huge, panel)


NEEDS = ("teacher_folder", "panel_folder")
ROWS = [
    Fault(id="C56-caps-in-bfloat16", title="a hidden soft-cap passes in bf16", check=in_bfloat16, needs=NEEDS),
    Fault(id="C56-known-heads", title="a head that is right is not refused", check=known_heads_stay, needs=NEEDS),
    Fault(id="C56-own-kernels", title="a hidden soft-cap of an engine passes", check=own_kernels),
    Fault(
        id="C57-logits-in-every-dtype",
        title="a head that is not separable cannot be captured",
        check=streamed_logits,
        needs=("teacher_folder",),
    ),
    Fault(id="C60-self-compare", title="5e-16 where 0 is right", check=logits_at_distance_zero, needs=NEEDS),
    Fault(id="C58-wrappers", title="a multimodal wrapper is refused as a teacher", check=wrappers, needs=NEEDS),
    Fault(id="C19-huge-logits", title="KL of logits beyond 1e29", check=huge_logits, needs=NEEDS),
]
