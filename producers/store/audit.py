"""The audit log: who made, changed or removed keys, webhook endpoints, routing.

The script that makes a change appends it to the stream `penstock:audit` (the latest KEPT), so neither is ever there
without the other. The process that asked for it also logs it as a line of JSON, under the logger `penstock.audit`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any, Final

from redis.asyncio import Redis

from producers.contract import keys

log = logging.getLogger("penstock.audit")

#: Entries of the stream; older ones are in the logs alone.
KEPT: Final = 100_000


@dataclass(frozen=True, slots=True)
class Change:
    """A change. `by`: a key's id, `local` for a caller without one, or `cli:USER@HOST`."""

    by: str
    did: str
    """What was done to what: `key.create`, `endpoint.delete`."""
    what: str
    """The changed thing's id."""
    tenant: str | None = None
    """Whose it is."""
    address: str | None = None
    """The caller's network address."""

    def to_json(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})

    def say(self) -> None:
        """Log it, once it is done."""
        log.info("%s", self.to_json())


async def latest(store: Redis, most: int) -> list[dict[str, Any]]:
    """Up to `most` changes, the latest first, each with its time `at` (unix ms). Raises redis.exceptions.RedisError or
    OSError."""
    found = await store.execute_command("XREVRANGE", keys.AUDIT, "+", "-", "COUNT", most)
    return [{"at": int(entry.split(b"-")[0]), **json.loads(said[1])} for entry, said in found]
