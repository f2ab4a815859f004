"""The running batch, as Celery's pool, its requests and remote control know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from celery import Celery

from workers.state.delivery import Delivery, Job


class Batch(Protocol):
    """The engine's running batch, whose sequences are the pool's slots. A delivery is named by its UUID."""

    @property
    def capacity(self) -> int:
        """The most sequences."""

    @property
    def in_flight(self) -> int:
        """Deliveries in this worker's hands."""

    def take_job(self, uuid: str, job: Job) -> Delivery | None:
        """Celery wants it run in the engine; None where the delivery is not ours any more."""

    def run(self, delivery: Delivery) -> None:
        """Celery calls it active: it may begin."""

    def take_beside(self, uuid: str) -> Delivery | None:
        """Celery wants it run on a thread; None where the delivery is not ours any more."""

    def ack(self, uuid: str) -> None:
        """What ran on a thread is done."""

    def reject(self, uuid: str, requeue: bool) -> None:
        """It is to be run elsewhere, or is kept as a dead letter."""

    def fail_beside(self, delivery: Delivery, reason: str) -> None:
        """Celery failed around it on a thread: it is kept as a dead letter."""

    def revoke(self, request: Any, expired: bool) -> None:
        """Celery revoked the task and told the result backend."""

    def close(self) -> None:
        """Fetch no more: Celery's worker is about to stop."""

    def stop(self, at_once: bool, /) -> None:
        """Drain. Returns once all is handed back."""

    def scheduled(self, most: int) -> Sequence[bytes]:
        """Messages that wait for their countdown, the soonest first."""

    def breaker(self) -> dict[str, Any]:
        """State and figures of the worker's breaker."""


def batch_of(app: Celery) -> Batch:
    """The batch that `workers.pool.app.attach` gave the application."""
    batch: Batch = app.penstock
    return batch
