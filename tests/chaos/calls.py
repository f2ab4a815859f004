"""What a request is, in the protocol's words: `APPEND`, `SET lease`, `SETEX result + PUBLISH result`, ..."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from producers.broker.redis import calls as broker
from producers.connection.script import Script, script
from producers.contract import leases
from producers.store import protocol

#: Said when a connection is made or looked after: nothing lasts of them.
MANNERS = frozenset({b"HELLO", b"AUTH", b"SELECT", b"PING", b"ECHO", b"INFO", b"CLIENT", b"SCRIPT", b"TIME", b"MULTI"})
#: From these on, the server speaks on the connection unasked.
LISTENS = frozenset({b"SUBSCRIBE", b"PSUBSCRIBE", b"UNSUBSCRIBE", b"PUNSUBSCRIBE"})

_FAMILIES = [
    (re.compile(rb"^penstock:queue:"), "queue"),
    (re.compile(rb"^penstock:(models|pools|routes)"), "directory"),
    (re.compile(rb"^penstock:(\w+)"), None),
    (re.compile(rb"^celery-task-meta-"), "result"),
]
#: kombu's bindings, and the lists that it looks at before it makes them.
_KOMBU = re.compile(rb"^_kombu\.|pidbox")


@dataclass(frozen=True, slots=True)
class Call:
    """`number` counts from 1, over all connections; `words` are the request's."""

    number: int
    kind: str
    words: tuple[bytes, ...]

    def names(self, task_id: str) -> bool:
        """Whether the call is about this task."""
        return any(task_id.encode() in word for word in self.words)


@cache
def sources() -> dict[Script, str]:
    """The protocol's scripts, and their names."""
    found = {}
    for package in (protocol.PACKAGE, leases.PACKAGE, broker.PACKAGE):
        folder = resources.files(package) / "scripts"
        for name in sorted(path.name for path in folder.iterdir()):
            if name.endswith(".lua") and not name.startswith("_"):
                stem = name.removesuffix(".lua")
                found[script(package, stem)] = stem.upper()
    return found


@cache
def _by_sha() -> dict[bytes, str]:
    return {source.sha.encode(): name for source, name in sources().items()}


def kind(requests: list[list[bytes]]) -> str:
    """Of one request, or of a transaction's."""
    if any(_KOMBU.search(word) for words in requests for word in words[1:4]) or requests[0][0].upper() == b"LLEN":
        return "kombu"
    return " + ".join(map(_kind, requests))


def _kind(words: list[bytes]) -> str:
    name = words[0].upper()
    if name in (b"EVALSHA", b"EVALSHA_RO"):
        return _by_sha().get(words[1]) or "EVALSHA of Celery"
    return f"{name.decode()} {_family(words[1])}" if len(words) > 1 else name.decode()


def _family(key: bytes) -> str:
    for pattern, name in _FAMILIES:
        if found := pattern.search(key):
            return name or found.group(1).decode()
    return key.decode(errors="replace")
