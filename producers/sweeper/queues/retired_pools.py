"""Handles pools without workers: reports waiting tasks, removes useless messages, forgets retired pools.

    told:     how many tasks wait, in the log whenever that changed (and in /metrics, always), once nobody has served
              them for a while: after a restart, workers load their model first. Not where an autoscaler has decided
              that they need no worker yet
    removed:  messages whose tasks are settled, deleted or past their time to live: a worker would only put them down
    retired:  a pool with nothing left, in its own queue or in that of its version, if no card names that; after an
              hour. What workers measured of a version goes when neither pool nor card names it

What is neither is somebody's task, and waits for a worker of that version, however long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from producers.client.aio import AsyncClient
from producers.connection.script import Call, aexecute_many, arun, parsed, script, text
from producers.contract import keys
from producers.contract.keys import takers_of, version_queue_of
from producers.contract.levels import looked_after
from producers.contract.message import is_plain, task_headers
from producers.store.fleet.scaling import is_fresh, states
from producers.store.protocol import PACKAGE

log = logging.getLogger(__name__)

#: Messages read at a time.
PAGE: Final = 500
#: Time (s) without a worker after which waiting tasks are logged; most models load in less.
PATIENCE_S: Final = 60.0
#: Time (s) without workers and messages after which a pool is forgotten.
RETIRE_AFTER_S: Final = 3600.0


def retire(queue: str, about: str) -> Call:
    """RETIRE: forget a pool. Answers 1, or 0 if the pool has changed."""
    return Call(script(PACKAGE, "retire"), (keys.POOLS,), (queue, about))


@dataclass(slots=True)
class Pruned:
    messages: int = 0
    pools: int = 0


class RetiredPools:
    """The leader's memory of since when each pool has had no worker."""

    def __init__(
        self, client: AsyncClient, retire_after_s: float = RETIRE_AFTER_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._store, self._broker = client.store, client.broker
        self._retire_after_s = retire_after_s
        self._patience_s = patience_s
        self._unserved_since: dict[str, float] = {}
        self._told: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._empty_since: dict[str, float] = {}

    async def sweep(self) -> Pruned:
        """Handle all pools once. Raises redis.exceptions.RedisError or OSError."""
        pruned = Pruned()
        measured = await self._store.hkeys(keys.PROFILES)  # first: a worker announces its pool before it measures
        pools = {text(queue): text(about) for queue, about in (await self._store.hgetall(keys.POOLS)).items()}
        serving = {worker.queue for worker in await self._broker.workers()}
        cards = {text(model): text(card) for model, card in (await self._store.hgetall(keys.MODELS)).items()}
        takers, resting = takers_of(pools, cards), await self._resting(cards)
        queues = [queue for queue, its in takers.items() if not serving & set(its)]
        for known in (self._unserved_since, self._told):
            for queue in known.keys() - set(queues):
                del known[queue]
        self._waiting = {}
        for queue in queues:
            self._waiting[queue] = await self._prune(queue, takers[queue], pruned)
            if queue not in resting:
                self._tell(queue, self._waiting[queue])
        current = takers_of({}, cards)
        for queue in pools.keys() - serving:
            version = version_queue_of(pools[queue])
            its = looked_after(queue) if version in current else looked_after(queue) + looked_after(version)
            await self._retire(its, pools[queue], pruned)
        for queue in self._empty_since.keys() - (pools.keys() - serving):
            del self._empty_since[queue]
        if unnamed := [name for name in measured if keys.model_queue(text(name)) not in takers]:
            await self._store.hdel(keys.PROFILES, *unnamed)
        return pruned

    async def _resting(self, cards: dict[str, str]) -> set[str]:
        """The queues of pools for which an autoscaler wants no worker now: it starts one when their tasks are due."""
        (seconds, _), found = await self._store.time(), await states(self._store)
        names = {name for name, one in found.items() if one.get("wanted") == 0 and is_fresh(one.get("at"), seconds)}
        versions = {model: f"{model}@{_version(card)}" for model, card in cards.items()}
        names |= {versions[name] for name in names & versions.keys()}
        names |= {model for model, current in versions.items() if current in names}
        return {queue for name in names for queue in looked_after(keys.model_queue(name))}

    def _tell(self, queue: str, waiting: int) -> None:
        """Log the number of waiting tasks whenever it has changed."""
        now = time.monotonic()
        late = now - self._unserved_since.setdefault(queue, now) >= self._patience_s
        if late and waiting and waiting != self._told.get(queue):
            log.warning("%d tasks wait in %s, which no worker serves: start one for it, or cancel them", waiting, queue)
            self._told[queue] = waiting

    async def _prune(self, queue: str, pools: Sequence[str], pruned: Pruned) -> int:
        """Return held-back and sorted messages to the lists and drop useless ones. Returns the number that is left."""
        while await self._broker.due(queue):
            pass
        while await self._broker.recall(queue, pools, PAGE) == PAGE:
            pass
        removed, left = await self._broker.prune(queue, self._over, PAGE)
        pruned.messages += removed
        return left

    async def _over(self, page: Iterable[bytes]) -> dict[bytes, str]:
        """Messages, with their tasks, that CLAIM would answer with `done` or `erased`.

        Their tasks are settled or deleted, or were a client's and have no record any more.
        """
        found = [(raw, headers) for raw in page if (headers := task_headers(raw)) is not None]
        ids = [headers["id"] for _, headers in found]
        answers = await aexecute_many(
            self._store,
            [
                *(("HMGET", keys.task(task_id), "status", "settled") for task_id in ids),
                *(("EXISTS", keys.erased(task_id)) for task_id in ids),
            ],
        )
        records, erased = answers[: len(ids)], answers[len(ids) :]
        return {
            raw: headers["id"]
            for (raw, headers), (status, settled), gone in zip(found, records, erased, strict=True)
            if settled is not None or (status is None and (gone or not is_plain(headers)))
        }

    async def _retire(self, queues: Sequence[str], about: str, pruned: Pruned) -> None:
        """The pool whose own queue is the first; the others go with it, unless they are served."""
        queue = queues[0]
        if any(self._waiting.get(name) for name in queues):
            self._empty_since.pop(queue, None)
            return
        since = self._empty_since.setdefault(queue, time.monotonic())
        # A worker that announces the pool again changes its entry, which holds the time.
        if time.monotonic() - since >= self._retire_after_s and await arun(self._store, retire(queue, about)):
            log.info("pool %s is forgotten: no worker serves it, and nothing is left of it", queue)
            for name in queues:
                if name in self._waiting:
                    await self._broker.forget(name)
            del self._empty_since[queue]
            pruned.pools += 1


def _version(card: str) -> str:
    """The version that a card names; empty where it makes no sense."""
    return str(parsed(card).get("version", ""))
