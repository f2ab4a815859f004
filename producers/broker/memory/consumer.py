"""A worker's side of the broker in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from producers.broker.base import Consumer, Waker
from producers.broker.memory.fetch import fetch
from producers.broker.memory.server import Server
from producers.broker.values import Ack, Back, Capabilities, Credit, Fetched, Listed, PutDown, Rules
from producers.contract.leases import Observation
from producers.contract.levels import beside

CAPABILITIES: Final = Capabilities(front_of_queue=True, max_message_bytes=sys.maxsize)
#: Messages of each list that one fetch sorts, unless it is told.
BITE: Final = 64


class MemoryConsumer(Consumer):
    capabilities = CAPABILITIES

    def __init__(self, server: Server, queues: Sequence[str], home: str | None = None) -> None:
        self._server = server
        self.queues = list(queues)
        self.home = home or self.queues[0]

    def fetch(
        self, incarnation: str, uuids: Sequence[str], credit: Credit, rules: Rules, bite: int | None = None
    ) -> list[Fetched] | None:
        queues = [queue for queue in self.queues if queue not in self.passed]
        return fetch(self._server, incarnation, queues, uuids, credit, rules, bite or BITE, self.home)

    def put_down(self, what: Sequence[Ack | Back]) -> list[PutDown | Exception]:
        with self._server.lock:
            return [PutDown.DONE if self._put_down(one) else PutDown.GONE for one in what]

    def _put_down(self, one: Ack | Back) -> bool:
        if isinstance(one, Ack):  # it holds no records: nothing here says that a task is not settled
            return self._server.ack(one.incarnation, one.uuid, one.reason, one.used)
        return self._server.back(one.incarnation, self.home, one.uuid, one.delay * 1000, one.to)

    def survived(self, task_ids: Sequence[str]) -> None:
        with self._server.lock:
            for task_id in task_ids:
                self._server.reaped.pop(task_id, None)

    def strays(self, incarnation: str, held: Sequence[str]) -> dict[str, str]:
        with self._server.lock:
            flying = self._server.inflight[incarnation].items()
            return {uuid: d.id for uuid, d in flying if uuid not in set(held)}

    def scheduled(self, count: int) -> list[bytes]:
        with self._server.lock:
            return [d.raw for d in sorted(self._server.delayed[self.home], key=lambda d: d.due)[:count]]

    def take_lease(self, incarnation: str, about: str, ttl: float) -> None:
        with self._server.lock:
            self._server.lease(incarnation, ttl * 1000, take=True, queue=self.queues[0])

    def renew(self, incarnation: str, about: str, ttl: float) -> bool:
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
                for own, version in zip(beside(self.queues[0]), beside(self.home), strict=True):
                    self._server.adopt(own, version)
            for queue in self.queues:
                self._server.recall(queue, takers.get(queue, self.queues), sys.maxsize)

    def workers(self) -> list[Listed]:
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
    """Is called by whoever sends; it has no thread of its own."""

    def __init__(self, server: Server, poke: Callable[[], None]) -> None:
        self._server, self._poke = server, poke

    def start(self) -> None:
        self._server.pokes.append(self._poke)
        self._poke()

    def stop(self) -> None:
        with suppress(ValueError):  # it was not started
            self._server.pokes.remove(self._poke)


def workers(server: Server) -> list[Listed]:
    """The same as `producers.broker.base.Consumer.workers`."""
    with server.lock:
        now = server.clock()
        left = {name: (server.leases.get(name, 0.0) - now) / 1000 for name in server.listed}
        return [Listed(name, queue, left[name] if left[name] > 0 else None) for name, queue in server.listed.items()]
