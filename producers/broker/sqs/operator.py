"""The side of senders, gateways, sweepers and operators, on SQS.

Messages go to SQS by a few threads. Counts and ages are read from the books in the store, without a request to SQS,
also while no worker is up. Only the number of plain Celery messages is SQS's own, approximately.

Repairs what dead workers, retention and lost replies leave behind. Sweepers do it.

a dead worker's message in flight             -> goes back to its queue, or is deleted (`reap`)
a kept message whose delay is over            -> is sent, if no worker serves its queue (`send_due`)
an entry whose task is settled, or gone       -> leaves the index; if its message comes, CLAIM says `done` (`Repair`)
an entry older than the retention less a day  -> its message is sent anew; of two copies CLAIM lets one run (`Repair`)

A process may die between any two steps, and each may be repeated; docs/how/sqs.md has the order of the steps.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import redis
from redis.asyncio import Redis

from producers.broker.base import NoSuchList, Sender
from producers.broker.redis import keys as shared
from producers.broker.redis.calls import Books
from producers.broker.sqs import keys
from producers.broker.sqs.address import Address, capabilities, is_celery, is_penstocks, lists, split
from producers.broker.sqs.check import Health
from producers.broker.sqs.queues import MIN_MESSAGE_BYTES, MIN_RETENTION_S, RENEW_BEFORE_S, Connection
from producers.broker.sqs.receiver import flight
from producers.broker.sqs.receiver.flight import BATCH, PACKAGE, BatchRequest, InFlight
from producers.broker.sqs.receiver.send import GONE, Action, send_batch
from producers.broker.sqs.sending import Batcher, Outgoing, put_celery, send, send_anew, send_one
from producers.broker.values import NO_COUNTS, Depth, Depths, QueuePosition, TenantCounts, Waiting
from producers.connection.aws import AwsError, AwsMissing
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, arun, ms, run, script, text
from producers.connection.trouble import Trouble, trouble
from producers.contract import keys as contract_keys
from producers.contract.keys import takes_from
from producers.contract.message import BodyStore, Message, check_in

logger = logging.getLogger(__name__)

#: Entries of each list that one step reads.
PAGE: Final = 2000
#: Kept messages that one call of `send_due` sends.
DUE_PAGE: Final = 100
#: Time (ms) for which it is kept that a message was sent again: SQS keeps none for longer than 14 days.
RENEWED_MS: Final = 15 * 24 * 3600 * 1000


def reap(to: Connection, incarnation: str) -> int:
    """As `producers.broker.base.Broker.reap`. Raises AwsError, and redis.exceptions.RedisError; then call it again."""
    count, entries = flight.read_reap(run(to.store, flight.reap(incarnation)))
    _over(to, incarnation, [entry for entry in entries if not entry.receipt])
    for request in flight.batch_requests(entries):
        refused = send_batch(to, request.name, Action.DELETE if request.delete else Action.SHOW, request.entries)
        _send_lost(to, request, refused)
        again = {index: error for index, error in refused.items() if error.trouble is not None}
        _over(to, incarnation, [entry for index, entry in enumerate(request.messages) if index not in again])
        for error in again.values():
            raise error
    return count


def _send_lost(to: Connection, request: BatchRequest, refused: dict[int, AwsError]) -> None:
    """Send messages again that SQS does not have though their records wait: a failover lost that they were deleted."""
    if not request.delete:
        lost = [request.messages[index].id for index, error in refused.items() if error.code in GONE]
        send_anew(to, request.name, [task_id for task_id in lost if task_id])


def _over(to: Connection, incarnation: str, done: Sequence[InFlight]) -> None:
    if done:
        run(to.store, flight.reaped(incarnation, [entry.field for entry in done]))


def send_due(to: Connection, queue: str) -> int:
    """Send kept messages whose delay is over. Returns their number; fewer than DUE_PAGE: these were all."""
    kept: list[bytes] = run(to.store, flight.due(queue, DUE_PAGE))
    by_list: dict[str, list[tuple[bytes, Outgoing]]] = {}
    for entry in kept:
        message = json.loads(entry)
        outgoing = Outgoing.again(message["list"], message["body"])
        by_list.setdefault(message["list"], []).append((entry, outgoing))
    for name, messages in by_list.items():
        for start in range(0, len(messages), BATCH):
            batch = messages[start : start + BATCH]
            errors = send(to, name, [message for _, message in batch])
            sent = [entry for (entry, _), error in zip(batch, errors, strict=True) if error is None]
            run(to.store, flight.due(queue, 0, sent=sent))
            for error in filter(None, errors):
                raise error
    return len(kept)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An entry of the index. `since`: ms at which its message was sent, or earlier."""

    member: str
    id: str
    since: int
    over: bool
    """Whether its task needs no message any more."""


