"""Keeps the worker's lease, and looks after what others left behind.

A thread with connections of its own: neither a busy event loop nor a consumer in reconnect back-off may let the lease
lapse. On each round it lets go of what its lapsed lives held, renews the lease on store and broker, reaps incarnations
whose lease is gone, ends tasks whose readers are gone and those that waited too long, gives back tasks that have been
preempted for long, and runs what was asked for `later`.
"""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from producers.broker import redis as broker
from producers.broker.values import sane_weights
from producers.client.steps import Read, Step, drive
from producers.connection.log_throttle import complain
from producers.connection.script import Call, run, run_many, text
from producers.contract import keys
from producers.store.protocol import release
from producers.sweeper.deadlines import expire_late
from producers.sweeper.orphaned_queues import takers_of
from producers.sweeper.reader_leases import LapsedReaders
from workers.flow.delivery import Delivery
from workers.flow.waker import PING_S
from workers.leases.incarnation import Incarnation
from workers.leases.reconcile import Strays
from workers.runtime.connect import LOST, connect
from workers.runtime.serving import announce

if TYPE_CHECKING:
    from workers.runtime.assembly import Runtime

logger = logging.getLogger(__name__)

TICK_S = 0.5
#: A lease is renewed four times before it lapses, and so often (s) at least; what others left is looked for as often.
ROUND_S = 5.0
#: A lease that was not renewed is looked at again so soon after its end.
REAP_AFTER_S = 0.02
#: Messages that go back into their lists in one call.
UNSORTED = 1000


