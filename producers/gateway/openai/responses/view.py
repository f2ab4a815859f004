"""Builds the JSON of a response from its task's record and what its stream has.

All is in ASCII, as streams need it. Text and log probabilities are JSON already: they may have tens of megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as quote
from typing import Any, Final, Self

from producers.contract.record import Record
from producers.contract.stream import Event, Token
from producers.gateway.openai.logprobs import ChatLogprobs
from producers.gateway.openai.parameters import worded
from producers.gateway.openai.responses.items import Item
from producers.gateway.openai.responses.request import NAMES

PREFIX: Final = "resp_"


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
    message, param = worded(NAMES, error["message"], error.get("param"))
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
