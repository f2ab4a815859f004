"""Workers' leases, and the deaths that count, on Redis or Valkey, wherever a broker has its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from redis import Redis

from producers.broker.base import Consumer
from producers.broker.redis import calls, keys
from producers.broker.values import Listed
from producers.connection.script import run, text
from producers.contract import keys as contract_keys
from producers.contract import leases


class Leases(Consumer):
    """That part of a `Consumer`. A subclass sets `_redis` and `queues`."""

    _redis: Redis

    def take_lease(self, incarnation: str, about: str, ttl: float) -> None:
        run(self._redis, calls.lease(incarnation, about, int(ttl * 1000), take=True, queue=self.queues[0]))

    def renew(self, incarnation: str, about: str, ttl: float) -> bool:
        return bool(run(self._redis, calls.lease(incarnation, about, int(ttl * 1000), take=False)))

    def end_lease(self, incarnation: str) -> None:
        self._redis.delete(contract_keys.lease(incarnation))

    def workers(self) -> list[Listed]:
        listed = self._redis.hgetall(keys.INCARNATIONS)
        with self._redis.pipeline(transaction=False) as pipe:
            for name in listed:
                pipe.pttl(contract_keys.lease(text(name)))
            return read_listed(listed, pipe.execute())

    def survived(self, task_ids: Sequence[str]) -> None:
        self._redis.hdel(keys.REAPED, *task_ids)

    def join(self, looker: str) -> int:
        return int(run(self._redis, leases.join(looker)))

    def look(self, looker: str, others: Sequence[str], since: int = 0) -> leases.Observation | None:
        return leases.observe(self._redis, looker, others, since)

    def retract(self, incarnation: str) -> list[str] | None:
        return leases.read_retract(run(self._redis, leases.retract(incarnation, keys.REAPED)))

    def adopt(self, source: str, target: str) -> int:
        """As `Consumer.adopt`. Where pools have no queues of their own, only delayed messages can be there."""
        return int(run(self._redis, calls.adopt(source, target)))


def read_listed(listed: Mapping[Any, Any], left_ms: Sequence[int]) -> list[Listed]:
    """`listed`: queues by incarnation; `left_ms`: PTTL of each one's lease, below -1 where there is none."""
    return [
        Listed(text(name), text(queue), None if left == -2 else max(0, left) / 1000)
        for (name, queue), left in zip(listed.items(), left_ms, strict=True)
    ]
