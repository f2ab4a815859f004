"""Parses an output into reasoning, content and calls, piece by piece as its tokens come.

tokens ─▶ reasoning, up to its closing mark ─▶ content and calls (`tool_call_parser`)
       ─▶ of gpt-oss: all three by the channels of its messages (`harmony`)

The state is a function of the tokens so far, so an output that another worker goes on with is parsed on, and one that
is read again gives the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring as quote
from typing import Any, Final, Protocol

from producers.contract.stream import Token
from producers.gateway.openai.answer import Output
from producers.gateway.openai.call_formats import CallSyntax
from producers.gateway.openai.complete import Choice, Scorer
from producers.gateway.openai.harmony import HarmonyParser
from producers.gateway.openai.logprobs import CHAT
from producers.gateway.openai.reasoning import ReasoningSyntax
from producers.gateway.openai.tool_call_parser import (
    CallArguments,
    CallStart,
    OutputPart,
    ParsedPart,
    ReasoningText,
    ToolCallParser,
)

#: The finish reason of an output that ends with calls.
CALLED: Final = "tool_calls"


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """The marks that separate the parts of an output."""

    calls: CallSyntax | None
    reasoning: ReasoningSyntax | None

    @classmethod
    def of(cls, calls: CallSyntax | None, reasoning: ReasoningSyntax | None) -> OutputSyntax | None:
        """None for an output that is content alone."""
        return None if calls is None and reasoning is None else cls(calls, reasoning)

    @classmethod
    def of_record(cls, fields: Mapping[str, Any]) -> OutputSyntax | None:
        """The syntax that a record's fields have."""
        return cls.of(CallSyntax.from_json(fields.get("calls")), ReasoningSyntax.from_json(fields.get("reasoning")))

    @property
    def fields(self) -> dict[str, str]:
        """The fields of a record that have it."""
        calls = {} if self.calls is None else {"calls": self.calls.to_json()}
        return calls if self.reasoning is None else calls | {"reasoning": self.reasoning.to_json()}

    def parser(self) -> OutputParser | HarmonyParser:
        """A parser of one output."""
        if self.reasoning is not None and self.reasoning.harmony:
            return HarmonyParser(self.reasoning, calling=self.calls is not None)
        return OutputParser(self)


class _AnswerParser(Protocol):
    @property
    def called(self) -> bool: ...

    def feed(self, tokens: Iterable[Token]) -> list[ParsedPart]: ...

    def end(self) -> list[ParsedPart]: ...


class _Content:
    """An answer without tools."""

    called = False

    def feed(self, tokens: Iterable[Token]) -> list[ParsedPart]:
        return [token.text for token in tokens if token.text]

    def end(self) -> list[ParsedPart]:
        return []


#: Where an output is: before its first text, in its reasoning, behind it but before any content, in its content.
_BEFORE, _REASONING, _BEHIND, _ANSWER = range(4)


