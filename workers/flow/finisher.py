"""After a won FINISH: runs Celery's stock tracer (result, events, links, chords), then SETTLE, then ACK. A task in
which Celery has no part is settled by FINISH, or by a CLAIM that ended it and SETTLE; monitors are told of it.

A worker that dies in here leaves a task that is final but not settled: whoever gets its message runs the tracer from
the record, never the engine. So links are sent at least once, and the output is made exactly once.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from celery import Celery, states
from celery.exceptions import Reject
from kombu.exceptions import OperationalError

from producers.connection.log_throttle import warn_throttled
from producers.connection.script import Call, run_many
from producers.contract import keys
from producers.contract.record import Record, error_json
from producers.contract.stream import collect, failure, summary
from producers.errors import PenstockError, ResultUnavailable, TaskFailed, TaskNotFound
from producers.store.protocol import release, settle
from workers.connect import LOST, connect
from workers.flow.deliveries import Deliveries
from workers.flow.monitors import Monitors, runtime_s
from workers.flow.stream import read_stream
from workers.state.clock import Clock
from workers.state.delivery import Delivery, Job
from workers.state.served import Served

logger = logging.getLogger(__name__)

#: The request header in which it leaves what the body of its task is to return or raise.
OUTCOME = "penstock_outcome"
BATCH = 256
#: Endings that are no final status: published again by Celery's retry; handed back; kept as a dead letter; deleted; the
#: message of a settled plain task.
RETRY, BACK, DEAD, ERASED, AGAIN = "retry", "back", "dead", "erased", "again"
RETRY_S = 1.0
#: Longest time (s) for reading a task's output back.
READ_S = 30.0
#: Times that Celery's side of a task may fail, other than by a server that is away.
MAX_FAILURES = 3
AWAY = (*LOST, OperationalError)


class Fault(PenstockError):
    """The engine failed the task, maybe through no fault of the task's: it is worth another try."""


@dataclass(slots=True)
class _Ending:
    delivery: Delivery
    status: str
    error: str = "null"
    delay: float = 0.0
    """Seconds before the message is fetched again, if it goes back."""
    traced: bool = False
    failures: int = 0
    reason: str = ""
    """The reason to keep the message as a dead letter; empty: it is acknowledged."""
    claimed: bool = True
    """The claim may be ours: put down without SETTLE or RELEASE, a copy of its message would wait for it for ever."""
    why: str = ""
    """Why it goes back, for the task's explanation."""
    otherwise: Callable[[], None] | None = None
    """Called if a copy for Celery's retry cannot be sent."""
    at: float = field(default_factory=time.monotonic)
    """When it ended (monotonic)."""


