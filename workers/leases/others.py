"""Repairs what other processes left: dead workers' deliveries, queues without workers, tasks of lost readers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from redis import Redis

from producers.broker.base import Consumer
from producers.broker.values import ListedWorker
from producers.client.reader_leases import LapsedReaders
from producers.client.steps import Read, Step, drive
from producers.connection.script import Call, run, text
from producers.contract import keys
from producers.contract.keys import version_queue_of
from producers.contract.levels import beside, emptied, queue_of
from producers.sweeper.tasks import expire_late
from workers.state.incarnation import Incarnation
from workers.state.served import Served

logger = logging.getLogger(__name__)


class Others:
    """Looked after on the housekeeper's thread. Redis errors come through."""

    def __init__(self, served: Served, store: Redis, broker: Consumer) -> None:
        self._served = served
        self._store = store
        self._broker = broker
        self._readers = LapsedReaders(served.settings.reader_lease)
        self._stranded: dict[str, int] = {}

    def reap(self, life: Incarnation) -> list[ListedWorker]:
        """Reap those whose lease is over; return those that live."""
        others = [one for one in self._broker.workers() if one.incarnation != life.id]
        for one in others:
            if one.remaining_s is None:
                count = self._broker.reap(one.incarnation)
                if count > 0:
                    logger.warning("Worker %s is gone: returned its %d deliveries to the queue", one.incarnation, count)
        return [one for one in others if one.remaining_s is not None]

    def adopt(self, alive: Sequence[ListedWorker]) -> None:
        """Move what waits for pools of this model that have no worker left to the queues of their versions.

        An upgrade of torch, another dtype or machine makes another pool; what was queued before must not wait for ever.
        Another version would give other output than was asked for: what waits for one is only told of.
        """
        serving = {self._served.pool.queue, *(one.queue for one in alive)}
        told = {text(name): text(about) for name, about in self._store.hgetall(keys.POOLS).items()}
        pools = {queue: about for queue, about in told.items() if json.loads(about)["model"] == self._served.model}
        for pool in pools:
            for queue, target in zip(beside(pool), beside(version_queue_of(pools[pool])), strict=True):
                # Where a pool has workers, those of an earlier release take nothing from the queues beside its own.
                if queue == pool and pool in serving:
                    continue
                count = self._broker.adopt(queue, target)
                if count > 0:
                    logger.warning("Pool %s has no worker: moved its %d queued tasks to %s", queue, count, target)
        for version in {version_queue_of(about) for about in pools.values()}:
            for level in emptied():  # every release that may be up can do it
                self._broker.adopt(queue_of(version, level), version)
        versions = {queue: json.loads(about)["version"] for queue, about in pools.items()}
        for version in sorted({*versions.values()} - {versions[queue] for queue in serving & pools.keys()}):
            self._tell_of(version)

    def _tell_of(self, version: str) -> None:
        """Log the number of waiting tasks whenever it has changed."""
        queue = keys.version_queue(self._served.model, version)
        count = self._broker.waiting(queue)
        if self._stranded.get(queue, 0) != count:
            self._stranded[queue] = count
            if not count:
                logger.info("No task waits for version %s of model %s any more", version, self._served.model)
                return
            logger.warning(
                "%d tasks wait for version %s of model %s, which no worker serves (this one serves %s): "
                "serve that version again, or cancel them",
                count,
                version,
                self._served.model,
                self._served.card["version"],
            )

    def end_unwanted(self) -> None:
        """End tasks of lost readers and late tasks. Gateways do this, too; workers do it when none is left."""
        if gone := drive(self._readers.sweep(), self._ask_store):
            logger.info("%d tasks are cancelled: their readers are gone", gone)
        if ended := drive(expire_late(), self._ask_store):
            logger.info("%d tasks that nobody has are ended: they are too late, or cancelled", ended)

    def _ask_store(self, step: Step) -> Any:
        if isinstance(step, Read):
            with self._store.pipeline(transaction=False) as pipe:
                for command in step.commands:
                    pipe.execute_command(*command)
                return pipe.execute()
        assert isinstance(step, Call)
        return run(self._store, step)
