"""Idempotency keys: a repeated request makes nothing twice, whichever process gets it.

    IDEMPOTENT(key, digest, a new id) -> the id to make -> make it with that id -> MADE, or in ADMIT itself

The first request's id is stored before anything is made. A process that dies in between leaves the id, and the next
request of the same key and body makes it, with that id. So making with a given id must be repeatable.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from producers.connection.script import Call, script, text
from producers.contract import keys
from producers.errors import PenstockError

#: Time (s) for which a key is kept, from its first request on.
KEPT_S: Final = 24 * 3600
#: Time (s) before its end from which an entry counts as none in `made_id`.
LAST_S: Final = 60
#: The form of a key: 1 to 255 visible ASCII characters.
KEY: Final = re.compile("[!-~]{1,255}")


@dataclass(frozen=True, slots=True)
class Entry:
    """The request behind a key. `state`: `new` (its first one), `known` (begun, maybe not made yet) or `made`.

    `name`: its key in the store, a record's field `idempotency`. `at`: server time (ms) of the first request.
    """

    name: str
    state: str
    id: str
    at: int


def name(tenant: str | None, key: str) -> str:
    """The entry's key in the store. Tenants have their keys to themselves."""
    return keys.idempotency(digest(json.dumps([tenant, key]).encode()))


def digest(*parts: bytes) -> str:
    """SHA-256 (hex) of a request's parts: requests with equal digests count as the same."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(b"%d:" % len(part))
        whole.update(part)
    return whole.hexdigest()


class TooManyKeys(PenstockError):
    """A tenant has begun as many keys within a day as it may: `kept`."""

    def __init__(self, kept: int) -> None:
        super().__init__(f"there are {kept} idempotency keys of this tenant")
        self.kept = kept


@dataclass(frozen=True, slots=True)
class KeyBound:
    """The most keys that a tenant ('': requests without one) may have."""

    tenant: str
    limit: int


def idempotent(entry: str, digest: str, new_id: str, kept_s: int = KEPT_S, bound: KeyBound | None = None) -> Call:
    """IDEMPOTENT: let a key stand for a request and an id, unless it stands for one. `read` reads the answer."""
    names = (entry,) if bound is None else (entry, keys.idempotency_keys(bound.tenant))
    return Call(script(__package__, "idempotent"), names, (digest, new_id, kept_s, 0 if bound is None else bound.limit))


def read(entry: str, answer: Sequence[Any]) -> Entry | None:
    """The request behind the key; None if that is another request. Raises TooManyKeys."""
    if len(answer) == 1:
        return None
    if len(answer) == 2:
        raise TooManyKeys(int(answer[1]))
    state, made_id, at = map(text, answer)
    return Entry(entry, state, made_id, int(at))


def look(entry: str) -> tuple[tuple[str, ...], ...]:
    """The commands whose answers `made_id` reads."""
    return ("HMGET", entry, "digest", "made", "id"), ("TTL", entry)


def made_id(digest: str, answers: Sequence[Any]) -> str | None:
    """The id of what this request made; None if it made nothing. An entry that is about to lapse does not count: a
    request that is let in because of it would be made a second time."""
    (stored_digest, done, made_id), ttl = answers
    return text(made_id) if done is not None and text(stored_digest) == digest and ttl > LAST_S else None


def ids(first: str, number: int) -> list[str]:
    """The ids of a request's `number` tasks. `first`: the first one's."""
    return [first, *(str(uuid.uuid5(uuid.UUID(first), str(index))) for index in range(1, number))]


def mark_made(entry: str) -> Call:
    """MADE: mark the key's object as made: later requests do not make it again, even deleted. Answers 1 | 0."""
    return Call(script(__package__, "made"), (entry,), ())
