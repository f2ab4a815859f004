"""Keeps bodies of messages that travel by claim check, as blobs (`producers.contract.message`).

    note, until KEPT_S from now ─▶ blob ─▶ the message is sent        each read notes it for KEPT_S more

The note is one of `producers.store.files`: the sweeper removes the blob when it is due, whatever became of the message.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from typing import Final

from redis import Redis

from producers.contract import keys
from producers.contract.message import BodyGone, MessageTooLarge
from producers.errors import shown
from producers.store.blobs import BlobNotFound, Blobs
from producers.store.protocol import NOTED_S
from producers.store.references import Places

#: Time (s) for which a body is kept from its last read on: SQS keeps a message for 14 days at most.
KEPT_S: Final = 15 * 24 * 3600
#: Names of such blobs: whoever may send a message could otherwise have any file read.
_NAME: Final = re.compile(r"message-[0-9a-f]{32}")


class MessageBlobs:
    """`place`: the folder or bucket, the same for all who send and receive; None: there is none."""

    def __init__(self, store: Redis, place: str | None) -> None:
        self._store = store
        self._places = Places(place)

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
        return None if self._places.own is None else self._places.at(self._places.own)


def _due() -> int:
    """The time of a note (unix s) that the sweeper obeys KEPT_S from now."""
    return int(time.time()) + KEPT_S - NOTED_S
