"""Builds the JSON of a response, and its events, from its task's record and stream: pure functions of both.

    created ─▶ queued ─▶ in_progress ─▶ item, part ─▶ delta ... ─▶ done ... ─▶ end     (foreground: not queued)
                                     each call: item ─▶ delta ... ─▶ done ...

So any gateway sends the same events with the same `sequence_number`, live or afterwards, and reads them from the
beginning, since each number counts those before. Nothing but the task's own entries is stored for it. For each token
with text there is one delta (for each token, where it has log probabilities); with tools, one for each piece of text or
of a call's arguments that is known to be that. Tokens are read one by one, however they came. A background response is
in progress from its first entry; a task that ended without a token never was.

A cancelled response ends with `response.incomplete` and has the status `cancelled`: clients know no event of that
name.

All is in ASCII, as streams need it. Text and log probabilities are JSON already: they may have tens of megabytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final, Self, TypeVar

from starlette.types import Receive, Scope, Send

from engine.errors import renamed
from producers.client.aio import AsyncHandle
from producers.contract.record import Record
from producers.contract.stream import End, Event, Token
from producers.errors import TaskNotFound
from producers.gateway.context import Gateway
from producers.gateway.fair_share import in_thread
from producers.gateway.http.errors import Problem, problem_of
from producers.gateway.http.request_body import INLINE
from producers.gateway.http.sse import Direct, LiveStream
from producers.gateway.openai.answer import run_by_weight, weight
from producers.gateway.openai.logprobs import ChatLogprobs
from producers.gateway.openai.output_parser import OutputSyntax
from producers.gateway.openai.responses.request import NAMES, REASONING, THOUGHT, Item, call_view
from producers.gateway.openai.tool_call_parser import CallArguments, CallEnd, CallStart, OutputPart, ReasoningText
from producers.gateway.tasks.foreground import Foreground, stopping

T = TypeVar("T")

PREFIX: Final = "resp_"
#: Status of an ended response -> its last event.
LAST: Final = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
EMPTY_THOUGHT: Final = '{"type": "reasoning_text", "text": ""}'
EMPTY_PART: Final = '{"type": "output_text", "annotations": [], "text": "", "logprobs": []}'


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """A response as its record has it. `fields`: those of its JSON that never change. `syntax`: what tells the parts of
    its output apart; None if it is text alone."""

    task_id: str
    fields: Mapping[str, Any]
    items: list[Item]
    syntax: OutputSyntax | None

    @classmethod
    def of(cls, task_id: str, record: Mapping[str, Any]) -> Self:
        """`record`: the record's fields."""
        kept = json.loads(record["response"])
        items = [Item.of(item) for item in kept["items"]]
        return cls(task_id, kept["fields"], items, OutputSyntax.of_record(record))

    @classmethod
    async def read(cls, task_id: str, record: Mapping[str, Any]) -> Self:
        """The same on the event loop, which parses no large conversation itself."""
        return await by_size(record, partial(cls.of, task_id, record))

    @property
    def background(self) -> bool:
        return bool(self.fields["background"])

    @property
    def item_id(self) -> str:
        """The id of its output's message."""
        return f"msg_{self.task_id}"

    def open(self, status: str) -> dict[str, Any]:
        """The response before its end."""
        return self._whole(status) | {"output": []}

    def _whole(self, status: str, **more: Any) -> dict[str, Any]:
        first = {"id": f"{PREFIX}{self.task_id}", "object": "response", "status": status}
        usual = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return first | dict(self.fields) | usual | more

    def ended(self, record: Record, reasoning_tokens: int = 0) -> dict[str, Any]:
        """The response at its end, without `output`."""
        status, finished = status_of(record), record.time("finished")
        return self._whole(
            status,
            completed_at=finished // 1000 if finished and status == "completed" else None,
            error=_error(record),
            incomplete_details={"reason": _reason(record)} if status == "incomplete" else None,
            usage=_usage(record, reasoning_tokens),
        )


async def by_size(record: Mapping[str, Any], make: Callable[[], T]) -> T:
    """Call `make`, in a thread if the conversation in the record's fields is large. Returns or raises what it does."""
    return make() if len(record["response"]) <= INLINE else await in_thread(make)


