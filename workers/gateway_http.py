"""The parts of HTTP that all clients of a gateway share: the API key that their requests carry, and server-sent events.

Events are parsed by the rules of the HTML standard (section 9.2.6, interpreting an event stream). This does no I/O:
`workers.cli.client` feeds it from a blocking connection, `workers.trials.bench.connection` from asyncio's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from workers.errors import Refused

API_KEY: Final = "PENSTOCK_API_KEY"


def authorization() -> dict[str, str]:
    """The header for it; empty without a key. Raises Refused for a key that no header may hold, without showing it."""
    key = os.environ.get(API_KEY, "").strip()
    if not key:
        return {}
    if not re.fullmatch("[!-~]+", key):
        raise Refused(f"{API_KEY} holds what no API key has: spaces, line breaks, or letters that are not ASCII")
    return {"authorization": f"Bearer {key}"}


class Event(NamedTuple):
    """One event. `kind`: `message` if the stream names none. `id`: the last one in the stream, or ""."""

    kind: str
    data: str
    id: str


class EventStream:
    """The parser of one stream. Lines end with LF, CR or CRLF. `retry` and unknown fields are passed over, and no byte
    order mark is looked for. `comment` gets the text of each comment."""

    __slots__ = ("_comment", "_data", "_id", "_kind", "_last", "_partial")

    def __init__(self, comment: Callable[[str], None] = lambda text: None) -> None:
        self._comment = comment
        self._partial = b""  # the beginning of a line that has not ended
        self._last = b""  # the last byte
        self._kind = self._id = ""
        self._data: list[str] = []

    @property
    def within(self) -> bool:
        """Whether an event has begun and not ended."""
        return bool(self._partial or self._kind or self._data)

    def feed(self, piece: bytes) -> list[Event]:
        """The events that end in the next piece of the stream, wherever it was cut."""
        before, self._last = self._last, piece[-1:] or self._last
        text = self._partial + (piece.removeprefix(b"\n") if before == b"\r" else piece)
        lines = text.splitlines()
        self._partial = lines.pop() if text[-1:] not in b"\r\n" else b""
        return [event for line in lines if (event := self._take(line.decode(errors="replace")))]

    def _take(self, line: str) -> Event | None:
        """Notes a field. An empty line ends an event; one without data is dropped."""
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif name == "event":
            self._kind = value.removeprefix(" ")
        elif name == "id" and "\0" not in value:
            self._id = value.removeprefix(" ")
        elif not name and line:
            self._comment(value.removeprefix(" "))
        elif not line:
            kind, data, self._kind, self._data = self._kind, self._data, "", []
            return Event(kind or "message", "\n".join(data), self._id) if data else None
        return None
