"""Readable text out of files that are not plain text: documentation in Python source, records in YAML or JSON."""

from __future__ import annotations

import ast
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, TemplateError

from harness.errors import PanelError
from harness.panel.recipe import FileText

#: String literals from this many characters on count as documentation.
LONG = 200


class RecordLoader(yaml.SafeLoader):
    """YAML in which unknown tags, such as lm-eval's ``!function``, stand for nothing."""


RecordLoader.add_multi_constructor("!", lambda loader, suffix, node: None)


def extract(name: str, text: str, source: FileText) -> str:
    """The text that a source takes out of one file."""
    if source.extract == "documentation":
        return documentation(name, text)
    if source.extract == "records":
        return records(name, text, source)
    return text


def documentation(name: str, text: str) -> str:
    """The long string literals of Python source in order, dedented and joined by blank lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # other people's escapes such as "\\d"
        try:
            tree = ast.parse(text)
        except SyntaxError as error:
            raise PanelError(f"{name} is not Python source: {error}", 'set extract = "text"') from error
    strings = sorted(_long_strings(tree), key=lambda node: (node.lineno, node.col_offset))
    return "\n\n".join(inspect.cleandoc(str(node.value)) for node in strings) + "\n"


def _long_strings(node: ast.AST) -> Iterator[ast.Constant]:
    """Long string constants below ``node``; pieces of f-strings differ between Python versions and are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str) and len(child.value) >= LONG:
            yield child
        elif not isinstance(child, ast.JoinedStr):
            yield from _long_strings(child)


def records(name: str, text: str, source: FileText) -> str:
    """``source.template`` rendered for each record (its keys, and itself as ``record``), joined by blank lines."""
    try:
        value: Any = yaml.load(text, Loader=RecordLoader)
        for key in source.records.split(".") if source.records else ():
            value = value[key]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        problem = " ".join(str(error).split())
        raise PanelError(f"{name} has no records at {source.records}: {problem}", "correct the recipe") from error
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=False).from_string(source.template or "")
    found = value if isinstance(value, list) else [value]
    try:
        return "\n\n".join(template.render(record, record=record).strip() for record in found) + "\n"
    except (TemplateError, TypeError) as error:
        raise PanelError(f"{name}: the recipe's template does not fit: {error}", "correct the recipe") from error
