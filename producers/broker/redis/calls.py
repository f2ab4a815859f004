"""The broker's scripts: one function each, which gives the `Call` to send, and another that reads its answer.

The head of each `scripts/*.lua` has its precondition and effect.

**Books.** The part of a broker that is in Redis or Valkey wherever its messages are: leases, dead letters, weights,
time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import redis
from redis.asyncio import Redis as AsyncRedis

from producers.broker.base import Broker, Consumer
from producers.broker.redis import keys
from producers.broker.values import (
    LEFT_MS,
    Credit,
    Fetched,
    ListedWorker,
    QueuePosition,
    TenantCounts,
    check_weight,
    sane_weights,
)
from producers.connection.script import Call, aexecute_many, ms, run, script, text
from producers.contract import keys as contract_keys
from producers.contract import leases
from producers.contract.levels import split
from producers.contract.message import Message

PACKAGE: Final = "producers.broker.redis"

#: Messages of each list that one FETCH sorts: a round trip's worth of the server's time, also with all lists full.
SORT_LIMIT: Final = 64


def lists(queues: Sequence[str]) -> list[tuple[str, int]]:
    """The lists of the queues, each with its tier's rank, best tier first."""
    ranked = sorted((rank, tier) for tier, (rank, _) in contract_keys.TIERS.items())
    return [(name, rank) for rank, tier in ranked for queue in queues for name in keys.tier_lists(queue, tier)]


def fetch(
    incarnation: str,
    queues: Sequence[str],
    uuids: Sequence[str],
    credit: Credit,
    *,
    capacity: tuple[int, int],
    plain_tokens: int,
    ageing_ms: int,
    max_redeliveries: int,
    sort_limit: int = SORT_LIMIT,
    home: str | None = None,
    places: bool = False,
    left_ms: int = LEFT_MS,
) -> Call:
    """FETCH. `capacity`: (sequences, tokens) of the whole engine; a larger task counts as this much. `sort_limit`:
    messages of each list to sort by tenant, at most. `home`: the queue whose delayed messages are served, by default
    the first. `places`: a message whose prefix another holds is left to it, for `left_ms`
    (docs/how/placement.md)."""
    ranked = lists(queues)
    return Call(
        script(PACKAGE, "fetch"),
        (
            contract_keys.lease(incarnation),
            keys.inflight(incarnation),
            keys.delayed(home or queues[0]),
            keys.DEAD,
            keys.REAPED,
            keys.UNSERVED,
            keys.RETURNED,
            keys.ARRIVALS,
            keys.WEIGHTS,
            *(name for name, _ in ranked),
        ),
        (
            ageing_ms,
            max_redeliveries,
            *capacity,
            plain_tokens,
            sort_limit,
            incarnation if places else "",
            left_ms,
            *credit.seqs,
            *credit.tokens,
            *(rank for _, rank in ranked),
            *uuids,
        ),
    )


def places(queues: Sequence[str]) -> dict[str, tuple[str, int]]:
    """The lists of the queues, each with its queue and its tier's rank."""
    return {name: (queue, rank) for queue in queues for name, rank in lists([queue])}


def read_fetch(answer: Sequence[Any], places: Mapping[str, tuple[str, int]]) -> list[Fetched] | None:
    """`places`: of the queues that were fetched from. Returns None if the incarnation's lease is gone."""
    if len(answer) == 1:
        return None
    fetched = []
    for uuid, list_name, raw, state in zip(
        answer[::4], answer[1::4], answer[2::4], map(text, answer[3::4]), strict=True
    ):
        if not list_name:  # `read_look_again` reads it
            continue
        (queue, rank), buried = places[text(list_name)], "" if uuid else state
        returned = not buried and state != "0"
        fetched.append(Fetched(text(uuid), queue, rank, raw, returned, state == "condemned", buried))
    return fetched


def read_look_again(answer: Sequence[Any]) -> float | None:
    """After how many seconds to fetch again, since messages were left to other workers; None: none were."""
    return int(answer[-1]) / 1000 if len(answer) > 1 and not answer[-3] else None