class Housekeeper(threading.Thread):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__(name="penstock-housekeeper", daemon=True)
        self._runtime = runtime
        # A lease must be renewed several times before it lapses, also when one try hangs.
        patience = min(5.0, runtime.settings.lease / 4)
        self._pause = min(ROUND_S, runtime.settings.lease / 4)
        self._store = connect(runtime.settings.store, timeout=patience)
        self._broker = connect(runtime.settings.broker, timeout=patience)
        self._control = connect(runtime.settings.store)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._strays = Strays(runtime, self._store, self._broker)
        self._readers = LapsedReaders(runtime.settings.reader_lease)
        self._lapsed: deque[tuple[Incarnation, list[Delivery]]] = deque()
        self._letting_go = threading.Lock()
        self._heard_at = time.monotonic()
        self._changed = threading.Condition()
        self._stopping = False
        self._clock_offset_ms = 0
        self.round_trip = 0.0
        """To the farther of the servers, as the lease's last renewal found it; seconds."""
        self._renew_at = 0.0
        self._reap_at = 0.0
        self._stranded: dict[str, int] = {}

    # ---- lives ------------------------------------------------------------------------------------------------

    def begin_life(self, life: Incarnation) -> None:
        """Take the lease. Raises redis errors."""
        ttl = int(self._runtime.settings.lease * 1000)
        about = self._runtime.about()
        seconds, micros = self._store.time()
        self._clock_offset_ms = int(seconds * 1000 + micros // 1000 - time.time() * 1000)
        run(self._store, broker.lease(life.id, about, ttl, take=True))
        run(self._broker, broker.lease(life.id, about, ttl, take=True, queue=self._runtime.queue))
        self._renew_at = time.monotonic() + self._pause
        life.begun = True
        threading.Thread(target=self._listen, args=(life,), name="penstock-control", daemon=True).start()

    def _announce_again(self) -> None:
        """A store that has lost the lease may have lost all: then nobody would know this model any more."""
        runtime = self._runtime
        if not self._store.hexists(keys.POOLS, runtime.queue):
            logger.warning("The store has forgotten %s: announcing it again", runtime.model)
            announce(self._store, runtime.engine, runtime.files)

    def end_life(self, life: Incarnation) -> None:
        """Give the lease up: nobody has to wait for it to lapse. What is still in flight is reaped, not left.

        In two round trips, as they may be long and the time is short, on connections that have nothing else to do by
        now: ours may be at work. Where this was the last worker of its queues, their lists hold all that waits again:
        who looks at nothing but their lengths, as a scaler does, must see it.
        """
        life.over = True
        try:
            self._let_lapsed_go()
            with self._runtime.finisher.redis.pipeline(transaction=False) as pipe:
                pipe.delete(keys.lease(life.id))
                pipe.hgetall(keys.POOLS)
                _, pools = pipe.execute()
            with self._runtime.courier.redis.pipeline(transaction=False) as pipe:
                queues = self._runtime.queues
                takers = takers_of({text(queue): text(about) for queue, about in pools.items()})
                reap = broker.reap(life.id)
                recall = [broker.recall(queue, takers.get(queue, queues), UNSORTED) for queue in queues]
                for call in (reap, recall[0]):
                    pipe.script_load(call.script.text)
                pipe.delete(keys.lease(life.id))
                for call in (reap, *recall):
                    pipe.execute_command(*call.command)
                counts = pipe.execute()[-len(recall) :]
            while again := [call for call, count in zip(recall, counts, strict=True) if count == UNSORTED]:
                recall, counts = again, run_many(self._runtime.courier.redis, again)
        except LOST as exc:
            logger.warning("The lease was not given up, it lapses by itself: %s", exc)

    def lapsed(self, life: Incarnation, dropped: list[Delivery]) -> None:
        """One of its leases is gone. What it held is let go before a new life begins, or the worker exits."""
        self._lapsed.append((life, dropped))
        self.later(0.0, self._runtime.intake.poke)

    def _let_lapsed_go(self) -> None:
        """RELEASE and BACK what lapsed lives held: their worker lives, so that no death is to be counted.

        Whatever another took up meanwhile is not touched by either. Raises redis errors: then it is all said again.
        """
        with self._letting_go:
            while self._lapsed:
                life, dropped = self._lapsed[0]
                self._abandon(life)
                _said(run_many(self._store, [release(one.task_id, one.uuid) for one in dropped]))
                # The last first: each goes to the front of its list.
                back = [broker.back(life.id, self._runtime.queue, one.uuid) for one in reversed(dropped)]
                _said(run_many(self._broker, back))
                self._lapsed.popleft()

    def _abandon(self, life: Incarnation) -> None:
        """No lease may make it look alive, and without one no late CLAIM of it is granted."""
        self._store.delete(keys.lease(life.id))
        self._broker.delete(keys.lease(life.id))

    def _renew(self, life: Incarnation) -> None:
        ttl = int(self._runtime.settings.lease * 1000)
        about = self._runtime.about()
        held, took = [], []
        for server in (self._store, self._broker):
            asked = time.monotonic()
            held.append(run(server, broker.lease(life.id, about, ttl, take=False)))
            took.append(time.monotonic() - asked)
        self.round_trip = max(took)
        if not all(held):
            self._runtime.life_is_over(life)

    def _reap(self, life: Incarnation) -> float:
        """Reap whose lease is over; return in how many seconds the next one will be, unless it is renewed."""
        others = [name for name in map(text, self._broker.hkeys(keys.INCARNATIONS)) if name != life.id]
        with self._broker.pipeline(transaction=False) as pipe:
            for name in others:
                pipe.pttl(keys.lease(name))
            lefts = pipe.execute()
        for name, left in zip(others, lefts, strict=True):
            if left < 0:
                count = run(self._broker, broker.reap(name))
                if count > 0:
                    logger.warning("Worker %s is gone: returned its %d deliveries to the queue", name, count)
        return min((left for left in lefts if left >= 0), default=float("inf")) / 1000

    def _adopt(self) -> None:
        """Take over the queues of pools that served this model version with another engine and have no worker left.

        An upgrade of torch, another dtype or machine makes another pool; what was queued before must not wait for ever.
        Another version would give other output than was asked for: what waits for one is only told of.
        """
        served = set(self._broker.hvals(keys.INCARNATIONS))
        for name, about in self._store.hgetall(keys.POOLS).items():
            pool, queue = json.loads(about), text(name)
            if name in served or pool["model"] != self._runtime.model:
                continue
            if pool["version"] != self._runtime.card["version"]:
                self._tell_of(queue, pool["version"])
                continue
            count = run(self._broker, broker.adopt(queue, self._runtime.queue))
            if count > 0:
                logger.warning("Pool %s has no worker: took over its %d queued tasks", queue, count)

    def _tell_of(self, queue: str, version: str) -> None:
        """Once for each number of tasks."""
        with self._broker.pipeline(transaction=False) as pipe:
            for name, _ in broker.lists([queue]):
                pipe.llen(name)
                pipe.zcard(keys.sorted_of(name))
            pipe.zcard(keys.delayed(queue))
            count = sum(pipe.execute())
        if self._stranded.get(queue, 0) != count:
            self._stranded[queue] = count
            logger.warning(
                "%d tasks wait for version %s of model %s, which no worker serves (this one serves %s): "
                "serve that version again, or cancel them",
                count,
                version,
                self._runtime.model,
                self._runtime.card["version"],
            )

    def _end_unwanted(self) -> None:
        """Whose readers are gone, and what is too late. Gateways do this too; here it is done when none is left."""
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

    def _listen(self, life: Incarnation) -> None:
        """Words to this incarnation: a cancel should not wait for the task's next token."""
        while not self._deaf(life):
            try:
                with self._control.pubsub(ignore_subscribe_messages=True) as channel:
                    channel.subscribe(keys.control(life.id))
                    heard = asked = time.monotonic()
                    while not self._deaf(life):
                        message = channel.get_message(timeout=min(1.0, PING_S / 2))
                        now = time.monotonic()
                        if message and message["type"] == "message":
                            self._heard(text(message["data"]))
                        if message:
                            heard = now
                        elif now - heard > 2 * PING_S:
                            raise ConnectionError(f"no sign of life for {2 * PING_S:.0f} s")
                        elif now - max(heard, asked) > PING_S:
                            channel.ping()
                            asked = now
            except LOST as exc:
                complain(logger, "Lost the control channel, subscribing again: %s", exc)
                time.sleep(TICK_S)

    def _deaf(self, life: Incarnation) -> bool:
        return life.over or self._stopping

    def _heard(self, message: str) -> None:
        word, _, task_id = message.partition(" ")
        if word == "cancel":
            for delivery in list(self._runtime.deliveries.values()):
                if delivery.task_id == task_id:
                    delivery.cancelled = True
                    if delivery.uuid in self._runtime.running:  # else whoever starts it sees to it
                        self._runtime.publisher.conclude_cancelled(delivery)

    # ---- tasks ------------------------------------------------------------------------------------------------

    def server_ms(self) -> int:
        """The store's clock, in which deadlines are."""
        return int(time.time() * 1000) + self._clock_offset_ms

    def renew_soon(self) -> None:
        """What the lease says has changed."""
        with self._changed:
            self._renew_at = 0.0
            self._changed.notify_all()

    def watch_deadline(self, delivery: Delivery) -> None:
        """Of a task that runs: it is ended when its deadline passes."""
        deadline = delivery.record.time("deadline") if delivery.record else None
        if deadline is not None:
            with self._changed:
                delivery.deadline = time.monotonic() + (deadline - self.server_ms()) / 1000
                self._changed.notify_all()

    def _expire(self) -> float:
        """End what is too late; when the next of what runs will be."""
        now, nearest = time.monotonic(), float("inf")
        for delivery in list(self._runtime.running.values()):
            if delivery.deadline is None:
                continue
            if delivery.deadline <= now:
                delivery.deadline = None
                self._runtime.publisher.conclude_late(delivery)
            else:
                nearest = min(nearest, delivery.deadline)
        return nearest

    def _release_preempted(self) -> None:
        patience = self._runtime.settings.release_preempted
        late = [uuid for uuid, waited in self._runtime.engine.preempted() if waited >= patience]
        found = [d for uuid in late if (d := self._runtime.running.get(uuid)) is not None]
        if found:
            logger.info("Giving %d tasks back that were preempted for %.0f s", len(found), patience)
            for delivery in found:
                self._runtime.let_go(delivery)

    # ---- the thread -------------------------------------------------------------------------------------------

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Run `action` on this thread after `delay` seconds; it must not block."""
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + delay, next(self._order), action))
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def run(self) -> None:
        tick = min(TICK_S, self._runtime.settings.lease / 8)
        while not self._stopping:
            # First of all: a worker that starts anew finds at once what its predecessor left.
            self._guarded(self._round)
            with self._changed:
                next_due = min(self._due[0][0] if self._due else float("inf"), self._reap_at, self._expire())
                self._changed.wait(max(0.0, min(tick, next_due - time.monotonic())))
                now = time.monotonic()
                ready = []
                while self._due and self._due[0][0] <= now:
                    ready.append(heapq.heappop(self._due)[2])
            for action in ready:
                self._guarded(action)

    def _round(self) -> None:
        life, quarter = self._runtime.incarnation, self._runtime.settings.lease / 4
        self._let_lapsed_go()
        if life.over:
            return
        now = time.monotonic()
        if not life.begun or now >= self._renew_at:
            if not life.begun:
                self._announce_again()
                self.begin_life(life)
            else:
                self._renew_at = now + self._pause
                self._renew(life)
                if life.over:
                    return
                self._strays.look(life)
            if now - self._heard_at > 2 * quarter:
                # The servers were away, or we were: let the others say first that they live, if they do.
                self._reap_at = now + quarter
            self._heard_at = now
        if now >= self._reap_at:
            self._reap_at = now + self._pause
            self._reap_at = min(self._reap_at, now + self._reap(life) + REAP_AFTER_S)
            self._adopt()
            self._end_unwanted()
            self._runtime.weights = sane_weights(self._broker.hgetall(keys.WEIGHTS))
        self._release_preempted()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except LOST as exc:
            complain(logger, "Housekeeping: the store or the broker is away, trying again: %s", exc)
            self._renew_at = 0.0
            self._reap_at = max(self._reap_at, time.monotonic() + TICK_S)  # what was due is not due again at once
        except Exception:
            logger.exception("Housekeeping failed, going on")


def _said(answers: Sequence[Any]) -> None:
    """An error that is a single call's own ends that call."""
    for answer in answers:
        if isinstance(answer, Exception):
            logger.warning("A dropped delivery was not let go, its lease lapsed: %s", answer)
