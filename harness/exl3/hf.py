"""EXL3 as a quantisation format of transformers: importing this module registers it.

``AutoModelForCausalLM.from_pretrained("an-exl3-folder")`` then works on CPU and GPU. Weights stay packed in the
modules and are decoded when used; with ``quantization_config=Exl3Config(dequantize=True)`` they are decoded once,
in float32, and cast once to the model's dtype.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers import auto as quantizers
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from harness.errors import CheckpointError
from harness.exl3.checkpoint import Checkpoint, open_checkpoint
from harness.exl3.files import model_files, require_single_copies
from harness.exl3.hf_layout import Accounting
from harness.exl3.hf_packed import check_packed, make_dense, packed_owners
from harness.exl3.hf_plan import Fitted, fit
from harness.exl3.hf_rules import check_rotary

METHOD = "exl3"


@register_quantization_config(METHOD)
class Exl3Config(QuantizationConfigMixin):
    """``quantization_config`` of an EXL3 checkpoint. Only ``dequantize`` matters: the shards say all the rest."""

    def __init__(self, dequantize: bool = False, **advisory: Any) -> None:
        for name, value in advisory.items():
            setattr(self, name, value)
        self.quant_method = METHOD
        self.dequantize = dequantize

    def get_loading_attributes(self) -> dict[str, Any]:
        """What a config given to ``from_pretrained`` overrides in the one that the checkpoint holds."""
        return {"dequantize": self.dequantize}


@register_quantizer(METHOD)
class Exl3Quantizer(HfQuantizer):
    """Fits packed modules into the model before loading; makes them dense after it on request."""

    requires_calibration = False
    quantization_config: Exl3Config

    def __init__(self, quantization_config: Exl3Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._plan: Fitted | None = None
        self._checkpoint: Checkpoint | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if not self.pre_quantized:
            raise _not_exl3("this checkpoint")

    def update_attn_implementation(self, config: Any) -> Any:
        """The one call before transformers looks for files: name a shard, since the index may be stale or absent."""
        folder = Path(str(getattr(config, "name_or_path", "") or ""))
        shards = sorted(folder.glob("*.safetensors")) if folder.name and folder.is_dir() else []
        if shards:
            config.transformers_weights = shards[0].name
        return config

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        files = kwargs["checkpoint_files"]
        checkpoint = open_checkpoint(Path(files[0]).parent)
        require_single_copies(model_files(Path(files[0]).parent))
        if not checkpoint.modules and not checkpoint.tables:
            raise _not_exl3(Path(files[0]).parent.name)
        # The list is the loader's own: from here on it reads every shard of the folder, later ones override.
        files[:] = [str(shard) for shard in checkpoint.shards]
        model.config.__dict__.pop("transformers_weights", None)
        self._plan, self._checkpoint = fit(model, checkpoint), checkpoint
        model.accounting = self._plan.accounting
        _hush(model, self._plan.accounting)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._plan is not None and self._checkpoint is not None
        for late in self._plan.fills:
            late.fill()
        self._plan.fills.clear()
        check_rotary(model, self._checkpoint)
        if self.quantization_config.dequantize:
            return self._dequantize(model)
        check_packed(model)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        for owner in packed_owners(model):
            make_dense(owner, dtype)
        return model

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def load_exl3(
    path: str | Path,
    *,
    dequantize: bool = False,
    dtype: torch.dtype | str = "auto",
    device: str | torch.device = "cpu",
) -> Any:
    """Load an EXL3 folder as a transformers model in evaluation mode, every tensor accounted for.

    Args:
        dequantize: decode once into plain dense parameters, instead of each time a weight is used.
        dtype: of dense parameters and of computation; ``auto`` is the one in config.json.
        device: where the model goes.

    Returns:
        The model; ``accounting`` on it says what became of every tensor.

    Raises:
        CheckpointError: a tensor without a place or a rule, a parameter that nothing fills, a damaged tensor.
    """
    from transformers import AutoConfig

    folder = Path(path)
    try:
        config = AutoConfig.from_pretrained(folder)
        config.quantization_config = _own_config(config) | {"quant_method": METHOD, "dequantize": dequantize}
        model, info = auto_class(config).from_pretrained(
            folder, config=config, dtype=dtype, device_map=device, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{folder.name} cannot be loaded: {lines[0]}", "check that the download is whole"
        ) from error
    _check_loaded(folder.name, info)
    return model.eval()


def _not_exl3(name: str) -> CheckpointError:
    return CheckpointError(
        f"{name} holds no EXL3 tensors", "drop quantization_config, or quantise it with `fidelity exl3 quantize`"
    )


def _own_config(config: Any) -> dict[str, Any]:
    """The checkpoint's own quantization_config where it is an EXL3 one; it stays advisory."""
    for holder in (config, config.get_text_config()):
        own = getattr(holder, "quantization_config", None)
        if isinstance(own, dict) and own.get("quant_method") == METHOD:
            return dict(own)
    return {}


def auto_class(config: Any) -> Any:
    """The auto class that knows this config: causal language models first, multimodal ones after."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def _check_loaded(name: str, info: dict[str, Any]) -> None:
    """Refuse a model that transformers had to complete or could not fill; the accounting should have seen it first."""
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors"):
        if found := sorted(map(str, info.get(what) or ())):
            raise CheckpointError(
                f"{name}: transformers reports {len(found)} {what.replace('_', ' ')}, first {found[0]}",
                "fetch the checkpoint again; if it is whole, report this architecture",
            )


def _hush(model: Any, accounting: Accounting) -> None:
    """Keep tensors that a rule skips out of transformers' own report of unexpected ones."""
    layers = {found[0] for key in accounting.skipped if (found := re.search(r"\blayers\.\d+\.", key))}
    names = {key for key in accounting.skipped if not re.search(r"\blayers\.\d+\.", key)}
    model._keys_to_ignore_on_load_unexpected |= {re.escape(part) for part in layers | names}


def _register_multimodal() -> None:
    """GLM-5.3-Flash as a causal language model: transformers 5.24 maps it to image-text-to-text only."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    NAMES.setdefault("glm5_next", "Glm5NextForConditionalGeneration")


quantizers.LOADING_ATTRIBUTES_CONFIG_TYPES += (Exl3Config,)
_register_multimodal()
