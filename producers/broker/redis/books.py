"""The part of a broker that is in Redis or Valkey wherever its messages are: leases, dead letters, weights, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import redis
from redis.asyncio import Redis as AsyncRedis

from producers.broker.base import Broker, Consumer
from producers.broker.redis import calls, keys
from producers.broker.values import ListedWorker, check_weight, sane_weights
from producers.connection.script import aexecute_many, ms, run, text
from producers.contract import keys as contract_keys
from producers.contract import leases


class Leases(Consumer):
    """The part of a `Consumer` for leases, and for the deaths that count. A subclass sets `_redis` and `queues`."""

    _redis: redis.Redis

    def take_lease(self, incarnation: str, state: str, ttl: float) -> None:
        run(self._redis, calls.lease(incarnation, state, int(ttl * 1000), take=True, queue=self.queues[0]))

    def renew(self, incarnation: str, state: str, ttl: float) -> bool:
        return bool(run(self._redis, calls.lease(incarnation, state, int(ttl * 1000), take=False)))

    def end_lease(self, incarnation: str) -> None:
        self._redis.delete(contract_keys.lease(incarnation))

    def workers(self) -> list[ListedWorker]:
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
        """The same as `Consumer.adopt`. If pools have no queues of their own, only delayed messages are moved."""
        return int(run(self._redis, calls.adopt(source, target)))


class Books(Broker):
    """The part of a `Broker` for workers, dead letters, weights and the time.

    `client`: without time limits; closed with the broker.
    """

    def __init__(self, client: AsyncRedis) -> None:
        self._redis = client

    async def workers(self) -> list[ListedWorker]:
        listed = await self._redis.hgetall(keys.INCARNATIONS)
        return read_listed(listed, await self._execute(*(("PTTL", contract_keys.lease(text(name))) for name in listed)))

    async def letters(self, start: int, count: int) -> list[bytes]:
        return await self._range(keys.DEAD, start, count)

    async def remove_letter(self, entry: bytes) -> bool:
        return bool(await self._redis.execute_command("LREM", keys.DEAD, 1, entry))

    async def now_ms(self) -> int:
        return ms(await self._redis.time())

    async def weights(self) -> dict[str, float]:
        return sane_weights(await self._redis.execute_command("HGETALL", keys.WEIGHTS))

    async def weigh(self, tenant: str, weight: float) -> None:
        check_weight(weight)
        if weight == 1:
            await self._redis.execute_command("HDEL", keys.WEIGHTS, tenant)
        else:
            await self._redis.execute_command("HSET", keys.WEIGHTS, tenant, repr(weight))

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _range(self, name: str, start: int, count: int) -> list[bytes]:
        page: list[bytes] = await self._redis.execute_command("LRANGE", name, start, start + count - 1)
        return page

    async def _execute(self, *commands: tuple[str | bytes, ...]) -> list[Any]:
        """The commands' answers, in one round trip."""
        return await aexecute_many(self._redis, commands)


def read_listed(listed: Mapping[Any, Any], ttls_ms: Sequence[int]) -> list[ListedWorker]:
    """`listed`: incarnation -> queue; `ttls_ms`: PTTL of each incarnation's lease, -2 if that has ended."""
    return [
        ListedWorker(text(name), text(queue), None if ttl_ms == -2 else max(0, ttl_ms) / 1000)
        for (name, queue), ttl_ms in zip(listed.items(), ttls_ms, strict=True)
    ]
