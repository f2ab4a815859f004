"""Tells a response's stream: a pure function of its record and its task's stream.

    created ─▶ queued ─▶ in_progress ─▶ item, part ─▶ delta ... ─▶ done ... ─▶ end     (foreground: not queued)

So any gateway tells the same events with the same `sequence_number`, live or afterwards. Nothing but the task's own
entries is stored for it. For each token with text there is one delta (for each token, where it has log probabilities).
A background response is in progress from its first entry; a task that ended without a token never was.

A cancelled response ends with `response.incomplete` and has the status `cancelled`: clients know no event of that
name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Final

from producers.contract.record import Record
from producers.contract.stream.events import Event, Token
from producers.gateway.openai.responses.view import About, Output, opened_item, status_of

#: Status of an ended response -> its last event.
LAST: Final = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",
    "failed": "response.failed",
}
EMPTY_PART: Final = '{"type": "output_text", "annotations": [], "text": "", "logprobs": []}'


class Story:
    """One telling. `after`: the last `sequence_number` that the reader has; -1: none. `number`: the next one."""

    def __init__(self, about: About, output: Output, after: int = -1) -> None:
        self.about = about
        self.output = output
        self.after = after
        self.number = 0
        self._place = f'"item_id": "{about.item_id}", "output_index": 0, "content_index": 0'

    def opening(self) -> bytes:
        """The events before the first entry of the stream."""
        status = "queued" if self.about.background else "in_progress"
        response = f'"response": {json.dumps(self.about.open(status))}'
        return self._event("response.created", response) + self._event(f"response.{status}", response)

    def told(self, events: Iterable[Event]) -> bytes:
        """The events for entries of the stream, without its end."""
        return b"".join(self._token(event) for event in events if isinstance(event, Token))

    def end(self, record: Record) -> Iterator[bytes]:
        """The last events, one at a time: each may have the whole output. `record`: the final one."""
        about, output = self.about, self.output
        status = status_of(record)
        if output.shown(record):
            if not output.begun:
                yield self._begin()
            yield self._event(
                "response.output_text.done",
                f'{self._place}, "text": "',
                output.text,
                '", "logprobs": [',
                output.logprobs,
                "]",
            )
            yield self._event("response.content_part.done", f'{self._place}, "part": ', *output.part())
            yield self._event("response.output_item.done", '"output_index": 0, "item": ', *output.item(about, status))
        yield self._event(LAST[status], '"response": ', *output.pieces(about, record))

    def _token(self, token: Token) -> bytes:
        begin = b"" if self.output.begun else self._begin()
        text, logprobs = self.output.add(token)
        if not text and token.logprobs is None:
            return begin
        delta = f'{self._place}, "delta": "{text}", "logprobs": [{logprobs}]'
        return begin + self._event("response.output_text.delta", delta)

    def _begin(self) -> bytes:
        """The events before the output's first delta."""
        began = b""
        if self.about.background:
            began = self._event("response.in_progress", f'"response": {json.dumps(self.about.open("in_progress"))}')
        item = opened_item(self.about.item_id, "in_progress")
        began += self._event("response.output_item.added", f'"output_index": 0, "item": {item}')
        return began + self._event("response.content_part.added", f'{self._place}, "part": {EMPTY_PART}')

    def _event(self, kind: str, *rest: str | bytes | bytearray) -> bytes:
        """One event's lines, or nothing if the reader has it. `rest`: the JSON of its other fields, in pieces."""
        number, self.number = self.number, self.number + 1
        if number <= self.after:
            return b""
        head = f'event: {kind}\ndata: {{"type": "{kind}", "sequence_number": {number}, '
        return b"".join(part.encode() if isinstance(part, str) else part for part in (head, *rest, "}\n\n"))
