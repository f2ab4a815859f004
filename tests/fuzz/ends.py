"""How each message that was put on a list ended. Shares no code with who ended it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from redis import Redis

from tests.fuzz.messages import Fuzzed

DEAD = "penstock:dead"
RETURNED = "penstock:returned"
ID = re.compile(rb'"id":\s*"([^"]+)"')
#: An ETA that tests do not live to see.
FAR = re.compile(rb'"eta":\s*"(9999|2199)-')
#: Seconds that a result is kept, as the record said: none.
AT_ONCE = re.compile(rb"-.*|0(x0)?|nan|1e400|")
#: Lists of what needs a later release (`*` in a pattern of Valkey).
LATER = "penstock:queue:*+[0-9]*"
#: A task that comes with Celery: its result is nobody's, unless it is asked for.
CELERYS = re.compile(rb'"task":\s*"celery\.')
#: A task of a kind that some release may know.
PENSTOCKS = re.compile(rb'"task":\s*"penstock\.')
FINAL = (b"completed", b"failed", b"cancelled", b"incomplete")
#: How much is not over, at one instant: between two looks, what is held back may come to be in flight.
LEFT = """
local left = 0
for _, name in ipairs(KEYS) do
  left = left + redis.call('LLEN', name)
end
for _, kind in ipairs({ 'sorted', 'inflight' }) do
  left = left + #redis.call('KEYS', 'penstock:' .. kind .. ':*')
end
local tomorrow = (redis.call('TIME')[1] + 86400) * 1000
for _, name in ipairs(redis.call('KEYS', 'penstock:delayed:*')) do
  left = left + redis.call('ZCOUNT', name, '-inf', tomorrow)
end
return left
"""


def sent_id(raw: bytes) -> str | None:
    """The task's id in a message, as far as anyone can read it."""
    try:
        found = json.loads(raw.decode(errors="replace"))["headers"]["id"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) and found and found.isprintable() else None


class Ends:
    """Looks at the server; `lists` are those that workers read."""

    def __init__(self, redis: Redis, lists: Sequence[str]) -> None:
        self._redis = redis
        self._lists = lists

    def quiet(self) -> bool:
        """Nothing waits, nothing is in flight, nothing comes due within a day."""
        return not self._redis.eval(LEFT, len(self._lists), *self._lists)

    def left(self) -> dict[str, Any]:
        """What is not over, for a report."""
        found: dict[str, Any] = {name: self._redis.lrange(name, 0, 5) for name in self._lists if self._redis.llen(name)}
        for name in self._redis.keys("penstock:inflight:*"):
            found[name.decode()] = list(self._redis.hvals(name))[:20]  # type: ignore[arg-type]
        for name in (*self._redis.keys("penstock:delayed:*"), *self._redis.keys("penstock:sorted:*")):
            found[name.decode()] = self._redis.zrange(name, 0, 5)
        return found

    def of(self, sent: Sequence[tuple[str, Fuzzed]]) -> list[tuple[str, str]]:
        """How each ended, and what is wrong with that, if anything is; forgets dead letters and what waits for long."""
        letters = self._take_letters()
        waiting = self._take_waiting()
        later = self._take_later()
        return [self._one(task_id, fuzzed, letters, waiting, later) for task_id, fuzzed in sent]

    def _take_letters(self) -> list[bytes]:
        """The messages of all dead letters: JSON whose strings are bytes, not characters."""
        found: Any = self._redis.lrange(DEAD, 0, -1)
        self._redis.delete(DEAD)
        return [json.loads(letter.decode("latin-1"))["message"].encode("latin-1") for letter in found]

    def _take_waiting(self) -> list[bytes]:
        found: list[bytes] = []
        for name in self._redis.keys("penstock:delayed:*"):
            found += self._redis.zrange(name, 0, -1)  # type: ignore[arg-type]
            self._redis.delete(name)
        if ids := [named[1] for packed in found if (named := ID.search(packed))]:
            self._redis.hdel(RETURNED, *ids)  # the numbers that they would have had again
        return found

    def _take_later(self) -> list[bytes]:
        found: list[bytes] = []
        for name in self._redis.keys(LATER):
            found += self._redis.lrange(name, 0, -1)  # type: ignore[arg-type]
            self._redis.delete(name)
        return found

    def _one(
        self, task_id: str, fuzzed: Fuzzed, letters: list[bytes], waiting: list[bytes], later: list[bytes]
    ) -> tuple[str, str]:
        key = f"penstock:task:{task_id}"
        record: Any = self._redis.hgetall(key) if self._redis.type(key) == b"hash" else {}
        told: Any = self._redis.get(f"celery-task-meta-{task_id}")
        if fuzzed.raw in letters:
            return "dead letter", ""
        if FAR.search(fuzzed.raw) and any(fuzzed.raw in packed for packed in waiting):
            return "waits for its ETA", ""
        if PENSTOCKS.search(fuzzed.raw) and fuzzed.raw in later:
            return "waits for a later release", ""
        if fuzzed.record is not None and b"settled" in fuzzed.record:
            return "was settled before", ""
        if sent_id(fuzzed.raw) is None and record == fuzzed.record:
            return "names another task", ""
        if record and b"status" in record:
            if b"settled" in record and record.get(b"status") in FINAL:
                return record[b"status"].decode(), "it is settled and claimed" if b"claim" in record else ""
            return "not final", f"its record says {record}"
        if told is not None:
            return "celery " + json.loads(told)["status"].lower(), ""
        made = fuzzed.record
        if fuzzed.kind.startswith(("client without", "client, its")) or (made is not None and b"status" not in made):
            return "dropped", ""
        if made is not None and AT_ONCE.fullmatch(made.get(b"ttl", b"")):
            return "expired at once", ""
        if CELERYS.search(fuzzed.raw):
            return "Celery's own", ""
        return "vanished", "neither a letter, nor a record, nor a result"
