"""The side of senders, gateways, sweepers and operators, on SQS.

Messages go to SQS by a few threads. Counts and ages are read from the books in the store, without a request to SQS,
also while no worker is up. Only the number of plain Celery messages is SQS's own, approximately.
"""

from __future__ import annotations

import asyncio
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
from producers.broker.redis.books import Books
from producers.broker.sqs import keys, repair
from producers.broker.sqs.address import Address, capabilities, is_celery, is_penstocks, lists, split
from producers.broker.sqs.check import Health
from producers.broker.sqs.queues import MIN_MESSAGE_BYTES, Connection
from producers.broker.sqs.receiver.flight import PACKAGE
from producers.broker.sqs.sending import Batcher, Outgoing, put_celery, send, send_one
from producers.broker.values import NO_COUNTS, Depth, Depths, QueuePosition, TenantCounts, Waiting
from producers.connection.aws import AwsError, AwsMissing
from producers.connection.script import Call, arun, script, text
from producers.connection.trouble import Trouble, trouble
from producers.contract import keys as contract_keys
from producers.contract.keys import takes_from
from producers.contract.message import BodyStore, Message, check_in

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
        self._repair = repair.Repair(self._to)

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
        return await asyncio.to_thread(repair.reap, self._to, incarnation)

    async def recall(self, queue: str, takers: Sequence[str], count: int) -> int:
        """Does nothing: what workers have is in flight, and returns by REAP or its visibility."""
        return 0

    async def adopt(self, source: str, target: str) -> int:
        """Does nothing: pools have no queues of their own here."""
        return 0

    async def due(self, queue: str) -> int:
        """Sends kept messages whose delay is over: they need no worker to come back."""
        return await asyncio.to_thread(repair.send_due, self._to, queue)

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
                removed += await arun(self._redis, repair.gone(name, [messages[raw] for raw in gone]))
                start += len(members) - len(gone)
            kept += start
        return removed, kept

    async def forget(self, queue: str) -> None:
        """Its SQS queues and their URLs stay: an operator made them."""
        for name, _ in _indexed(queue):
            await arun(self._redis, repair.gone(name, []))

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
