"""Builds a message's JSON, or its events, from the tokens of its task.

tokens ─▶ parts (`output_parser`), without the stop sequence ─▶ blocks: thinking, text, tool_use ─▶ one JSON object
                                                             ─▶ message_start ─▶ each block: start, deltas, stop
                                                                ─▶ message_delta (stop reason, usage) ─▶ message_stop
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from json.encoder import encode_basestring as quote
from json.encoder import encode_basestring_ascii as quote_ascii
from typing import Any, Final

from producers.contract import model_fit
from producers.contract.stream import End, Token
from producers.gateway.context import Gateway
from producers.gateway.http.errors import messages_body_of, problem_of
from producers.gateway.http.sse import Direct
from producers.gateway.openai.answer import ChunkStream, Output, OutputBatch, output_batches, run_by_weight
from producers.gateway.openai.chat import PreparedChat
from producers.gateway.openai.complete import Choice, Whole
from producers.gateway.openai.logprobs import CHAT, dumps
from producers.gateway.openai.output_parser import OutputSyntax
from producers.gateway.openai.tool_call_parser import CallArguments, CallStart, OutputPart, ReasoningText
from producers.gateway.tasks.foreground import Foreground

PREFIX: Final = "msg_"
#: Our tier -> Anthropic's name of it; others have their own.
_TIERS: Final = {"default": "standard"}
#: Events that have a type alone.
PING: Final = b'event: ping\ndata: {"type": "ping"}\n\n'
STOP: Final = b'event: message_stop\ndata: {"type": "message_stop"}\n\n'
#: The types of blocks.
TEXT, THINKING, CALL = "text", "thinking", "tool_use"


class OutputReader:
    """Reads one output. `chat`: what it answers. `stops`: the sequences that end it, which its tokens still have.

    `stop_sequence`: the one that ended it.
    """

    def __init__(self, chat: PreparedChat, stops: Sequence[str]) -> None:
        syntax: OutputSyntax | None = chat.syntax
        self.syntax = syntax
        self.task_id = chat.foreground.ids[0]
        self._parser = None if syntax is None else syntax.parser()
        self._stops = sorted(stops, key=len, reverse=True)
        #: The tokens of prompt and output that are all for which there is room, where that alone bounds the output.
        self._room = model_fit.room(chat.resolved.card)
        self._bounded = chat.task.max_tokens is not None
        self.stop_sequence: str | None = None

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.reasoning_tokens

    @property
    def called(self) -> bool:
        """Whether the output has calls, and all of them are whole."""
        return self._parser is not None and self._parser.called

    def feed(self, tokens: Sequence[Token]) -> list[OutputPart]:
        """The parts in further tokens."""
        if self._stops:
            tokens = [*map(self._without_stop, tokens)]
        if self._parser is None:
            return [token.text for token in tokens if token.text]
        return [*filter(self._included, self._parser.feed(tokens))]

    def end(self) -> list[OutputPart]:
        """Parts that were held back until they could be told apart."""
        return [] if self._parser is None else [*filter(self._included, self._parser.end())]

    def stop_reason(self, reason: str | None, ends: Iterable[End]) -> str | None:
        """The message's stop reason. `reason`: the task's."""
        if reason == "length":
            used = sum(end.usage["prompt_tokens"] + end.usage["output_tokens"] for end in ends)
            return "max_tokens" if self._bounded or used < self._room else "model_context_window_exceeded"
        if reason != "stop":
            return reason
        if self.stop_sequence is not None:
            return "stop_sequence"
        return "tool_use" if self.called else "end_turn"

    def call_id(self, index: int) -> str:
        assert self.syntax is not None
        assert self.syntax.calls is not None, "an output without tools has no calls"
        return self.syntax.calls.format.id_of(self.task_id, 0, index)

    def _without_stop(self, token: Token) -> Token:
        """A token without the sequence that ended the output. The engine gives such a sequence out in the last token
        as a whole (`engine.output.StopMatcher`)."""
        if token.finish_reason == "stop":
            self.stop_sequence = next(filter(token.text.endswith, self._stops), None)
            if self.stop_sequence is not None:
                return replace(token, text=token.text.removesuffix(self.stop_sequence))
        return token

    def _included(self, part: OutputPart) -> bool:
        reasoning = None if self.syntax is None else self.syntax.reasoning
        return not isinstance(part, ReasoningText) or (reasoning is not None and reasoning.include)


def opened(chat: PreparedChat) -> dict[str, Any]:
    """The first members of a message."""
    return {
        "id": f"{PREFIX}{chat.foreground.ids[0]}",
        "type": "message",
        "role": "assistant",
        "model": chat.resolved.card["name"],
        **chat.foreground.shortened,
    }


def usage_of(ends: Sequence[End], reader: OutputReader, tier: str) -> dict[str, Any]:
    """The usage of a message. What the prefix cache had is apart from `input_tokens`."""
    prompt, cached, output = (
        sum(end.usage[name] for end in ends) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
    )
    return {
        **_input(prompt - cached, cached),
        "output_tokens": output,
        "output_tokens_details": {"thinking_tokens": reader.reasoning_tokens},
        "service_tier": _TIERS.get(tier, tier),
    }


def _input(tokens: int, cached: int) -> dict[str, int]:
    return {"input_tokens": tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}


class MessageChoice(Choice):
    """The output of a message in one piece, collected as JSON."""

    __slots__ = ("_blocks", "_reader", "_size")

    def __init__(self, reader: OutputReader) -> None:
        super().__init__(None, CHAT)
        self._reader = reader
        #: Type and text of each block: text as JSON without quotes, a call's arguments as they are; and its name.
        self._blocks: list[tuple[str, bytearray, str]] = []
        self._size = 0

    @property
    def size(self) -> int:
        return self._size

    @property
    def reasoning_tokens(self) -> int:
        return self._reader.reasoning_tokens

    def take(self, output: Output) -> None:
        self._keep(self._reader.feed(output.tokens))
        self.reason = output.reason or self.reason

    def content(self) -> Iterator[bytes | bytearray]:
        """The JSON of its blocks with commas between, once all of the output was taken."""
        self._keep(self._reader.end())
        calls = 0
        for at, (kind, text, name) in enumerate(self._blocks):
            yield b"," if at else b""
            if kind == CALL:
                yield dumps({"type": CALL, "id": self._reader.call_id(calls), "name": name})[:-1] + b',"input":'
                yield _object_or_empty(text, whole=self._reader.called)
                calls += 1
            else:
                yield b'{"type":"%b","%b":"' % (kind.encode(), kind.encode())
                yield text
                yield b'"' if kind == TEXT else b'","signature":' + dumps(self._reader.task_id)
            yield b"}"

    def _keep(self, parts: Sequence[OutputPart]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self._begin(CALL, part.name)
            elif isinstance(part, CallArguments):
                self._add(part.text.encode())
            elif isinstance(part, (str, ReasoningText)):
                kind, text = (TEXT, part) if isinstance(part, str) else (THINKING, part.text)
                if not self._blocks or self._blocks[-1][0] != kind:
                    self._begin(kind)
                self._add(quote(text)[1:-1].encode())

    def _begin(self, kind: str, name: str = "") -> None:
        self._blocks.append((kind, bytearray(), name))
        self._size += 100

    def _add(self, text: bytes) -> None:
        self._blocks[-1][1].extend(text)
        self._size += len(text)


def _object_or_empty(arguments: bytearray, *, whole: bool) -> bytes | bytearray:
    """A call's arguments; an empty object for those that the output's end has cut. `whole`: whether it has cut none of
    the message's."""
    try:
        whole = isinstance(json.loads(arguments), dict)
    except RecursionError:
        pass  # too deep for Python, and not for all clients
    except ValueError:
        whole = False
    return arguments if whole else b"{}"


