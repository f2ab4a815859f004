"""What the store has counted of tenants' waiting tasks: a broker's list tells of so many tenants only by samples."""

from __future__ import annotations

from typing import Final

from redis.asyncio import Redis

from producers.broker.values import NOTHING_COUNTED, Counted
from producers.connection.script import text
from producers.contract import keys
from producers.contract.message import Message

#: With more tenants than this, reading their counts would take too long.
MOST: Final = 4000


async def count(store: Redis, message: Message, since: float) -> Counted:
    """`since`: when the task that has waited longest in its tier was submitted, unix s. Raises
    redis.exceptions.RedisError or OSError.

    The part of the tenant's tasks that came before it is that of those since then that lists show.
    """
    index, first = keys.tasks(message.tenant), str(int(since * 1000))
    async with store.pipeline(transaction=False) as pipe:
        pipe.execute_command("HLEN", keys.WAITING_TENANTS)
        pipe.execute_command("ZCOUNT", index, first, f"({message.at}")
        pipe.execute_command("ZCOUNT", index, first, "+inf")
        tenants, before, whole = await pipe.execute()
    if not 0 < tenants <= MOST:
        return NOTHING_COUNTED
    waiting = await store.execute_command("HGETALL", keys.WAITING_TENANTS)
    share = before / whole if message.tenant and whole else None
    return Counted({text(name): int(number) for name, number in waiting.items()}, share)
