"""Chat templates: render a list of messages as the prompt format that a model was trained on.

    files -> TemplateSource (parsed, not run) -> ChatTemplate (compiled) -> render(messages) -> text

A template without tools gets them, and calls in the messages, as text (`engine.text.spelled_tools`). So does one with
tools if its caller asks for that.

A template comes with a model and is untrusted. It runs in a sandbox (`environment`) and gets only plain JSON data. A
process that must not fail uses `engine.text.confined_template`, which also limits time and memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import ModelError, RequestError
from engine.text.files import read_files, read_object
from engine.text.spelled_tools import (
    calls_with_text,
    has_tools,
    list_tools,
    spell_broken_calls,
    spell_calls,
    spell_tools,
)

#: Marks the place where a final message goes on. The space at its end shows whether the template strips messages.
_HERE: Final = "PENSTOCK:GOES:ON:HERE "
#: The names under which messages carry an assistant's reasoning. Templates read the first, some the second.
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
_LONGEST: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A template's text, with the special tokens that it sees as `bos_token` and so on. No part of it has run.

    `with_tools`: the text for chats with tools, where that is another.
    """

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str = ""

    def __post_init__(self) -> None:
        """Raises ModelError if the text is not a template.

        The text is only parsed, because compiling a template evaluates its constants, which may be huge.
        """
        for text in (self.text, self.with_tools):
            if len(text) > _LONGEST:
                raise ModelError(f"the chat template has {len(text)} characters; at most {_LONGEST} are taken")
            try:
                environment().parse(text)
            except (jinja2.TemplateError, RecursionError) as error:
                raise ModelError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_bytes(cls, files: Mapping[str, bytes]) -> TemplateSource | None:
        """Read chat_template.jinja, else tokenizer_config.json's chat_template: of several, those named "default" and
        "tool_use".

        Returns None if the model has no template. Raises ModelError.
        """
        config = read_object(files, "tokenizer_config.json")
        if "chat_template.jinja" in files:
            try:
                text = files["chat_template.jinja"].decode("utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"chat_template.jinja is not UTF-8: {error}") from error
            return cls(text, _special_tokens(config))
        entry, with_tools = config.get("chat_template"), None
        if isinstance(entry, list):
            named = {template.get("name"): template.get("template") for template in entry if isinstance(template, dict)}
            entry, with_tools = named.get("default"), named.get("tool_use")
        if entry is None:
            return None
        if not isinstance(entry, str):
            raise ModelError("tokenizer_config.json has a chat_template that is not a string")
        return cls(entry, _special_tokens(config), with_tools if isinstance(with_tools, str) else "")


class ChatTemplate:
    """A compiled chat template. Thread-safe."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None, with_tools: str = "") -> None:
        """`special_tokens`: the values that the template sees as `bos_token` and so on. `with_tools`: see
        TemplateSource.

        Raises ModelError if the source is not a template.
        """
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._has_tools = has_tools(source) or has_tools(with_tools)
        try:
            self._template = environment().from_string(source)
            self._with_tools = environment().from_string(with_tools) if with_tools else self._template
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    @classmethod
    def from_folder(cls, folder: str | Path) -> ChatTemplate | None:
        """Read a model folder's template. Returns None if the model has none."""
        return cls.from_bytes(read_files(folder))

    @classmethod
    def from_bytes(cls, files: Mapping[str, bytes]) -> ChatTemplate | None:
        """See TemplateSource.from_bytes."""
        source = TemplateSource.from_bytes(files)
        return None if source is None else cls(source.text, source.special_tokens, source.with_tools)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        now: float | None = None,
        tools_as_text: bool | str = False,
        **variables: Any,
    ) -> str:
        """Render messages as a prompt, special tokens included. `variables`: further variables, for instance `tools`.
        `tools_as_text`: tools and calls are spelled out as for a template without tools, although this one has some; a
        text is how a call is written by a template that lists no tools: then tools alone are spelled out.

        `now`: the time, in seconds since the epoch, for templates that write the date, shown in UTC. None: the clock's,
        in local time. `continue_final_message`: the prompt ends where the last message's content ends, so that the
        model continues it; `add_generation_prompt` should then be False. Both mean the same as in transformers.

        A content that is None is empty where a template prints or joins it, and `none` where it is tested.

        Raises RequestError if the template refuses the messages or fails on them, and ModelError if the template tries
        something that the sandbox forbids.
        """
        context: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **variables}
        context |= {"messages": [_reasoning_by_all_names(message) for message in messages]}
        context = _plain(context | {"add_generation_prompt": add_generation_prompt})
        if now is not None:
            context["strftime_now"] = datetime.fromtimestamp(now, UTC).strftime
        refusal: RequestError | None = None
        call = tools_as_text if isinstance(tools_as_text, str) else ""
        spelled = tools_as_text is True or not self._has_tools
        tools = context["tools"] if spelled or call else None
        if tools_as_text:
            context["tools"] = None
        for messages in self._ways(context["messages"], tools, spelled, call):
            try:
                text = self._rendered(context | {"messages": _plain(messages)}, continue_final_message)
            except RequestError as error:
                refusal = error  # of the last way: those before may be ours alone
                continue
            if not tools or list_tools(tools) in text:
                return text
            refusal = RequestError("the model's chat template leaves out the text that names the tools", param="tools")
        assert refusal is not None, "there is one way at least"
        raise refusal

    @staticmethod
    def _ways(messages: list[Any], tools: list[Any] | None, spelled: bool, call: str) -> Iterator[list[Any]]:
        """The messages as the template should take them, and as others may have to: those without a system's message,
        and those that take arguments of calls as objects, or as text, alone. `tools`: those that are spelled out.
        `spelled`: whether calls are."""
        ways = [messages]
        if spelled:
            ways = [spell_calls(messages)]
        else:
            ways += [way for way in (calls_with_text(messages), spell_broken_calls(messages)) if way is not None]
        for way in ways:
            if not tools:
                yield way
                continue
            yield spell_tools(way, tools, "system", call)
            yield spell_tools(way, tools, "user", call)

    def _rendered(self, context: dict[str, Any], continue_final_message: bool) -> str:
        final = self._mark(context["messages"]) if continue_final_message else None
        for message in context["messages"]:
            if isinstance(message, dict) and message.get("content", "") is None:
                message["content"] = _NoContent()
        try:
            text = (self._with_tools if context["tools"] else self._template).render(context)
        except SecurityError as error:
            raise ModelError(f"the model's chat template was stopped: {error}") from error
        except MemoryError:
            raise
        except Exception as error:
            # On odd messages a template may raise any exception of Python.
            raise RequestError(
                f"the model's chat template does not accept these messages: {error}", param="messages"
            ) from error
        return text if final is None else _cut(text, final)

    def _mark(self, messages: list[Any]) -> str:
        """Append the mark to the last message's text (of several parts, the last text). Returns the text before it."""
        last = messages[-1] if messages else None
        content = last.get("content") if isinstance(last, dict) else None
        if isinstance(content, list):
            part = next((p for p in reversed(content) if isinstance(p, dict) and isinstance(p.get("text"), str)), None)
            if part is not None:
                before: str = part["text"]
                part["text"] = before + _HERE
                return before
        if not isinstance(last, dict) or not isinstance(content, str):
            raise RequestError("continue_final_message needs a last message with text to go on from", param="messages")
        last["content"] = content + _HERE
        return content


def _cut(text: str, final: str) -> str:
    """The text up to the mark. If the template stripped the message, the space before the mark is removed too."""
    at = text.rfind(_HERE.strip())
    if at < 0 or final.strip() not in text:
        raise RequestError(
            "the last message does not stand in the prompt as it was given, so that it cannot go on: "
            "the model's chat template changes or leaves out parts of it",
            param="messages",
        )
    return text[:at] if text.startswith(_HERE, at) else text[:at].rstrip()


class _NoContent(str):
    """A message's content that is null, as that of tool calls alone. Many templates print it as it is, which would be
    `None`, or join it to text, which would raise; others tell by it that there are calls."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other is None or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _is_none(value: object) -> bool:
    return value is None or isinstance(value, _NoContent)


def _reasoning_by_all_names(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """A copy in plain JSON types, because the methods of other objects could bypass the sandbox."""
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


def environment() -> ImmutableSandboxedEnvironment:
    """The jinja2 environment of chat templates. It equals transformers', so that a template gives the same text.

    A template cannot change its input, nor access Python's internal attributes. The environment does not limit time or
    memory; `engine.text.confined_template` does.
    """
    """Make a new environment."""
    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.tests["none"] = _is_none
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