class Finisher(threading.Thread):
    """`clock` brings back endings that Celery's side could not take just now."""

    def __init__(self, served: Served, app: Celery, deliveries: Deliveries, clock: Clock, monitors: Monitors) -> None:
        super().__init__(name="penstock-finisher", daemon=True)
        self._app = app
        self._deliveries = deliveries
        self._clock = clock
        self._monitors = monitors
        self._settings = served.settings
        self._max_retries = served.settings.max_retries
        self.redis = connect(served.settings.store)
        self._queue: queue.SimpleQueue[_Ending | None] = queue.SimpleQueue()

    def finish(self, delivery: Delivery, status: str, error: str = "null") -> None:
        """The record is final with this status, and the claim is ours."""
        self._queue.put(_Ending(delivery, status, error))

    def settled(self, delivery: Delivery, status: str, error: str) -> None:
        """The record is final and settled, and Celery has no part in the task. Any thread."""
        self._deliveries.done(delivery, settled=True)
        try:
            self._monitors.ended(delivery, status, error, time.monotonic())
        except Exception:  # the ends of other tasks wait behind it
            logger.exception("Monitors are not told how task %s ended", delivery.task_id, extra=delivery.subject)

    def may_retry(self, delivery: Delivery) -> bool:
        """Whether Celery has a try left. Of a condemned message there is nothing to publish again."""
        if delivery.native is not None:
            return self._max_retries > 0
        job = delivery.job
        return job is not None and (job.headers.get("retries") or 0) < self._max_retries

    def retry(self, delivery: Delivery, message: str, otherwise: Callable[[], None]) -> None:
        """Retries a task that the engine failed and whose record is not final: publishes a copy, then RELEASE and ACK.
        Calls `otherwise` if no copy can be published."""
        self._queue.put(_Ending(delivery, RETRY, message, why="failed", otherwise=otherwise))

    def release(self, delivery: Delivery, delay: float = 0.0, why: str = "") -> None:
        """Sends RELEASE, then BACK. The next worker that claims the task continues from its next token."""
        self._queue.put(_Ending(delivery, BACK, delay=delay, traced=True, why=why))

    def let_go(self, delivery: Delivery, delay: float = 0.0, why: str = "") -> None:
        """Stops the engine's work on a delivery; RELEASE if it was claimed (without effect if the claim is another's by
        now); BACK."""
        self._deliveries.end(delivery)
        if delivery.record is None:
            self._deliveries.give_back(delivery, delay)
        else:
            self.release(delivery, delay, why)

    def bury(self, delivery: Delivery, reason: str, *, claimed: bool = False, code: str = "dead_lettered") -> None:
        """Keeps a message as a dead letter, as there is no record that could be finished: an error becomes the task's
        result, RELEASE ends what was `claimed` with it, then ACK."""
        self._deliveries.end(delivery)
        self._queue.put(_Ending(delivery, DEAD, _unusable(reason, code), reason=reason, claimed=claimed))

    def erase(self, delivery: Delivery) -> None:
        """Acknowledges a deleted plain task, after removing the result that a worker may have stored since."""
        self._queue.put(_Ending(delivery, ERASED, claimed=False))

    def repeat(self, delivery: Delivery, letter: str) -> None:
        """Acknowledges the message of a settled plain task, which its sender may have sent again, once Celery has its
        result. `letter`: the reason to keep the message as a dead letter; empty: there is none."""
        self._queue.put(_Ending(delivery, AGAIN, reason=letter))

    def stop(self, timeout: float) -> bool:
        """Returns True once every earlier ending is settled."""
        self._queue.put(None)
        if self.is_alive():  # a drain may begin before the threads
            self.join(timeout)
        return not self.is_alive()

    def run(self) -> None:
        with suppress(*LOST):  # so that handing back, which has little time, does not begin with that
            self.redis.script_load(release("", "").script.text)
        stopping = False
        while not stopping:
            batch = [self._queue.get()]
            while len(batch) < BATCH and not self._queue.empty():
                batch.append(self._queue.get())
            stopping = None in batch
            traced = [end for end in batch if end is not None and not end.delivery.put_down and self._trace(end)]
            self._settle(traced)

    # ---- the tracer ---------------------------------------------------------------------------------------------

    def _trace(self, end: _Ending) -> bool:
        """Returns True if Celery's side is done, or given up; else it is tried again later."""
        if end.traced:
            return True
        try:
            self._tell_celery(end)
            end.traced = True
        except AWAY as exc:
            warn_throttled(logger, "Celery's side of task %s has to wait: %s", end.delivery.task_id, exc)
        except Exception as exc:
            logger.exception("Celery's side of task %s failed", end.delivery.task_id, extra=end.delivery.subject)
            end.failures += 1
            if end.failures >= MAX_FAILURES:
                return self._give_up(end, exc)
        if not end.traced:
            self._clock.later(RETRY_S, lambda: self._queue.put(end))
        return end.traced

    def _give_up(self, end: _Ending, exc: Exception) -> bool:
        """Gives up Celery's side, for instance callbacks that cannot be sent: the output stays, and the message is kept
        as a dead letter."""
        if end.otherwise is not None:  # no copy was sent, so there is no other try
            end.otherwise()
            return False
        end.traced = True
        if end.status != ERASED:  # whose message is not kept: Celery removes the result in its time
            end.reason = end.reason or f"Celery's side of it failed: {exc!r}"
        return True

    def _tell_celery(self, end: _Ending) -> None:
        """Runs Celery's side of an ending. Raises its error, maybe that result backend or broker are away."""
        delivery, job = end.delivery, end.delivery.job
        if end.status == ERASED:
            self._app.backend.delete(self._app.backend.get_key_for_task(delivery.task_id))
            return
        if delivery.revoked:
            return  # it has announced the revocation itself
        if end.status == AGAIN:
            self._store_again(delivery)
        elif delivery.native is not None and end.status == RETRY:
            self._run_tracer(end, job or self._monitors.job(delivery))
        elif delivery.native is not None:
            self._monitors.ended(delivery, "cancelled" if _cancelled(end) else end.status, end.error, end.at)
        elif job is None:
            self._tell_of_condemned(end)
        elif _cancelled(end):
            self._revoke(job)
        else:
            self._run_tracer(end, job)

    def _store_again(self, delivery: Delivery) -> None:
        """Stores a settled plain task's result unless Celery has it. A message that was redelivered looks the same as
        one that was sent again, so links are not sent again, and the engine does not run."""
        from producers.client.blocking import Client  # few workers ever need it
        from producers.sweeper.celery_results import store_result

        task_id, backend = delivery.task_id, self._app.backend
        ignored = delivery.job is not None and delivery.job.headers.get("ignore_result")
        if ignored or backend.get_state(task_id) in states.READY_STATES:
            return
        record = Record.parse(task_id, self.redis.hgetall(keys.task(task_id)))
        if not record.final:  # it was deleted, or its time is over: SETTLE says which
            return
        logger.info("Task %s has ended, and its message came again: its result is stored again", task_id)
        if not record.plain:
            message = "A task with this id was submitted in another way than by Celery."
            backend.store_result(task_id, failure({"code": "task_exists", "message": message}), states.FAILURE)
            return
        settings = self._settings
        try:
            with Client(settings.broker, settings.store, files_dir=settings.files_dir) as client:
                result = client.get(task_id).result(READ_S, raise_for_status=False)
        except ResultUnavailable as exc:
            message = f"The task's output is kept where its worker cannot read it: {exc}"
            backend.store_result(task_id, failure({"code": "file_unavailable", "message": message}), states.FAILURE)
        except TaskNotFound:
            return
        else:
            store_result(backend, record, summary(result))

    def _tell_of_condemned(self, end: _Ending) -> None:
        """Stores the result of a condemned message, which nobody may decode, for whoever waits for it."""
        backend, task_id = self._app.backend, end.delivery.task_id
        if backend.get_state(task_id) in states.READY_STATES:  # of a copy, or told by Celery
            return
        if _cancelled(end):
            backend.mark_as_revoked(task_id, "cancelled")
        else:
            backend.store_result(task_id, self._failure(end), states.FAILURE)

    def _revoke(self, job: Job) -> None:
        request = job.request
        self._app.backend.mark_as_revoked(
            request.id, "cancelled", request=request._context, store_result=request.store_errors
        )
        request.send_event("task-revoked", terminated=True, signum=None, expired=False)

    def _run_tracer(self, end: _Ending, job: Job) -> None:
        job.headers[OUTCOME] = self._outcome(end)
        try:
            failed, value, _ = job.tracer(*job.args)
        except Reject as rejected:  # a link that the broker does not take (`workers.pool.app`)
            raise rejected.reason from rejected
        if failed and getattr(value, "internal", False):
            fault = getattr(value.exception, "exc", value.exception)
            raise getattr(fault, "reason", fault)  # a copy that could not be published comes as Reject(reason)
        job.on_done((failed, value, runtime_s(end.delivery, end.at)))

    def _outcome(self, end: _Ending) -> Any:
        """The value that the task's body is to return or raise."""
        if end.status == RETRY:
            return Fault(end.error)
        if end.status in ("failed", DEAD):
            return self._failure(end)
        delivery = end.delivery
        assert delivery.record is not None
        if delivery.job is not None and delivery.job.headers.get("ignore_result") and delivery.plain is None:
            return end.status
        record = Record.parse(delivery.task_id, self.redis.hgetall(delivery.record.key))
        result = collect(record, read_stream(self.redis, delivery.task_id))
        return summary(result)

    def _failure(self, end: _Ending) -> TaskFailed:
        record = end.delivery.record
        return failure(json.loads(end.error) or (record.json("error") if record else None))

    # ---- settle ---------------------------------------------------------------------------------------------------

    def _settle(self, ends: list[_Ending]) -> None:
        """SETTLE or RELEASE, again and again until the store answers; then put them down."""
        for end in ends:
            if not end.claimed:
                self._deliveries.done(end.delivery, end.reason)
        ends = [end for end in ends if end.claimed]
        calls = [_settling(end) for end in ends]
        while calls and not all(end.delivery.put_down for end in ends):
            try:
                answers = run_many(self.redis, calls)
            except LOST as exc:
                warn_throttled(logger, "Cannot settle or release %d tasks, trying again: %s", len(ends), exc)
                time.sleep(RETRY_S)
                continue
            broken = [end for end, answer in zip(ends, answers, strict=True) if not self._put_down(end, answer)]
            return self._settle([end for end in broken if self._trace(end)])

    def _put_down(self, end: _Ending, answer: Any) -> bool:
        """Puts a message down according to the store's answer. False if it is to be released as a dead letter."""
        delivery = end.delivery
        if end.status == DEAD:
            self._deliveries.done(delivery, end.reason)
        elif isinstance(answer, Exception):
            logger.error("Cannot settle or release task %s: %s", delivery.task_id, answer, extra=delivery.subject)
            end.traced = end.status != BACK  # of which Celery was told nothing
            end.status, end.reason = DEAD, f"its record cannot be used: {answer}"
            end.error = _unusable(end.reason)
            return False
        elif end.status == BACK:
            self._deliveries.give_back(delivery, end.delay)
        elif end.status == RETRY or answer > 0:
            self._deliveries.done(delivery, _dead_letter(end), settled=end.status != RETRY)
        elif answer == -2 and delivery.plain is not None:
            self.erase(delivery)
        elif answer < 0 and delivery.plain is None:  # no record: CLAIM would say `done`
            self._deliveries.done(delivery, settled=True)
        else:
            lost = "A failover lost the end of a task, which goes back: %s"
            warn_throttled(logger, lost, delivery.task_id, extra=delivery.subject)
            self.release(delivery)
        return True


def _dead_letter(end: _Ending) -> str:
    """Returns why the message is kept as a dead letter, if it is: a task given up on is worth a look."""
    record = end.delivery.record
    try:
        error = record.json("error") if record else None
    except ValueError as exc:
        return f"its record cannot be used: {exc}"
    if isinstance(error, dict) and error.get("code") == "dead_lettered":
        return str(error["message"])
    return end.reason


def _cancelled(end: _Ending) -> bool:
    """Whether RELEASE ends a dead letter's task so, too."""
    return end.status == "cancelled" or (end.status == DEAD and end.claimed and end.delivery.cancelled)


def _unusable(reason: str, code: str = "dead_lettered") -> str:
    return error_json(code, f"The message cannot be used: {reason}")


def _settling(end: _Ending) -> Call:
    delivery = end.delivery
    if end.status == DEAD:
        return release(delivery.task_id, delivery.uuid, run=delivery.run(), error=end.error, letter=end.reason)
    if end.status in (RETRY, BACK):
        return release(delivery.task_id, delivery.uuid, end.why, delivery.run())
    return settle(delivery.task_id, letter=_dead_letter(end))
