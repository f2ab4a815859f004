"""The interface of a broker: `Consumer` for a worker's threads, `Broker` for all other processes.

A message is in one state at a time: waiting (by queue and tier), delayed, in flight under one incarnation's lease, or a
dead letter. Each operation is atomic. A call that raises may have been done. Every operation may be repeated with the
same arguments, and its docstring says what that does. Operations raise errors that `producers.connection.trouble`
classifies: redis.exceptions.RedisError from Redis, OSError (ConnectionError) from any other broker that is away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from producers.broker.values import (
    NO_COUNTS,
    Ack,
    Back,
    Capabilities,
    Credit,
    Depths,
    Fetched,
    ListedWorker,
    PutDown,
    QueuePosition,
    Rules,
    TenantCounts,
    Waiting,
)
from producers.connection.storage import Storage
from producers.contract.leases import Observation
from producers.contract.message import Message
from producers.errors import PenstockError


class NoSuchList(PenstockError):
    """The list that a dead letter is to go to takes no messages."""


class Waker(Protocol):
    """Reports, once started, when a message may have arrived in one of the consumer's queues."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """End soon and close the waker's connection. Callable from any thread."""


class Consumer(ABC):
    """A worker's side: blocking, one for each thread that must not wait for another's call.

    `queues`: the queues that the worker serves, its own pool's first; `home`: the one whose delayed messages it serves.
    """

    capabilities: Capabilities
    queues: Sequence[str]
    home: str
    passed: frozenset[str] = frozenset()
    """Those of `queues` that `fetch` takes nothing from for now; never all of them."""
    places: bool = False
    """Whether `fetch` leaves messages to workers that hold longer parts of their prefixes; only where the broker can
    (`Capabilities.places`)."""
    look_again: float | None = None
    """After how many seconds `fetch` is to be called again, since it left messages to others; None: it left none."""

    # ---- deliveries -----------------------------------------------------------------------------------------------

    @abstractmethod
    def fetch(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, sort_limit: int | None = None
    ) -> list[Fetched] | None:
        """Take up to one message for each of the caller's new `uuids`, and enter it in flight under that UUID.

        Returns None if the incarnation's lease is gone. The best tier comes first, with ageing counted. A head that
        does not fit its tier's credit stays, as do all messages of its own and lower tiers. A UUID that is in flight
        already gives the same answer again, so after a lost reply the caller repeats the same UUIDs. Suspects (one more
        return condemns them) are handed out one at a time. Buried messages come last, and only once. `sort_limit`:
        messages of each list to sort by tenant, at most; a broker may sort fewer.
        """

    def hold(self, incarnation: str, enter: Sequence[str], drop: Sequence[str] = (), *, anew: bool = False) -> int:
        """Say what the incarnation holds: it holds the marks of prefixes `enter` from now on, and `drop` no more.

        `anew`: what it said before goes first. Its end removes all of it. Returns how many marks it has entered now; -1
        if its lease is gone. Repeatable. A broker that places nothing enters nothing.
        """
        return 0

    @abstractmethod
    def put_down(self, outcomes: Sequence[Ack | Back]) -> list[PutDown | Exception]:
        """Acknowledge and give back deliveries, in this order, in one round trip.

        An outcome's own error is returned at its index. If the call raises, any of them may have been done; repeated,
        those answer GONE. `Ack` also corrects its tenant's charge. For a task that the worker calls settled, a broker
        that is also the store checks the record, and answers UNSETTLED if it is not settled. `Back` counts nothing
        against the task and charges no tenant.
        """

    @abstractmethod
    def survived(self, task_ids: Sequence[str]) -> None:
        """Forget the redeliveries that count against these tasks, since the caller has published a new token of each.
        Repeatable."""

    @abstractmethod
    def strays(self, incarnation: str, expected: Sequence[str]) -> dict[str, str]:
        """UUID -> task id of the incarnation's deliveries in flight beside the `expected`: a failover restored them."""

    @abstractmethod
    def scheduled(self, count: int) -> list[bytes]:
        """Delayed messages of the home queue, soonest first, at most `count`."""

    # ---- leases ---------------------------------------------------------------------------------------------------
    # The lease on the broker. CLAIM goes by a lease on the store, of the same name (`producers.store.protocol.lease`):
    # take the store's first, so that no message is fetched that cannot be claimed.

    @abstractmethod
    def take_lease(self, incarnation: str, state: str, ttl: float) -> None:
        """Begin a lease of `ttl` seconds, and list the incarnation with its pool's queue. Repeating it changes nothing.

        It works with full memory. `state`: the worker's (JSON).
        """

    @abstractmethod
    def renew(self, incarnation: str, state: str, ttl: float) -> bool:
        """Extend the lease. Returns False if it is gone; it cannot be restored then."""

    @abstractmethod
    def end_lease(self, incarnation: str) -> None:
        """Give the lease up. Deliveries in flight stay, to be given Back or reaped."""

    @abstractmethod
    def leave(self, incarnation: str, takers: Mapping[str, Sequence[str]]) -> None:
        """End the worker: end its lease, reap it, and recall each of its queues. Any part may be left undone.

        The home queue adopts the messages of its pool, if this was the pool's last worker. It takes one round trip if
        no queue holds more than a page. `takers`: queue -> pools, as for `recall`.
        """

    @abstractmethod
    def workers(self) -> list[ListedWorker]:
        """All listed incarnations, also those of other queues and those whose lease has ended."""

    @abstractmethod
    def join(self, looker: str) -> int:
        """Tell all others that this incarnation's heartbeats arrive here now. Returns the join's number; 0 if not."""

    @abstractmethod
    def look(self, looker: str, others: Sequence[str], since: int = 0) -> Observation | None:
        """Look whether other incarnations live, as `looker`. Returns None if the looker's own heartbeats do not arrive
        here: nothing is known then (docs/how/failover.md). `since`: the join from which on leases count; 0: all."""

    @abstractmethod
    def reap(self, incarnation: str, looker: str = "", since: int = 0) -> int:
        """Return a dead incarnation's deliveries to the front of their lists, in order of fetch, and forget it.

        It counts one redelivery against each. Returns their number, -1 while the lease stands, 0 if repeated.
        `looker`: the incarnation that found it silent, by leases `since` that join. If it is, its lease ends first, in
        the same script; ordinary Celery tasks wait for as long as the lease would have lasted.
        """

    @abstractmethod
    def retract(self, incarnation: str) -> list[str] | None:
        """Take back the redeliveries that `reap` counted when a looker ended this incarnation, whose worker lives.

        Returns the ids of their tasks; None if no looker ended it. Repeated, it takes nothing more back.
        """

    # ---- queues ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def adopt(self, source: str, target: str) -> int:
        """Move the messages of a pool's own queue to the front of its version's queue `target`, in order.

        Delayed messages stay delayed. Returns their number (twice: 0), or -1 if a worker of the pool lives.
        """

    @abstractmethod
    def waiting(self, queue: str) -> int:
        """Number of a queue's messages that wait or are delayed, of all tiers."""

    @abstractmethod
    def weights(self) -> dict[str, float]:
        """Tenant -> weight, where it is not 1."""

    @abstractmethod
    def waker(self, poke: Callable[[], None]) -> Waker:
        """A waker that calls `poke`, from any thread, when a message may have arrived. `poke` must not block.

        Calls may be spurious. A message may arrive unnoticed during a reconnect, so callers must also look regularly.
        """

    def faults(self) -> list[str]:
        """The reasons why messages of its queues cannot be received, as last observed. Asks no server."""
        return []

    @abstractmethod
    def prepare(self) -> None:
        """Do in advance the work of the first `put_down`, such as loading scripts."""

    @abstractmethod
    def close(self) -> None: ...


