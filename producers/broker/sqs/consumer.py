"""A worker's side of the broker on SQS: leases and books are in the store, messages in the process's `Receiver`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from redis import Redis

from producers.broker.base import Waker
from producers.broker.redis import keys as shared
from producers.broker.redis.calls import Leases
from producers.broker.sqs import keys
from producers.broker.sqs.address import Address, capabilities, lists
from producers.broker.sqs.keys import Entry
from producers.broker.sqs.receiver import flight
from producers.broker.sqs.receiver.receive import Receiver, release, shared_receiver
from producers.broker.values import Ack, Back, Credit, Fetched, PutDown, Rules
from producers.connection.connect import SILENT_S, connect
from producers.connection.script import run, text

#: Longest wait (s) for SQS in a call of a thread that has other work, such as the lease's; the sender goes on.
PATIENCE_S: Final = 1.0


class SqsConsumer(Leases):
    """Consumers of one process and address share what it has received."""

    def __init__(
        self,
        address: Address,
        queues: Sequence[str],
        store_url: str,
        timeout: float = SILENT_S,
        home: str | None = None,
    ) -> None:
        self.queues = list(queues)
        self.home = home or self.queues[0]
        self.capabilities = capabilities(address)
        self._timeout = timeout
        self._redis: Redis = connect(store_url, timeout=timeout)
        self._receiver = shared_receiver(address, self.queues, store_url, self.home)

    # ---- deliveries -----------------------------------------------------------------------------------------------

    def fetch(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, sort_limit: int | None = None
    ) -> list[Fetched] | None:
        self._receiver.passed = self.passed
        return self._receiver.fetch(incarnation, uuids, credit, rules)

    def put_down(self, outcomes: Sequence[Ack | Back]) -> list[PutDown | Exception]:
        return self._receiver.put_down(outcomes, self._timeout)

    def survived(self, task_ids: Sequence[str]) -> None:
        super().survived(task_ids)
        self._receiver.survived(task_ids)

    def strays(self, incarnation: str, expected: Sequence[str]) -> dict[str, str]:
        fields = self._redis.hgetall(keys.inflight(incarnation))
        entries = [flight.read_entry(text(field), raw) for field, raw in fields.items()]
        return self._receiver.strays(incarnation, entries, expected)

    def scheduled(self, count: int) -> list[bytes]:
        """As `Consumer.scheduled`. Of a message that SQS delays, the index has only id, size and tenant."""
        scheduled: list[tuple[float, bytes]] = []
        seconds: int = self._redis.time()[0]
        for queue in self._receiver.served:
            kept: Any = self._redis.zrange(keys.delayed(queue), 0, count - 1, withscores=True)
            scheduled += [(due, flight.body_of(raw)) for raw, due in kept]
        for name in self._receiver.lines:
            later: Any = self._redis.zrangebyscore(
                keys.waiting(name), (seconds + 1) * 1000, "inf", start=0, num=count, withscores=True
            )
            scheduled += [(due, Entry.parse(text(raw)).message(name).envelope().encode()) for raw, due in later]
        return [body for _, body in sorted(scheduled)[:count]]

    # ---- leases ---------------------------------------------------------------------------------------------------

    def renew(self, incarnation: str, state: str, ttl: float) -> bool:
        if super().renew(incarnation, state, ttl):
            return True
        self._receiver.lose(incarnation)
        return False

    def leave(self, incarnation: str, takers: Mapping[str, Sequence[str]]) -> None:
        self._receiver.pause()
        self._receiver.flush(PATIENCE_S)
        self.end_lease(incarnation)
        self.reap(incarnation)

    def reap(self, incarnation: str, looker: str = "", since: int = 0) -> int:
        count, entries = flight.read_reap(run(self._redis, flight.reap(incarnation, looker, since)))
        self._receiver.maintenance.reap(incarnation, entries, min(PATIENCE_S, self._timeout))
        return count

    # ---- queues ---------------------------------------------------------------------------------------------------

    def waiting(self, queue: str) -> int:
        indexes = [keys.waiting(name) for name, _ in lists(queue)]
        return sum(self._redis.zcard(key) for key in chain(indexes, [keys.delayed(queue)]))

    def weights(self) -> dict[str, float]:
        return self._receiver.set_weights(self._redis.hgetall(shared.WEIGHTS))

    def waker(self, poke: Callable[[], None]) -> Waker:
        return SqsWaker(self._receiver, poke)

    def prepare(self) -> None:
        """The connections to SQS are there already."""

    def faults(self) -> list[str]:
        return self._receiver.faults()

    def close(self) -> None:
        release(self._receiver)
        self._redis.close()


class SqsWaker:
    """The pollers call it; it has no thread of its own."""

    def __init__(self, receiver: Receiver, poke: Callable[[], None]) -> None:
        self._receiver, self._poke = receiver, poke
        self._started = False

    def start(self) -> None:
        self._started = True
        self._receiver.pokes.append(self._poke)
        self._poke()

    def stop(self) -> None:
        """Also ends fetching: messages that the worker has not taken go back."""
        if self._started and self._poke in self._receiver.pokes:
            self._receiver.pokes.remove(self._poke)
            self._receiver.pause()
