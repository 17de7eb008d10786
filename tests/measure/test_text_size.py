"""Bytes and words of what is scored, against the text itself; perplexity per word and bits per byte by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from harness.measure.run import Request, measure
from harness.measure.text_size import TextSize, per_text, text_size
from harness.panel import load_panel
from harness.report.run_report import write_report
from harness.types import Row
from harness.verify import verify

TEXT = "The naïve miller — «ça va?» — paid 7 €: 水車は川のそばで回る。 ok 🙂 and\n\n  twice two blanks. " * 6


def row(ids: list[int]) -> Row:
    return Row(index=0, ids_T=np.array(ids, dtype=np.int32), document="d", domain="x", sha256="")


def byte_level() -> Any:
    """A byte-level BPE with merges, trained on the text: characters of several bytes are cut between tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


def sentence_piece() -> Any:
    """Blocks for blanks and bytes for characters that it does not know, as in Llama's first tokenizers."""
    known = sorted({"\u2581" if c == " " else c for c in TEXT if c.isascii()} | {"\u2581"})
    pieces = ["<unk>", *(f"<0x{n:02X}>" for n in range(256)), *known]
    inner = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
def test_every_cut_of_a_text_adds_up_to_its_bytes(make: Any) -> None:
    """Rows that tile a text, wherever a character is cut: their bytes are those of the text, none twice or lost."""
    tokenizer = make()
    ids = tokenizer(TEXT, add_special_tokens=False).input_ids
    assert len(ids) > 300
    for length in (7, 10, 41):
        # A row's first token is not scored, so each row begins with the last token of the one before it.
        rows = [row(ids[start : start + length]) for start in range(0, len(ids) - 1, length - 1)]
        sizes = [text_size([r], tokenizer) for r in rows if len(r.ids_T) > 1]
        first = text_size([row([0, ids[0]])], tokenizer)
        assert first is not None
        assert sum(size.bytes for size in sizes if size) + first.bytes == len(TEXT.encode())


def test_words_are_split_at_blanks_and_special_tokens_are_spelled() -> None:
    tokenizer = byte_level()
    end = tokenizer.eos_token_id
    ids = [end, *tokenizer("two words\nand two").input_ids, end]
    assert text_size([row(ids)], tokenizer) == TextSize(bytes=len("two words\nand two<|end|>"), words=4)
    assert text_size([row(ids), row(ids)], tokenizer) == TextSize(bytes=48, words=8)


def test_a_tokenizer_that_changes_the_text_gives_no_size() -> None:
    """Tokens that do not add up to what they decode to: nothing is stated rather than something wrong."""
    tokenizer = byte_level()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], {"type": "Fuse"}]}
    fused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    ids = fused("a text that is long enough to tell").input_ids
    assert text_size([row(ids)], fused) is not None
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], replaced("e", "eeeeee")]}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    assert text_size([row(ids)], other) is None
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    unknown = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)))
    assert text_size([row(ids)], unknown) is None


def replaced(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def test_three_perplexities_of_one_model() -> None:
    """10 nats over 5 tokens, 4 words and 20 bytes."""
    found = per_text(np.full(5, 2.0), np.array([1.0, 2, 3, 4, 0]), TextSize(bytes=20, words=4))
    assert found["ppl_word_teacher"] == found["ppl_word_candidate"] == pytest.approx(math.exp(2.5), rel=1e-15)
    assert found["bits_per_byte_teacher"] == pytest.approx(0.7213475204444817, rel=1e-15)
    lost = per_text(np.array([np.inf]), np.array([np.nan]), TextSize(bytes=1, words=1))
    assert lost["ppl_word_teacher"] == np.inf and np.isnan(lost["bits_per_byte_candidate"])


def test_a_measurement_states_and_verifies_them(
    teacher_folder: Path, panel_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny tokenizer has one byte a token: bits per byte are nats a token over ln 2, and words are in the text."""
    monkeypatch.chdir(tmp_path)
    candidate = str(teacher_folder)
    found = measure(Request(candidate=candidate, panel=panel_folder, teacher=candidate, out=tmp_path / "r")).measurement
    assert found.counts["text_bytes"] == found.positions
    bits = found.summary["nll_teacher"] / math.log(2)
    assert found.summary["bits_per_byte_teacher"] == pytest.approx(bits, rel=1e-12)
    tokenizer = AutoTokenizer.from_pretrained(teacher_folder)
    words = sum(len(tokenizer.decode(r.ids_T[1:]).split()) for r in load_panel(panel_folder).rows)
    assert found.counts["text_words"] == words > 50
    nats = found.summary["nll_candidate"] * found.positions
    assert found.summary["ppl_word_candidate"] == pytest.approx(math.exp(nats / words), rel=1e-12)
    report = write_report(tmp_path / "r").read_text()
    assert "| bits per byte of the candidate |" in report and "| ppl_word of the teacher |" in report
    assert verify(tmp_path / "r").ok
    file = tmp_path / "r" / "measurement.json"
    file.write_text(file.read_text().replace(f'"text_words": {words}', f'"text_words": {words + 1}'))
    assert {finding.where for finding in verify(tmp_path / "r").findings} >= {"summary.ppl_word_teacher"}
