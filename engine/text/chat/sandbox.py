"""The jinja2 environment of chat templates. It equals transformers', so that a template gives the same text.

A template cannot change its input, nor access Python's internal attributes. The environment does not limit time or
memory; `engine.text.chat.confined` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def environment() -> ImmutableSandboxedEnvironment:
    """Make a new environment."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals["raise_exception"] = _raise_exception
    sandbox.globals["strftime_now"] = _strftime_now
    sandbox.globals["namespace"] = _Namespace
    # The class itself would give templates more than they need.
    sandbox.globals["dict"] = _Dict()
    return sandbox


class _GenerationTag(Extension):
    """The tag `{% generation %}`, with which some templates mark the assistant's text. It does not change the text,
    and what is set within it is not set behind it, as in transformers."""

    # Declared like jinja2's own attribute.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that refuses underscore names, which could pass for Python's internal attributes."""

    # Declared like jinja2's own, because the names may include "self".
    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *arguments = args
        attributes = dict(*arguments, **kwargs)
        for name in attributes:
            _check(name)
        super(_Namespace, self).__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check(name)
        super().__setitem__(name, value)


def _check(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace may not have an attribute {name!r}")


class _Dict:
    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, names: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(names, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format a value as JSON. jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # Local time, as in transformers.
    return datetime.now().strftime(format)