class Sender(ABC):
    """A blocking client's side."""

    capabilities: Capabilities

    @abstractmethod
    def send(self, message: Message) -> None:
        """Put a task's message at the end of its queue and tier. A call that raises may have sent it.

        Repeating it makes a second message; the record lets only one run.
        """

    @abstractmethod
    def put(self, queue: str, tier: str, message: str) -> None:
        """Put Celery's own message (JSON as kombu writes it) at the end of any Celery queue, also of other programs'.

        Workers publish links, chords and retries with it. A queue of a model version takes it at this tier.
        """

    @abstractmethod
    def close(self) -> None: ...


class Broker(ABC):
    """The side of senders, gateways, sweepers and operators: asyncio, without its own time limits."""

    capabilities: Capabilities

    @abstractmethod
    async def ping(self) -> None:
        """Raise unless the broker answers and has the queues of the announced models, if it can lack any."""

    async def storage(self) -> Storage | None:
        """The used memory of the broker's server; None if it has no limit."""
        return None

    @abstractmethod
    async def send(self, message: Message) -> None:
        """The same as `Sender.send`."""

    @abstractmethod
    async def send_many(self, messages: Sequence[Message]) -> None:
        """Send messages in this order, in one round trip. A call that raises may have sent some of them."""

    # ---- counts ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def waiting(self, queue: str) -> Waiting:
        """The waiting messages of one queue, in one round trip."""

    @abstractmethod
    async def queue_position(self, message: Message, counted: TenantCounts = NO_COUNTS) -> QueuePosition | None:
        """The position of a task's message, in one round trip. `counted`: for brokers that cannot count the messages of
        tenants before workers have sorted them.

        Returns None if the message does not wait (it is in flight, or gone), or if the broker does not know its order.
        """

    @abstractmethod
    async def depths(self, queues: Sequence[str]) -> Depths:
        """The figures for /metrics, in at most three round trips for any number of queues."""

    @abstractmethod
    async def workers(self) -> list[ListedWorker]:
        """The same as `Consumer.workers`."""

    # ---- repair ---------------------------------------------------------------------------------------------------

    @abstractmethod
    async def reap(self, incarnation: str) -> int:
        """The same as `Consumer.reap`."""

    @abstractmethod
    async def recall(self, queue: str, takers: Sequence[str], count: int) -> int:
        """Return messages that workers had sorted to the queue's lists, whose lengths others can see.

        `takers`: the pools whose workers serve the queue; none of them may be alive. The youngest `count` go first.
        Returns their number (fewer than `count`: all are done), or -1 if a worker lives. Order and tier are kept.
        """

    @abstractmethod
    async def adopt(self, source: str, target: str) -> int:
        """The same as `Consumer.adopt`."""

    @abstractmethod
    async def due(self, queue: str) -> int:
        """Return the due ones of the delayed messages of a queue without workers to its lists. Returns their number."""

    @abstractmethod
    async def prune(
        self,
        queue: str,
        over: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, str]]],
        page: int,
        reason: str = "",
        to: str = "",
    ) -> tuple[int, int]:
        """Remove messages from a queue without workers. Returns the numbers of removed and remaining messages.

        Delayed messages remain. With a `reason`, each removed message becomes a dead letter; with `to`, it goes to the
        front of its tier in that queue: in one step each.

        `over` gets the waiting messages, `page` at a time, and returns those to remove -> their task ids. A broker that
        removes messages for their receivers alone stops counting them: CLAIM answers `done` if they come.
        """

    @abstractmethod
    async def forget(self, queue: str) -> None:
        """Remove the data of an empty queue that no sender and no worker uses any more."""

    @abstractmethod
    async def tidy(self) -> None:
        """Remove data without a TTL that belongs to no waiting message."""

    # ---- dead letters ---------------------------------------------------------------------------------------------
    # An entry is JSON: {"reason", "list" (that it came from), "at" (ms of the broker's clock), "message"}.

    @abstractmethod
    async def letters(self, start: int, count: int) -> list[bytes]:
        """A page of dead letters, oldest first."""

    @abstractmethod
    async def remove_letter(self, entry: bytes) -> bool:
        """Remove a dead letter. Returns False if it no longer exists."""

    @abstractmethod
    async def replay(self, entry: bytes, list_name: str, message: bytes, task_id: str) -> bool:
        """Replay a dead letter: remove it, forget the task's earlier redeliveries, put `message` at the end of a list.

        Returns False if the letter no longer exists, so that none is replayed twice. Raises NoSuchList.
        """

    @abstractmethod
    async def now_ms(self) -> int:
        """The broker's time in ms."""

    # ---- tenants --------------------------------------------------------------------------------------------------

    @abstractmethod
    async def tenants(self, queues: Sequence[str]) -> tuple[dict[str, dict[str, int]], int]:
        """Tenant -> tier -> waiting messages, and the number of messages that are not sorted by tenant yet."""

    @abstractmethod
    async def weights(self) -> dict[str, float]:
        """The same as `Consumer.weights`."""

    @abstractmethod
    async def weigh(self, tenant: str, weight: float) -> None:
        """Set a tenant's weight, from the next fetch on. Raises ValueError outside MIN_WEIGHT to MAX_WEIGHT."""

    @abstractmethod
    async def aclose(self) -> None: ...
