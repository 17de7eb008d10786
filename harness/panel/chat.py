"""Conversations as text: through the tokenizer's own chat template, which may not read the clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any
from unittest import mock

from harness.errors import PanelError
from harness.panel.bounded import bounded, refuse_powers, require_short
from harness.panel.recipe import ChatSource
from harness.panel.seal import LockFile
from harness.panel.sources import SourceFile, Text, source_files
from harness.panel.tokenizer import Tokenizer

#: Two moments that differ in every field a template could print.
DATES = (datetime(2001, 1, 2, 3, 4, 5), datetime(2032, 12, 28, 21, 55, 56))
CLOCK_FORMAT = "%Y-%m-%d %H:%M"
CLOCK_TEMPLATE = "{{ strftime_now('" + CLOCK_FORMAT + "') }}"


def read_chats(
    source: ChatSource, number: int, folder: Path, tokenizer: Tokenizer
) -> tuple[list[Text], list[LockFile]]:
    """Rendered conversations and the digests of their files."""
    has_template = bool(tokenizer.chat_template)
    require_one_template(tokenizer, source.template_kwargs)
    if not has_template and source.without_template == "refuse":
        raise PanelError(
            "the recipe has conversations, and the tokenizer has no chat template",
            'set without_template = "plain" in that source, or take another tokenizer',
        )
    if has_template:
        check_clock(tokenizer)
        for template in templates_of(tokenizer, source.template_kwargs):
            refuse_powers("the tokenizer's chat template", template)
    texts: list[Text] = []
    locks: list[LockFile] = []
    for file in source_files(source, folder):
        locks.append(LockFile(source=number, name=file.name, sha256=file.sha256))
        for name, conversation in conversations(file):
            kwargs = source.template_kwargs
            text = render(name, conversation, tokenizer, kwargs) if has_template else transcript(conversation)
            texts.append(Text(name=name, text=text))
    return texts, locks


def require_one_template(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> None:
    """Of several named templates the recipe names one, or there is a default."""
    named = tokenizer.chat_template
    if isinstance(named, dict) and "chat_template" not in kwargs and "default" not in named:
        raise PanelError(
            f"the tokenizer has chat templates {', '.join(sorted(named))} and none is the default",
            'name one in that source: template_kwargs = { chat_template = "..." }',
        )


def templates_of(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> list[str]:
    """Every text that may be rendered: the tokenizer's own template or named ones, and one that the recipe gives."""
    own = tokenizer.chat_template
    named = list(own.values()) if isinstance(own, dict) else [own]
    return [text for text in (*named, kwargs.get("chat_template")) if isinstance(text, str)]


def transcript(conversation: dict[str, Any]) -> str:
    """A conversation as plain text, for tokenizers without a chat template."""
    return "".join(f"{message['role']}: {message.get('content') or ''}\n\n" for message in conversation["messages"])


def conversations(file: SourceFile) -> list[tuple[str, dict[str, Any]]]:
    """Names and conversations of one JSON file."""
    try:
        value = json.loads(file.data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise PanelError(f"{file.name} is not JSON: {error}", "correct that file") from error
    single = isinstance(value, dict)
    found = [value] if single else value
    for index, conversation in enumerate(found):
        _check_shape(file.name if single else f"{file.name}#{index}", conversation)
    return [(file.name if single else f"{file.name}#{index}", one) for index, one in enumerate(found)]


def _check_shape(name: str, conversation: Any) -> None:
    unknown = set(conversation) - {"messages", "tools"} if isinstance(conversation, dict) else {"not an object"}
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    whole = isinstance(messages, list) and all(isinstance(m, dict) and "role" in m for m in messages)
    if unknown or not whole or not messages:
        raise PanelError(
            f'{name} is not a conversation {{"messages": [{{"role": ..., "content": ...}}], "tools": [...]}}'
            + (f" (unknown: {', '.join(sorted(unknown))})" if unknown else ""),
            "correct that file",
        )


def render(name: str, conversation: dict[str, Any], tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> str:
    """The conversation as the template writes it; refused when it depends on the date or drops a message."""
    rendered = [_render_at(moment, name, conversation, tokenizer, kwargs) for moment in DATES]
    if rendered[0] != rendered[1]:
        raise PanelError(
            f"{name}: the tokenizer's chat template reads the clock, so the panel would change by itself",
            'give the date in the recipe under the name the template uses: template_kwargs = { date_string = "..." }',
        )
    for index, message in enumerate(conversation["messages"]):
        content = message.get("content")
        if isinstance(content, str) and content.strip() not in rendered[0]:
            raise PanelError(
                f"{name}: the chat template leaves out message {index} ({message['role']})",
                "write the conversation so that the template shows all of it",
            )
    return rendered[0]


def _render_at(
    moment: datetime, name: str, conversation: dict[str, Any], tokenizer: Tokenizer, kwargs: Mapping[str, Any]
) -> str:
    try:
        with bounded(name), clock_at(moment):
            text = tokenizer.apply_chat_template(
                conversation["messages"], tools=conversation.get("tools"), tokenize=False, **kwargs
            )
    except PanelError:
        raise
    except Exception as error:  # a template raises what it likes
        raise PanelError(f"{name}: the chat template failed: {error}", "correct the conversation") from error
    return require_short(name, str(text))


@contextmanager
def clock_at(moment: datetime) -> Iterator[None]:
    """Set the clock that transformers gives to templates (``strftime_now``) to ``moment``."""
    from transformers.utils import chat_template_utils

    class Stopped(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Stopped:
            return cls.fromtimestamp(moment.timestamp(), tz)

    with mock.patch.object(chat_template_utils, "datetime", Stopped):
        yield


def check_clock(tokenizer: Tokenizer) -> None:
    """Refuse to go on when `clock_at` does not reach the templates of this transformers version."""
    seen = []
    for moment in DATES:
        with clock_at(moment):
            messages = [{"role": "user", "content": "x"}]
            seen.append(tokenizer.apply_chat_template(messages, chat_template=CLOCK_TEMPLATE, tokenize=False))
    if seen != [moment.strftime(CLOCK_FORMAT) for moment in DATES]:
        raise PanelError(
            "this transformers version gives chat templates a clock that cannot be checked",
            "install the transformers version of constraints.txt",
        )
