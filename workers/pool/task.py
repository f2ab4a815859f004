"""The Celery task `penstock.generate`: its body runs when the engine is done, and passes on what the engine made."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from celery import Celery, Task
from celery.worker.request import Request

from producers.contract.keys import TASK_NAME
from producers.errors import TaskFailed
from workers.flow.finisher import OUTCOME, Fault

if TYPE_CHECKING:
    from workers.flow.celery_side import CelerySide

#: Before a task that the engine failed is tried again, seconds; doubled each time.
RETRY_COUNTDOWN_S = 1.0
#: One lock for all requests: it is held for microseconds.
_acknowledging = threading.RLock()


def batch_of(app: Celery) -> CelerySide:
    """The batch that `workers.pool.app.attach` gave the application."""
    batch: CelerySide = app.penstock
    return batch


class EngineRequest(Request):
    """Celery's request, taught that revoking a task must reach its record and the engine. Everything else is stock."""

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)
        batch_of(self._app).revoke(self, expired)

    def acknowledge(self) -> None:
        """Acknowledge once, from whichever thread comes first.

        A lease may end while the finisher acknowledges, and Celery's worker exits at a second acknowledgement.
        """
        with _acknowledging:
            super().acknowledge()

    def reject(self, requeue: bool = False) -> None:
        """Reject once, as `acknowledge`."""
        with _acknowledging:
            super().reject(requeue)


class EngineTask(Task):
    """Run by `EnginePool` in the engine; any other task of the app runs on a thread beside it."""

    abstract = True
    engine_task = True
    acks_late = True
    Request = EngineRequest


def register(app: Celery, max_retries: int) -> None:
    """Add `penstock.generate` to the app."""

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:  # what is wrong with `args` is the outcome's to say
        outcome = getattr(self.request, OUTCOME, None)
        if outcome is None:
            raise RuntimeError(f"{TASK_NAME} runs in a Penstock worker only (EnginePool), not here")
        if isinstance(outcome, Fault):
            headers = {"penstock": said} if (said := getattr(self.request, "penstock", None)) else {}
            countdown = RETRY_COUNTDOWN_S * 2**self.request.retries
            raise self.retry(exc=outcome, countdown=countdown, headers=headers)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    app.task(
        generate,
        name=TASK_NAME,
        bind=True,
        base=EngineTask,
        max_retries=max_retries,
        shared=False,
        throws=(TaskFailed,),
    )
