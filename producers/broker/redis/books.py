"""Workers, dead letters, weights and the time: what a broker keeps in Redis or Valkey, wherever its messages are."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from producers.broker.base import Broker
from producers.broker.redis import keys
from producers.broker.redis.leases import read_listed
from producers.broker.values import Listed, check_weight, sane_weights
from producers.connection.script import ask, ms, text
from producers.contract import keys as contract_keys


class Books(Broker):
    """That part of a `Broker`. `client`: without time limits; closed with the broker."""

    def __init__(self, client: Redis) -> None:
        self._redis = client

    async def workers(self) -> list[Listed]:
        listed = await self._redis.hgetall(keys.INCARNATIONS)
        return read_listed(listed, await self._ask(*(("PTTL", contract_keys.lease(text(name))) for name in listed)))

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
        found: list[bytes] = await self._redis.execute_command("LRANGE", name, start, start + count - 1)
        return found

    async def _ask(self, *commands: tuple[str | bytes, ...]) -> list[Any]:
        """In one round trip."""
        return await ask(self._redis, commands)