def holds(incarnation: str, enter: Sequence[str], drop: Sequence[str] = (), *, anew: bool = False) -> Call:
    """HOLDS. `enter`: marks of prefixes (`engine.prefix`) that the incarnation holds from now on; `drop`: those that it
    holds no more; `anew`: all that it had entered before goes first. Answers how many it has entered now, or -1 if its
    lease is gone."""
    names = (contract_keys.lease(incarnation), keys.held(incarnation), keys.PREFIXES)
    return Call(script(PACKAGE, "holds"), names, (incarnation, int(anew), len(enter), *enter, *drop))


def ack(incarnation: str, uuid: str, reason: str = "", used: int = 0, settled: str = "") -> Call:
    """ACK. With a reason, the message becomes a dead letter. `used`: KV tokens that its tenant is charged, instead of
    the estimate. `settled`: the task that the worker has settled, or empty.

    Answers 1; 0 if there is no such delivery; -1 if that task is not settled.
    """
    return Call(
        script(PACKAGE, "ack"),
        (keys.inflight(incarnation), keys.REAPED, keys.DEAD, contract_keys.task(settled)),
        (uuid, reason, used, int(bool(settled))),
    )


def back(incarnation: str, queue: str, uuid: str, delay_ms: int = 0, to: str = "") -> Call:
    """Return a delivery to the front of its list, or of its tier's in the queue `to`; with a delay, it waits in `queue`
    first. Answers 1, or 0 if there is no such delivery."""
    names = (keys.inflight(incarnation), keys.delayed(queue), keys.RETURNED)
    ranked = sorted(contract_keys.TIERS, key=lambda tier: contract_keys.TIERS[tier][0])
    return Call(script(PACKAGE, "back"), names, (uuid, delay_ms, *(keys.tier_list(to, tier) for tier in ranked if to)))


def scheduled(queue: str, count: int) -> Call:
    """Answers the queue's delayed messages (JSON), soonest first, `count` at most."""
    return Call(script(PACKAGE, "scheduled"), (keys.delayed(queue),), (count,))


def oldest(lists: Sequence[str]) -> Call:
    """Answers for how long (ms) the oldest message of each list waits, -1 if that is unknown."""
    return Call(script(PACKAGE, "oldest"), [key for name in lists for key in (name, keys.sorted_of(name))], ())


#: Delayed messages that one `queue_position` searches.
DELAYED: Final = 1000


def queue_position(message: Message, counted: TenantCounts) -> Call:
    """Answers a message's position in its tier; `read_queue_position` reads it."""
    lists = keys.tier_lists(message.queue, message.tier)
    before, size = ("" if figure is None else f"{figure:.6f}" for figure in (counted.before, counted.tokens))
    tenants = json.dumps(dict(counted.tenants))
    names = (keys.delayed(split(message.queue)[0]), keys.WEIGHTS, keys.RETURNED, *lists)
    arguments = (message.id, message.tenant, message.at, message.tokens, DELAYED, before, size, tenants)
    return Call(script(PACKAGE, "queue_position"), names, arguments)


def read_queue_position(answer: Sequence[Any]) -> QueuePosition | None:
    match [text(part) if isinstance(part, bytes) else part for part in answer]:
        case ["waiting", ahead, exact, tokens, *left_to]:
            return QueuePosition(int(ahead), bool(exact), tokens=int(tokens), left_to="".join(left_to))
        case ["delayed", ms]:
            return QueuePosition(due_s=int(ms) / 1000)
    return None


def recall(queue: str, pools: Sequence[str], count: int) -> Call:
    """RECALL: return a queue's sorted messages to its lists' fronts, if no worker of the `pools` that serve it lives.

    Answers the number of messages, at most `count` (fewer: all are done), or -1 if a worker lives. For a queue of tasks
    that need a later release, only workers of such a release count.
    """
    names = (keys.INCARNATIONS, *(name for name, _ in lists([queue])))
    return Call(script(PACKAGE, "recall"), names, (count, split(queue)[1], *pools))


