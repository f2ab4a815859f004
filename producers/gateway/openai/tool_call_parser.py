"""Parses an output's text into content and tool calls, piece by piece as it comes, for messages and streams' deltas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from producers.contract.stream import Token
from producers.gateway.openai.answer import Output
from producers.gateway.openai.complete import Choice, Scorer
from producers.gateway.openai.logprobs import CHAT
from producers.gateway.openai.tools import CallSyntax

#: The finish reason of an output that ends with calls.
CALLED = "tool_calls"


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call. `index`: its number in the output."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which are JSON together."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call, which is whole."""

    index: int


#: A piece of an output: text is content.
ParsedPart = str | CallStart | CallArguments | CallEnd


class ToolCallParser:
    """Parses one output as it comes. Its grammar guarantees the form, so little is checked here."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._mark = syntax.begin
        self._format = syntax.format
        self._head = re.compile(rf'\{{"name": "([\w-]+)", "{syntax.format.arguments}": ')
        scan = self._tell_answer if syntax.answer else self._scan_content
        self._step = self._find_head if syntax.must else scan
        #: Text that is not yet sure to be content, or not yet a call's whole head.
        self._pending = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self._calls_only = syntax.must
        self.calls = 0

    @property
    def called(self) -> bool:
        """Whether the output has calls, and all of them are whole."""
        return self.calls > 0 and self._step != self._take_arguments

    def feed(self, tokens: Iterable[Token]) -> list[ParsedPart]:
        """The pieces in further tokens."""
        parts: list[ParsedPart] = []
        for token in tokens:
            scanning = self._step in (self._scan_content, self._tell_answer)
            if self._mark is not None and token.token_id == self._mark and scanning:
                self._step = self._find_head
            text = token.text
            while text:
                text = self._step(text, parts)
        return parts

    def end(self) -> list[ParsedPart]:
        """The content that was held back until it was sure to be that."""
        pending, self._pending = self._pending, ""
        if self._step == self._find_head:
            pending = "" if self.calls or self._calls_only else self._content_before(pending)
        return [pending] if pending else []

    def _scan_content(self, text: str, parts: list[ParsedPart]) -> str:
        """Content, up to the first call. Returns the text of the calls."""
        text, self._pending = self._pending + text, ""
        begin = self._format.begin
        if not begin:
            self._step = self._find_head if text.startswith("{") else self._take_content
            return text
        if self._mark is None and begin in text:
            self._step = self._find_head
            return text
        # White space at the end, and what may be the beginning of `begin`, may belong to a call.
        size = next((n for n in range(len(begin) - 1, 0, -1) if text.endswith(begin[:n])), 0)
        certain = text[: len(text) - size].rstrip()
        parts += [certain] if certain else []
        self._pending = text[len(certain) :]
        return ""

    def _tell_answer(self, text: str, parts: list[ParsedPart]) -> str:
        """The beginning of an output that is JSON, whose strings may have anything, or calls alone."""
        text, self._pending = self._pending + text, ""
        begun, begin = text.lstrip(), self._format.begin
        if not begun or (self._mark is None and len(begun) < len(begin) and begin.startswith(begun)):
            self._pending = text
            return ""
        called = self._mark is None and begun.startswith(begin)
        self._step = self._find_head if called else self._take_content
        return text

    def _take_content(self, text: str, parts: list[ParsedPart]) -> str:
        """Content to the end."""
        parts.append(text)
        return ""

    def _find_head(self, text: str, parts: list[ParsedPart]) -> str:
        """The next call's head. Returns the text after it."""
        text, self._pending = self._pending + text, ""
        match = self._head.search(text)
        if match is None:
            self._pending = text
            return ""
        # Text before the mark may come after its token, for what was held back until it was sure.
        if not self.calls and not self._calls_only and (before := self._content_before(text[: match.start()])):
            parts.append(before)
        parts.append(CallStart(self.calls, match[1]))
        self.calls += 1
        self._step = self._take_arguments
        return text[match.end() :]

    def _content_before(self, text: str) -> str:
        """The content in a text that ends where the first call begins, or on the way there."""
        content, mark, _ = text.partition(self._format.begin) if self._format.begin else (text, "", "")
        return content.rstrip() if mark else content.removesuffix(self._format.opening).rstrip()

    def _take_arguments(self, text: str, parts: list[ParsedPart]) -> str:
        """The arguments up to their last brace. Returns the text after it."""
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if char in "}]" and not self._depth:
                    self._step = self._find_head
                    parts += [CallArguments(self.calls - 1, text[: at + 1]), CallEnd(self.calls - 1)]
                    return text[at + 1 :]
        parts.append(CallArguments(self.calls - 1, text))
        return ""


class CallingChoice(Choice):
    """A choice that may have calls. `task_id`, `index`: its own, by which its calls have their ids."""

    __slots__ = ("_calls", "_format", "_id_parts", "_parser", "_size")

    def __init__(self, scorer: Scorer | None, syntax: CallSyntax, task_id: str, index: int) -> None:
        super().__init__(scorer, CHAT)
        self._format = syntax.format
        self._parser = ToolCallParser(syntax)
        self._id_parts = task_id, index
        self._calls: list[tuple[str, list[str]]] = []
        self._size = 0

    @property
    def size(self) -> int:
        return super().size + self._size

    def take(self, output: Output) -> None:
        self._take(output, self._keep(self._parser.feed(output.tokens)))

    def close(self) -> list[dict[str, Any]]:
        """The message's `tool_calls`, once all of the output was taken."""
        self._take(Output(), self._keep(self._parser.end()))
        self.reason = CALLED if self.reason == "stop" and self._parser.called else self.reason
        return [
            {
                "id": self._format.id_of(*self._id_parts, at),
                "type": "function",
                "function": {"name": name, "arguments": "".join(arguments)},
            }
            for at, (name, arguments) in enumerate(self._calls)
        ]

    def _keep(self, parts: Sequence[ParsedPart]) -> str:
        """Keeps the calls. Returns the content."""
        for part in parts:
            if isinstance(part, CallStart):
                self._calls.append((part.name, []))
                self._size += 100
            elif isinstance(part, CallArguments):
                self._calls[part.index][1].append(part.text)
                self._size += len(part.text)
        return "".join(part for part in parts if isinstance(part, str))


def message(choice: Choice) -> Iterator[bytes | bytearray]:
    """The members of a message after its role: content, and calls if there are any."""
    calls = choice.close() if isinstance(choice, CallingChoice) else []
    if calls and not choice.text:
        yield b'"content":null'
    else:
        yield b'"content":"'
        yield choice.text
        yield b'"'
    yield b',"refusal":null,"annotations":[]'
    if calls:
        yield b',"tool_calls":' + json.dumps(calls, ensure_ascii=False, separators=(",", ":")).encode()


def deltas(parts: Sequence[ParsedPart], syntax: CallSyntax, task_id: str, index: int) -> Iterator[dict[str, Any]]:
    """The deltas of a stream's choice `index`."""
    for part in parts:
        if isinstance(part, str):
            yield {"content": part}
        elif isinstance(part, CallStart):
            function = {"name": part.name, "arguments": ""}
            identity = {"id": syntax.format.id_of(task_id, index, part.index), "type": "function"}
            yield {"tool_calls": [{"index": part.index, **identity, "function": function}]}
        elif isinstance(part, CallArguments):
            yield {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
