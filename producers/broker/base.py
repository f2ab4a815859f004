"""The interface of a broker, operation by operation: `Consumer` for a worker's threads, `Broker` for everybody else.

A message is in one place at a time: waiting (by queue and tier), delayed, in flight under one incarnation's lease, or a
dead letter. Each operation is atomic. Where a call raises, it may have been done: every operation may be called again
with the same arguments, and says below what that does. Raised is what `producers.connection.trouble` can tell apart:
redis.exceptions.RedisError from Redis, OSError (ConnectionError) from any other broker that is away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from producers.broker.values import Ack, Back, Capabilities, Credit, Depths, Fetched, Listed, PutDown, Rules, Waiting
from producers.contract.message import Message
from producers.errors import PenstockError


class NoSuchPlace(PenstockError):
    """The place that a dead letter says it came from takes no messages."""


class Waker(Protocol):
    """Says when something may have come into one of the consumer's queues, once it is started."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """End soon. Any thread; the waker's own connection closes."""


class Consumer(ABC):
    """A worker's side: blocking, one for each thread that must not wait for another's call.

    `queues` are those that the worker takes from, its own pool's first.
    """

    capabilities: Capabilities
    queues: Sequence[str]

    # ---- deliveries -----------------------------------------------------------------------------------------------

    @abstractmethod
    def fetch(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, bite: int | None = None
    ) -> list[Fetched] | None:
        """Take up to one message for each of the `uuids`, which the caller makes up, and enter it in flight so named.

        Only under the incarnation's lease; None where it is gone. Best tier first, whatever has aged counted up; a head
        that does not fit its tier's credit stays, and so does all of its own and of lower tiers. A UUID that is in
        flight already answers the same again, so that a lost reply is asked for by the same UUIDs. A suspect (one more
        return and it is condemned) is handed out one at a time. Messages that were buried come last; of those a lost
        reply leaves nothing to ask for. `bite`: of each list so many are sorted by tenant at most.
        """

    @abstractmethod
    def put_down(self, what: Sequence[Ack | Back]) -> list[PutDown | Exception]:
        """Acknowledge and give back deliveries, in this order, in one round trip.

        An error of one call's own is answered in its place. Where the call raises, any of them may have been done; said
        again they answer GONE. `Ack` also corrects what its tenant was charged. Of a task that its worker calls
        settled, it looks at the record, if this server holds it: where that is not settled, it answers UNSETTLED. Only
        a broker that is the store as well can know. `Back` counts nothing against the task, and charges nobody.
        """

    @abstractmethod
    def strays(self, incarnation: str, held: Sequence[str]) -> dict[str, str]:
        """Task ids, by UUID, of what is in flight of the incarnation and not `held`: a failover brought it back."""

    @abstractmethod
    def scheduled(self, count: int) -> list[bytes]:
        """Messages of the own queue that wait for their time, soonest first, `count` at most."""

    # ---- leases ---------------------------------------------------------------------------------------------------
    # This server's side. CLAIM goes by a lease on the store, of the same name (`producers.store.protocol.lease`): take
    # the store's first, so that nothing is fetched that cannot be claimed.

    @abstractmethod
    def take_lease(self, incarnation: str, about: str, ttl: float) -> None:
        """Begin a lease of `ttl`, and list the incarnation with its pool's queue. Twice: as once. Works with memory
        full. `about`: what the worker says of itself (JSON)."""

    @abstractmethod
    def renew(self, incarnation: str, about: str, ttl: float) -> bool:
        """Extend the lease; False where it is gone, and then nothing brings it back."""

    @abstractmethod
    def end_lease(self, incarnation: str) -> None:
        """Give the lease up; what is in flight stays, to be given Back or reaped."""

    @abstractmethod
    def leave(self, incarnation: str, takers: Mapping[str, Sequence[str]]) -> None:
        """A worker's last words: end the lease, reap itself, and recall each of its queues. In one round trip, as far
        as no queue holds more than a page. `takers`: as for `recall`, by queue. Any part of it may be left undone."""

    @abstractmethod
    def workers(self) -> list[Listed]:
        """All incarnations that are listed, also those of other queues and those whose lease has ended."""

    @abstractmethod
    def reap(self, incarnation: str) -> int:
        """Only once its lease has ended: return its deliveries to the front, in the order in which they were fetched,
        count one redelivery against each, and forget it. Answers how many; -1 while the lease stands. Twice: 0."""

    # ---- queues ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def adopt(self, source: str) -> int:
        """Move what waits or is delayed in a queue without workers to the front of the own one, in its order. Answers
        how many messages."""

    @abstractmethod
    def waiting(self, queue: str) -> int:
        """Messages of a queue that are not in flight: waiting and delayed, of all tiers."""

    @abstractmethod
    def weights(self) -> dict[str, float]:
        """Tenants' shares, where they are not 1."""

    @abstractmethod
    def waker(self, poke: Callable[[], None]) -> Waker:
        """`poke` is called, from any thread, whenever something may have come; also for nothing. It must not block. A
        message may come unheard while a connection is made anew, so that whoever waits looks now and then all the
        same."""

    @abstractmethod
    def prepare(self) -> None:
        """Do beforehand what the first `put_down` would have to, e.g. load scripts."""

    @abstractmethod
    def close(self) -> None: ...


