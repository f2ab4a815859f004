"""Returns the messages of queues whose workers were all killed to the queues' lists.

    no worker of a queue has its lease, at two looks -> REAP each that is gone
        -> a pool's own queue: ADOPT, to its version's        -> any other: RECALL, a page at a time

A drained worker does this itself, by RECALL. An autoscaler sees only the lists' lengths, so messages elsewhere would
wait until a worker is started for another reason.

Each call is one script, which checks the leases itself: REAP the worker's, RECALL those of all workers that serve the
queue. So a worker that starts at that moment keeps what it has sorted, and a sweeper that is killed between two calls
leaves the rest to the next sweep. A page returns to the front of its list, the youngest messages first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Final

from producers.client.aio import AsyncClient
from producers.connection.script import text
from producers.contract import keys
from producers.contract.keys import takers_of, version_queue_of
from producers.contract.levels import emptied, looked_after, queue_of, split

log = logging.getLogger(__name__)

#: Messages returned in one call.
PAGE: Final = 500
#: Time (s) for which a queue must be without a worker. A live worker, whose lease lapsed while its servers were away,
#: needs less to renew it.
PATIENCE_S: Final = 5.0


class OrphanedQueues:
    """The leader's memory of since when each queue has had no worker."""

    def __init__(self, client: AsyncClient, patience_s: float = PATIENCE_S) -> None:
        self._store, self._broker = client.store, client.broker
        self._patience_s = patience_s
        self._since: dict[str, float] = {}

    async def sweep(self) -> tuple[int, int]:
        """Return the messages. Returns the numbers taken from dead workers and from the sorted sets.

        Raises redis.exceptions.RedisError or OSError; then the waiting times begin anew.
        """
        since, self._since = self._since, {}
        pools = {text(queue): text(about) for queue, about in (await self._store.hgetall(keys.POOLS)).items()}
        takers = takers_of(pools)
        workers = await self._broker.workers()
        served = {worker.queue for worker in workers if worker.remaining_s is not None}
        now = time.monotonic()
        found = {queue: since.get(queue, now) for queue, its in takers.items() if not served & set(its)}
        late = [queue for queue, first in found.items() if queue in since and now - first >= self._patience_s]
        reaped = recalled = 0
        for worker in workers:
            if worker.queue in late and worker.remaining_s is None:
                reaped += max(0, await self._broker.reap(worker.incarnation))
        for pool, about in pools.items():
            for queue, target in zip(looked_after(pool), looked_after(version_queue_of(about)), strict=True):
                if queue in late or (queue != pool and pool not in late):
                    recalled += await self._moved(queue, target)
        for version in {version_queue_of(about) for about in pools.values()}:
            for level in emptied():
                recalled += await self._moved(queue_of(version, level), version)
        for queue, its in takers.items():
            # Of a queue beside another the script looks whether a worker lives that takes from it.
            if split(queue)[0] in pools or (queue not in late and not split(queue)[1]):
                continue
            recalled += (back := await self._all(queue, its))
            if back:
                log.warning("All workers of %s are gone: %d tasks that they had sorted are in its lists", queue, back)
        if reaped:
            log.warning("%d deliveries of workers that are gone, and that no other follows, are in the lists", reaped)
        self._since = found
        return reaped, recalled

    async def _moved(self, pool: str, queue: str) -> int:
        count = max(0, await self._broker.adopt(pool, queue))
        if count:
            log.warning("Pool %s has no worker: moved its %d queued tasks to %s", pool, count, queue)
        return count

    async def _all(self, queue: str, pools: Sequence[str]) -> int:
        moved = 0
        while (count := await self._broker.recall(queue, pools, PAGE)) > 0:
            moved += count
            if count < PAGE:
                break
        return moved
