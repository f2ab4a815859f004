"""The claim check of a message that is too large for its queue: a store keeps the body, a reference travels instead.

    send:     check_in(envelope, limit, bodies) ─▶ the envelope, or one without a body, with the header `penstock_body`
    receive:  redeem(envelope, bodies)          ─▶ the envelope as it was

Only Penstock's own receivers read references, so use this for queues that its workers take from. What is received by
reference and sent anew stays a reference. A `BodyStore` removes a body by time, not with its message: copies of a
message find it, too.
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


class BodyStore(Protocol):
    """Keeps bodies of messages: `producers.store.claim_check` on disk or S3. Both calls block, and may raise
    OSError and redis.exceptions.RedisError."""

    def put(self, body: bytes) -> Mapping[str, str]:
        """Keep a body. Returns its reference."""

    def get(self, reference: Mapping[str, str]) -> bytes:
        """The body. Raises BodyGone."""


def check_in(envelope: str, limit: int, bodies: BodyStore | None) -> str:
    """An envelope (JSON as kombu writes it) of up to `limit` bytes: itself, or one whose body is in `bodies`.

    Raises MessageTooLarge: there are no `bodies`, or the headers alone are too large.
    """
    size = len(envelope.encode())
    if size <= limit:
        return envelope
    if bodies is None:
        raise MessageTooLarge(
            f"the message has {size} bytes, and its queue takes {limit}; with --files-dir it would fit"
        )
    message: dict[str, Any] = json.loads(envelope)
    headers = {**message["headers"], HEADER: {}}
    if (without := len(json.dumps({**message, "body": "", "headers": headers}).encode())) > limit:
        raise MessageTooLarge(f"the message has {without} bytes without its body, and its queue takes {limit}")
    headers[HEADER] = dict(bodies.put(message["body"].encode()))
    return json.dumps({**message, "body": "", "headers": headers})


def redeem(envelope: str, bodies: BodyStore | None) -> str:
    """An envelope with its body. Costs nothing where it has it. Raises BodyGone."""
    if f'"{HEADER}"' not in envelope:
        return envelope
    message = json.loads(envelope)
    headers = dict(message["headers"])
    reference = headers.pop(HEADER, None)
    if reference is None:  # the word stands elsewhere
        return envelope
    if bodies is None or not isinstance(reference, dict):
        raise BodyGone("the message's body is kept aside, and nothing here can read it")
    return json.dumps({**message, "headers": headers, "body": bodies.get(reference).decode()})
