"""Chat templates: a list of messages as the prompt that a model was trained on.

A template comes with a model, from anybody: it runs in jinja2's sandbox, which lets it change nothing that it is given
and see no attribute of Python's own machinery, and it is given plain JSON data only. The sandbox does not limit time
or memory: that much a model's publisher is trusted with. The environment is that of transformers'
`apply_chat_template`, so that a template gives the same text here as there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, RequestError
from engine.text.tokenizer import read_files, read_object


class ChatTemplate:
    """Thread-safe once made."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are what the template sees as `bos_token` and the like.

        Raises ModelError where the source is not a template.
        """
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """None for a model that has no template."""
        return cls.from_bytes(read_files(folder))

    @classmethod
    def from_bytes(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """From chat_template.jinja, else tokenizer_config.json's chat_template (of several, that named "default")."""
        config = read_object(files, "tokenizer_config.json")
        if "chat_template.jinja" in files:
            try:
                source = files["chat_template.jinja"].decode("utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"chat_template.jinja is not UTF-8: {error}") from error
            return cls(source, _special_tokens(config))
        entry = config.get("chat_template")
        if isinstance(entry, list):
            named = {one.get("name"): one.get("template") for one in entry if isinstance(one, dict)}
            entry = named.get("default")
        if entry is None:
            return None
        if not isinstance(entry, str):
            raise ModelError("tokenizer_config.json has a chat_template that is not a string")
        return cls(entry, _special_tokens(config))

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt as text, special tokens included. `variables` are passed on, for instance `tools`.

        Raises RequestError where the template refuses the messages or cannot make sense of them, ModelError where
        the template tries what the sandbox forbids.
        """
        given: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **variables}
        given |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(_plain(given))
        except SecurityError as error:
            raise ModelError(f"the model's chat template was stopped: {error}") from error
        except RequestError:
            raise
        except Exception as error:
            # A template fails on odd messages in as many ways as Python does.
            raise RequestError(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


class _GenerationTag(Extension):
    """`{% generation %}`, with which some templates mark what the assistant says; it changes nothing in the text."""

    # Declared as jinja2 declares it.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Without underscore names, which could pass for attributes of Python's machinery."""

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace may not have an attribute {name!r}")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes for HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    # Local time, as in transformers.
    return datetime.now().strftime(format)


def _plain(value: Any) -> Any:
    """A copy in plain JSON types: methods of richer objects could do what the sandbox knows nothing of."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise RequestError(
        f"messages and template variables must be JSON data, not {type(value).__name__}",
        param="messages",
        code="invalid_type",
    )


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer_config.json's bos_token, eos_token and so on, each a string or {"content": string}."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens
