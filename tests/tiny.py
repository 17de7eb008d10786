"""A small real language model, trained in seconds on text written here, and a panel sealed for its tokenizer.

Checks such as "the NLL at shift 0 is the lowest" only mean something for a model that predicts, so random
weights will not do.
"""

from __future__ import annotations

from pathlib import Path

import torch

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


def train_llama(folder: Path, *, seed: int = 0, steps: int = 150) -> None:
    """Train a two-layer Llama (hidden 128, 259 tokens) and save it as bf16 with its tokenizer."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    save_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=257,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(text(seed=1, sentences=60))["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        starts = torch.randint(len(ids) - 65, (8,))
        batch = torch.stack([ids[s : s + 64] for s in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.to(torch.bfloat16).save_pretrained(folder)


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
        (texts / f"doc{index}.txt").write_text(text(seed=10 + index, sentences=4))
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
