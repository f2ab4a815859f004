"""Queues whose workers were all killed: what those held, or had sorted by tenant, goes back to the lists.

    no worker of a queue has its lease, at two looks -> REAP each that is gone -> RECALL, a page at a time

A worker that ends in good order does this itself, by RECALL. Whoever starts workers sees nothing but the lists'
lengths, so what lies elsewhere would wait until somebody starts one for another reason.

Each call is a script of its own, which looks at the leases itself: REAP at the worker's, RECALL at those of all workers
that take from the queue. So one that starts at this very moment keeps what it sorts, and whoever is killed between two
calls leaves what the next sweep does; a page goes back to the front of its list, the youngest messages first.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from typing import Final

from producers.client.aio import AsyncClient
from producers.connection.script import text
from producers.contract import keys

log = logging.getLogger(__name__)

#: Messages that go back in one call.
PAGE: Final = 500
#: Seconds for which a queue is to have been seen without a worker: more than a living one, whose lease lapsed while its
#: servers were away, takes to say that it lives.
PATIENCE_S: Final = 5.0


class DesertedQueues:
    """One for each process that leads: it remembers since when nobody serves a queue."""

    def __init__(self, client: AsyncClient, patience_s: float = PATIENCE_S) -> None:
        self._store, self._broker = client.store, client.broker
        self._patience_s = patience_s
        self._since: dict[str, float] = {}

    async def sweep(self) -> tuple[int, int]:
        """How many messages were taken back from the dead, and how many had been sorted. Raises
        redis.exceptions.RedisError or OSError; then everybody's time begins anew."""
        since, self._since = self._since, {}
        pools = {text(queue): text(about) for queue, about in (await self._store.hgetall(keys.POOLS)).items()}
        takers = takers_of(pools)
        workers = await self._broker.workers()
        served = {worker.queue for worker in workers if worker.left is not None}
        now = time.monotonic()
        found = {queue: since.get(queue, now) for queue, its in takers.items() if not served & set(its)}
        late = [queue for queue, first in found.items() if queue in since and now - first >= self._patience_s]
        reaped = recalled = 0
        for worker in workers:
            if worker.queue in late and worker.left is None:
                reaped += max(0, await self._broker.reap(worker.incarnation))
        for queue in late:
            recalled += (back := await self._all(queue, takers[queue]))
            if back:
                log.warning("All workers of %s are gone: %d tasks that they had sorted are in its lists", queue, back)
        if reaped:
            log.warning("%d deliveries of workers that are gone, and that no other follows, are in the lists", reaped)
        self._since = found
        return reaped, recalled

    async def _all(self, queue: str, pools: Sequence[str]) -> int:
        moved = 0
        while (count := await self._broker.recall(queue, pools, PAGE)) > 0:
            moved += count
            if count < PAGE:
                break
        return moved


def takers_of(pools: dict[str, str]) -> dict[str, list[str]]:
    """The queues that there are, each with the pools whose workers take from it: its own, or all of a model's."""
    found = {queue: [queue] for queue in pools}
    for queue, about in pools.items():
        found.setdefault(keys.model_queue(json.loads(about)["model"]), []).append(queue)
    return found
