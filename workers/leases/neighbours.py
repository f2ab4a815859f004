"""Looks whether neighbours' processes are alive, and takes over what dead ones held before their leases lapse.

Each incarnation looks at the two that follow it by name. It judges leases that were written since it joined, and after
a whole lease all. docs/how/failover.md has the rules, and what happens when a process dies or is cut off between any
two lines.

**The others.** `Others` repairs what other processes left behind: dead workers' deliveries, queues without workers,
tasks of lost readers. `Peers` reads the leases of the pool's other workers for this worker's breaker.
docs/how/deaths.md has what happens when a worker dies between any two lines.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from redis import Redis

from producers.broker.base import Consumer
from producers.broker.values import ListedWorker
from producers.client.leases import LapsedReaders
from producers.client.steps import Read, Step, drive
from producers.connection.script import Call, parsed_value, run, text
from producers.contract import keys
from producers.contract.keys import version_queue_of
from producers.contract.leases import Liveness, end, join, observe
from producers.contract.levels import beside, emptied, queue_of
from producers.store.protocol import eject
from producers.sweeper.tasks import expire_late
from workers.breaker import Breaker, Figures, State
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.leases.control import Control
from workers.state.delivery import Delivery, Incarnation
from workers.state.served import Served

logger = logging.getLogger(__name__)

#: Time (s) between two looks, as the housekeeper calls for them.
LOOK_S: Final = 0.25
#: Once a worker has been subscribed for so many leases, its looks count whenever a lease was written.
STOOD_LEASES: Final = 1.0
#: Incarnations that each looks at.
LOOKED_AT: Final = 2


@dataclass(frozen=True, slots=True)
class Since:
    """The joins since when leases on store and broker count for a looker; 0: all do."""

    store: int
    broker: int


@dataclass(slots=True)
class Neighbours:
    """Looks run on the housekeeper's thread. `store`: None if the broker's leases are on the same server.

    `lease`: seconds of a lease. Redis errors come through.
    """

    store: Redis | None
    broker: Consumer
    control: Control
    lease: float
    on_join: Callable[[], None] = field(init=False, default=lambda: None)
    """Called when a worker has joined, this one too: it cannot judge a lease that was written before."""
    _names: list[str] = field(init=False, default_factory=list)
    _suspects: set[str] = field(init=False, default_factory=set)
    _subscriptions: tuple[float, ...] = field(init=False, default=())
    """The subscriptions under which it looks, as `Control.subscribed_since` has them."""
    _joined: Since | None = field(init=False, default=None)
    """With these subscriptions."""
    _joins: int = field(init=False, default=-1)
    """The broker's count, at the last look."""

    def learn(self, life: Incarnation, alive: Sequence[ListedWorker]) -> None:
        """Chooses whom to look at from all other workers that have a lease."""
        ring = sorted(worker.incarnation for worker in alive)
        after = [name for name in ring if name > life.id]
        self._names = [*after, *ring][: min(LOOKED_AT, len(ring))]

    def look(self, life: Incarnation) -> int:
        """Takes over workers that are silent for the second time in a row. Returns how many."""
        suspects, self._suspects = self._suspects, set()  # a look that does not count begins anew
        if not life.begun:
            return 0
        subscriptions = self.control.subscribed_since(life)
        if subscriptions != self._subscriptions:
            self._subscriptions, self._joined, suspects = subscriptions, None, set()
        since = self._since()
        here = self.broker.look(life.id, self._names if since else (), since.broker if since else 0)
        if here is None:
            return 0
        if here.joins != self._joins:
            self._joins = here.joins
            self.on_join()
        if subscriptions and self._joined is None:
            self._joined = self._join(life)
        if since is None:
            return 0
        silent = [name for name, liveness in here.others.items() if liveness is Liveness.SILENT]
        silent = self._silent_on_store(life, silent, since)
        if self.control.subscribed_since(life) != subscriptions:  # a server may have begun anew while it was asked
            return 0
        self._suspects = {*silent}
        return sum(self._take(life, name, since) for name in sorted(suspects & self._suspects))

    def _since(self) -> Since | None:
        """Returns since when leases count for this worker's looks; None: no look counts yet."""
        if self._subscriptions and time.monotonic() - max(self._subscriptions) >= STOOD_LEASES * self.lease:
            return Since(0, 0)
        return self._joined

    def _join(self, life: Incarnation) -> Since | None:
        """Joins on the store first: a worker that sees the broker's count raised renews its lease on both."""
        on_store = run(self.store, join(life.id)) if self.store is not None else 0
        if self.store is not None and not on_store:
            return None
        on_broker = self.broker.join(life.id)
        return Since(on_store, on_broker) if on_broker else None

    def _silent_on_store(self, life: Incarnation, names: Sequence[str], since: Since) -> list[str]:
        """Returns the workers that the store does not find alive, either."""
        if self.store is None or not names:
            return [*names]
        there = observe(self.store, life.id, names, since.store)
        return [name for name, liveness in there.others.items() if liveness is not Liveness.LIVES] if there else []

    def _take(self, life: Incarnation, name: str, since: Since) -> bool:
        if self.store is not None and not run(self.store, end(name, life.id, since.store)):
            return False
        count = self.broker.reap(name, life.id, since.broker)
        if count < 0:
            return False
        self._names.remove(name)
        logger.warning("Worker %s is dead: returned its %d deliveries to the queue", name, count)
        return True


