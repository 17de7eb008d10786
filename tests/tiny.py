"""A small language model of text written here, and a panel sealed for its tokenizer.

Checks such as "the NLL at shift 0 is the lowest" only mean something for a model that predicts, so random
weights will not do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 259

SENTENCES = [
    "the mill by the river turns when the water is high and rests when it is low. ",
    "a careful clerk counts the sacks twice, once at noon and once at night. ",
    "if the count is wrong the miller sends a boy to ask the ferryman again. ",
    "nobody knows why the bell rings late, but everyone has learned to wait. ",
    "seven boats left in the morning and six came home before the rain. ",
    "the old bridge is narrow, so carts take turns and drivers wave their hats. ",
]


def text(seed: int, sentences: int) -> str:
    """Sentences in a seeded order."""
    order = torch.randint(len(SENTENCES), (sentences,), generator=torch.Generator().manual_seed(seed))
    return "".join(SENTENCES[i] for i in order)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: 256 bytes and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)


def save_llama(folder: Path, *, seed: int = 0) -> None:
    """A two-layer Llama (hidden 128, 259 tokens) that predicts by bigrams, saved as bf16 with its tokenizer.

    Embeddings and head factor the log bigram frequencies of the text; attention and MLPs are random, large enough
    that quantising them shows. Made in milliseconds, where training would take minutes on a busy machine.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    save_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.06,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    learn_bigrams(model, folder)
    model.to(torch.bfloat16).save_pretrained(folder)


def learn_bigrams(model: Any, tokenizer: Path) -> None:
    """Let the embedding and the head of a causal language model of 259 tokens factor the log bigram frequencies."""
    from transformers import AutoTokenizer

    width = min(model.config.hidden_size, VOCAB)
    ids = torch.tensor(AutoTokenizer.from_pretrained(tokenizer)(text(seed=1, sentences=60))["input_ids"])
    counts = torch.full((VOCAB, VOCAB), 0.01)
    counts.index_put_((ids[:-1], ids[1:]), torch.ones(len(ids) - 1), accumulate=True)
    logits = (counts / counts.sum(1, keepdim=True)).log()
    u, s, v = torch.linalg.svd(logits - logits.mean(1, keepdim=True))
    rows = u[:, :width] * s[:width]
    scale = rows.norm(dim=1, keepdim=True) / width**0.5
    empty = torch.zeros(VOCAB, model.config.hidden_size - width)
    model.model.embed_tokens.weight.data = torch.cat([rows / scale, empty], 1)
    model.lm_head.weight.data = torch.cat([v[:width].T * scale[ids].mean(), empty], 1)


def write_panel(folder: Path, tokenizer: Path, *, rows: int = 4, length: int = 96) -> None:
    """A panel recipe over local texts, one document a row; building it is the test's business."""
    texts = folder / "text"
    texts.mkdir(parents=True)
    recipe = [
        'name = "tiny"',
        'description = "sentences in random order"',
        'license = "MIT"',
        f'tokenizer = "{tokenizer}"',
        f"rows = {rows}",
        f"length = {length}",
        "seed = 1",
        'bos = "never"',
        "near_duplicates = 1.0",
    ]
    for index in range(rows):
        words = text(seed=10 + index, sentences=4)
        last = index == rows - 1  # the only row with a capital E, for tests that need a token of one row
        (texts / f"doc{index}.txt").write_text(words.replace("e", "E") if last else words)
        domain = "even" if index % 2 == 0 else "odd"
        recipe += [
            "[[sources]]",
            'kind = "text"',
            f'domain = "{domain}"',
            "rows = 1",
            f'files = ["text/doc{index}.txt"]',
            'license = "MIT"',
        ]
    (folder / "panel.toml").write_text("\n".join(recipe) + "\n")
