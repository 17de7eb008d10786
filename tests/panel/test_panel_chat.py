"""Conversations: the template's text, its clock, and what it leaves out."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from harness.errors import PanelError
from harness.panel import build_panel, load_tokenizer
from tests.panel.made_panels import TEMPLATE, make_panel, make_tokenizer, words

MESSAGES = [{"role": "user", "content": words(14, 1)}, {"role": "assistant", "content": words(16, 2)}]
CLOCK = (
    "{% if date_string is defined %}{{ date_string }}{% else %}{{ strftime_now('%d %b %Y') }}{% endif %}\n"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def chat_panel(folder: Path, tokenizer: Path, *, extra: str = "", value: object = None, bos: str = "tokenizer") -> Path:
    body = f'[[sources]]\nkind = "chat"\ndomain = "chat"\nrows = 1\nlicense = "none"\nfiles = ["c.json"]\n{extra}'
    text = json.dumps({"messages": MESSAGES} if value is None else value)
    return make_panel(folder, files={"c.json": text}, body=body, rows=1, tokenizer=str(tokenizer), bos=bos)


def test_rendered_through_the_template(tmp_path: Path, tokenizer_folder: Path) -> None:
    panel = build_panel(chat_panel(tmp_path / "p", tokenizer_folder))
    text = load_tokenizer(tokenizer_folder).decode(panel.rows[0].ids_T)
    assert text.startswith("<s>user: " + " ".join(MESSAGES[0]["content"].split()[:5]))


def test_fault_a5_a_template_that_reads_the_clock_is_refused(tmp_path: Path) -> None:
    """No panel may change with the date; a date given in the recipe is fine."""
    tokenizer = make_tokenizer(tmp_path / "t", template=CLOCK)
    with pytest.raises(PanelError, match=r"c\.json: the tokenizer's chat template reads the clock"):
        build_panel(chat_panel(tmp_path / "p", tokenizer))
    fixed = chat_panel(tmp_path / "q", tokenizer, extra='template_kwargs = { date_string = "26 Jul 2024" }\n')
    assert len(build_panel(fixed).rows) == 1


def test_fault_a5_a_clock_that_cannot_be_set_is_refused(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check proves itself, should another transformers version read the clock elsewhere."""
    monkeypatch.setattr("harness.panel.chat.clock_at", lambda moment: nullcontext())
    with pytest.raises(PanelError, match="a clock that cannot be checked"):
        build_panel(chat_panel(tmp_path / "p", tokenizer_folder))


def test_fault_a5_an_edited_template_breaks_the_seal(tmp_path: Path) -> None:
    """The template's digest is sealed even where the ids stay the same."""
    tokenizer = make_tokenizer(tmp_path / "t", template=TEMPLATE)
    panel = chat_panel(tmp_path / "p", tokenizer)
    build_panel(panel)
    make_tokenizer(tmp_path / "t", template=TEMPLATE + "{# edited upstream #}")
    with pytest.raises(PanelError, match="different: tokenizer"):
        build_panel(panel)


def test_fault_a4_template_arguments_are_part_of_the_recipe(tmp_path: Path, tokenizer_folder: Path) -> None:
    """Thinking on and thinking off are two panels."""
    template = "{{ 'think ' if enable_thinking is not defined or enable_thinking }}" + TEMPLATE
    tokenizer = make_tokenizer(tmp_path / "t", template=template)
    first = build_panel(chat_panel(tmp_path / "p", tokenizer))
    second = build_panel(chat_panel(tmp_path / "q", tokenizer, extra="template_kwargs = { enable_thinking = false }\n"))
    assert first.recipe_sha256 != second.recipe_sha256
    assert first.sha256 != second.sha256


def test_fault_a2_template_bos_and_always_is_double(tmp_path: Path, tokenizer_folder: Path) -> None:
    """The template writes a BOS and the policy adds one."""
    with pytest.raises(PanelError, match="double BOS at row 0"):
        build_panel(chat_panel(tmp_path / "p", tokenizer_folder, bos="always"))


def test_template_bos_is_not_doubled_by_the_tokenizers_policy(tmp_path: Path, bos_tokenizer_folder: Path) -> None:
    ids = build_panel(chat_panel(tmp_path / "p", bos_tokenizer_folder)).rows[0].ids_T
    assert list(ids[:2]).count(0) == 1


def test_a_template_that_drops_a_message_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t", template="{{ messages[0].content }}" * 2)
    with pytest.raises(PanelError, match="leaves out message 1"):
        build_panel(chat_panel(tmp_path / "p", tokenizer))


def test_without_template(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t")
    with pytest.raises(PanelError, match="has no chat template"):
        build_panel(chat_panel(tmp_path / "p", tokenizer))
    plain = build_panel(chat_panel(tmp_path / "q", tokenizer, extra='without_template = "plain"\n'))
    assert load_tokenizer(tokenizer).decode(plain.rows[0].ids_T).startswith("user: ")


@pytest.mark.parametrize(
    "value",
    [{"messages": []}, {"messages": [{"content": "x"}]}, {"turns": []}, [3], {"messages": MESSAGES, "date": "x"}],
)
def test_what_is_no_conversation_is_refused(tmp_path: Path, tokenizer_folder: Path, value: object) -> None:
    with pytest.raises(PanelError, match="is not a conversation"):
        build_panel(chat_panel(tmp_path / "p", tokenizer_folder, value=value))


def test_a_template_that_raises_is_reported(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "t", template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PanelError, match="the chat template failed: roles must alternate"):
        build_panel(chat_panel(tmp_path / "p", tokenizer))


LONG = [{"role": role, "content": words(30, seed)} for seed, role in enumerate(("user", "assistant") * 3)]


def test_fault_c12_a_templates_bos_is_in_every_row_of_its_document_or_in_none(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """The template writes BOS once: windows after the first would start without one, in silence."""

    def panel(name: str, bos: str) -> Path:
        body = '[[sources]]\nkind = "chat"\ndomain = "chat"\nrows = 5\nrows_per_document = 9\nlicense = "none"\n'
        text = json.dumps({"messages": LONG})
        body += 'files = ["c.json"]\n'
        return make_panel(
            tmp_path / name, files={"c.json": text}, body=body, rows=5, tokenizer=str(tokenizer_folder), bos=bos
        )

    with pytest.raises(PanelError, match=r"of c\.json#?0? ?.*starts with BOS and row \d of it does not"):
        build_panel(panel("never", "never"))
    bos = load_tokenizer(tokenizer_folder).bos_token_id
    rows = build_panel(panel("tokenizer", "tokenizer")).rows
    assert len(rows) == 5 and all(row.ids_T[0] == bos for row in rows)
    assert all(bos not in row.ids_T[1:] for row in rows)