class Repair:
    """Repairs the index, page by page; remembers its position. The leading sweeper uses it, one thread at a time."""

    def __init__(self, connection: Connection) -> None:
        self._to = connection
        self._cursors: dict[str, int] = {}

    def step(self) -> None:
        """Repair one page of each list's entries. Raises redis.exceptions.RedisError, and AwsError if SQS is away."""
        store = self._to.store
        now = ms(store.time())
        for name in sorted(map(text, store.smembers(keys.LISTS))):
            page = self._page(name)
            run(store, mark_gone(name, [entry.member for entry in page if entry.over]))
            self._renew(name, [entry for entry in page if not entry.over], now)
        store.zremrangebyscore(keys.RENEWED, "-inf", now - RENEWED_MS)

    def _page(self, name: str) -> list[_Waiting]:
        store = self._to.store
        self._cursors[name], raw = store.zscan(keys.waiting(name), self._cursors.get(name, 0), count=PAGE)
        page = [(text(member), float(score)) for member, score in raw]
        with store.pipeline(transaction=False) as pipe:
            for member, _ in page:
                pipe.hmget(contract_keys.task(_id(member)), "status", "settled", "created")
                pipe.zscore(keys.RENEWED, _id(member))
            answers = pipe.execute()
        entries = []
        for (member, score), (status, settled, created), renewed in zip(page, answers[::2], answers[1::2], strict=True):
            since = int(max(float(created or score), renewed or 0))
            entries.append(_Waiting(member, _id(member), since, over=not status or settled is not None))
        return entries

    def _renew(self, name: str, entries: Sequence[_Waiting], now: int) -> None:
        """Send again the messages that are so old that their queue is about to drop them."""
        old = [entry for entry in entries if now - entry.since > (MIN_RETENTION_S - RENEW_BEFORE_S) * 1000]
        if not old:
            return
        try:
            keeps_ms = (self._to.queues.check(name).retention - RENEW_BEFORE_S) * 1000
            late = [entry.id for entry in old if now - entry.since > keeps_ms]
            for start in range(0, len(late), BATCH):
                send_anew(self._to, name, late[start : start + BATCH])
        except AwsError as error:
            if trouble(error) is Trouble.AWAY:
                raise
            warn_throttled(logger, "Old messages are not sent anew: %s", error)


def _id(member: str) -> str:
    return member.partition(" ")[0]


def mark_gone(name: str, members: Sequence[str]) -> Call:
    """Remove messages from a list's index, since nobody needs them. Answers how many were there."""
    return Call(script(PACKAGE, "gone"), (shared.UNSERVED,), (name, *members))


#: Requests that one process sends at a time.
THREADS: Final = 8
#: Attempts of `send_many` at what SQS is too busy for, and the longest pause (s) before the second; it doubles.
TRIES: Final = 5
PAUSE_S: Final = 0.1
#: Time (s) for which SQS is believed to be well, and to be unwell: probes ask more often than that.
WELL_S, UNWELL_S = 15.0, 3.0


