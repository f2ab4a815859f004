"""The broker on Redis or Valkey: a worker's side, and the side of senders, gateways, sweepers and operators.

RedisSender, RedisBroker.send ─ LPUSH ─▶ list of the tier ─▶ RedisConsumer.fetch (FETCH) ─▶ put_down (ACK, BACK)
                                              └─ key tracking ─▶ TrackingWaker ─▶ the worker fetches
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import redis
from redis.exceptions import RedisError, ResponseError

from producers.broker.base import NoSuchList, Sender, Waker
from producers.broker.redis import calls, keys
from producers.broker.redis.calls import Books, Leases
from producers.broker.values import (
    NO_COUNTS,
    Ack,
    Back,
    Capabilities,
    Credit,
    Depth,
    Depths,
    Fetched,
    PutDown,
    QueuePosition,
    Rules,
    TenantCounts,
    Waiting,
    sane_weights,
)
from producers.connection.connect import SILENT_S, connect, connection_pool
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, aexecute, arun, run, run_many, text
from producers.connection.storage import Storage, read_storage
from producers.connection.trouble import Trouble, trouble
from producers.contract import keys as contract_keys
from producers.contract.keys import takes_from
from producers.contract.levels import beside
from producers.contract.message import Message

logger = logging.getLogger(__name__)

CAPABILITIES: Final = Capabilities(
    front_of_queue=True,
    max_message_bytes=512 * 1024 * 1024,  # proto-max-bulk-len, unless the server says otherwise
    places=True,
)
#: Messages that go back into their lists in one call.
PAGE: Final = 1000
#: Answers of ACK and BACK.
_OUTCOMES: Final = {1: PutDown.DONE, 0: PutDown.GONE, -1: PutDown.UNSETTLED}
#: Pause (s) before a waker connects again.
RECONNECT_S: Final = 0.5
#: Interval (s) of a waker's pings on a quiet connection. It connects again if no answer came by the next ping.
PING_S: Final = 5.0
PONG: Final = b"+PONG\r\n"
#: Interval (s) of polling a server that has no tracking (Redis before 6) or forbids it.
POLL_S: Final = 0.05


class RedisConsumer(Leases):
    capabilities = CAPABILITIES

    def __init__(self, url: str, queues: Sequence[str], timeout: float = SILENT_S, home: str | None = None) -> None:
        self._url = url
        self._redis: redis.Redis = connect(url, timeout=timeout)
        self.queues = list(queues)
        self.home = home or self.queues[0]
        self._places = calls.places(queues)

    # ---- deliveries -----------------------------------------------------------------------------------------------

    def fetch(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, sort_limit: int | None = None
    ) -> list[Fetched] | None:
        call = calls.fetch(
            incarnation,
            [queue for queue in self.queues if queue not in self.passed],
            uuids,
            credit,
            capacity=rules.capacity,
            plain_tokens=rules.plain_tokens,
            ageing_ms=int(rules.ageing * 1000),
            max_redeliveries=rules.max_redeliveries,
            sort_limit=sort_limit or calls.SORT_LIMIT,
            home=self.home,
            places=self.places,
            left_ms=rules.left_ms,
        )
        answer = run(self._redis, call)
        self.look_again = calls.read_look_again(answer)
        return calls.read_fetch(answer, self._places)

    def hold(self, incarnation: str, enter: Sequence[str], drop: Sequence[str] = (), *, anew: bool = False) -> int:
        return int(run(self._redis, calls.holds(incarnation, enter, drop, anew=anew)))

    def put_down(self, outcomes: Sequence[Ack | Back]) -> list[PutDown | Exception]:
        answers = run_many(self._redis, [self._call(outcome) for outcome in outcomes])
        return [answer if isinstance(answer, Exception) else _OUTCOMES[answer] for answer in answers]

    def _call(self, outcome: Ack | Back) -> Call:
        if isinstance(outcome, Ack):
            return calls.ack(outcome.incarnation, outcome.uuid, outcome.reason, outcome.used, outcome.settled)
        return calls.back(outcome.incarnation, self.home, outcome.uuid, int(outcome.delay * 1000), outcome.to)

    def strays(self, incarnation: str, expected: Sequence[str]) -> dict[str, str]:
        return calls.read_strays(run(self._redis, calls.strays(incarnation, expected)))

    def scheduled(self, count: int) -> list[bytes]:
        return list(run(self._redis, calls.scheduled(self.home, count)))

    # ---- leases ---------------------------------------------------------------------------------------------------

    def leave(self, incarnation: str, takers: Mapping[str, Sequence[str]]) -> None:
        first = [calls.reap(incarnation)]
        if self.home != self.queues[0]:
            first += [calls.adopt(*pair) for pair in zip(beside(self.queues[0]), beside(self.home), strict=True)]
        recall = [calls.recall(queue, takers.get(queue, self.queues), PAGE) for queue in self.queues]
        with self._redis.pipeline(transaction=False) as pipe:
            for call in (*first, recall[0]):
                pipe.script_load(call.script.text)
            pipe.delete(contract_keys.lease(incarnation))
            for call in (*first, *recall):
                pipe.execute_command(*call.command)
            counts = pipe.execute()[-len(recall) :]
        while again := [call for call, count in zip(recall, counts, strict=True) if count == PAGE]:
            recall, counts = again, run_many(self._redis, again)

    def reap(self, incarnation: str, looker: str = "", since: int = 0) -> int:
        return int(run(self._redis, calls.reap(incarnation, looker, self.home, since)))

    # ---- queues ---------------------------------------------------------------------------------------------------

    def waiting(self, queue: str) -> int:
        with self._redis.pipeline(transaction=False) as pipe:
            for name, _ in calls.lists([queue]):
                pipe.llen(name)
                pipe.zcard(keys.sorted_of(name))
            pipe.zcard(keys.delayed(queue))
            return sum(pipe.execute())

    def weights(self) -> dict[str, float]:
        return sane_weights(self._redis.hgetall(keys.WEIGHTS))

    def waker(self, poke: Callable[[], None]) -> Waker:
        return TrackingWaker(self._url, self.queues, poke)

    def prepare(self) -> None:
        self._redis.script_load(calls.back("", "", "").script.text)

    def close(self) -> None:
        self._redis.close()


class TrackingWaker(threading.Thread):
    """Calls `poke` from its thread whenever a list of the queues may have changed, without polling or taking a message.

    The server tells a tracking client of every key that changes under a prefix (`CLIENT TRACKING ... BCAST`, Redis 6
    and Valkey), whoever changes it: a plain Celery sender's LPUSH too. The pushes are not even parsed: any byte means
    "look". A blocking pop would wake as fast, but a worker that dies between the pop and the next command loses the
    message.
    """

    def __init__(self, url: str, queues: Sequence[str], poke: Callable[[], None]) -> None:
        super().__init__(name="penstock-waker", daemon=True)
        self._pool = connection_pool(url, timeout=PING_S, protocol=3)
        self._prefixes = shortest_prefixes(queues)
        self._poke = poke
        self._connection: Any = None
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        connection = self._connection
        if connection is not None:
            connection.disconnect()

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._follow()
            except ResponseError as exc:
                if trouble(exc) is Trouble.AWAY:
                    warn_throttled(logger, "The broker takes no wake-up connection, trying again: %s", exc)
                    self._stopped.wait(RECONNECT_S)
                    continue
                logger.warning("The broker offers no key tracking (%s): looking every %s s instead", exc, POLL_S)
                while not self._stopped.wait(POLL_S):
                    self._poke()
            except (RedisError, OSError, ValueError, AttributeError) as exc:
                # AttributeError, ValueError: stop() closed the connection under our hands
                if not self._stopped.wait(RECONNECT_S):
                    warn_throttled(logger, "Lost the broker's wake-up connection, connecting again: %s", exc)

    def _follow(self) -> None:
        connection: Any = self._pool.connection_class(**self._pool.connection_kwargs)
        self._connection = connection
        try:
            connection.connect()
            prefixes = [argument for prefix in self._prefixes for argument in ("PREFIX", prefix)]
            connection.send_command("CLIENT", "TRACKING", "ON", "BCAST", *prefixes)
            connection.read_response()
            self._poke()  # for messages that came before tracking
            sock = connection._sock
            pinged = False
            while not self._stopped.is_set():
                try:
                    received = sock.recv(65536)
                except TimeoutError:
                    # An idle queue is silent, and so is a peer that vanished.
                    if pinged:
                        raise
                    connection.send_command("PING", check_health=False)
                    pinged = True
                    continue
                if not received:
                    raise ConnectionError("the server closed it")
                if not pinged or received != PONG:
                    self._poke()
                pinged = False
        finally:
            self._connection = None
            connection.disconnect()


def shortest_prefixes(queues: Sequence[str]) -> list[str]:
    """The queues' prefixes without those that another covers: tracked prefixes must not overlap."""
    prefixes: list[str] = []
    for queue in sorted(queues):
        if not any(queue.startswith(prefix) for prefix in prefixes):
            prefixes.append(queue)
    return prefixes


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
        await self._execute(*(("LPUSH", name, *envelopes) for name, envelopes in lists.items()))

    # ---- counts ---------------------------------------------------------------------------------------------------

    async def waiting(self, queue: str) -> Waiting:
        lists = _lists(queue)
        *counts, delivered_tokens, pools = await self._execute(
            *(("LLEN", name) for name, _ in lists),
            *(("ZCARD", keys.sorted_of(name)) for name, _ in lists),
            ("GET", keys.DELIVERED_TOKENS),
            ("HVALS", keys.INCARNATIONS),
        )
        served = any(takes_from(text(pool), queue) for pool in pools)
        waiting = Waiting(delivered_tokens=int(delivered_tokens or 0), served=served)
        for (_, tier), count in zip(lists * 2, counts, strict=True):
            waiting.tiers[tier] += count
        return waiting

    async def queue_position(self, message: Message, counted: TenantCounts = NO_COUNTS) -> QueuePosition | None:
        return calls.read_queue_position(await arun(self._redis, calls.queue_position(message, counted)))

    async def depths(self, queues: Sequence[str]) -> Depths:
        lists = [(queue, tier, name) for queue in queues for name, tier in _lists(queue)]
        listed, dead_letters, *counts = await self._execute(
            ("HGETALL", keys.INCARNATIONS),
            ("LLEN", keys.DEAD),
            *(("ZCARD", keys.delayed(queue)) for queue in queues),
            *(
                command
                for _, _, name in lists
                for command in (("LLEN", name), ("ZCARD", keys.sorted_of(name)), ("ZCARD", keys.turns(name)))
            ),
        )
        depths = {queue: Depth(delayed=count) for queue, count in zip(queues, counts, strict=False)}
        each = iter(counts[len(queues) :])
        filled = []
        for (queue, tier, name), arrived, by_tenant, tenants in zip(lists, each, each, each, strict=True):
            depths[queue].waiting[tier] += arrived + by_tenant
            depths[queue].tenants[tier] += tenants
            filled += [(depths[queue].oldest, tier, name)] if arrived or by_tenant else []
        waited = await arun(self._redis, calls.oldest([name for *_, name in filled])) if filled else ()
        for (oldest, tier, _), ms in zip(filled, waited, strict=True):
            if ms >= 0:
                oldest[tier] = max(oldest.get(tier, 0.0), ms / 1000)
        workers = {text(name): text(queue) for name, queue in listed.items()}
        in_flight = await self._execute(*(("HLEN", keys.inflight(name)) for name in workers))
        for queue, count in zip(workers.values(), in_flight, strict=True):
            if queue in depths:
                depths[queue].in_flight += count
        return Depths(depths, workers, dead_letters)

    # ---- repair ---------------------------------------------------------------------------------------------------

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
        removed = remaining = 0
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
            remaining += start
        return removed, remaining + await self._redis.zcard(keys.delayed(queue))

    async def forget(self, queue: str) -> None:
        await self._redis.delete(f"_kombu.binding.{queue}", f"_kombu.binding_permanent.{queue}")

    async def tidy(self) -> None:
        for name in map(text, await self._redis.hkeys(keys.UNSERVED)):
            if not await self._redis.exists(name):  # FETCH enters it again once the list has messages
                await self._redis.hdel(keys.UNSERVED, name)

    # ---- dead letters ---------------------------------------------------------------------------------------------

    async def replay(self, entry: bytes, list_name: str, message: bytes, task_id: str) -> bool:
        try:
            return bool(await arun(self._redis, calls.replay(entry, list_name, message, task_id)))
        except ResponseError as error:
            if trouble(error) is not None:
                raise
            raise NoSuchList(f"{list_name} is no list that takes it ({error})") from error

    # ---- tenants --------------------------------------------------------------------------------------------------

    async def tenants(self, queues: Sequence[str]) -> tuple[dict[str, dict[str, int]], int]:
        waiting: dict[str, dict[str, int]] = {}
        unsorted = 0
        for name, tier in (pair for queue in queues for pair in _lists(queue)):
            unsorted += await self._redis.llen(name)
            for tenant in map(text, await self._redis.zrange(keys.turns(name), 0, -1)):
                tiers = waiting.setdefault(tenant, dict.fromkeys(contract_keys.TIERS, 0))
                tiers[tier] += await self._redis.zcard(keys.turn(name, tenant))
        return waiting, unsorted


def _push(message: Message) -> tuple[str, str, str]:
    return "LPUSH", keys.list_of(message), message.envelope()


def _lists(queue: str) -> list[tuple[str, str]]:
    """Each list of the queue, with its tier."""
    return [(name, tier) for tier in contract_keys.TIERS for name in keys.tier_lists(queue, tier)]