class Sender(ABC):
    """A blocking client's side."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Put a task's message behind the others of its queue and tier. Twice: two messages, of which the record lets
        one run. A lost confirmation may have sent it."""

    @abstractmethod
    def close(self) -> None: ...


class Broker(ABC):
    """The side of senders, gateways, sweepers and operators: asyncio, without time limits of its own."""

    capabilities: Capabilities

    @abstractmethod
    async def ping(self) -> None:
        """Raise unless the broker answers."""

    @abstractmethod
    async def send(self, message: Message) -> None:
        """As `Sender.send`."""

    # ---- what there is --------------------------------------------------------------------------------------------

    @abstractmethod
    async def waiting(self, queue: str) -> Waiting:
        """What waits in one queue, in one round trip: asked before tasks are let in."""

    @abstractmethod
    async def waiting_of(self, queue: str, tenant: str) -> int:
        """Messages of one tenant, as far as they are sorted by tenant."""

    @abstractmethod
    async def depths(self, queues: Sequence[str]) -> Depths:
        """Everything that /metrics tells, in three round trips at most, whatever the number of queues."""

    @abstractmethod
    async def workers(self) -> list[Listed]:
        """As `Consumer.workers`."""

    # ---- what dead workers left -----------------------------------------------------------------------------------

    @abstractmethod
    async def reap(self, incarnation: str) -> int:
        """As `Consumer.reap`."""

    @abstractmethod
    async def recall(self, queue: str, takers: Sequence[str], count: int) -> int:
        """Only where no worker of the pools `takers` has its lease, which are those that take from the queue: what they
        had sorted goes back to where its length can be seen from outside, the youngest `count` first. Answers how many
        (fewer than `count` were the last), -1 where a worker lives. Order and tier stay what they were."""

    @abstractmethod
    async def due(self, queue: str) -> int:
        """For a queue without workers: delayed messages become waiting ones. Answers how many; 0 once all are."""

    @abstractmethod
    async def prune(
        self, queue: str, over: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, str]]], page: int
    ) -> tuple[int, int]:
        """For a queue without workers: `over` is given the waiting messages, `page` at a time, and names those to be
        removed, with their task ids. Answers how many were removed, and how many are left."""

    @abstractmethod
    async def forget(self, queue: str) -> None:
        """Remove what is kept of a queue that nobody sends to or takes from any more, and that holds nothing."""

    @abstractmethod
    async def tidy(self) -> None:
        """Remove what has no time to live and belongs to nothing that waits."""

    # ---- dead letters ---------------------------------------------------------------------------------------------
    # An entry is JSON: {"reason", "list" (the place that it came from), "at" (ms of the broker's clock), "message"}.

    @abstractmethod
    async def letters(self, start: int, count: int) -> list[bytes]:
        """A page of the entries, oldest first."""

    @abstractmethod
    async def remove_letter(self, entry: bytes) -> bool:
        """False where it is not there any more."""

    @abstractmethod
    async def replay(self, entry: bytes, place: str, message: bytes, task_id: str) -> bool:
        """Where the entry is there: remove it, forget what became of the task's earlier deliveries, and put `message`
        behind the others in `place`. False where it is not, so that no entry is replayed twice. Raises NoSuchPlace."""

    @abstractmethod
    async def now_ms(self) -> int:
        """The broker's clock."""

    # ---- tenants --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def tenants(self, queues: Sequence[str]) -> tuple[dict[str, dict[str, int]], int]:
        """Messages that wait, by tenant and tier, of all tenants of whom some do; and how many are not sorted yet."""

    @abstractmethod
    async def weights(self) -> dict[str, float]:
        """As `Consumer.weights`."""

    @abstractmethod
    async def weigh(self, tenant: str, weight: float) -> None:
        """From the next fetch on, the tenant's share is `weight`. Raises ValueError outside of MIN_WEIGHT to
        MAX_WEIGHT."""

    @abstractmethod
    async def aclose(self) -> None: ...
