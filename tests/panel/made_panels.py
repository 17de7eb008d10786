"""Small panels of invented text and a small BPE tokenizer, all made on the spot."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

WORDS = "amber basin copper drift ember fallow granite harbour island juniper kettle lantern meadow".split()
TEMPLATE = "{% for m in messages %}{{ '<s>' if loop.first }}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def words(count: int, seed: int) -> str:
    """Invented text of ``count`` words; different seeds share hardly any 8-gram."""
    chooser = random.Random(seed)
    return " ".join(chooser.choice(WORDS) for _ in range(count)) + "\n"


def make_tokenizer(folder: Path, *, add_bos: bool = False, words_seed: int = 0, template: str | None = None) -> Path:
    """Train a byte-level BPE tokenizer and save it as a folder."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    inner.train_from_iterator([words(400, words_seed)], trainer)
    if add_bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def make_panel(
    folder: Path, *, files: dict[str, str | bytes], body: str = "", **keys: str | int | float | bool
) -> Path:
    """Write a panel folder: text files and a panel.toml with one text source over them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    defaults = {
        "name": folder.name,
        "description": "test",
        "license": "none",
        "tokenizer": "set by the test",
        "rows": len(files),
        "length": 32,
        "seed": 1,
    }
    head = "\n".join(f"{key} = {_toml(value)}" for key, value in {**defaults, **keys}.items())
    rows = {**defaults, **keys}["rows"]
    source = f"""
[[sources]]
kind = "text"
domain = "words"
rows = {rows}
license = "none"
files = {sorted(files)}
"""
    (folder / "panel.toml").write_text(head + "\n" + (body or source))
    return folder


def _toml(value: str | int | float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
