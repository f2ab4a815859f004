"""EnginePool: a Celery pool whose slots are sequences of the running batch. No thread waits per task.

The stock tracer (`celery.app.trace`) is a synchronous function around the task's body. It runs when the engine is done,
with a body that returns or raises what the engine made: so the result backend, events, signals, retries, links and
chords are all stock code. Tasks that are not the engine's run on a few threads beside it.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.concurrency.base import BasePool, apply_target

from workers.pool.app import batch_of
from workers.state.delivery import Delivery, Job, forget

if TYPE_CHECKING:
    from workers.flow.celery_side import CelerySide

logger = logging.getLogger(__name__)

#: Threads for tasks that are not the engine's.
SIDE_THREADS = 4


class EnginePool(BasePool):
    """Built by Celery."""

    signal_safe = False
    body_can_be_buffer = True
    task_join_will_block = False

    def on_start(self) -> None:
        # ids that can never be a process': Celery hands them back to terminate_job
        self._pids = itertools.count(1 << 40)
        self._beside: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for k in range(SIDE_THREADS):  # daemons: a task that outlasts the drain must not keep the process
            threading.Thread(target=self._side_thread, name=f"penstock-side-{k}", daemon=True).start()

    @property
    def batch(self) -> CelerySide:
        return batch_of(self.app)

    def on_apply(
        self,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        **_: Any,
    ) -> Delivery | None:
        assert callback is not None, "celery.worker.request passes it"
        assert accept_callback is not None, "celery.worker.request passes it"
        name, headers = args[0], args[2]
        uuid = headers["properties"]["delivery_tag"]
        request = accept_callback.__self__  # type: ignore[attr-defined]
        if not getattr(self.app.tasks[name], "engine_task", False):
            side = self.batch.take_beside(uuid)
            if side is None:
                forget(request)
            else:
                self._beside.put(partial(self._run_beside, side, target, args, callback, accept_callback, request))
            return None
        # The tracer would decode the body again, which the consumer has done: without a content type it takes it as is.
        args = (name, args[1], headers, request.message.payload, None, None)
        delivery = self.batch.take_job(uuid, Job(target, args, callback, request))
        # Active from here on, so that `inspect` shows it. A request terminated before it came here is revoked at once.
        accept_callback(next(self._pids), time.monotonic())
        if delivery is None:
            forget(request)
        else:
            self.batch.run(delivery)
        return delivery

    def _side_thread(self) -> None:
        while True:
            self._beside.get()()

    def _run_beside(
        self,
        delivery: Delivery,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        callback: Callable[..., Any],
        accept_callback: Callable[..., Any],
        request: Any,
    ) -> None:
        """Acknowledges and rejects at once: Celery leaves both to the event loop, which nobody runs at shutdown."""
        if delivery.put_down:
            forget(request)
            return

        def reject(log: Any, errors: Any, requeue: bool) -> None:
            self.batch.reject(delivery.uuid, requeue)
            on_reject(log, errors, requeue)

        on_reject, request.on_reject = request.on_reject, reject
        try:
            apply_target(target, args, {}, callback, accept_callback)
        except BaseException as exc:  # a task that exits must not take the thread along
            logger.exception("Celery failed around task %s", delivery.task_id)
            self.batch.fail_beside(delivery, f"Celery failed around it: {exc!r}")
            forget(request)
        if request.acknowledged:
            self.batch.ack(delivery.uuid)

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Do nothing: Celery announces the revocation next, and `EngineRequest` passes that on."""

    def on_close(self) -> None:
        self.batch.close()

    def on_stop(self) -> None:
        """Drain; whoever told the worker to stop (`workers.runtime.signals`) has begun that."""
        self.batch.stop(False)

    def on_terminate(self) -> None:
        self.batch.stop(True)

    @property
    def num_processes(self) -> int:
        return self.batch.capacity

    def _get_info(self) -> dict[str, Any]:
        return {**super()._get_info(), "max-concurrency": self.num_processes, "in-flight": self.batch.in_flight}
