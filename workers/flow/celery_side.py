"""The running batch as Celery's pool, its requests and remote control know it.

They say of a delivery: run it, acknowledge it, reject it, revoke it.

kombu's callbacks -> Request -> EnginePool -> take_job, run -> claimer
                                           -> take_beside -> a thread of the pool's own
                 -> of a kind that is unknown -> put_aside -> the queue of the next level
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from producers.broker.base import Consumer
from producers.connection.log_throttle import warn_throttled
from producers.contract import keys, levels
from producers.contract.message import id_of, is_plain
from workers.breaker.breaker import Breaker
from workers.flow.claimer import Claimer, Decode
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.plain import plain_fields
from workers.flow.publisher import Publisher
from workers.state.clock import Clock
from workers.state.delivery import Delivery, Job, Keeper
from workers.state.served import Served

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CelerySide:
    """Deliveries are named by UUID, which Celery knows as the tag. One that is not ours any more is passed over."""

    served: Served
    deliveries: Deliveries
    clock: Clock
    claimer: Claimer
    publisher: Publisher
    finisher: Finisher
    broker: Consumer
    own_breaker: Breaker
    close: Callable[[], None] = lambda: None
    """Called when Celery's worker is about to stop: nothing more is to be fetched for it."""
    stop: Callable[[bool], None] = lambda at_once: None
    """Called when it stops; returns once all is handed back."""

    # ---- the pool -------------------------------------------------------------------------------------------------

    def take_job(self, uuid: str, job: Job) -> Delivery | None:
        """Celery wants it run in the engine; None where it is not ours any more."""
        delivery = self.deliveries.held.get(uuid)
        if delivery is not None:
            delivery.job = job
            self._own(delivery, job.headers, job.headers)
        return delivery

    def run(self, delivery: Delivery) -> None:
        """Celery calls it active: it may begin."""
        self.claimer.submit(delivery)

    def take_beside(self, uuid: str) -> Delivery | None:
        """Celery wants it run on a thread; None where it is not ours any more."""
        delivery = self.deliveries.held.get(uuid)
        if delivery is not None:
            delivery.keeper = Keeper.THREAD
        return delivery

    def fail_beside(self, delivery: Delivery, reason: str) -> None:
        """Celery failed around it on a thread: it is kept as a dead letter."""
        self.deliveries.done(delivery, reason)

    @property
    def in_flight(self) -> int:
        """Deliveries in this worker's hands."""
        return len(self.deliveries)

    @property
    def capacity(self) -> int:
        """The most sequences."""
        most: int = self.served.engine.max_num_seqs
        return most

    # ---- remote control -------------------------------------------------------------------------------------------

    def scheduled(self, most: int) -> list[bytes]:
        """Messages that wait for their countdown, the soonest first."""
        return self.broker.scheduled(most)

    def breaker(self) -> dict[str, Any]:
        return self.own_breaker.to_dict()

    # ---- the consumer ---------------------------------------------------------------------------------------------

    def ack(self, uuid: str) -> None:
        """Acknowledged by Celery: an engine task's message is kept until it is settled, any other goes now."""
        delivery = self.deliveries.held.get(uuid)
        if delivery is not None and delivery.keeper is not Keeper.FLOW:
            self.deliveries.done(delivery)

    def reject(self, uuid: str, requeue: bool) -> None:
        """Refused by Celery: unknown or undecodable (kept as a dead letter), or to be run elsewhere."""
        delivery = self.deliveries.held.get(uuid)
        if delivery is None or delivery.keeper is Keeper.FLOW:
            return
        if requeue:
            self.deliveries.give_back(delivery)
        else:
            self.finisher.bury(delivery, "rejected: unknown task, or arguments that cannot be decoded")

    def put_aside(self, uuid: str, kind: str) -> None:
        """The message is of a kind of Penstock's (`penstock.*`) that this release does not know: it waits where only
        workers of a later one take from. Where nobody could end it there, its sender is told at once, and it is kept as
        a dead letter: on SQS, or if its id cannot be part of a key."""
        delivery = self.deliveries.held.get(uuid)
        if delivery is None:
            return
        if self.broker.capabilities.prunes and id_of({"id": delivery.task_id}):
            warn_throttled(logger, "Put aside for a later release: message %s, of kind %r", delivery.task_id, kind)
            home = self.served.pool.version_queue
            self.deliveries.give_back(delivery, to=levels.queue_of(home, levels.LEVEL + 1))
        else:
            self.finisher.bury(delivery, f"its kind {kind!r} is of a later release, or of none", code="release_missing")

    def forget(self, uuid: str) -> None:
        """The consumer's channel closed: what it had not yet handed to the pool goes back."""
        delivery = self.deliveries.held.get(uuid)
        if delivery is not None and delivery.keeper is Keeper.CONSUMER:
            self.finisher.let_go(delivery)

    def refuse(self, uuid: str, reason: str) -> None:
        """The message cannot be decoded: it is kept as a dead letter."""
        delivery = self.deliveries.held.get(uuid)
        if delivery is not None:
            self.finisher.bury(delivery, reason)

    def revoke(self, request: Any, expired: bool) -> None:
        """Celery revoked the task and told the result backend; the record and the engine must follow."""
        delivery = self.deliveries.held.get(request.message.delivery_tag)
        if delivery is None or delivery.put_down:
            return
        delivery.revoked = "failed" if expired else "cancelled"
        if delivery.keeper is not Keeper.FLOW:  # before the pool had it: it has no job, and needs none
            self._own(delivery, request.request_dict, request.request_dict)
            self.claimer.submit(delivery)
        elif delivery.uuid in self.deliveries.running:
            self.publisher.conclude_revoked(delivery)

    # ---- the intake -----------------------------------------------------------------------------------------------

    def condemn(self, delivery: Delivery, headers: dict[str, Any], decode: Decode) -> None:
        """Claim what killed workers before they could claim it.

        `decode` gives it to Celery, once a worker has claimed it and lived.
        """
        if headers["task"] == keys.TASK_NAME:
            self._own(delivery, headers, None)
            self.claimer.submit(delivery, decode)
        else:
            self.finisher.bury(delivery, "its workers died before they could run it")

    def unreadable(self, delivery: Delivery, reason: str) -> None:
        """Keep a message of which only the id can be read as a dead letter."""
        self.finisher.bury(delivery, reason)

    def _own(self, delivery: Delivery, headers: dict[str, Any], arguments: dict[str, Any] | None) -> None:
        """Let the pool acknowledge it from now on. `arguments`: see `plain_fields`."""
        delivery.keeper = Keeper.FLOW
        if is_plain(headers):
            delivery.plain = plain_fields(self.served, self.clock.server_ms(), headers, arguments)
