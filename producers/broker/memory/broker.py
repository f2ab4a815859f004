"""The interface of `producers.broker.base` on a `Server` in memory: the worker's side and the other one."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Final

from producers.broker.base import Broker, Consumer, NoSuchList, Sender, Waker
from producers.broker.memory.message import Sent, Unusable, read
from producers.broker.memory.server import Server, Turns, fetch
from producers.broker.values import (
    NO_COUNTS,
    Ack,
    Back,
    Capabilities,
    Credit,
    Depth,
    Depths,
    Fetched,
    ListedWorker,
    PutDown,
    QueuePosition,
    Rules,
    TenantCounts,
    Waiting,
    check_weight,
)
from producers.contract import keys
from producers.contract.keys import takes_from
from producers.contract.leases import Observation
from producers.contract.levels import beside
from producers.contract.message import Message

CAPABILITIES: Final = Capabilities(front_of_queue=True, max_message_bytes=sys.maxsize, places=True)
#: Messages of each list that one fetch sorts, by default.
SORT_LIMIT: Final = 64
#: A tier's rank -> the tier.
_TIERS: Final = {rank: tier for tier, (rank, _) in keys.TIERS.items()}


class MemoryConsumer(Consumer):
    capabilities = CAPABILITIES

    def __init__(self, server: Server, queues: Sequence[str], home: str | None = None) -> None:
        self._server = server
        self.queues = list(queues)
        self.home = home or self.queues[0]

    def fetch(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, sort_limit: int | None = None
    ) -> list[Fetched] | None:
        queues = [queue for queue in self.queues if queue not in self.passed]
        limit, places = sort_limit or SORT_LIMIT, self.places
        fetched = fetch(self._server, incarnation, queues, uuids, credit, rules, limit, self.home, places=places)
        if fetched is None:
            return None
        deliveries, self.look_again = fetched
        return deliveries

    def hold(self, incarnation: str, enter: Sequence[str], drop: Sequence[str] = (), *, anew: bool = False) -> int:
        with self._server.lock:
            return self._server.hold(incarnation, enter, drop, anew=anew)

    def put_down(self, outcomes: Sequence[Ack | Back]) -> list[PutDown | Exception]:
        with self._server.lock:
            return [PutDown.DONE if self._put_down(outcome) else PutDown.GONE for outcome in outcomes]

    def _put_down(self, outcome: Ack | Back) -> bool:
        if isinstance(outcome, Ack):  # there are no records here, which might say that a task is not settled
            return self._server.ack(outcome.incarnation, outcome.uuid, outcome.reason, outcome.used)
        return self._server.back(outcome.incarnation, self.home, outcome.uuid, outcome.delay * 1000, outcome.to)

    def survived(self, task_ids: Sequence[str]) -> None:
        with self._server.lock:
            for task_id in task_ids:
                self._server.reaped.pop(task_id, None)

    def strays(self, incarnation: str, expected: Sequence[str]) -> dict[str, str]:
        with self._server.lock:
            flying = self._server.inflight[incarnation].items()
            return {uuid: d.id for uuid, d in flying if uuid not in set(expected)}

    def scheduled(self, count: int) -> list[bytes]:
        with self._server.lock:
            return [d.raw for d in sorted(self._server.delayed[self.home], key=lambda d: d.due)[:count]]

    def take_lease(self, incarnation: str, state: str, ttl: float) -> None:
        with self._server.lock:
            self._server.lease(incarnation, ttl * 1000, take=True, queue=self.queues[0])

    def renew(self, incarnation: str, state: str, ttl: float) -> bool:
        with self._server.lock:
            return self._server.lease(incarnation, ttl * 1000, take=False)

    def end_lease(self, incarnation: str) -> None:
        with self._server.lock:
            self._server.leases.pop(incarnation, None)

    def leave(self, incarnation: str, takers: Mapping[str, Sequence[str]]) -> None:
        with self._server.lock:
            self.end_lease(incarnation)
            self.reap(incarnation)
            if self.home != self.queues[0]:
                for source, target in zip(beside(self.queues[0]), beside(self.home), strict=True):
                    self._server.adopt(source, target)
            for queue in self.queues:
                self._server.recall(queue, takers.get(queue, self.queues), sys.maxsize)

    def workers(self) -> list[ListedWorker]:
        return workers(self._server)

    def join(self, looker: str) -> int:
        return 0

    def look(self, looker: str, others: Sequence[str], since: int = 0) -> Observation | None:
        return None  # all of its workers live and die in this process

    def retract(self, incarnation: str) -> list[str] | None:
        return None

    def reap(self, incarnation: str, looker: str = "", since: int = 0) -> int:
        with self._server.lock:
            return self._server.reap(incarnation)

    def adopt(self, source: str, target: str) -> int:
        with self._server.lock:
            return self._server.adopt(source, target)

    def waiting(self, queue: str) -> int:
        server = self._server
        with server.lock:
            waiting = sum(len(server.lists[name]) + len(server.turns[name]) for name, _ in server.places(queue))
            return waiting + len(server.delayed[queue])

    def weights(self) -> dict[str, float]:
        with self._server.lock:
            return dict(self._server.weights)

    def waker(self, poke: Callable[[], None]) -> Waker:
        return MemoryWaker(self._server, poke)

    def prepare(self) -> None:
        pass

    def close(self) -> None:
        pass


class MemoryWaker:
    """Senders call it; it has no thread of its own."""

    def __init__(self, server: Server, poke: Callable[[], None]) -> None:
        self._server, self._poke = server, poke

    def start(self) -> None:
        self._server.pokes.append(self._poke)
        self._poke()

    def stop(self) -> None:
        with suppress(ValueError):  # it was not started
            self._server.pokes.remove(self._poke)


def workers(server: Server) -> list[ListedWorker]:
    """The same as `producers.broker.base.Consumer.workers`."""
    with server.lock:
        now = server.clock()
        remaining_s = {name: (server.leases.get(name, 0.0) - now) / 1000 for name in server.listed}
        return [
            ListedWorker(name, queue, remaining_s[name] if remaining_s[name] > 0 else None)
            for name, queue in server.listed.items()
        ]


class MemorySender(Sender):
    capabilities = CAPABILITIES

    def __init__(self, server: Server) -> None:
        self._server = server

    def send(self, message: Message) -> None:
        self.put(message.queue, message.tier, message.envelope())

    def put(self, queue: str, tier: str, message: str) -> None:
        rank = keys.TIERS[tier][0]
        name = next(name for name, its in self._server.places(queue) if its == rank)
        with self._server.lock:
            self._server.push(name, message.encode())

    def close(self) -> None:
        pass


class MemoryBroker(Broker):
    capabilities = CAPABILITIES

    def __init__(self, server: Server) -> None:
        self._server = server

    async def ping(self) -> None:
        pass

    async def send(self, message: Message) -> None:
        MemorySender(self._server).send(message)

    async def send_many(self, messages: Sequence[Message]) -> None:
        for message in messages:
            await self.send(message)

    # ---- counts ---------------------------------------------------------------------------------------------------

    async def waiting(self, queue: str) -> Waiting:
        server = self._server
        with server.lock:
            served = any(takes_from(pool, queue) for pool in server.listed.values())
            return Waiting(self._depth(queue).waiting, server.delivered_tokens, served)

    async def queue_position(self, message: Message, counted: TenantCounts = NO_COUNTS) -> QueuePosition | None:
        with self._server.lock:
            lists = [name for name, tier in self._lists(message.queue) if tier == message.tier]
            return _queue_position(self._server, lists, message)

    async def depths(self, queues: Sequence[str]) -> Depths:
        with self._server.lock:
            depths = {queue: self._depth(queue) for queue in queues}
            return Depths(depths, dict(self._server.listed), len(self._server.dead))

    def _depth(self, queue: str) -> Depth:
        server, depth = self._server, Depth(delayed=len(self._server.delayed[queue]))
        for name, tier in self._lists(queue):
            depth.waiting[tier] += len(server.lists[name]) + len(server.turns[name])
            depth.tenants[tier] += len(server.turns[name].queues)
            if submitted := server.submitted(name):
                depth.oldest[tier] = max(0.0, server.clock() - submitted) / 1000
        depth.in_flight = sum(len(server.inflight[inc]) for inc, its in server.listed.items() if its == queue)
        return depth

    def _lists(self, queue: str) -> Iterator[tuple[str, str]]:
        """Each list of the queue, with its tier."""
        return ((name, _TIERS[rank]) for name, rank in self._server.places(queue))

    async def workers(self) -> list[ListedWorker]:
        return workers(self._server)

    # ---- repair ---------------------------------------------------------------------------------------------------

    async def reap(self, incarnation: str) -> int:
        with self._server.lock:
            return self._server.reap(incarnation)

    async def recall(self, queue: str, takers: Sequence[str], count: int) -> int:
        with self._server.lock:
            return self._server.recall(queue, takers, count)

    async def adopt(self, source: str, target: str) -> int:
        with self._server.lock:
            return self._server.adopt(source, target)

    async def due(self, queue: str) -> int:
        with self._server.lock:
            return self._server.due(queue, self._server.clock(), 1000)

    async def prune(
        self,
        queue: str,
        over: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, str]]],
        page: int,
        reason: str = "",
        to: str = "",
    ) -> tuple[int, int]:
        removed = remaining = 0
        for (name, _), (target, _) in zip(self._lists(queue), self._lists(to), strict=True):
            messages = list(self._server.lists[name])
            gone = {
                raw: id_
                for at in range(0, len(messages), page)
                for raw, id_ in (await over(messages[at : at + page])).items()
            }
            with self._server.lock:
                for raw, task_id in gone.items():
                    while (
                        self._server.move(name, target, raw) if to else self._server.remove(name, raw, task_id, reason)
                    ):
                        removed += 1
                remaining += len(self._server.lists[name])
        return removed, remaining + len(self._server.delayed[queue])

    async def forget(self, queue: str) -> None:
        with self._server.lock:
            for name, _ in self._lists(queue):
                for by_list in (self._server.lists, self._server.turns, self._server.unserved):
                    by_list.pop(name, None)
            self._server.delayed.pop(queue, None)

    async def tidy(self) -> None:
        with self._server.lock:
            for name in list(self._server.unserved):
                if not self._server.lists[name] and not self._server.turns[name]:
                    del self._server.unserved[name]

    # ---- dead letters ---------------------------------------------------------------------------------------------

    async def letters(self, start: int, count: int) -> list[bytes]:
        with self._server.lock:
            return self._server.dead[start : start + count]

    async def remove_letter(self, entry: bytes) -> bool:
        with self._server.lock:
            exists = entry in self._server.dead
            if exists:
                self._server.dead.remove(entry)
            return exists

    async def replay(self, entry: bytes, list_name: str, message: bytes, task_id: str) -> bool:
        with self._server.lock:
            if list_name not in self._server.lists:
                raise NoSuchList(f"{list_name} is no list of this broker")
            if not await self.remove_letter(entry):
                return False
            self._server.push(list_name, message)
            self._server.reaped.pop(task_id, None)
            return True

    async def now_ms(self) -> int:
        return int(self._server.clock())

    # ---- tenants --------------------------------------------------------------------------------------------------

    async def tenants(self, queues: Sequence[str]) -> tuple[dict[str, dict[str, int]], int]:
        tenants: dict[str, dict[str, int]] = {}
        unsorted = 0
        with self._server.lock:
            for name, tier in [pair for queue in queues for pair in self._lists(queue)]:
                unsorted += len(self._server.lists[name])
                for tenant, waiting in self._server.turns[name].queues.items():
                    tenants.setdefault(tenant, dict.fromkeys(keys.TIERS, 0))[tier] += len(waiting)
        return tenants, unsorted

    async def weights(self) -> dict[str, float]:
        with self._server.lock:
            return dict(self._server.weights)

    async def weigh(self, tenant: str, weight: float) -> None:
        check_weight(weight)
        with self._server.lock:
            self._server.weights[tenant] = weight
            if weight == 1:
                del self._server.weights[tenant]

    async def aclose(self) -> None:
        pass


def _queue_position(server: Server, lists: Sequence[str], message: Message) -> QueuePosition | None:
    """A message's position in one of its tier's `lists`, found by playing the turns. `redis/scripts/queue_position.lua`
    estimates the same. Needs `server.lock`."""
    for name in lists:
        turns = _all_sorted(server, name)
        if any(sent.id == message.id for sent in turns.messages().values()):
            alone = len(turns.queues) == 1
            count, tokens = _takes_before(server, turns, message.id)
            return QueuePosition(count, alone, tokens=tokens)
    for delayed in server.delayed[message.queue]:
        with suppress(Unusable):
            if read(delayed.raw).id == message.id:
                return QueuePosition(due_s=max(0.0, delayed.due - server.clock()) / 1000)
    return None


def _all_sorted(server: Server, name: str) -> Turns:
    """A list's turns, as if all its messages were sorted already."""
    turns, number = deepcopy(server.turns[name]), server.arrivals
    for raw in reversed(server.lists[name]):
        number += 1
        with suppress(Unusable):
            sent = read(raw)
            turns.add(server.returned.get(sent.id, number), sent)
    return turns


def _takes_before(server: Server, turns: Turns, task_id: str) -> tuple[int, int]:
    """The number of messages that are taken before a task's, and the KV tokens that they may need."""
    count = tokens = 0
    while (head := turns.head(set())) is not None and head[1].id != task_id:
        number, sent = head
        turns.serve(sent.tenant, number, _charge(sent) / server.weights.get(sent.tenant, 1.0))
        count, tokens = count + 1, tokens + int(_charge(sent))
    return count, tokens


def _charge(sent: Sent) -> float:
    return max(1.0, sent.tokens)