#: Peers that one look reads: enough for a median, however large the pool is.
READ: Final = 16


class Others:
    """Other workers, of all pools, and readers."""

    def __init__(self, served: Served, store: Redis, broker: Consumer) -> None:
        self._served = served
        self._store = store
        self._broker = broker
        self._readers = LapsedReaders(served.settings.reader_lease)
        self._stranded: dict[str, int] = {}

    def reap(self, life: Incarnation) -> list[ListedWorker]:
        """Reaps workers whose lease is over. Returns those that live."""
        others = [worker for worker in self._broker.workers() if worker.incarnation != life.id]
        for worker in others:
            if worker.remaining_s is None:
                count = self._broker.reap(worker.incarnation)
                if count > 0:
                    logger.warning(
                        "Worker %s is gone: returned its %d deliveries to the queue", worker.incarnation, count
                    )
        return [worker for worker in others if worker.remaining_s is not None]

    def adopt(self, alive: Sequence[ListedWorker]) -> None:
        """Moves tasks that wait for pools of this model without a worker to the queues of their versions.

        An upgrade of torch, another dtype or machine makes another pool; what was queued before must not wait for ever.
        Another version would give other output than was requested: tasks that wait for one are only logged.
        """
        serving = {self._served.pool.queue, *(worker.queue for worker in alive)}
        descriptions = {text(name): text(description) for name, description in self._store.hgetall(keys.POOLS).items()}
        pools = {
            queue: description
            for queue, description in descriptions.items()
            if json.loads(description)["model"] == self._served.model
        }
        for pool in pools:
            for queue, target in zip(beside(pool), beside(version_queue_of(pools[pool])), strict=True):
                # Where a pool has workers, those of an earlier release take nothing from the queues beside its own.
                if queue == pool and pool in serving:
                    continue
                count = self._broker.adopt(queue, target)
                if count > 0:
                    logger.warning("Pool %s has no worker: moved its %d queued tasks to %s", queue, count, target)
        for version in {version_queue_of(description) for description in pools.values()}:
            for level in emptied():  # every release that may be up can do it
                self._broker.adopt(queue_of(version, level), version)
        versions = {queue: json.loads(description)["version"] for queue, description in pools.items()}
        for version in sorted({*versions.values()} - {versions[queue] for queue in serving & pools.keys()}):
            self._report(version)

    def _report(self, version: str) -> None:
        """Logs the number of tasks that wait for a version, whenever it has changed."""
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
        """Ends tasks of lost readers and late tasks. Gateways do this, too; workers do it when no gateway is left."""
        if gone := drive(self._readers.sweep(), self._drive_step):
            logger.info("%d tasks are cancelled: their readers are gone", gone)
        if ended := drive(expire_late(), self._drive_step):
            logger.info("%d tasks that nobody has are ended: they are too late, or cancelled", ended)

    def _drive_step(self, step: Step) -> Any:
        if isinstance(step, Read):
            with self._store.pipeline(transaction=False) as pipe:
                for command in step.commands:
                    pipe.execute_command(*command)
                return pipe.execute()
        assert isinstance(step, Call)
        return run(self._store, step)


@dataclass(slots=True)
class Peers:
    """`queue`: the pool's."""

    store: Redis
    queue: str
    breaker: Breaker
    deliveries: Deliveries
    finisher: Finisher
    _entered: bool = field(init=False, default=False)
    """EJECT may have entered this worker."""

    def look(self, life: Incarnation, alive: Sequence[ListedWorker]) -> None:
        """Compare this worker with its peers. `alive`: all others that have a lease."""
        breaker, others = self.breaker, [peer.incarnation for peer in alive if peer.queue == self.queue]
        breaker.peers = self._figures(others)
        if why := breaker.outlier():
            if self._granted(life, len(others) + 1):
                breaker.open(why)
        elif not breaker.closed:
            if not self.deliveries.by_uuid:
                breaker.on_idle()
            if not self._granted(life, len(others) + 1):
                breaker.refused()
        elif self._entered:
            self.store.srem(keys.ejected(self.queue), life.id)
            self._entered = False

    def give_back(self) -> None:
        """Gives tasks back when the breaker has opened: all if the engine fails them, else those not begun."""
        if self.breaker.state is State.OPEN:
            for delivery in list(self.deliveries.running.values()):
                if self.breaker.alone or not _begun(delivery):
                    self.finisher.let_go(delivery, why="breaker")

    def _granted(self, life: Incarnation, living: int) -> bool:
        self._entered = True
        return bool(run(self.store, eject(life.id, self.queue, living, alone=self.breaker.alone)))

    def _figures(self, others: Sequence[str]) -> list[Figures]:
        """Reads the figures of some peers that are not held back themselves."""
        chosen = random.sample(others, min(READ, len(others)))
        leases: list[Any] = [parsed_value(raw) for raw in self.store.mget(map(keys.lease, chosen))] if chosen else []
        return [
            Figures.of(lease.get("figures"))
            for lease in leases
            if isinstance(lease, dict) and not lease.get("breaker_open")
        ]


def _begun(delivery: Delivery) -> bool:
    """Returns whether this worker has made tokens of a delivery."""
    return any(delivery.entries)