class OutputParser:
    """Parses one output. `reasoning_tokens`: the tokens so far of its reasoning, with its marks."""

    def __init__(self, syntax: OutputSyntax) -> None:
        self._answer: _AnswerParser = _Content() if syntax.calls is None else ToolCallParser(syntax.calls)
        self._syntax = syntax.reasoning
        #: The token that begins calls, which may have no text.
        self._call = None if syntax.calls is None else syntax.calls.begin
        self._state = _ANSWER if syntax.reasoning is None else _REASONING if syntax.reasoning.opened else _BEFORE
        #: Text that is not yet sure to be a mark, or white space that may stand beside one.
        self._pending = ""
        #: The same without white space at its beginning, before the output's first text.
        self._first = ""
        #: Whether the token of the next mark has come, whose text is still to come whole.
        self._marked = False
        self._begun = False
        self._held_tokens = 0
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """Whether the output has calls, and all of them are whole."""
        return self._answer.called

    def feed(self, tokens: Iterable[Token]) -> list[OutputPart]:
        """The pieces in further tokens."""
        if self._state == _ANSWER:
            return [*self._answer.feed(tokens)]
        parts: list[OutputPart] = []
        for token in tokens:
            self._feed(token, parts)
        return parts

    def end(self) -> list[OutputPart]:
        """Text that was held back until it could be told apart."""
        parts: list[OutputPart] = []
        pending, self._pending = self._pending, ""
        if self._state == _BEFORE and pending:
            parts += self._answer.feed([Token(0, 0, 0, -1, pending)])
        elif self._state == _REASONING:
            self._think(pending.rstrip(), parts)
        return [*parts, *self._answer.end()]

    def _feed(self, token: Token, parts: list[OutputPart]) -> None:
        if self._state == _BEFORE:
            self._find_begin(token, parts)
        elif self._state == _REASONING:
            self.reasoning_tokens += 1
            self._find_end(token, parts)
        elif self._state == _BEHIND:
            self._find_content(token, parts)
        else:
            parts += self._answer.feed([token])

    def _find_begin(self, token: Token, parts: list[OutputPart]) -> None:
        """Whether the output begins with the first mark, after white space."""
        syntax = self._syntax
        assert syntax is not None, "an output without reasoning is its answer"
        begin = syntax.marks.begin
        self._held_tokens += 1
        self._pending += token.text
        text = self._first = self._first + token.text if self._first else token.text.lstrip()
        if self._call is not None and token.token_id == self._call:  # it calls without reasoning
            self._find_answer(token, parts)
            return
        if syntax.begin is not None:
            self._marked = self._marked or token.token_id == syntax.begin
            if not self._marked:
                if text:
                    self._find_answer(token, parts)
                return
            if syntax.special:
                begin = ""  # what text there is was held back before it, and is white space
        elif not text or (len(text) < len(begin) and begin.startswith(text)):
            return
        elif not text.startswith(begin):
            self._find_answer(token, parts)
            return
        if begin in text:
            self._state, self._marked, self._pending = _REASONING, False, ""
            self.reasoning_tokens += self._held_tokens
            self._find_end(replace(token, token_id=-1, text=text.partition(begin)[2] if begin else text), parts)

    def _find_answer(self, token: Token, parts: list[OutputPart]) -> None:
        """Take what was held back for the answer's beginning."""
        pending, self._pending = self._pending, ""
        self._state = _ANSWER
        parts += self._answer.feed([replace(token, text=pending)])

    def _find_end(self, token: Token, parts: list[OutputPart]) -> None:
        """Reasoning, up to the closing mark."""
        syntax = self._syntax
        assert syntax is not None, "an output without reasoning is its answer"
        end = syntax.marks.end
        if token.text.isspace() and self._pending[-1:].isspace() and not self._marked and token.token_id != syntax.end:
            self._pending += token.text  # looked through once, however long it gets
            return
        text, self._pending = self._pending + token.text, ""
        if syntax.end is not None and token.token_id == syntax.end:
            if syntax.special:
                self._close(text, "", token, parts)
                return
            self._marked = True
        if (self._marked or syntax.end is None) and end in text:
            before, _, behind = text.partition(end)
            self._close(before, behind, token, parts)
            return
        withheld = 0
        if self._marked:
            withheld = len(text)
        elif syntax.end is None:
            withheld = next((size for size in range(len(end) - 1, 0, -1) if text.endswith(end[:size])), 0)
        certain = text[: len(text) - withheld].rstrip()
        self._pending = text[len(certain) :]
        self._think(certain, parts)

    def _close(self, before: str, behind: str, token: Token, parts: list[OutputPart]) -> None:
        self._think(before.rstrip(), parts)
        self._state = _BEHIND
        if behind:
            self._find_content(replace(token, token_id=-1, text=behind), parts)

    def _think(self, text: str, parts: list[OutputPart]) -> None:
        """Adds reasoning, without white space at its beginning."""
        if not self._begun:
            text = text.lstrip()
        if text:
            self._begun = True
            parts.append(ReasoningText(text))

    def _find_content(self, token: Token, parts: list[OutputPart]) -> None:
        """The answer, without white space at its beginning."""
        text = token.text.lstrip()
        if text:
            self._state = _ANSWER
        parts += self._answer.feed([replace(token, text=text)])


