"""Keeps bodies of messages that are too large for their queue, as blobs (`producers.contract.aside`).

    note, until KEPT_S from now ─▶ blob ─▶ the message is sent        each read notes it for KEPT_S more

The note is one of `producers.store.files`: the sweeper removes the blob when it is due, whatever became of the message.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Final

from redis import Redis

from producers.contract import keys
from producers.contract.aside import BodyGone, MessageTooLarge
from producers.store.blobs import BlobNotFound
from producers.store.protocol import NOTED_S
from producers.store.references import Places

#: Time (s) for which a body is kept from its last read on: SQS keeps a message for 14 days at most.
KEPT_S: Final = 15 * 24 * 3600


class MessageBlobs:
    """`place`: the folder or bucket to write to; None: bodies can be read alone, where their references say."""

    def __init__(self, store: Redis, place: str | None) -> None:
        self._store = store
        self._places = Places(place)

    def put(self, body: bytes) -> Mapping[str, str]:
        if self._places.own is None:
            raise MessageTooLarge(f"a message's body has {len(body)} bytes: it needs --files-dir")
        blobs, name = self._places.at(self._places.own), f"message-{secrets.token_hex(16)}"
        self._store.zadd(keys.FILE_NOTES, {name: _due()})
        with blobs.writer(name) as writer:
            writer.write(body)
            writer.commit()
        return {"place": blobs.place, "name": name}

    def get(self, reference: Mapping[str, str]) -> bytes:
        try:
            blobs, name = self._places.at(reference["place"]), reference["name"]
            body = blobs.read(name, 0, blobs.size(name))
        except (BlobNotFound, KeyError, ValueError) as error:
            raise BodyGone(f"the message's body is gone: {error}") from error
        self._store.zadd(keys.FILE_NOTES, {name: _due()}, xx=True, gt=True)
        return body


def _due() -> int:
    """The time of a note (unix s) that the sweeper obeys KEPT_S from now."""
    return int(time.time()) + KEPT_S - NOTED_S
