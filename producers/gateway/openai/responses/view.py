"""Builds the JSON of a response, and its events, from its task's record and stream: pure functions of both.

    created ─▶ queued ─▶ in_progress ─▶ item, part ─▶ delta ... ─▶ done ... ─▶ end     (foreground: not queued)

So any gateway sends the same events with the same `sequence_number`, live or afterwards, and reads them from the
beginning, since each number counts those before. Nothing but the task's own entries is stored for it. For each token
with text there is one delta (for each token, where it has log probabilities). A background response is in progress from
its first entry; a task that ended without a token never was.

A cancelled response ends with `response.incomplete` and has the status `cancelled`: clients know no event of that
name.

All is in ASCII, as streams need it. Text and log probabilities are JSON already: they may have tens of megabytes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final, Self

from starlette.types import Receive, Scope, Send

from producers.client.aio import AsyncHandle
from producers.contract.record import Record
from producers.contract.stream import End, Event, Token
from producers.errors import TaskNotFound
from producers.gateway.context import Gateway
from producers.gateway.http.errors import Problem, problem_of
from producers.gateway.http.sse import LiveStream
from producers.gateway.openai.answer import run_by_weight, weight
from producers.gateway.openai.logprobs import ChatLogprobs
from producers.gateway.openai.parameters import in_callers_names
from producers.gateway.openai.responses.request import NAMES, Item
from producers.gateway.tasks.foreground import Foreground, stopping

PREFIX: Final = "resp_"
#: Status of an ended response -> its last event.
LAST: Final = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
EMPTY_PART: Final = '{"type": "output_text", "annotations": [], "text": "", "logprobs": []}'


@dataclass(frozen=True, slots=True)
class ResponseMetadata:
    """A response as its record's field `response` has it. `fields`: those of its JSON that never change."""

    task_id: str
    fields: Mapping[str, Any]
    items: list[Item]

    @classmethod
    def of(cls, task_id: str, kept: str) -> Self:
        read = json.loads(kept)
        return cls(task_id, read["fields"], [Item.of(item) for item in read["items"]])

    @property
    def background(self) -> bool:
        return bool(self.fields["background"])

    @property
    def item_id(self) -> str:
        """The id of its output."""
        return f"msg_{self.task_id}"

    def open(self, status: str) -> dict[str, Any]:
        """The response before its end."""
        return self._whole(status) | {"output": []}

    def _whole(self, status: str, **more: Any) -> dict[str, Any]:
        first = {"id": f"{PREFIX}{self.task_id}", "object": "response", "status": status}
        usual = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return first | dict(self.fields) | usual | more

    def ended(self, record: Record) -> dict[str, Any]:
        """The response at its end, without `output`."""
        status, finished = status_of(record), record.time("finished")
        return self._whole(
            status,
            completed_at=finished // 1000 if finished and status == "completed" else None,
            error=_error(record),
            incomplete_details={"reason": _reason(record)} if status == "incomplete" else None,
            usage=_usage(record),
        )


class Output:
    """A response's output as JSON, collected from its stream. `size`: bytes so far."""

    def __init__(self, scorer: ChatLogprobs | None) -> None:
        self._scorer = scorer
        self.text = bytearray()
        self.logprobs = bytearray()
        self.begun = False

    @property
    def size(self) -> int:
        return len(self.text) + len(self.logprobs)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Token):
                self.add(event)

    def add(self, token: Token) -> tuple[str, str]:
        """Add a token. Returns its text and its log probabilities as JSON, without quotes and brackets."""
        self.begun = True
        text = quote(token.text)[1:-1]
        logprobs = "" if self._scorer is None else json.dumps(self._scorer.of([token])["content"])[1:-1]
        self.text += text.encode()
        if logprobs:
            self.logprobs += b", " if self.logprobs else b""
            self.logprobs += logprobs.encode()
        return text, logprobs

    def part(self) -> Iterator[bytes | bytearray]:
        """The output's one part as JSON."""
        yield b'{"type": "output_text", "annotations": [], "text": "'
        yield self.text
        yield b'", "logprobs": ['
        yield self.logprobs
        yield b"]}"

    def item(self, metadata: ResponseMetadata, status: str) -> Iterator[bytes | bytearray]:
        """The output's one item as JSON. `status`: the response's."""
        yield opened_item(metadata.item_id, "completed" if status == "completed" else "incomplete")[:-2].encode()
        yield from self.part()
        yield b"]}"

    def pieces(self, metadata: ResponseMetadata, record: Record) -> Iterator[bytes | bytearray]:
        """The final response's JSON in pieces."""
        head = metadata.ended(record)
        yield json.dumps(head)[:-1].encode() + b', "output": ['
        if self.shown(record):
            yield from self.item(metadata, head["status"])
        yield b"]}"

    def shown(self, record: Record) -> bool:
        """Whether there is an output: also an empty one, where the task ended by itself."""
        return self.begun or record.status in ("completed", "incomplete")


