"""A worker's side of the broker on SQS: its leases and books are on the store, its messages in the process's `Hold`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from redis import Redis

from producers.broker.base import Waker
from producers.broker.redis import keys as shared
from producers.broker.redis.leases import Leases
from producers.broker.sqs import keys, names
from producers.broker.sqs.address import Address, capabilities
from producers.broker.sqs.hold import reaping
from producers.broker.sqs.hold.errand import body_of
from producers.broker.sqs.hold.hold import Hold
from producers.broker.sqs.hold.shared import hold_of, release
from producers.broker.sqs.keys import Entry
from producers.broker.values import Ack, Back, Credit, Fetched, PutDown, Rules
from producers.connection.connect import SILENT_S, connect
from producers.connection.script import run, text

#: Longest wait (s) for SQS in a call of a thread that has other work, such as the lease's; the courier goes on.
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
        self._hold = hold_of(address, self.queues, store_url, self.home)

    # ---- deliveries -----------------------------------------------------------------------------------------------

    def fetch(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, bite: int | None = None
    ) -> list[Fetched] | None:
        self._hold.passed = self.passed
        return self._hold.fetch(incarnation, uuids, credit, rules)

    def put_down(self, what: Sequence[Ack | Back]) -> list[PutDown | Exception]:
        return self._hold.put_down(what, self._timeout)

    def survived(self, task_ids: Sequence[str]) -> None:
        super().survived(task_ids)
        self._hold.survived(task_ids)

    def strays(self, incarnation: str, held: Sequence[str]) -> dict[str, str]:
        said = self._redis.hgetall(keys.inflight(incarnation))
        flying = [reaping.read_flying(text(field), raw) for field, raw in said.items()]
        return self._hold.strays(incarnation, flying, held)

    def scheduled(self, count: int) -> list[bytes]:
        """Of what SQS delays, the index knows id, size and tenant."""
        found: list[tuple[float, bytes]] = []
        seconds: int = self._redis.time()[0]
        for queue in self._hold.served:
            kept: Any = self._redis.zrange(keys.delayed(queue), 0, count - 1, withscores=True)
            found += [(due, body_of(raw)) for raw, due in kept]
        for name in self._hold.lines:
            later: Any = self._redis.zrangebyscore(
                keys.waiting(name), (seconds + 1) * 1000, "inf", start=0, num=count, withscores=True
            )
            found += [(due, Entry.parse(text(raw)).message(name).envelope().encode()) for raw, due in later]
        return [body for _, body in sorted(found)[:count]]

    # ---- leases ---------------------------------------------------------------------------------------------------

    def renew(self, incarnation: str, about: str, ttl: float) -> bool:
        if super().renew(incarnation, about, ttl):
            return True
        self._hold.lose(incarnation)
        return False

    def leave(self, incarnation: str, takers: Mapping[str, Sequence[str]]) -> None:
        self._hold.rest()
        self._hold.flush(PATIENCE_S)
        self.end_lease(incarnation)
        self.reap(incarnation)

    def reap(self, incarnation: str, looker: str = "", since: int = 0) -> int:
        count, flying = reaping.read_reap(run(self._redis, reaping.reap(incarnation, looker, since)))
        self._hold.chores.reap(incarnation, flying, min(PATIENCE_S, self._timeout))
        return count

    # ---- queues ---------------------------------------------------------------------------------------------------

    def waiting(self, queue: str) -> int:
        indexes = [keys.waiting(name) for name, _ in names.lists(queue)]
        return sum(self._redis.zcard(key) for key in chain(indexes, [keys.delayed(queue)]))

    def weights(self) -> dict[str, float]:
        return self._hold.weigh(self._redis.hgetall(shared.WEIGHTS))

    def waker(self, poke: Callable[[], None]) -> Waker:
        return SqsWaker(self._hold, poke)

    def prepare(self) -> None:
        """The connections to SQS are there already."""

    def faults(self) -> list[str]:
        return self._hold.faults()

    def close(self) -> None:
        release(self._hold)
        self._redis.close()


class SqsWaker:
    """Is called by the pollers; it has no thread of its own."""

    def __init__(self, hold: Hold, poke: Callable[[], None]) -> None:
        self._hold, self._poke = hold, poke
        self._started = False

    def start(self) -> None:
        self._started = True
        self._hold.pokes.append(self._poke)
        self._poke()

    def stop(self) -> None:
        """The worker fetches no more, either: what it has not taken goes back."""
        if self._started and self._poke in self._hold.pokes:
            self._hold.pokes.remove(self._poke)
            self._hold.rest()
