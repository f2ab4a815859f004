"""The side of senders, gateways, sweepers and operators, on Redis or Valkey."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import redis
from redis.exceptions import ResponseError

from producers.broker.base import NoSuchPlace, Sender
from producers.broker.redis import calls, keys
from producers.broker.redis.books import Books
from producers.broker.redis.consumer import CAPABILITIES
from producers.broker.values import NOTHING_COUNTED, Counted, Depth, Depths, Standing, Waiting
from producers.connection.script import aexecute, arun, text
from producers.connection.storage import Storage, read_storage
from producers.connection.trouble import trouble
from producers.contract import keys as contract_keys
from producers.contract.keys import takes_from
from producers.contract.message import Message


class RedisSender(Sender):
    capabilities = CAPABILITIES

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client

    def send(self, message: Message) -> None:
        self._redis.execute_command(*_push(message))

    def put(self, queue: str, tier: str, message: str) -> None:
        self._redis.execute_command("LPUSH", keys.tier_list(queue, tier), message)

    def close(self) -> None:
        self._redis.close()


class RedisBroker(Books):
    """`client`: may be the store's, where that is the same server."""

    capabilities = CAPABILITIES

    async def ping(self) -> None:
        await self._redis.execute_command("PING")

    async def storage(self) -> Storage:
        return await read_storage(self._redis)

    async def send(self, message: Message) -> None:
        await aexecute(self._redis, *_push(message))

    async def send_many(self, messages: Sequence[Message]) -> None:
        lists: dict[str, list[str]] = {}
        for message in messages:
            lists.setdefault(keys.list_of(message), []).append(message.envelope())
        await self._ask(*(("LPUSH", name, *envelopes) for name, envelopes in lists.items()))

    # ---- what there is --------------------------------------------------------------------------------------------

    async def waiting(self, queue: str) -> Waiting:
        lists = _lists(queue)
        *counts, taken, pools = await self._ask(
            *(("LLEN", name) for name, _ in lists),
            *(("ZCARD", keys.sorted_of(name)) for name, _ in lists),
            ("GET", keys.DELIVERED_TOKENS),
            ("HVALS", keys.INCARNATIONS),
        )
        served = any(takes_from(text(pool), queue) for pool in pools)
        found = Waiting(taken=int(taken or 0), served=served)
        for (_, tier), count in zip(lists * 2, counts, strict=True):
            found.tiers[tier] += count
        return found

    async def standing(self, message: Message, counted: Counted = NOTHING_COUNTED) -> Standing | None:
        return calls.read_standing(await arun(self._redis, calls.standing(message, counted)))

    async def depths(self, queues: Sequence[str]) -> Depths:
        lists = [(queue, tier, name) for queue in queues for name, tier in _lists(queue)]
        listed, dead_letters, *counts = await self._ask(
            ("HGETALL", keys.INCARNATIONS),
            ("LLEN", keys.DEAD),
            *(("ZCARD", keys.delayed(queue)) for queue in queues),
            *(
                command
                for _, _, name in lists
                for command in (("LLEN", name), ("ZCARD", keys.sorted_of(name)), ("ZCARD", keys.turns(name)))
            ),
        )
        found = {queue: Depth(delayed=count) for queue, count in zip(queues, counts, strict=False)}
        each = iter(counts[len(queues) :])
        some = []
        for (queue, tier, name), arrived, by_tenant, tenants in zip(lists, each, each, each, strict=True):
            found[queue].waiting[tier] += arrived + by_tenant
            found[queue].tenants[tier] += tenants
            some += [(found[queue].oldest, tier, name)] if arrived or by_tenant else []
        waited = await arun(self._redis, calls.oldest([name for *_, name in some])) if some else ()
        for (oldest, tier, _), ms in zip(some, waited, strict=True):
            if ms >= 0:
                oldest[tier] = max(oldest.get(tier, 0.0), ms / 1000)
        workers = {text(name): text(queue) for name, queue in listed.items()}
        held = await self._ask(*(("HLEN", keys.inflight(name)) for name in workers))
        for queue, count in zip(workers.values(), held, strict=True):
            if queue in found:
                found[queue].in_flight += count
        return Depths(found, workers, dead_letters)

    # ---- what dead workers left -----------------------------------------------------------------------------------

    async def reap(self, incarnation: str) -> int:
        return int(await arun(self._redis, calls.reap(incarnation)))

    async def recall(self, queue: str, takers: Sequence[str], count: int) -> int:
        return int(await arun(self._redis, calls.recall(queue, takers, count)))

    async def adopt(self, source: str, target: str) -> int:
        return int(await arun(self._redis, calls.adopt(source, target)))

    async def due(self, queue: str) -> int:
        return int(await arun(self._redis, calls.due(queue)))

    async def prune(
        self,
        queue: str,
        over: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, str]]],
        page: int,
        reason: str = "",
        to: str = "",
    ) -> tuple[int, int]:
        removed = left = 0
        for (name, _), (target, _) in zip(_lists(queue), _lists(to), strict=True):
            start = 0
            while messages := await self._range(name, start, page):
                gone = await over(messages)
                for raw, task_id in gone.items():
                    if reason or to:
                        call = calls.move(name, target, raw) if to else calls.bury(name, raw, task_id, reason)
                        for _ in range(messages.count(raw)):
                            removed += await arun(self._redis, call)
                        continue
                    removed += await self._redis.execute_command("LREM", name, -messages.count(raw), raw)
                    for counts in (keys.REAPED, keys.RETURNED):
                        await self._redis.hdel(counts, task_id)
                start += sum(raw not in gone for raw in messages)
            left += start
        return removed, left + await self._redis.zcard(keys.delayed(queue))

    async def forget(self, queue: str) -> None:
        await self._redis.delete(f"_kombu.binding.{queue}", f"_kombu.binding_permanent.{queue}")

    async def tidy(self) -> None:
        for name in map(text, await self._redis.hkeys(keys.UNSERVED)):
            if not await self._redis.exists(name):  # FETCH enters it anew, when it finds something there
                await self._redis.hdel(keys.UNSERVED, name)

    # ---- dead letters ---------------------------------------------------------------------------------------------

    async def replay(self, entry: bytes, place: str, message: bytes, task_id: str) -> bool:
        try:
            return bool(await arun(self._redis, calls.replay(entry, place, message, task_id)))
        except ResponseError as error:
            if trouble(error) is not None:
                raise
            raise NoSuchPlace(f"{place} is no list that takes it ({error})") from error

    # ---- tenants --------------------------------------------------------------------------------------------------

    async def tenants(self, queues: Sequence[str]) -> tuple[dict[str, dict[str, int]], int]:
        found: dict[str, dict[str, int]] = {}
        unsorted = 0
        for name, tier in [one for queue in queues for one in _lists(queue)]:
            unsorted += await self._redis.llen(name)
            for tenant in map(text, await self._redis.zrange(keys.turns(name), 0, -1)):
                tiers = found.setdefault(tenant, dict.fromkeys(contract_keys.TIERS, 0))
                tiers[tier] += await self._redis.zcard(keys.turn(name, tenant))
        return found, unsorted


def _push(message: Message) -> tuple[str, str, str]:
    return "LPUSH", keys.list_of(message), message.envelope()


def _lists(queue: str) -> list[tuple[str, str]]:
    """Each list of the queue, with its tier."""
    return [(name, tier) for tier in contract_keys.TIERS for name in keys.tier_lists(queue, tier)]