class SqsSender(Sender):
    """`store`: closed with it. `bodies`: for those of messages that are too large. It may be made before a fork."""

    def __init__(self, address: Address, store: redis.Redis, bodies: BodyStore | None = None) -> None:
        self.capabilities = capabilities(address)
        self._to = Connection(address, store)
        self._bodies = bodies
        self._pid = os.getpid()

    def send(self, message: Message) -> None:
        send_one(self._here(), keys.list_of(message), Outgoing.of(message))

    def put(self, queue: str, tier: str, message: str) -> None:
        to = self._here()
        if is_celery(queue):
            put_celery(to, queue, self._check_in(to, f"{queue}#default", message))
        else:
            name = f"{queue}#{tier}"
            send_one(to, name, Outgoing.again(name, self._check_in(to, name, message)))

    def _check_in(self, to: Connection, name: str, message: str) -> str:
        """The message as its queue takes it. Other programs read no references: their queues get it as it is."""
        if len(message) <= MIN_MESSAGE_BYTES // 2 or not is_penstocks(name):
            return message
        try:
            limit = to.queues.check(name).max_message_bytes
        except AwsMissing:
            return message  # its queue is to be made
        return check_in(message, limit // 4 * 3 if is_celery(split(name)[0]) else limit, self._bodies)  # base64

    def close(self) -> None:
        self._to.close()

    def _here(self) -> Connection:
        """boto3's connections must not be shared with the parent of a fork."""
        if self._pid != os.getpid():
            self._to, self._pid = Connection(self._to.address, self._to.store), os.getpid()
        return self._to


class SqsBroker(Books):
    """`client`: of the store; `store`: a blocking one, for threads. Both are closed with it."""

    def __init__(self, address: Address, client: Redis, store: redis.Redis) -> None:
        super().__init__(client)
        self.capabilities = capabilities(address)
        self._to = Connection(address, store)
        self._threads = ThreadPoolExecutor(THREADS, "penstock-sqs-send")
        self._batcher = Batcher(self._send, THREADS, in_order=address.fifo)
        self._health, self._believed_until = Health(self._to), 0.0
        self._running_check: asyncio.Task[None] | None = None
        self._repair = Repair(self._to)

    async def ping(self) -> None:
        """Raise what the last check of SQS raised, if that is recent; else check. Callers that leave end no check."""
        if self._running_check is None or (self._running_check.done() and time.monotonic() >= self._believed_until):
            self._running_check = asyncio.create_task(self._check_now())
        await asyncio.shield(self._running_check)

    async def _check_now(self) -> None:
        seconds = UNWELL_S
        try:
            await asyncio.to_thread(self._health.look)
            seconds = WELL_S
        finally:
            self._believed_until = time.monotonic() + seconds

    async def send(self, message: Message) -> None:
        await self._batcher.put(keys.list_of(message), Outgoing.of(message))

    async def send_many(self, messages: Sequence[Message]) -> None:
        unsent = [(keys.list_of(message), Outgoing.of(message)) for message in messages]
        for attempt in range(TRIES):
            futures = [self._batcher.put(name, message) for name, message in unsent]
            outcomes = await asyncio.gather(*futures, return_exceptions=True)
            unsent = [failed for failed, error in zip(unsent, outcomes, strict=True) if error is not None]
            errors = [error for error in outcomes if error is not None]
            if not errors:
                return
            if attempt + 1 == TRIES or any(trouble(error) is not Trouble.AWAY for error in errors):
                raise errors[0]
            await asyncio.sleep(random.uniform(0.5, 1.0) * PAUSE_S * 2**attempt)  # noqa: S311 - spreads load

    async def _send(self, name: str, messages: Sequence[Outgoing]) -> list[AwsError | None]:
        return await asyncio.get_running_loop().run_in_executor(self._threads, send, self._to, name, messages)

    # ---- counts ---------------------------------------------------------------------------------------------------

    async def waiting(self, queue: str) -> Waiting:
        books = await self._counts([], [queue])
        served = any(takes_from(pool, queue) for pool, _ in books.workers.values())
        waiting = Waiting(delivered_tokens=books.delivered_tokens, served=served)
        for (_, tier), counts in zip(_indexed(queue), books.lists, strict=True):
            waiting.tiers[tier] += counts.waiting
        waiting.tiers["default"] += await self._stock(queue)
        return waiting

    async def queue_position(self, message: Message, counted: TenantCounts = NO_COUNTS) -> QueuePosition | None:
        """Returns None: SQS keeps no order."""
        return None

    async def depths(self, queues: Sequence[str]) -> Depths:
        books = await self._counts(queues, queues)
        depths = {queue: Depth(delayed=count) for queue, count in zip(queues, books.delayed, strict=True)}
        tiers = [(queue, tier) for queue in queues for _, tier in _indexed(queue)]
        for (queue, tier), counts in zip(tiers, books.lists, strict=True):
            depth = depths[queue]
            depth.waiting[tier] += counts.waiting
            depth.tenants[tier] += counts.tenants
            depth.delayed += counts.delayed
            if counts.oldest >= 0:
                depth.oldest[tier] = counts.oldest / 1000
        for queue in queues:
            depths[queue].waiting["default"] += await self._stock(queue)
        for queue, in_flight in books.workers.values():
            if queue in depths:
                depths[queue].in_flight += in_flight
        return Depths(depths, {name: queue for name, (queue, _) in books.workers.items()}, books.dead_letters)

    async def _counts(self, delayed: Sequence[str], queues: Sequence[str]) -> BookCounts:
        """The counts of the books. `delayed`: queues whose kept messages are counted; `queues`: those to count."""
        names = [name for queue in queues for name, _ in _indexed(queue)]
        delayed_keys = [keys.delayed(queue) for queue in delayed]
        book_keys = (shared.INCARNATIONS, shared.DEAD, shared.DELIVERED_TOKENS, *delayed_keys)
        return _read_counts(await arun(self._redis, Call(script(PACKAGE, "depths"), book_keys, names)))

    async def _stock(self, queue: str) -> int:
        """Messages of a queue for plain Celery senders, where workers take from it."""
        if not self._to.address.celery or not is_celery(queue):
            return 0
        return await asyncio.to_thread(self._to.queues.stock, lists(queue)[0][0])

    # ---- repair ---------------------------------------------------------------------------------------------------

    async def reap(self, incarnation: str) -> int:
        return await asyncio.to_thread(reap, self._to, incarnation)

    async def recall(self, queue: str, takers: Sequence[str], count: int) -> int:
        """Does nothing: what workers have is in flight, and returns by REAP or its visibility."""
        return 0

    async def adopt(self, source: str, target: str) -> int:
        """Does nothing: pools have no queues of their own here."""
        return 0

    async def due(self, queue: str) -> int:
        """Sends kept messages whose delay is over: they need no worker to come back."""
        return await asyncio.to_thread(send_due, self._to, queue)

    async def prune(
        self,
        queue: str,
        over: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, str]]],
        page: int,
        reason: str = "",
        to: str = "",
    ) -> tuple[int, int]:
        """Removes from the index alone: SQS removes a message for its receiver only, or at the end of its retention. So
        no dead letter is kept, and no message is moved."""
        removed, kept = 0, await self._stock(queue)
        for name, _ in _indexed(queue):
            start = 0
            while members := list(map(text, await self._redis.zrange(keys.waiting(name), start, start + page - 1))):
                messages = {keys.Entry.parse(member).message(name).envelope().encode(): member for member in members}
                gone = await over(list(messages))
                removed += await arun(self._redis, mark_gone(name, [messages[raw] for raw in gone]))
                start += len(members) - len(gone)
            kept += start
        return removed, kept

    async def forget(self, queue: str) -> None:
        """Its SQS queues and their URLs stay: an operator made them."""
        for name, _ in _indexed(queue):
            await arun(self._redis, mark_gone(name, []))

    async def tidy(self) -> None:
        await asyncio.to_thread(self._repair.step)

    # ---- dead letters ---------------------------------------------------------------------------------------------

    async def replay(self, entry: bytes, list_name: str, message: bytes, task_id: str) -> bool:
        if list_name not in [name for name, _ in lists(split(list_name)[0])]:
            raise NoSuchList(f"{list_name} is no list of this broker")
        try:
            body = message.decode()
        except UnicodeDecodeError as error:
            raise NoSuchList(f"SQS takes no message that is not UTF-8 ({error})") from error
        if not body:
            raise NoSuchList("SQS takes no message that is empty")
        position, _ = await self._execute(("LPOS", shared.DEAD, entry), ("HDEL", shared.REAPED, task_id))
        if position is None:
            return False
        await self._batcher.put(
            list_name, Outgoing.again(list_name, body)
        )  # sent twice, if this process dies before the next line
        return await self.remove_letter(entry)

    # ---- tenants --------------------------------------------------------------------------------------------------

    async def tenants(self, queues: Sequence[str]) -> tuple[dict[str, dict[str, int]], int]:
        tenants: dict[str, dict[str, int]] = {}
        lists_of_queues = [indexed for queue in queues for indexed in _indexed(queue)]
        answers = await self._execute(*(("HGETALL", keys.tenants(name)) for name, _ in lists_of_queues))
        for (_, tier), counts in zip(lists_of_queues, answers, strict=True):
            for tenant, count in counts.items():
                tenants.setdefault(text(tenant), dict.fromkeys(contract_keys.TIERS, 0))[tier] += int(count)
        return tenants, sum([await self._stock(queue) for queue in queues])

    async def aclose(self) -> None:
        self._batcher.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._to.close()
        await super().aclose()