class MessageItem:
    """An output's message, collected as JSON."""

    __slots__ = ("id", "logprobs", "text")

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = bytearray()
        self.logprobs = bytearray()

    @property
    def size(self) -> int:
        return len(self.text) + len(self.logprobs)

    def part(self) -> Iterator[bytes | bytearray]:
        """Its one part as JSON."""
        yield b'{"type": "output_text", "annotations": [], "text": "'
        yield self.text
        yield b'", "logprobs": ['
        yield self.logprobs
        yield b"]}"

    def pieces(self, status: str) -> Iterator[bytes | bytearray]:
        """Its JSON in pieces."""
        yield opened_item(self.id, status)[:-2].encode()
        yield from self.part()
        yield b"]}"


class ReasoningItem:
    """An output's reasoning, collected as JSON."""

    __slots__ = ("id", "text")

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.text = bytearray()

    @property
    def size(self) -> int:
        return len(self.text)

    def part(self) -> Iterator[bytes | bytearray]:
        """Its one part as JSON."""
        yield b'{"type": "reasoning_text", "text": "'
        yield self.text
        yield b'"}'

    def pieces(self, status: str) -> Iterator[bytes | bytearray]:
        """Its JSON in pieces."""
        yield opened_reasoning(self.id, status)[:-2].encode()
        yield from self.part()
        yield b"]}"


class CallItem:
    """A call of an output, collected as JSON."""

    __slots__ = ("arguments", "call_id", "id", "name", "whole")

    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        self.id = item_id
        self.call_id = call_id
        self.name = name
        self.arguments = bytearray()
        self.whole = False

    @property
    def size(self) -> int:
        return len(self.arguments) + len(self.name)

    def pieces(self, status: str) -> Iterator[bytes | bytearray]:
        """Its JSON in pieces."""
        yield json.dumps(call_view(self.id, status, self.call_id, self.name, ""))[:-2].encode()
        yield self.arguments
        yield b'"}'


@dataclass(frozen=True, slots=True)
class Text:
    """New text of an output's message as JSON, with its log probabilities, without quotes and brackets. `scored`:
    whether there are some, also where no tokenizer can write them any more."""

    text: str
    logprobs: str
    scored: bool


#: A change of an output.
Change = Text | ReasoningText | CallStart | CallArguments | CallEnd