class ParsedChoice(Choice):
    """A choice that may have reasoning, and calls. `task_id`, `index`: its own, by which its calls have their ids."""

    __slots__ = ("_calls", "_id_parts", "_parser", "_size", "_syntax", "reasoning")

    def __init__(self, scorer: Scorer | None, syntax: OutputSyntax, task_id: str, index: int) -> None:
        super().__init__(scorer, CHAT)
        self._syntax = syntax
        self._parser = syntax.parser()
        self._id_parts = task_id, index
        self._calls: list[tuple[str, list[str]]] = []
        self._size = 0
        self.reasoning = bytearray()
        """As JSON, without quotes."""

    @property
    def size(self) -> int:
        return super().size + self._size + len(self.reasoning)

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def take(self, output: Output) -> None:
        self._take(output, self._keep(self._parser.feed(output.tokens)))

    def end(self) -> None:
        """All of the output was taken."""
        self._take(Output(), self._keep(self._parser.end()))
        self.reason = CALLED if self.reason == "stop" and self._parser.called else self.reason

    def members(self) -> Iterator[bytes | bytearray]:
        """The members of its message after the role, once all of the output was taken."""
        self.end()
        reasoning = self._syntax.reasoning
        if reasoning is not None and reasoning.include:
            yield b'"reasoning_content":'
            yield from (b'"', self.reasoning, b'"') if self.reasoning else (b"null",)
            yield b","
        yield from content_of(self, null=bool(self._calls))
        if self._calls:
            calls = json.dumps([*self.tool_calls()], ensure_ascii=False, separators=(",", ":"))
            yield b',"tool_calls":' + calls.encode()

    def tool_calls(self) -> Iterator[dict[str, Any]]:
        """Its calls as OpenAI has them. The last one's arguments may be cut."""
        calls = self._syntax.calls
        if not self._calls:
            return
        assert calls is not None, "an output without tools has no calls"
        for at, (name, arguments) in enumerate(self._calls):
            function = {"name": name, "arguments": "".join(arguments)}
            yield {"id": calls.format.id_of(*self._id_parts, at), "type": "function", "function": function}

    def _keep(self, parts: Sequence[OutputPart]) -> str:
        """Keeps reasoning and calls. Returns the content."""
        for part in parts:
            if isinstance(part, CallStart):
                self._calls.append((part.name, []))
                self._size += 100
            elif isinstance(part, CallArguments):
                self._calls[part.index][1].append(part.text)
                self._size += len(part.text)
            elif isinstance(part, ReasoningText):
                self.reasoning += quote(part.text)[1:-1].encode()
        return "".join(part for part in parts if isinstance(part, str))


def content_of(choice: Choice, *, null: bool = False) -> Iterator[bytes | bytearray]:
    """The content of a message, and members that are the same in all. `null`: whether no text is null."""
    if null and not choice.text:
        yield b'"content":null'
    else:
        yield b'"content":"'
        yield choice.text
        yield b'"'
    yield b',"refusal":null,"annotations":[]'


def message(choice: Choice) -> Iterator[bytes | bytearray]:
    """The members of a message after its role."""
    yield from choice.members() if isinstance(choice, ParsedChoice) else content_of(choice)


def deltas(parts: Sequence[OutputPart], syntax: OutputSyntax, task_id: str, index: int) -> Iterator[dict[str, Any]]:
    """The deltas of a stream's choice `index`."""
    for part in parts:
        if isinstance(part, str):
            yield {"content": part}
        elif isinstance(part, ReasoningText):
            if syntax.reasoning is not None and syntax.reasoning.include:
                yield {"reasoning_content": part.text}
        elif isinstance(part, CallStart):
            assert syntax.calls is not None, "an output without tools has no calls"
            function = {"name": part.name, "arguments": ""}
            identity = {"id": syntax.calls.format.id_of(task_id, index, part.index), "type": "function"}
            yield {"tool_calls": [{"index": part.index, **identity, "function": function}]}
        elif isinstance(part, CallArguments):
            yield {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
