"""Parses outputs in harmony, the form of gpt-oss: messages with channels, told apart by tokens that have no text.

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
                                  ... or: <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>JSON

The prompt ends with `<|start|>assistant`. The channel `analysis` is reasoning, a message to a function is a call, and
any other is content. Text without any of these tokens is content, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Final

from producers.contract.stream import Token
from producers.gateway.openai.reasoning import ReasoningSyntax
from producers.gateway.openai.tool_call_parser import CallArguments, CallEnd, CallStart, OutputPart, ReasoningText

_TO: Final = re.compile(r"to=functions\.([\w-]+)")


class HarmonyParser:
    """Parses one output. `reasoning_tokens`: the tokens so far of its reasoning, with its marks."""

    def __init__(self, syntax: ReasoningSyntax, *, calling: bool) -> None:
        """`calling`: whether there are tools; without some, a message to a function is content."""
        assert syntax.begin is not None, "harmony's marks are tokens"
        assert syntax.end is not None, "harmony's marks are tokens"
        self._channel = syntax.begin
        self._message, start, self._constrain, call = syntax.others
        self._ends = (syntax.end, start, call)
        self._calling = calling
        #: Whether one of harmony's tokens has come.
        self._marked = False
        #: The head of the next message; None within a message's text.
        self._head: str | None = ""
        self._head_tokens = 0
        self._analysis = False
        #: The arguments so far of a call that is not whole yet.
        self._arguments: list[str] | None = None
        self.calls = 0
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """Whether the output has calls, and all of them are whole."""
        return self.calls > 0 and self._arguments is None

    def feed(self, tokens: Iterable[Token]) -> list[OutputPart]:
        """The pieces in further tokens. Text that comes with a mark was held back before it."""
        parts: list[OutputPart] = []
        for token in tokens:
            self.reasoning_tokens += self._analysis
            self._head_tokens += self._head is not None
            if token.text:
                self._take(token.text, parts)
            self._marked = self._marked or token.token_id in (self._channel, self._message, *self._ends)
            if token.token_id in self._ends:
                self._close(parts)
            elif self._head is None:
                continue
            elif token.token_id == self._message:
                self._open(self._head, parts)
            elif token.token_id in (self._channel, self._constrain):
                self._head += " "
        return parts

    def end(self) -> list[OutputPart]:
        """What is known only at the end: whether the last call is whole, where no token ended it, and whether any of
        harmony's tokens has come."""
        parts: list[OutputPart] = []
        if not self._marked and self._head:
            parts.append(self._head)
            self._head = ""
        if self._arguments is not None and _is_object("".join(self._arguments)):
            self._close(parts)
        return parts

    def _take(self, text: str, parts: list[OutputPart]) -> None:
        if self._head is not None:
            self._head += text
        elif self._arguments is not None:
            self._arguments.append(text)
            parts.append(CallArguments(self.calls - 1, text))
        else:
            parts.append(ReasoningText(text) if self._analysis else text)

    def _open(self, head: str, parts: list[OutputPart]) -> None:
        """The text of a message begins."""
        self._head = None
        function = _TO.search(head) if self._calling else None
        if function is not None:
            parts.append(CallStart(self.calls, function[1]))
            self.calls += 1
            self._arguments = []
        elif "analysis" in head.split():
            self._analysis = True
            self.reasoning_tokens += self._head_tokens

    def _close(self, parts: list[OutputPart]) -> None:
        """The message has ended."""
        if self._arguments is not None:
            parts.append(CallEnd(self.calls - 1))
        self._arguments, self._analysis = None, False
        self._head, self._head_tokens = "", 0


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
