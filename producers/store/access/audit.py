"""The audit log: who made, changed or removed keys, webhook endpoints, routing.

The script that makes a change appends it to the stream `penstock:audit` (the latest KEPT), so neither is ever there
without the other. Changes of webhook endpoints, of which a tenant may make any number, have a stream of their own
(`penstock:audit:endpoints`), so that they push no change of a key out. What operators do beside changes, such as a
replay, is appended after it. The process that asked for it also logs it as a line of JSON, under the logger
`penstock.audit`.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import text
from producers.contract import keys

log = logging.getLogger("penstock.audit")
log.setLevel(logging.INFO)  # changes are logged whatever else is

#: Entries of the stream; older ones are in the logs alone.
KEPT: Final = 100_000


@dataclass(frozen=True, slots=True)
class Change:
    """A change. `by`: a key's id, `local` for a caller without one, a process's name, or `cli:USER@HOST`."""

    by: str
    did: str
    """The change: `key.create`, `endpoint.delete`."""
    what: str
    """The changed thing's id."""
    tenant: str | None = None
    """Its tenant."""
    address: str | None = None
    """The caller's network address."""

    @property
    def log(self) -> str:
        """The stream that has it."""
        return keys.AUDIT_ENDPOINTS if self.did.startswith("endpoint.") else keys.AUDIT

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    def say(self) -> None:
        """Log it, once it is done."""
        log.info("%s", self.to_json())


@dataclass(frozen=True, slots=True)
class Actor:
    """The maker of changes. `by` and `address`: as in `Change`."""

    by: str
    address: str | None = None

    def did(self, did: str, subject: str, tenant: str | None = None) -> Change:
        return Change(self.by, did, subject, tenant, self.address)


def operator() -> str:
    """The user of this process, as `by` of a change."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = str(os.getuid())
    return f"cli:{user}@{socket.gethostname()}"


async def append(store: Redis, change: Change) -> None:
    """Append what was done by no script of ours, such as a replay, once it is done; and log it.

    Raises redis.exceptions.RedisError or OSError."""
    change.say()
    await store.execute_command("XADD", change.log, "MAXLEN", "~", KEPT, "*", "e", change.to_json())


async def latest(store: Redis, limit: int) -> list[dict[str, Any]]:
    """Up to `limit` changes, the latest first, each with its time `at` (unix ms).

    Raises redis.exceptions.RedisError or OSError.
    """
    entries: list[Any] = []
    for log_ in (keys.AUDIT, keys.AUDIT_ENDPOINTS):
        entries += await store.execute_command("XREVRANGE", log_, "+", "-", "COUNT", limit)
    entries.sort(key=lambda entry: tuple(map(int, text(entry[0]).split("-"))), reverse=True)
    return [
        {"at": int(text(entry).partition("-")[0]), **json.loads(*fields.values())} for entry, fields in entries[:limit]
    ]