def body(record: Record, events: Iterable[Event], scorer: ChatLogprobs | None = None) -> bytes:
    """The final response's JSON, from its record and all events of its stream.

    `scorer`: given where the task has log probabilities.
    """
    output = Output(scorer)
    output.take(events)
    return b"".join(output.pieces(ResponseMetadata.of(record.id, record.fields["response"]), record))


def opened_item(item_id: str, status: str) -> str:
    """The JSON of an output without content; the last two characters close it."""
    item = {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": []}
    return json.dumps(item)


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
    message, param = in_callers_names(NAMES, error["message"], error.get("param"))
    return {"code": error["code"], "message": message, "param": param}


def _usage(record: Record) -> dict[str, Any]:
    usage = record.json("usage") or {}
    prompt, output = usage.get("prompt_tokens", 0), usage.get("output_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": usage.get("cached_tokens", 0), "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


class EventWriter:
    """Writes the events of a response. `after`: the last `sequence_number` that the reader has; -1: none. `number`: the
    next one."""

    def __init__(self, metadata: ResponseMetadata, output: Output, after: int = -1) -> None:
        self.metadata = metadata
        self.output = output
        self.after = after
        self.number = 0
        self._part_fields = f'"item_id": "{metadata.item_id}", "output_index": 0, "content_index": 0'

    def opening(self) -> bytes:
        """The events before the first entry of the stream."""
        status = "queued" if self.metadata.background else "in_progress"
        response = f'"response": {json.dumps(self.metadata.open(status))}'
        return self._event("response.created", response) + self._event(f"response.{status}", response)

    def deltas(self, events: Iterable[Event]) -> bytes:
        """The events for entries of the stream, without its end."""
        return b"".join(self._token(event) for event in events if isinstance(event, Token))

    def end(self, record: Record) -> Iterator[bytes]:
        """The last events, one at a time: each may have the whole output. `record`: the final one."""
        metadata, output = self.metadata, self.output
        status = status_of(record)
        if output.shown(record):
            if not output.begun:
                yield self._begin()
            yield self._event(
                "response.output_text.done",
                f'{self._part_fields}, "text": "',
                output.text,
                '", "logprobs": [',
                output.logprobs,
                "]",
            )
            yield self._event("response.content_part.done", f'{self._part_fields}, "part": ', *output.part())
            yield self._event(
                "response.output_item.done", '"output_index": 0, "item": ', *output.item(metadata, status)
            )
        yield self._event(LAST[status], '"response": ', *output.pieces(metadata, record))

    def _token(self, token: Token) -> bytes:
        begin = b"" if self.output.begun else self._begin()
        text, logprobs = self.output.add(token)
        if not text and token.logprobs is None:
            return begin
        delta = f'{self._part_fields}, "delta": "{text}", "logprobs": [{logprobs}]'
        return begin + self._event("response.output_text.delta", delta)

    def _begin(self) -> bytes:
        """The events before the output's first delta."""
        began = b""
        if self.metadata.background:
            began = self._event("response.in_progress", f'"response": {json.dumps(self.metadata.open("in_progress"))}')
        item = opened_item(self.metadata.item_id, "in_progress")
        began += self._event("response.output_item.added", f'"output_index": 0, "item": {item}')
        return began + self._event("response.content_part.added", f'{self._part_fields}, "part": {EMPTY_PART}')

    def _event(self, kind: str, *fields: str | bytes | bytearray) -> bytes:
        """One event's lines, or nothing if the reader has it. `fields`: the JSON of its other fields, in pieces."""
        number, self.number = self.number, self.number + 1
        if number <= self.after:
            return b""
        head = f'event: {kind}\ndata: {{"type": "{kind}", "sequence_number": {number}, '
        return b"".join(part.encode() if isinstance(part, str) else part for part in (head, *fields, "}\n\n"))


class ResponseStream(LiveStream):
    """One response's events. With a `foreground`, its task ends with the stream.

    An error comes as the event `error`. Its sequence number is that of the last event before it, with which the stream
    is taken up again.
    """

    def __init__(
        self, writer: EventWriter, handle: AsyncHandle, gateway: Gateway, foreground: Foreground | None = None
    ) -> None:
        batches = handle.batches() if foreground is None else foreground.only()
        settings = gateway.settings
        super().__init__(
            self._frames(batches, handle), gateway.streams, heartbeat=settings.heartbeat, stall=settings.stall
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
