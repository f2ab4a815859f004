"""Takes what Celery says of a delivery: run it, acknowledge it, reject it, revoke it.

kombu's callbacks -> Request -> EnginePool -> take_job, run -> claimer
                                           -> take_beside -> a thread of the pool's own
"""

from __future__ import annotations

from typing import Any

from producers.contract import keys
from producers.contract.message import is_plain
from workers.flow.claimer import Claimer, Decode
from workers.flow.deliveries import Deliveries
from workers.flow.finisher import Finisher
from workers.flow.plain import plain_fields
from workers.flow.publisher import Publisher
from workers.state.clock import Clock
from workers.state.delivery import Delivery, Job
from workers.state.served import Served


class CelerySide:
    """Deliveries are named by UUID, which Celery knows as the tag. One that is not ours any more is passed over."""

    def __init__(
        self,
        served: Served,
        deliveries: Deliveries,
        clock: Clock,
        claimer: Claimer,
        publisher: Publisher,
        finisher: Finisher,
    ) -> None:
        self._served = served
        self._deliveries = deliveries
        self._clock = clock
        self._claimer = claimer
        self._publisher = publisher
        self._finisher = finisher

    # ---- the pool -------------------------------------------------------------------------------------------------

    def take_job(self, uuid: str, job: Job) -> Delivery | None:
        """Celery has decoded the message and wants it run; None where the delivery is not ours any more."""
        delivery = self._deliveries.held.get(uuid)
        if delivery is not None:
            delivery.job = job
            self._own(delivery, job.headers, job.headers)
        return delivery

    def run(self, delivery: Delivery) -> None:
        """Celery calls it active: it may begin."""
        self._claimer.submit(delivery)

    def take_beside(self, uuid: str) -> Delivery | None:
        """Celery wants it run on a thread; None where the delivery is not ours any more."""
        delivery = self._deliveries.held.get(uuid)
        if delivery is not None:
            delivery.beside = True
        return delivery

    # ---- the consumer ---------------------------------------------------------------------------------------------

    def ack(self, uuid: str) -> None:
        """Acknowledged by Celery: an engine task's message is kept until it is settled, any other goes now."""
        delivery = self._deliveries.held.get(uuid)
        if delivery is not None and not delivery.owned:
            self._deliveries.done(delivery)

    def reject(self, uuid: str, requeue: bool) -> None:
        """Refused by Celery: unknown or undecodable (kept as a dead letter), or to be run elsewhere."""
        delivery = self._deliveries.held.get(uuid)
        if delivery is None or delivery.owned:
            return
        if requeue:
            self._deliveries.give_back(delivery)
        else:
            self._finisher.bury(delivery, "rejected: unknown task, or arguments that cannot be decoded")

    def forget(self, uuid: str) -> None:
        """The consumer's channel closed: what it had not yet handed to the pool goes back."""
        delivery = self._deliveries.held.get(uuid)
        if delivery is not None and not delivery.owned and not delivery.beside:
            self._finisher.let_go(delivery)

    def refuse(self, uuid: str, reason: str) -> None:
        """The message cannot be decoded: it is kept as a dead letter."""
        delivery = self._deliveries.held.get(uuid)
        if delivery is not None:
            self._finisher.bury(delivery, reason)

    def revoke(self, request: Any, expired: bool) -> None:
        """Celery revoked the task and told the result backend; the record and the engine must follow."""
        delivery = self._deliveries.held.get(request.message.delivery_tag)
        if delivery is None or delivery.put_down:
            return
        delivery.revoked = True
        delivery.revoked_expired = expired
        if not delivery.owned:  # before the pool had it: it has no job, and needs none
            self._own(delivery, request.request_dict, request.request_dict)
            self._claimer.submit(delivery)
        elif delivery.uuid in self._deliveries.running:
            self._publisher.conclude_revoked(delivery)

    # ---- the intake -----------------------------------------------------------------------------------------------

    def condemn(self, delivery: Delivery, headers: dict[str, Any], decode: Decode) -> None:
        """Claim what killed workers before they could claim it.

        `decode` gives it to Celery, once a worker has claimed it and lived.
        """
        if headers["task"] == keys.TASK_NAME:
            self._own(delivery, headers, None)
            self._claimer.submit(delivery, decode)
        else:
            self._finisher.bury(delivery, "its workers died before they could run it")

    def unreadable(self, delivery: Delivery, reason: str) -> None:
        """Keep a message of which only the id can be read as a dead letter."""
        self._finisher.bury(delivery, reason)

    def _own(self, delivery: Delivery, headers: dict[str, Any], arguments: dict[str, Any] | None) -> None:
        """Let the pool acknowledge it from now on. `arguments`: see `plain_fields`."""
        delivery.owned = True
        if is_plain(headers):
            delivery.plain = plain_fields(self._served, self._clock.server_ms(), headers, arguments)
