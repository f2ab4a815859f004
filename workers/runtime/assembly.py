"""What one worker process holds, and who does what with it.

    Intake -> (event loop: Celery's consumer) -> EnginePool -> Claimer -> engine -> Publisher -> Finisher -> Courier
    FETCH                                                      CLAIM               APPEND,      tracer,     ACK, BACK
                                                                                   FINISH       SETTLE

Each arrow is a queue between two threads. A delivery is in exactly one place, and is put down exactly once: settled and
acknowledged, released and given back, or dropped because its incarnation is over (then REAP returns it).
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from celery.worker import state

from producers.contract import keys
from producers.contract.message import is_plain
from workers.flow.acker import Courier
from workers.flow.claimer import Claimer
from workers.flow.delivery import Delivery, Job, forget
from workers.flow.finisher import Finisher
from workers.flow.intake import Arrival, Intake
from workers.flow.ledger import Ledger, Size
from workers.flow.publisher import Publisher
from workers.leases.housekeeper import Housekeeper
from workers.leases.incarnation import Incarnation
from workers.pool.plain import plain_fields
from workers.runtime.drain import Drain
from workers.runtime.gpu_facts import GpuFacts
from workers.runtime.watchdog import Watchdog
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)

#: What CUDA says (cudaErrorECCUncorrectable) to a process that has met memory which could not be corrected.
ECC_ERROR = "uncorrectable ECC error"


class Runtime:
    """`engine` behaves like `engine.Engine`; `card` is its model's, `queue` the pool's own, `app` the Celery app,
    `files` what was announced with the card."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Any,
        app: Any,
        card: dict[str, Any],
        queue: str,
        files: dict[str, bytes],
    ) -> None:
        self.settings = settings
        self.engine = engine
        self.app = app
        self.card = card
        self.queue = queue
        self.files = files
        self.model: str = card["name"]
        self.queues = [queue, keys.model_queue(self.model)]
        self.incarnation = Incarnation(settings.name)
        self.deliveries: dict[str, Delivery] = {}
        self.running: dict[str, Delivery] = {}
        self.draining = False
        self.drain = Drain(self)
        self.weights: dict[str, float] = {}
        """Tenants' shares, where they are not 1; as last read from the broker."""
        self._lock = threading.RLock()
        self.ledger = Ledger((engine.max_num_seqs, engine.kv_tokens_total))
        self.courier = Courier(settings.broker, queue)
        self.intake = Intake(settings, self.queues, self.ledger, self.courier, self)
        self.finisher = Finisher(self)
        self.publisher = Publisher(self)
        self.claimer = Claimer(self)
        self.housekeeper = Housekeeper(self)
        self.gpu = GpuFacts(engine.stats().device)
        self.watchdog = Watchdog(self)
        self.given_up = ""
        engine.on_lost = self._device_lost
        engine.on_step = self.publisher.on_step

    def start(self) -> None:
        """Raises redis errors when broker or store cannot be reached: a worker without a lease must not begin."""
        self.housekeeper.begin_life(self.incarnation)
        self.gpu.start()
        for thread in (self.courier, self.finisher, self.publisher, self.claimer, self.housekeeper, self.intake):
            thread.start()
        self.watchdog.start()

    # ---- arrivals ---------------------------------------------------------------------------------------------

    def arrived(self, arrival: Arrival, size: Size) -> bool:
        """Enter a fetched message into the books; False for one that must be claimed before it may be decoded."""
        one, headers = arrival.fetched, arrival.payload["headers"]
        delivery = Delivery(one.uuid, headers["id"], arrival.incarnation, condemned=one.condemned)
        with self._lock:
            if arrival.incarnation.over:
                return False
            self.ledger.hold(one.uuid, size)
            self.deliveries[one.uuid] = delivery
        if one.condemned and headers["task"] == keys.TASK_NAME:
            delivery.owned = True
            if is_plain(headers):
                delivery.plain = plain_fields(self, headers, None)
            self.claimer.submit(delivery, arrival)
            return False
        if one.condemned:
            self.finisher.bury(delivery, "its workers died before they could run it")
            return False
        return True

    def take_job(self, uuid: str, job: Job) -> Delivery | None:
        """Celery has decoded the message and wants it run; None where the delivery is not ours any more."""
        delivery = self.deliveries.get(uuid)
        if delivery is None:
            return None
        delivery.job = job
        delivery.owned = True
        if is_plain(job.headers):
            delivery.plain = plain_fields(self, job.headers, job.headers)
        return delivery

    def take_beside(self, uuid: str) -> Delivery | None:
        """Celery wants it run on a thread; None where the delivery is not ours any more."""
        delivery = self.deliveries.get(uuid)
        if delivery is not None:
            delivery.beside = True
        return delivery

    # ---- what Celery says of a delivery ---------------------------------------------------------------------------

    def celery_ack(self, uuid: str) -> None:
        """Acknowledged by Celery: an engine task's message is kept until it is settled, any other goes now."""
        delivery = self.deliveries.get(uuid)
        if delivery is not None and not delivery.owned:
            self.done(delivery)

    def celery_reject(self, uuid: str, requeue: bool) -> None:
        """Refused by Celery: unknown or undecodable (kept as a dead letter), or to be run elsewhere."""
        delivery = self.deliveries.get(uuid)
        if delivery is None or delivery.owned:
            return
        if requeue:
            self.give_back(delivery)
        else:
            self.finisher.bury(delivery, "rejected: unknown task, or arguments that cannot be decoded")

    def refused(self, uuid: str, reason: str) -> None:
        """The message cannot be decoded: it is kept as a dead letter."""
        delivery = self.deliveries.get(uuid)
        if delivery is not None:
            self.finisher.bury(delivery, reason)

    def unreadable(self, incarnation: Incarnation, uuid: str, task_id: str, reason: str) -> None:
        """No more than its id can be read: it is kept as a dead letter."""
        self.finisher.bury(Delivery(uuid, task_id, incarnation), reason)

    def loop_answers(self) -> None:
        """The event loop runs."""
        self.watchdog.loop_answers()

    def celery_forgets(self, uuid: str) -> None:
        """The consumer's channel closed: what it had not yet handed to the pool goes back."""
        delivery = self.deliveries.get(uuid)
        if delivery is not None and not delivery.owned and not delivery.beside:
            self.let_go(delivery)

    def revoke(self, request: Any, expired: bool) -> None:
        """Celery revoked the task and told the result backend; the record and the engine must follow."""
        delivery = self.deliveries.get(request.message.delivery_tag)
        if delivery is None or delivery.put_down:
            return
        delivery.revoked = True
        delivery.revoked_expired = expired
        if not delivery.owned:  # before the pool had it: it has no job, and needs none
            delivery.owned = True
            if is_plain(request.request_dict):
                delivery.plain = plain_fields(self, request.request_dict, request.request_dict)
            self.claimer.submit(delivery)
        elif delivery.uuid in self.running:
            self.publisher.conclude_revoked(delivery)

    # ---- putting down ---------------------------------------------------------------------------------------------

    def _put_down(self, delivery: Delivery, errand: Callable[[], None]) -> None:
        """Take it out of the books, once. The errand is on its way before that is seen: a drain waits for empty books,
        and what is in flight then without one is reaped."""
        with self._lock:
            if delivery.put_down:
                return
            delivery.put_down = True
            self.running.pop(delivery.uuid, None)
        errand()
        with self._lock:
            self.deliveries.pop(delivery.uuid, None)
        self.ledger.release(delivery.uuid)
        self.claimer.room()
        self.drain.put_down()
        if delivery.job is not None:
            forget(delivery.job.request)

    def done(self, delivery: Delivery, reason: str = "", *, settled: bool = False) -> None:
        """ACK: nobody needs the message any more. `settled`: because its task is, or has no record."""
        task = delivery.task_id if settled else ""
        ack = partial(self.courier.ack, delivery.incarnation, delivery.uuid, reason, delivery.used, task)
        self._put_down(delivery, ack)

    def give_back(self, delivery: Delivery, delay: float = 0.0) -> None:
        """BACK: another worker's, or nobody's yet. What was claimed must be released first (`let_go`)."""
        self._put_down(delivery, lambda: self.courier.back(delivery.incarnation, delivery.uuid, delay))

    def let_go(self, delivery: Delivery, delay: float = 0.0) -> None:
        """The engine stops; RELEASE if it was claimed (it does nothing where the claim is another's by now); BACK."""
        if self.running.pop(delivery.uuid, None):
            self.engine.abort(delivery.uuid)
        delivery.ended = True
        if delivery.record is None:
            self.give_back(delivery, delay)
        else:
            self.finisher.release(delivery, delay)

    def life_is_over(self, incarnation: Incarnation) -> None:
        """Our lease is gone: drop everything at once (others may hold it by now) and begin anew.

        Where the store was away, or we were stopped, nobody may have taken it up yet: then it is let go first, so that
        no death is counted (`Housekeeper.lapsed`).
        """
        with self._lock:
            if incarnation.over or incarnation is not self.incarnation:
                return
            incarnation.over = True
            dropped = list(self.deliveries.values())
            running = list(self.running)
            for delivery in dropped:
                delivery.put_down = True
            self.deliveries.clear()
            self.running.clear()
            self.ledger.clear()
        self.drain.put_down()
        logger.warning("The lease of %s lapsed: dropping %d deliveries, beginning anew", incarnation.id, len(dropped))
        for uuid in running:
            self.engine.abort(uuid)
        self.claimer.forget_suspects()
        for delivery in dropped:
            if delivery.job is not None:
                forget(delivery.job.request)
        self.housekeeper.lapsed(incarnation, dropped)
        if not self.draining:
            self.incarnation = Incarnation(self.settings.name)  # the housekeeper takes its lease on its next round

    # ---- shutdown ---------------------------------------------------------------------------------------------

    def stop_fetching(self) -> None:
        self.draining = True
        self.intake.stop()

    def stop(self, seconds: float, why: str, status: int = 0, suspects: Collection[str] | None = frozenset()) -> None:
        """End this worker: drain for at most `seconds`, then exit. Any thread; again, to make it shorter."""
        state.should_stop = state.should_stop or 0
        self.drain.begin(seconds, why, status, suspects)
        self.intake.nudge()

    def notice(self, left: float, why: str) -> None:
        """The machine is to be taken away in `left` seconds. Any thread."""
        self.stop(min(left, self.settings.drain), why)

    def give_up(self, why: str, suspects: Collection[str] | None) -> None:
        """This process is broken: hand its tasks over, end it with a status that says so. Any thread.

        `suspects`: see `Drain.begin`. What is broken cannot be stopped, but nothing that it does later counts: its
        requests are dropped, its claims released or its incarnation over.
        """
        if not self.given_up:
            self.given_up = why
            logger.critical("Giving this worker up: %s", why)
            self.housekeeper.renew_soon()
            self.stop(0.0, why, os.EX_SOFTWARE, suspects)

    def _device_lost(self, why: str, suspects: set[str]) -> None:
        """No task is to blame for memory that failed."""
        self.give_up(f"the device is lost: {why}", frozenset() if ECC_ERROR in why else suspects)

    def unready(self) -> list[str]:
        """Why it takes no tasks; empty where it does."""
        found = self.faults()
        if self.draining:
            found.append("it drains")
        elif not self.incarnation.begun or self.incarnation.over:
            found.append("it has no lease: the store or the broker does not answer")
        return found

    def faults(self) -> list[str]:
        """What is wrong with it."""
        return [*([self.given_up] if self.given_up else []), *self.watchdog.reasons]

    def later(self, delay: float, action: Callable[[], None]) -> None:
        """Run `action` after a while on the housekeeper's thread."""
        self.housekeeper.later(delay, action)

    def __json__(self) -> str:
        """As `inspect stats` shows the transport's options, of which this is one."""
        return self.settings.name

    def about(self) -> str:
        """What the lease says of this worker (JSON)."""
        stats, gpu = self.engine.stats(), self.gpu.latest
        return json.dumps(
            {
                "worker": self.settings.name,
                "queue": self.queue,
                "model": self.model,
                "version": self.card["version"],
                "tasks": len(self.deliveries),
                "draining": self.draining,
                "unready": self.faults(),
                "capacity": self.engine.max_num_seqs,
                "running": stats.running,
                "waiting": stats.waiting,
                "kv_blocks_used": stats.kv_blocks_used,
                "kv_blocks_most": stats.kv_blocks_most,
                "kv_blocks_total": stats.kv_blocks_total,
                "steps": stats.steps,
                "prompt_tokens": stats.prompt_tokens,
                "cached_tokens": stats.cached_tokens,
                "generated_tokens": stats.generated_tokens,
                "preemptions": stats.preemptions,
                "out_of_memory": stats.out_of_memory,
                "not_finite": stats.not_finite,
                "drafted": stats.drafted,
                "draft_accepted": stats.draft_accepted,
                **({} if gpu is None else {"gpu": gpu}),
            }
        )