class Output:
    """A response's output, collected from its stream: items in the order in which the model wrote them, which is mostly
    reasoning, a message, calls, as far as there are such. `size`: bytes so far."""

    def __init__(self, metadata: ResponseMetadata, scorer: ChatLogprobs | None) -> None:
        self._metadata = metadata
        self._scorer = scorer
        self._parser = None if metadata.syntax is None else metadata.syntax.parser()
        self._pending_logprobs: list[str] = []
        """Log probabilities of tokens that may be of the message, or not."""
        self.items: list[ReasoningItem | MessageItem | CallItem] = []
        #: How many there are of a kind: a model may write thousands.
        self._numbers: Counter[type] = Counter()
        self.begun = False

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.add(event)
            elif isinstance(event, End):
                self.end()

    def add(self, token: Token) -> list[Change]:
        """Add a token. Returns what is new by it."""
        self.begun = True
        if token.logprobs is not None:
            self._pending_logprobs.append(
                "" if self._scorer is None else json.dumps(self._scorer.of([token])["content"])[1:-1]
            )
        if self._parser is None:
            return self._changes([token.text])
        reasoning = self._parser.reasoning_tokens
        parts = self._parser.feed([token])
        if self._parser.reasoning_tokens > reasoning:
            self._pending_logprobs.clear()
        return self._changes(parts)

    def end(self) -> list[Change]:
        """Returns what is known only at the end."""
        parts = [] if self._parser is None else self._parser.end()
        called = any(isinstance(item, CallItem) for item in self.items)
        return self._changes(parts or ([""] if self._pending_logprobs and not called else []))

    @property
    def reasoning_tokens(self) -> int:
        return 0 if self._parser is None else self._parser.reasoning_tokens

    def _changes(self, parts: Sequence[OutputPart]) -> list[Change]:
        changes: list[Change] = []
        for part in parts:
            if isinstance(part, str):
                changes.append(self._add_text(part))
                continue
            changes.append(part)
            if isinstance(part, ReasoningText):
                self._reasoning().text += quote(part.text)[1:-1].encode()
            elif isinstance(part, CallStart):
                self._pending_logprobs.clear()
                self.items.append(self._new_call(part))
            else:
                call = self.items[-1]
                assert isinstance(call, CallItem)
                if isinstance(part, CallArguments):
                    call.arguments += quote(part.text)[1:-1].encode()
                else:
                    call.whole = True
        return changes

    def _add_text(self, new: str) -> Text:
        text, logprobs, scored = (
            quote(new)[1:-1],
            ", ".join(filter(None, self._pending_logprobs)),
            bool(self._pending_logprobs),
        )
        self._pending_logprobs.clear()
        message = self.message()
        message.text += text.encode()
        if logprobs:
            message.logprobs += b", " if message.logprobs else b""
            message.logprobs += logprobs.encode()
        return Text(text, logprobs, scored)

    def message(self) -> MessageItem:
        """The output's message; made if the last item is none."""
        message = self.items[-1] if self.items else None
        if not isinstance(message, MessageItem):
            message = MessageItem(self._numbered(self._metadata.item_id, MessageItem))
            self.items.append(message)
        return message

    def _reasoning(self) -> ReasoningItem:
        """The output's reasoning; made if the last item is none."""
        reasoning = self.items[-1] if self.items else None
        if not isinstance(reasoning, ReasoningItem):
            reasoning = ReasoningItem(self._numbered(f"{THOUGHT}{self._metadata.task_id}", ReasoningItem))
            self.items.append(reasoning)
        return reasoning

    def _numbered(self, item_id: str, kind: type) -> str:
        """The id of a further item of a kind; that of the first has no number."""
        number = self._numbers[kind]
        self._numbers[kind] += 1
        return f"{item_id}_{number}" if number else item_id

    def _new_call(self, start: CallStart) -> CallItem:
        syntax, task_id = self._metadata.syntax, self._metadata.task_id
        assert syntax is not None
        assert syntax.calls is not None
        return CallItem(f"fc_{task_id}_{start.index}", syntax.calls.format.id_of(task_id, 0, start.index), start.name)

    def as_input(self) -> list[Item]:
        """Its items as those of a conversation."""
        items = []
        for item in self.items:
            if isinstance(item, CallItem):
                items.append(Item(item.id, "assistant", (_unquoted(item.arguments),), item.call_id, item.name))
            elif item.text:
                role = REASONING if isinstance(item, ReasoningItem) else "assistant"
                items.append(Item(item.id, role, (_unquoted(item.text),)))
        return items

    def status_of(self, index: int, status: str) -> str:
        """The status of an item. `status`: the response's."""
        item = self.items[index]
        if isinstance(item, CallItem):
            return "completed" if item.whole else "incomplete"
        return "completed" if status == "completed" or index < len(self.items) - 1 else "incomplete"

    def pieces(self, record: Record) -> Iterator[bytes | bytearray]:
        """The final response's JSON in pieces."""
        head = self._metadata.ended(record, self.reasoning_tokens)
        yield json.dumps(head)[:-1].encode() + b', "output": ['
        self.complete(record)
        for index, item in enumerate(self.items):
            yield b", " if index else b""
            yield from item.pieces(self.status_of(index, head["status"]))
        yield b"]}"

    def complete(self, record: Record) -> None:
        """Adds an empty message where there is no other item, and the task ended by itself or had begun."""
        if not self.items and (self.begun or record.status in ("completed", "incomplete")):
            self.message()


def body(record: Record, events: Iterable[Event], scorer: ChatLogprobs | None = None) -> bytes:
    """The final response's JSON, from its record and all events of its stream.

    `scorer`: given where the task has log probabilities.
    """
    output = Output(ResponseMetadata.of(record.id, record.fields), scorer)
    output.take(events)
    return b"".join(output.pieces(record))


def _unquoted(text: bytearray) -> str:
    """Text that is JSON without its quotes."""
    return str(json.loads(b'"' + text + b'"'))


