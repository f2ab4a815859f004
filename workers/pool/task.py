"""The Celery task `penstock.generate`: its body runs when the engine is done, and passes on what the engine made."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task

from producers.contract.keys import TASK_NAME
from producers.errors import TaskFailed
from workers.flow.finisher import OUTCOME, Fault

#: Before a task that the engine failed is tried again, seconds; doubled each time.
RETRY_COUNTDOWN_S = 1.0


class EngineTask(Task):
    """Run by `EnginePool` in the engine; any other task of the app runs on a thread beside it."""

    abstract = True
    engine_task = True
    acks_late = True
    Request = "workers.pool.request:EngineRequest"


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
