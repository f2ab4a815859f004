"""Messages that are too large for their queue: the body is kept aside, and a reference travels in its place.

    send:     fitting(envelope, most, aside) ─▶ the envelope, or one with an empty body and the header `penstock_body`
    receive:  whole(envelope, aside)         ─▶ the envelope as it was

Only Penstock's own receivers read references, so use this for queues that its workers take from. What is received by
reference and sent anew stays a reference. An `Aside` removes a body by time, not with its message: copies of a message
find it, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, Protocol

from producers.errors import PenstockError

HEADER: Final = "penstock_body"


class MessageTooLarge(PenstockError):
    """The queue does not take a message of this size."""


class BodyGone(PenstockError):
    """The body of a message is not where its reference says: nobody can use the message any more."""


class Aside(Protocol):
    """Keeps bodies of messages: `producers.store.aside` on disk or S3. Both calls block, and may raise OSError and
    redis.exceptions.RedisError."""

    def put(self, body: bytes) -> Mapping[str, str]:
        """Keep a body. Returns its reference."""

    def get(self, reference: Mapping[str, str]) -> bytes:
        """The body. Raises BodyGone."""


def fitting(envelope: str, most: int, aside: Aside | None) -> str:
    """An envelope (JSON as kombu writes it) of up to `most` bytes: itself, or one whose body is kept aside.

    Raises MessageTooLarge: there is no `aside`, or the headers alone are too large.
    """
    size = len(envelope.encode())
    if size <= most:
        return envelope
    if aside is None:
        raise MessageTooLarge(
            f"the message has {size} bytes, and its queue takes {most}; with --files-dir it would fit"
        )
    message: dict[str, Any] = json.loads(envelope)
    headers = {**message["headers"], HEADER: {}}
    if (rest := len(json.dumps({**message, "body": "", "headers": headers}).encode())) > most:
        raise MessageTooLarge(f"the message has {rest} bytes without its body, and its queue takes {most}")
    headers[HEADER] = dict(aside.put(message["body"].encode()))
    return json.dumps({**message, "body": "", "headers": headers})


def whole(envelope: str, aside: Aside | None) -> str:
    """An envelope with its body. Costs nothing where it has it. Raises BodyGone."""
    if f'"{HEADER}"' not in envelope:
        return envelope
    message = json.loads(envelope)
    headers = dict(message["headers"])
    reference = headers.pop(HEADER, None)
    if reference is None:  # the word stands elsewhere
        return envelope
    if aside is None or not isinstance(reference, dict):
        raise BodyGone("the message's body is kept aside, and nothing here can read it")
    return json.dumps({**message, "headers": headers, "body": aside.get(reference).decode()})