def opened_item(item_id: str, status: str) -> str:
    """The JSON of a message without content; the last two characters close it."""
    item = {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": []}
    return json.dumps(item)


def opened_reasoning(item_id: str, status: str) -> str:
    """The JSON of reasoning without content; the last two characters close it."""
    return json.dumps({"id": item_id, "type": REASONING, "status": status, "summary": [], "content": []})


def status_of(record: Record) -> str:
    """The response's status: that of its task, but `incomplete` where its output was cut at its length."""
    cut = record.status == "completed" and record.json("reasons") == ["length"]
    return "incomplete" if cut else record.status


def _reason(record: Record) -> str:
    if record.status == "completed":
        return "max_output_tokens"
    code: str = (record.json("error") or {}).get("code", "")
    return code if code == "release_missing" else "deadline"


def _error(record: Record) -> dict[str, Any] | None:
    error = record.json("error")
    if not error:
        return None
    param = error.get("param")
    return {"code": error["code"], "message": renamed(error["message"], NAMES), "param": NAMES.get(param, param)}


def _usage(record: Record, reasoning_tokens: int) -> dict[str, Any]:
    usage = record.json("usage") or {}
    prompt, output = usage.get("prompt_tokens", 0), usage.get("output_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt + output,
    }


class EventWriter:
    """Writes the events of a response. `after`: the last `sequence_number` that the reader has; -1: none. `number`: the
    next one."""

    def __init__(self, metadata: ResponseMetadata, scorer: ChatLogprobs | None, after: int = -1) -> None:
        self.metadata = metadata
        self.output = Output(metadata, scorer)
        self.after = after
        self.number = 0
        #: Items whose events have begun, and those that have ended.
        self._opened = self._closed = 0

    def opening(self) -> bytes:
        """The events before the first entry of the stream."""
        status = "queued" if self.metadata.background else "in_progress"
        response = f'"response": {json.dumps(self.metadata.open(status))}'
        return self._event("response.created", response) + self._event(f"response.{status}", response)

    def deltas(self, events: Iterable[Event]) -> bytes:
        """The events for entries of the stream, without its end."""
        return b"".join(chunk for event in events if isinstance(event, Token) for chunk in self._token(event))

    def end(self, record: Record) -> Iterator[bytes]:
        """The last events, one at a time: each may have the whole output. `record`: the final one."""
        output, status = self.output, status_of(record)
        for change in output.end():
            yield from self._change(change)
        output.complete(record)
        if output.items and not self._opened:
            yield from self._open()
        yield from self._close(status)
        yield self._event(LAST[status], '"response": ', *output.pieces(record))

    def _token(self, token: Token) -> Iterator[bytes]:
        if not self.output.begun and self.metadata.background:
            yield self._event("response.in_progress", f'"response": {json.dumps(self.metadata.open("in_progress"))}')
        for change in self.output.add(token):
            yield from self._change(change)

    def _change(self, change: Change) -> Iterator[bytes]:
        if isinstance(change, Text):
            yield from self._enter(MessageItem)
            if change.text or change.scored:
                delta = f'{self._item_fields()}, "content_index": 0, "delta": "{change.text}"'
                yield self._event("response.output_text.delta", f'{delta}, "logprobs": [{change.logprobs}]')
        elif isinstance(change, ReasoningText):
            yield from self._enter(ReasoningItem)
            delta = f'{self._item_fields()}, "content_index": 0, "delta": {quote(change.text)}'
            yield self._event("response.reasoning_text.delta", delta)
        elif isinstance(change, CallStart):
            yield from self._close("completed")
            yield from self._open()
        elif isinstance(change, CallArguments):
            delta = f'{self._item_fields()}, "delta": {quote(change.text)}'
            yield self._event("response.function_call_arguments.delta", delta)
        else:
            yield from self._close("completed")

    def _enter(self, kind: type) -> Iterator[bytes]:
        """The events before text of an item of a kind, where another is open, or none."""
        if not self._opened or not isinstance(self.output.items[self._opened - 1], kind):
            yield from self._close("completed")
            yield from self._open()

    def _item_fields(self) -> str:
        """The fields that name the item whose events come."""
        index = self._opened - 1
        return f'"item_id": "{self.output.items[index].id}", "output_index": {index}'

    def _open(self) -> Iterator[bytes]:
        """The events before the next item's first delta."""
        index, self._opened = self._opened, self._opened + 1
        item = self.output.items[index]
        if isinstance(item, CallItem):
            opened = json.dumps(call_view(item.id, "in_progress", item.call_id, item.name, ""))
        elif isinstance(item, ReasoningItem):
            opened = opened_reasoning(item.id, "in_progress")
        else:
            opened = opened_item(item.id, "in_progress")
        yield self._event("response.output_item.added", f'"output_index": {index}, "item": {opened}')
        if not isinstance(item, CallItem):
            part = EMPTY_PART if isinstance(item, MessageItem) else EMPTY_THOUGHT
            yield self._event(
                "response.content_part.added", f'{self._item_fields()}, "content_index": 0, "part": {part}'
            )

    def _close(self, status: str) -> Iterator[bytes]:
        """The events after an item's last delta, if one is open. `status`: the response's, or `completed`."""
        if self._closed == self._opened:
            return
        index, self._closed = self._closed, self._opened
        item, fields = self.output.items[index], self._item_fields()
        if isinstance(item, CallItem):
            yield self._event("response.function_call_arguments.done", f'{fields}, "arguments": "', item.arguments, '"')
        else:
            fields += ', "content_index": 0'
            if isinstance(item, ReasoningItem):
                yield self._event("response.reasoning_text.done", f'{fields}, "text": "', item.text, '"')
            else:
                logprobs = ('", "logprobs": [', item.logprobs, "]")
                yield self._event("response.output_text.done", f'{fields}, "text": "', item.text, *logprobs)
            yield self._event("response.content_part.done", f'{fields}, "part": ', *item.part())
        pieces = item.pieces(self.output.status_of(index, status))
        yield self._event("response.output_item.done", f'"output_index": {index}, "item": ', *pieces)

    def _event(self, kind: str, *fields: str | bytes | bytearray) -> bytes:
        """One event's lines, or nothing if the reader has it. `fields`: the JSON of its other fields, in pieces."""
        number, self.number = self.number, self.number + 1
        if number <= self.after:
            return b""
        head = f'event: {kind}\ndata: {{"type": "{kind}", "sequence_number": {number}, '
        return b"".join(part.encode() if isinstance(part, str) else part for part in (head, *fields, "}\n\n"))


class ResponseStream(LiveStream):
    """One response's events. With a `foreground`, its task ends with the stream. Without, `whole`: whether the caller
    may know of the fleet (`WaitReasons.text`).

    An error comes as the event `error`. Its sequence number is that of the last event before it, with which the stream
    is taken up again.
    """

    def __init__(
        self,
        writer: EventWriter,
        handle: AsyncHandle,
        gateway: Gateway,
        foreground: Foreground | None = None,
        *,
        whole: bool = False,
    ) -> None:
        direct = Direct(self._tokens)
        batches = handle.batches(shortcut=direct) if foreground is None else foreground.only(direct)
        settings = gateway.settings
        super().__init__(
            self._frames(batches, handle),
            gateway.streams,
            heartbeat=settings.heartbeat,
            stall=settings.stall,
            waits=partial(gateway.waits.text, handle.id, whole=whole) if foreground is None else foreground.waits,
            direct=direct,
        )
        self._writer = writer
        self._foreground = foreground
        self._last_sent = writer.after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            if self._foreground is not None:
                await self._foreground.close()

    def cut(self) -> bytes:
        if self._foreground is not None:
            return self.broken(stopping())
        return self.broken(
            Problem(
                503,
                "This gateway is stopping; the response goes on. Take the stream up again with starting_after.",
                code="stopping",
            )
        )

    def broken(self, error: Exception) -> bytes:
        problem = problem_of(error)
        problem_fields = {"code": problem.code, "message": problem.message, "param": problem.param}
        event = {"type": "error", "sequence_number": self._last_sent, **problem_fields}
        return f"event: error\ndata: {json.dumps(event)}\n\n".encode()

    def _tokens(self, tokens: list[Token]) -> bytes:
        chunk = self._writer.deltas(tokens)
        self._last_sent = max(self._last_sent, self._writer.number - 1)
        return chunk

    async def _frames(self, batches: AsyncGenerator[list[Event]], handle: AsyncHandle) -> AsyncGenerator[bytes]:
        async with aclosing(self._events(batches, handle)) as chunks:
            try:
                async for chunk in chunks:
                    number = self._writer.number - 1
                    if chunk:
                        yield chunk
                        self._last_sent = max(self._last_sent, number)
            except TaskNotFound:
                raise Problem(404, "The response was deleted.", code="response_not_found") from None

    async def _events(self, batches: AsyncGenerator[list[Event]], handle: AsyncHandle) -> AsyncGenerator[bytes]:
        writer = self._writer
        yield writer.opening()
        async with aclosing(batches):
            async for events in batches:
                effort = weight(event.logprobs for event in events if isinstance(event, Token))
                yield await run_by_weight(effort, partial(writer.deltas, events))
                if isinstance(events[-1], End):
                    record = await handle.status()
                    for event in writer.end(record):
                        yield event
                    return
