"""Parses an output's text into content and tool calls, piece by piece as it comes, for messages and streams' deltas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from producers.contract.stream import Token
from producers.gateway.openai.call_formats import CallSyntax


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


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of an output's reasoning."""

    text: str


#: A piece of an answer: text is content. And of an output, which may reason before it.
ParsedPart = str | CallStart | CallArguments | CallEnd
OutputPart = ParsedPart | ReasoningText


class ToolCallParser:
    """Parses one output as it comes. Its grammar guarantees the form, so little is checked here."""

    def __init__(self, syntax: CallSyntax) -> None:
        self._mark = syntax.begin
        self._format = syntax.format
        self._head = syntax.format.head_pattern()
        scan = self._tell_answer if syntax.answer else self._scan_content
        self._step = self._find_head if syntax.must else scan
        #: Text that is not yet sure to be content, or not yet a call's whole head.
        self._pending = ""
        self._depth = 0
        self._quoted = self._escaped = False
        self._calls_only = syntax.must
        #: Whether the first call has begun: its mark, as far as it has text, or its head has come.
        self._begun = False
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
            text = token.text
            if self._mark is not None and token.token_id == self._mark and scanning:
                if self._format.begin not in text:  # what comes with a mark that has no text was held back before it
                    while text:
                        text = self._step(text, parts)
                self._step = self._find_head
            while text:
                text = self._step(text, parts)
        return parts

    def end(self) -> list[ParsedPart]:
        """The content that was held back until it was sure to be that."""
        pending, self._pending = self._pending, ""
        if self._step == self._find_head:
            pending = "" if self._begun or self._calls_only else self._content_before(pending)
        return [pending] if pending else []

    def _scan_content(self, text: str, parts: list[ParsedPart]) -> str:
        """Content, up to the first call. Returns the text of the calls."""
        if text.isspace() and self._pending[-1:].isspace():
            self._pending += text  # looked through once, however long it gets
            return ""
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
        begin = self._format.begin
        if begin and begin in text and not self._begun:
            # Text before the mark may come after its token, for what was held back until it was sure.
            content, _, text = text.partition(begin)
            if not self._calls_only and (content := content.rstrip()):
                parts.append(content)
            self._begun = True
        match = self._head.search(text)
        if match is None:
            self._pending = text
            return ""
        if not self._begun and (before := self._content_before(text[: match.start()])):
            parts.append(before)
        self._begun = True
        parts.append(CallStart(self.calls, match[1]))
        self.calls += 1
        self._step = self._take_arguments
        return text[match.end() :]

    def _content_before(self, text: str) -> str:
        """The content in a text that ends where the first call begins, or on the way there, without its mark."""
        return "" if self._calls_only else text.removesuffix(self._format.opening).rstrip()

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
