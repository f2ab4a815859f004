"""Shows Celery's monitors the tasks in which Celery has no part (`producers.contract.message.is_native`).

Those pass Celery's consumer, pool and tracer by. Celery's books hear of one only when somebody looks: remote control
gets the requests that Celery would have made (`show`), and monitors that listen get its events, in batches, from the
event loop (`send`). A fault of the engine makes its request, too, for Celery's retry (`job`).
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Final

from celery import Celery
from celery.app import trace as tracing
from celery.worker import state
from kombu import Message

from producers.contract import keys
from producers.contract.message import NATIVE_BODY
from producers.contract.stream import failure
from workers.flow.deliveries import Deliveries
from workers.state.delivery import Delivery, Job

#: Statuses in which a task has its output.
SUCCEEDED: Final = ("completed", "incomplete")
#: Events that wait for the event loop at most; beyond that the oldest are dropped, as the server drops those of a
#: monitor that does not read.
WAITING: Final = 10_000
#: The process id that Celery shows, and hands back to `terminate_job`: one that no process can have.
NO_PROCESS: Final = (1 << 40) - 1


class Monitors:
    """`name`: the worker's, as Celery shows it. `nudge` wakes the event loop, from any thread."""

    def __init__(self, app: Celery, deliveries: Deliveries, name: str) -> None:
        self._app = app
        self._deliveries = deliveries
        self._name = name
        self._events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=WAITING)
        self._nudged = False
        self.nudge: Callable[[], None] = lambda: None
        self.eventer: Any = None
        """Celery's event dispatcher; another one after each connection, None before the first."""
        self.begun_count = 0
        """How many such tasks this worker has taken."""

    # ---- events ---------------------------------------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        """Whether a monitor, or the worker's option, has turned on the events of tasks."""
        eventer = self.eventer
        return eventer is not None and eventer.enabled and (not eventer.groups or "task" in eventer.groups)

    def begun(self, delivery: Delivery) -> None:
        """It is taken, and about to be claimed. The intake's thread alone."""
        self.begun_count += 1
        if self.listening and delivery.native is not None:
            headers = delivery.native.payload["headers"]
            fields = {name: headers.get(name) for name in ("root_id", "parent_id", "eta", "expires")}
            shown = {"args": headers.get("argsrepr", ""), "kwargs": headers.get("kwargsrepr", "")}
            self._tell("task-received", delivery, name=keys.TASK_NAME, retries=0, **shown, **fields)
            self._tell("task-started", delivery)

    def ended(self, delivery: Delivery, status: str, error: str, at: float) -> None:
        """Tells log and monitors of an end, as Celery does. `error`: JSON; `at`: when it ended (monotonic). Any
        thread."""
        if delivery.revoked or not (self.listening or tracing.logger.isEnabledFor(logging.INFO)):
            return  # Celery has announced its revocation itself
        name, runtime = keys.TASK_NAME, runtime_s(delivery, at)
        if status in SUCCEEDED:
            result = repr(status)
            fields = {"id": delivery.task_id, "name": name, "runtime": runtime, "return_value": result}
            tracing.info(tracing.LOG_SUCCESS, fields)
            self._tell("task-succeeded", delivery, result=result, runtime=runtime)
        elif status == "cancelled":
            self._tell("task-revoked", delivery, terminated=True, signum=None, expired=False)
        else:
            record = delivery.record
            failed = failure(json.loads(error) or (record.json("error") if record else None))
            tracing.logger.info("Task %s[%s] failed: %r", name, delivery.task_id, failed)
            self._tell("task-failed", delivery, exception=repr(failed), traceback="")

    def _tell(self, kind: str, delivery: Delivery, **fields: Any) -> None:
        if not self.listening:
            return
        self._events.append((kind, {"uuid": delivery.task_id, "timestamp": time.time(), **fields}))
        if not self._nudged:
            self._nudged = True
            self.nudge()

    def send(self) -> None:
        """Send what waits; runs in the event loop, where Celery's dispatcher makes batches of it."""
        self._nudged = False  # first: what is appended from now on is seen below, or nudges again
        while self._events:
            kind, fields = self._events.popleft()
            if self.eventer is not None:
                self.eventer.send(kind, **fields)

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def unseen(self) -> int:
        """How many such tasks are in this worker's hands that Celery's books do not have."""
        return sum(self._hidden(delivery) for delivery in list(self._deliveries.by_uuid.values()))

    def show(self, task_ids: Collection[str] | None = None) -> None:
        """Enter tasks in this worker's hands into Celery's books as active, those of these ids or all; they leave with
        their delivery. The event loop alone."""
        for delivery in list(self._deliveries.by_uuid.values()):
            if not self._hidden(delivery) or not (task_ids is None or delivery.task_id in task_ids):
                continue
            job = self.job(delivery)
            with self._deliveries.changed:
                if delivery.put_down or delivery.job is not None:
                    continue
                delivery.job = job
                state.task_reserved(job.request)
                state.active_requests.add(job.request)

    @staticmethod
    def _hidden(delivery: Delivery) -> bool:
        return delivery.native is not None and delivery.job is None

    def job(self, delivery: Delivery) -> Job:
        """Makes Celery's side of a native delivery. Any thread."""
        native, app = delivery.native, self._app
        assert native is not None
        properties = native.payload["properties"] | {"delivery_tag": delivery.uuid, "priority": native.priority}
        task, hostname = app.tasks[keys.TASK_NAME], f"penstock@{self._name}"
        message = Message(
            body=NATIVE_BODY,
            delivery_tag=delivery.uuid,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_info=properties.get("delivery_info"),
            properties=properties,
            headers=native.payload["headers"],
            accept={"application/json"},
        )
        request = task.Request(
            message, app=app, hostname=hostname, eventer=self.eventer, task=task, utc=app.uses_utc_timezone()
        )
        request.time_start, request.worker_pid = time.time() - (time.monotonic() - native.at), NO_PROCESS
        tracer = tracing.fast_trace_task if app.use_fast_trace_task else tracing.trace_task_ret
        arguments = (keys.TASK_NAME, request.id, request.request_dict, message.payload, None, None)
        return Job(tracer, arguments, request.on_success, request)


def runtime_s(delivery: Delivery, at: float) -> float:
    """Returns the time (s) for which the task ran: in this worker until `at` (monotonic), or from its first start to
    its end if another worker has ended it."""
    record, began_at = delivery.record, delivery.began_at
    if record is not None and record.final:
        started, finished = record.time("started"), record.time("finished")
        return 0.0 if started is None or finished is None else (finished - started) / 1000
    return at - began_at if began_at else 0.0
