"""References to blobs from elsewhere: from results whose blocks were moved to a blob, and from messages' bodies.

Bodies of messages travel by claim check (`producers.contract.message`):

    note, until KEPT_S from now ─▶ blob ─▶ the message is sent        each read notes it for KEPT_S more

The note is one of `producers.store.files`: the sweeper removes the blob when it is due, whatever became of the message.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from redis import Redis

from producers.contract import keys
from producers.contract.message import BodyGone, MessageTooLarge
from producers.errors import shown
from producers.store.blobs import BlobNotFound, Blobs, open_blobs
from producers.store.protocol import NOTED_S

#: Most places whose connections are kept.
MAX_PLACES: Final = 8
#: Time (s) for which a body is kept from its last read on: SQS keeps a message for 14 days at most.
KEPT_S: Final = 15 * 24 * 3600
#: Names of such blobs: whoever may send a message could otherwise have any file read.
_NAME: Final = re.compile(r"message-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Reference:
    """The place and name of a blob. `ends`: for a result, where each of its blocks ends (bytes)."""

    place: str
    name: str
    ends: tuple[int, ...] = ()

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Begin and size of each block of a result."""
        return [(start, end - start) for start, end in zip((0, *self.ends), self.ends, strict=False)]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, raw: str | bytes) -> Self:
        """Raises ValueError, KeyError or TypeError for an unreadable reference."""
        values: Mapping[str, Any] = json.loads(raw)
        return cls(str(values["place"]), str(values["name"]), tuple(int(end) for end in values["ends"]))


class Places:
    """The blobs that references name. Threads may share it.

    `location`: where they all are, whatever the references say, for a process that has a setting: it may have the same
    folder under another name, or reach the bucket by another endpoint. None: where each reference says.
    """

    def __init__(self, location: str | None = None) -> None:
        self.location = location
        self._open: dict[str, Blobs] = {}
        self._lock = threading.Lock()

    def block(self, reference: Reference, number: int) -> bytes | None:
        """A block of a result; None behind its last one. Blocks.

        Raises BlobNotFound, OSError, ValueError for a bad place, and AwsNotInstalled.
        """
        if number >= len(reference.ends):
            return None
        return self.at(reference.place).read(reference.name, *reference.blocks[number])

    def at(self, location: str) -> Blobs:
        """Raises as `open_blobs`."""
        location = self.location or location
        with self._lock:
            if location not in self._open:
                if len(self._open) >= MAX_PLACES:
                    self._open.clear()
                self._open[location] = open_blobs(location)
            return self._open[location]


class MessageBlobs:
    """Message bodies as blobs. `location`: the folder or bucket that all processes share; None: there is none."""

    def __init__(self, store: Redis, location: str | None) -> None:
        self._store = store
        self._places = Places(location)

    def put(self, body: bytes) -> Mapping[str, str]:
        if (blobs := self._blobs()) is None:
            raise MessageTooLarge(f"a message's body has {len(body)} bytes: it needs --files-dir")
        name = f"message-{secrets.token_hex(16)}"
        self._store.zadd(keys.FILE_NOTES, {name: _due()})
        with blobs.writer(name) as writer:
            writer.write(body)
            writer.commit()
        return {"name": name}

    def get(self, reference: Mapping[str, str]) -> bytes:
        name = str(reference.get("name"))
        if not _NAME.fullmatch(name):
            raise BodyGone(f"the message's body is gone: {shown(name)} names none")
        if (blobs := self._blobs()) is None:
            raise BodyGone("the message's body is in a file: this process needs --files-dir")
        try:
            body = blobs.read(name, 0, blobs.size(name))
        except BlobNotFound as error:
            raise BodyGone(f"the message's body is gone: {error}") from error
        self._store.zadd(keys.FILE_NOTES, {name: _due()}, xx=True, gt=True)
        return body

    def _blobs(self) -> Blobs | None:
        return None if self._places.location is None else self._places.at(self._places.location)


def _due() -> int:
    """The time of a note (unix s) that the sweeper obeys KEPT_S from now."""
    return int(time.time()) + KEPT_S - NOTED_S