def _indexed(queue: str) -> list[tuple[str, str]]:
    """(list, tier) of a queue, of lists that have an index."""
    return [] if is_celery(queue) else lists(queue)


class ListCounts(NamedTuple):
    """The messages of one list. `oldest`: ms for which the oldest message has waited; below 0 if none waits."""

    waiting: int
    delayed: int
    tenants: int
    oldest: int


@dataclass(frozen=True, slots=True)
class BookCounts:
    """The counts of the books."""

    delivered_tokens: int
    """KV tokens of all messages ever delivered."""
    dead_letters: int
    workers: dict[str, tuple[str, int]]
    """Incarnation -> its pool's queue, its messages in flight."""
    delayed: list[int]
    """For each queue, messages with a delay that is longer than SQS's longest."""
    lists: list[ListCounts]


def _read_counts(answer: Sequence[Any]) -> BookCounts:
    """`answer`: of `scripts/depths.lua`."""
    delivered_tokens, dead, workers, delayed, *rows = answer
    flat = zip(workers[::3], workers[1::3], workers[2::3], strict=True)
    by_name = {text(incarnation): (text(queue), int(in_flight)) for incarnation, queue, in_flight in flat}
    return BookCounts(int(delivered_tokens), int(dead), by_name, list(delayed), [ListCounts(*row) for row in rows])