def adopt(source: str, target: str) -> Call:
    """Move the messages of a pool's queue to the front of its version's, if the pool has no workers.

    Answers the number of messages, or -1 if a worker of the pool lives. For a queue of tasks that need a later release,
    only workers of such a release count.
    """
    names = [name for pair in zip(lists([source]), lists([target]), strict=True) for name, _ in pair]
    delayed = (keys.delayed(source), keys.delayed(target))
    return Call(script(PACKAGE, "adopt"), (keys.INCARNATIONS, *delayed, *names), split(source))


def bury(list_name: str, message: bytes, task_id: str, reason: str) -> Call:
    """Make a waiting message of a list a dead letter. Answers 1, or 0 if it does not wait there."""
    names = (list_name, keys.DEAD, keys.REAPED, keys.RETURNED)
    return Call(script(PACKAGE, "bury"), names, (message, task_id, reason))


def move(list_name: str, target: str, message: bytes) -> Call:
    """Move a waiting message of a list to the front of another. Answers 1, or 0 if it does not wait there."""
    return Call(script(PACKAGE, "move"), (list_name, target), (message,))


def due(queue: str) -> Call:
    """Return the queue's due messages to their lists. Answers their number."""
    return Call(script(PACKAGE, "due"), (keys.delayed(queue),), ())


def replay(entry: bytes, list_name: str, message: bytes, task_id: str) -> Call:
    """Put a dead letter's message on a list. Answers 1, or 0 if there is no such entry."""
    return Call(script(PACKAGE, "replay"), (keys.DEAD, keys.REAPED, list_name), (entry, message, task_id))


def reap(incarnation: str, looker: str = "", queue: str = "", since: int = 0) -> Call:
    """REAP. Answers how many deliveries of a dead incarnation went back to their lists; -1 while it lives.

    `looker`: the incarnation that found it silent, if its lease is valid; `since`: the join from which on leases count.
    Ordinary Celery tasks then wait in `queue`."""
    names = (keys.inflight(incarnation), keys.INCARNATIONS, keys.REAPED, keys.RETURNED, keys.delayed(queue))
    return Call(script(PACKAGE, "reap"), (contract_keys.lease(incarnation), *names), (incarnation, looker, since))


def strays(incarnation: str, expected: Sequence[str]) -> Call:
    """`expected`: deliveries that its worker knows. Answers the others, `[uuid, task id, ...]`; see `read_strays`."""
    return Call(script(PACKAGE, "strays"), (keys.inflight(incarnation),), expected)


def read_strays(answer: Sequence[Any]) -> dict[str, str]:
    """Delivery -> task id."""
    return {text(uuid): text(task_id) for uuid, task_id in zip(answer[::2], answer[1::2], strict=True)}


def lease(incarnation: str, state: str, ttl_ms: int, *, take: bool, queue: str = "") -> Call:
    """Take or renew a worker's lease. `state`: the worker's (JSON); `queue`: lists it with its pool's. Answers 1, or 0
    if the lease is gone."""
    return Call(
        script(PACKAGE, "lease"),
        (contract_keys.lease(incarnation), keys.INCARNATIONS),
        (incarnation, state, ttl_ms, int(take), queue),
    )


class Leases(Consumer):
    """The part of a `Consumer` for leases, and for the deaths that count. A subclass sets `_redis` and `queues`."""

    _redis: redis.Redis

    def take_lease(self, incarnation: str, state: str, ttl: float) -> None:
        run(self._redis, lease(incarnation, state, int(ttl * 1000), take=True, queue=self.queues[0]))

    def renew(self, incarnation: str, state: str, ttl: float) -> bool:
        return bool(run(self._redis, lease(incarnation, state, int(ttl * 1000), take=False)))

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
        return int(run(self._redis, adopt(source, target)))


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