class WholeMessage(Whole):
    """Collects a message in one piece."""

    def __init__(self, reader: OutputReader, tier: str) -> None:
        self._choice = MessageChoice(reader)
        super().__init__([self._choice], 1, lambda *_: iter(()))
        self._reader, self._tier = reader, tier

    def pieces(self, first: dict[str, Any]) -> Iterator[bytes | bytearray]:
        yield dumps(first)[:-1] + b',"content":['
        yield from self._choice.content()
        last = {
            "stop_reason": self._reader.stop_reason(self._choice.reason, self.ends),
            "stop_sequence": self._reader.stop_sequence,
            "usage": usage_of(self.ends, self._reader, self._tier),
        }
        yield b"]," + dumps(last)[1:]


class EventWriter:
    """Writes a message's events, in ASCII, because many clients split lines at U+2028 and the like."""

    def __init__(self, chat: PreparedChat, reader: OutputReader) -> None:
        self._chat = chat
        self._reader = reader
        #: The type of the block that is open; and how many blocks there were.
        self._kind: str | None = None
        self._blocks = 0

    def start(self) -> bytes:
        """The events before the first token."""
        tier = self._chat.task.tier
        usage = {**_input(len(self._chat.task.prompt), 0), "output_tokens": 0, "service_tier": _TIERS.get(tier, tier)}
        message = {**opened(self._chat), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", f'"message": {json.dumps(message)}') + PING

    def tokens(self, tokens: list[Token]) -> bytes:
        """The events of further tokens."""
        return b"".join(self._parts(self._reader.feed(tokens)))

    def end(self, ends: Sequence[End], reason: str | None) -> bytes:
        """The last events."""
        last = [*self._parts(self._reader.end()), *self._close()]
        delta = {"stop_reason": self._reader.stop_reason(reason, ends), "stop_sequence": self._reader.stop_sequence}
        usage = usage_of(ends, self._reader, self._chat.task.tier)
        members = f'"delta": {json.dumps(delta)}, "usage": {json.dumps(usage)}'
        return b"".join([*last, _event("message_delta", members), STOP])

    async def chunks(self, foreground: Foreground, direct: Direct) -> AsyncGenerator[bytes]:
        """All events behind the first ones."""
        with self._chat.chat.text_request.naming():
            ends: dict[int, End] = {}
            reason: str | None = None
            async with aclosing(output_batches(foreground.events(direct), 1)) as batches:
                async for batch in batches:
                    ends |= batch.ends
                    for output in batch.outputs.values():
                        reason = output.reason or reason
                    if batch.outputs and (chunk := await run_by_weight(batch.weight, partial(self._of, batch))):
                        yield chunk
            yield self.end([*ends.values()], reason)

    def _of(self, batch: OutputBatch) -> bytes:
        return b"".join(self.tokens(output.tokens) for output in batch.outputs.values())

    def _parts(self, parts: Sequence[OutputPart]) -> Iterator[bytes]:
        for part in parts:
            if isinstance(part, str):
                yield from self._enter(TEXT, {"text": ""})
                yield self._delta("text_delta", "text", part)
            elif isinstance(part, ReasoningText):
                yield from self._enter(THINKING, {"thinking": "", "signature": ""})
                yield self._delta("thinking_delta", "thinking", part.text)
            elif isinstance(part, CallStart):
                yield from self._close()
                call = {"id": self._reader.call_id(part.index), "name": part.name, "input": {}}
                yield from self._enter(CALL, call)
            elif isinstance(part, CallArguments):
                yield self._delta("input_json_delta", "partial_json", part.text)

    def _enter(self, kind: str, members: Mapping[str, Any]) -> Iterator[bytes]:
        """The events before a block's first delta, unless it is open."""
        if self._kind != kind:
            yield from self._close()
            self._kind = kind
            block = json.dumps({"type": kind, **members})
            yield _event("content_block_start", f'"index": {self._blocks}, "content_block": {block}')

    def _close(self) -> Iterator[bytes]:
        """The events after the open block's last delta."""
        if self._kind is None:
            return
        if self._kind == THINKING:
            yield self._delta("signature_delta", "signature", self._reader.task_id)
        yield _event("content_block_stop", f'"index": {self._blocks}')
        self._kind, self._blocks = None, self._blocks + 1

    def _delta(self, kind: str, member: str, text: str) -> bytes:
        delta = f'{{"type": "{kind}", "{member}": {quote_ascii(text)}}}'
        return _event("content_block_delta", f'"index": {self._blocks}, "delta": {delta}')


def _event(kind: str, members: str) -> bytes:
    """An event's lines. `members`: the JSON of its members beside the type."""
    return f'event: {kind}\ndata: {{"type": "{kind}", {members}}}\n\n'.encode()


class MessageStream(ChunkStream):
    """Streams a message's events; an error comes as the event `error`. `request_id`: the request's, for errors."""

    def __init__(
        self, writer: EventWriter, foreground: Foreground, gateway: Gateway, direct: Direct, request_id: str
    ) -> None:
        super().__init__(writer.chunks(foreground, direct), foreground, gateway, direct)
        self._writer = writer
        self._request_id = request_id

    def opening(self) -> bytes:
        return self._writer.start()

    def broken(self, error: Exception) -> bytes:
        body = json.dumps(messages_body_of(problem_of(error), self._request_id))
        return f"event: error\ndata: {body}\n\n".encode()
