"""The digest of a tokenizer: what it follows, what it ignores; and what cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from transformers import AutoTokenizer

from harness.errors import PanelError, UsageError
from harness.panel import load_tokenizer, tokenizer_digest, tokenizer_name
from harness.panel.gguf_metadata import gguf_scalars
from harness.panel.tokenizer import adds_bos, backend
from tests.panel.made_panels import TEMPLATE, make_tokenizer


def test_digest_survives_saving_padding_and_truncation(tokenizer_folder: Path, tmp_path: Path) -> None:
    digest = tokenizer_digest(tokenizer_folder)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert tokenizer_digest(tokenizer) == digest
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer(["amber", "amber basin copper"], padding=True, truncation=True, max_length=2)
    tokenizer.padding_side = "left"
    assert tokenizer_digest(tokenizer) == digest
    tokenizer.save_pretrained(tmp_path / "again")
    assert tokenizer_digest(tmp_path / "again") == digest


def change_normalizer(data: dict[str, Any]) -> None:
    data["normalizer"] = {"type": "Lowercase"}


def swap_merges(data: dict[str, Any]) -> None:
    data["model"]["merges"][:2] = data["model"]["merges"][1::-1]


def drop_special(data: dict[str, Any]) -> None:
    data["added_tokens"][1]["special"] = False


@pytest.mark.parametrize("change", [change_normalizer, swap_merges, drop_special])
def test_digest_follows_what_makes_other_ids(tokenizer_folder: Path, change: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    before = tokenizer_digest(tokenizer)
    data = json.loads(backend(tokenizer).to_str())
    change(data)

    class Edited:
        bos_token_id, eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        backend_tokenizer = type("Backend", (), {"to_str": staticmethod(lambda: json.dumps(data))})

        def __call__(self, *arguments: Any, **options: Any) -> Any:
            return tokenizer(*arguments, **options)

    assert tokenizer_digest(Edited()) != before


def test_fault_a1_bos_policy_is_part_of_the_digest(tmp_path: Path) -> None:
    """The same vocabulary with and without a BOS in front."""
    plain, bos = make_tokenizer(tmp_path / "a"), make_tokenizer(tmp_path / "b", add_bos=True)
    assert not adds_bos(load_tokenizer(plain))
    assert adds_bos(load_tokenizer(bos))
    assert tokenizer_digest(plain) != tokenizer_digest(bos)


def test_chat_template_is_not_part_of_the_digest(tmp_path: Path) -> None:
    with_template = make_tokenizer(tmp_path / "a", template=TEMPLATE)
    assert tokenizer_digest(with_template) == tokenizer_digest(make_tokenizer(tmp_path / "b"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("./nowhere", "no tokenizer folder"),
        ("package:surely-not-installed", "is not installed"),
        ("package:numpy", "holds 0 GGUF files"),
        ("missing.gguf", "no GGUF file"),
    ],
)
def test_what_is_not_there_is_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_tokenizer(spec)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer could be loaded from empty"):
        (tmp_path / "empty").mkdir()
        load_tokenizer(tmp_path / "empty")


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(PanelError, match="slow tokenizer"):
        backend(object())


def test_names_are_never_paths(tokenizer_folder: Path) -> None:
    assert tokenizer_name(tokenizer_folder) == "plain"
    assert tokenizer_name("org/model", revision="4.0bpw") == "org/model@4.0bpw"
    assert tokenizer_name("org/model@main") == "org/model@main"


def test_gguf_scalars_equal_the_library(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_bos_token_id(7)
    writer.add_add_bos_token(True)
    writer.add_token_list(["a", "bb", "ccc"])
    writer.add_token_types([1, 2, 3])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(9)
    writer.add_name("model name")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours = gguf_scalars(tmp_path / "m.gguf")
    theirs = GGUFReader(tmp_path / "m.gguf").fields
    assert ours["tokenizer.ggml.bos_token_id"] == 7
    assert ours["tokenizer.ggml.eos_token_id"] == 9
    assert ours["tokenizer.ggml.add_bos_token"] is True
    assert ours["general.name"] == "model name"
    assert "tokenizer.ggml.tokens" not in ours
    assert all(theirs[key].contents() == value for key, value in ours.items())


def test_gguf_that_is_none_or_cut_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04 not a gguf")
    (tmp_path / "b.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 10)
    for name, message in (("a", "is not a GGUF file"), ("b", "header of b.gguf cannot be read")):
        with pytest.raises(UsageError, match=message):
            gguf_scalars(tmp_path / f"{name}.gguf")
