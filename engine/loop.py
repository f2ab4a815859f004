"""The thread that steps: takes requests in, runs one plan after the other, delivers events, outlives every fault."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from engine.errors import EngineError, RequestError
from engine.plan import Sampled, StepPlan
from engine.request import Event, Request, Status
from engine.scheduler import Scheduler, SchedulerStats

logger = logging.getLogger("penstock.engine")


class Executor(Protocol):
    """What executes plans: a Runner."""

    def execute(self, plan: StepPlan) -> list[Sampled]: ...

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None: ...


@dataclass(slots=True, eq=False)
class _Ticket:
    """One submission: an id may be used again, a ticket never is."""

    request: Request
    on_event: Callable[[Event], None]
    aborted: bool = False


class StepLoop:
    """`submit` and `abort` may be called by any thread; they only leave a note for the loop's own thread.

    That thread alone changes the scheduler, between steps, so that no block changes hands while a step runs.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, on_start: Callable[[], None]) -> None:
        """`on_start` is called once on the loop's thread."""
        self._scheduler = scheduler
        self._executor = executor
        self._on_start = on_start
        #: Called on the loop's thread when all events of a step have been delivered.
        self.on_step: Callable[[], None] | None = None
        self.last_step_s = 0.0
        self._wake = threading.Condition()
        # Under _wake: who is in, by id, and what has to be told to the scheduler.
        self._tickets: dict[str, _Ticket] = {}
        self._notes: deque[_Ticket] = deque()
        self._closing = False
        # Held while the scheduler changes, not while a step computes.
        self._state = threading.Lock()
        # Of the loop's thread alone: the tickets that the scheduler knows.
        self._known: dict[str, _Ticket] = {}
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    # ---- any thread

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Raises RequestError if the request can never run or its id is in use; EngineError when closed."""
        self._scheduler.check(request)
        ticket = _Ticket(request, on_event)
        with self._wake:
            if self._closing:
                raise EngineError("the engine is closed")
            if request.id in self._tickets:
                raise RequestError(f"request id {request.id!r} is in use", param="id", code="duplicate_request")
            self._tickets[request.id] = ticket
            self._notes.append(ticket)
            self._wake.notify()

    def abort(self, request_id: str) -> bool:
        """False if no such request is in. Its memory is free when the step that is running has ended."""
        with self._wake:
            ticket = self._tickets.pop(request_id, None)
            if ticket is None:
                return False
            ticket.aborted = True
            self._notes.append(ticket)
            self._wake.notify()
            return True

    def stats(self) -> SchedulerStats:
        with self._state:
            return self._scheduler.stats()

    def preempted(self) -> list[tuple[str, float]]:
        with self._state:
            return self._scheduler.preempted(time.monotonic())

    def close(self) -> None:
        """Stop after the running step. Requests that are still in end with finish_reason "abort"."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the loop's thread

    def _run(self) -> None:
        self._on_start()
        while self._wait_for_work():
            try:
                self._step()
            except Exception as error:
                # A fault of ours, not of a request (those end alone in _execute): nothing of this step can be kept.
                logger.exception("a step failed as a whole; its requests are ended")
                self._end_all(f"the engine failed: {_brief(error)}")
        self._end_all("the engine was closed", closing=True)

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._closing or self._notes or self._scheduler.has_work):
                try:
                    self._scheduler.check_idle()
                except EngineError:
                    logger.exception("the KV cache is not whole although nothing runs")
                self._wake.wait()
            return not self._closing

    def _step(self) -> None:
        began = time.monotonic()
        told = self._read_notes()
        with self._state:
            plan = self._scheduler.schedule(began)
        if plan is None:
            if self._scheduler.has_work:
                raise EngineError("the scheduler has work and plans nothing")
            if told:
                self._tell_step()
            return
        failures: list[Event] = []
        sampled = self._execute(plan, failures)
        with self._state:
            events = self._scheduler.update(plan, sampled, time.monotonic())
        self._deliver(failures)
        self._deliver(events)
        self.last_step_s = time.monotonic() - began
        self._tell_step()

    def _tell_step(self) -> None:
        if self.on_step is not None:
            try:
                self.on_step()
            except Exception:
                logger.exception("on_step raised")

    def _read_notes(self) -> bool:
        """True where a request has ended, or a choice of it, as it was taken in: its events were delivered."""
        told = False
        while True:
            with self._wake:
                if not self._notes:
                    return told
                ticket = self._notes.popleft()
            request_id = ticket.request.id
            if self._known.get(request_id) is ticket:
                del self._known[request_id]
                with self._state:
                    self._scheduler.abort(request_id)
            elif not ticket.aborted:
                self._known[request_id] = ticket
                try:
                    with self._state:
                        events = self._scheduler.add(ticket.request)
                except Exception as error:
                    logger.exception("request %r could not be taken in", request_id)
                    events = [_ending(ticket.request, f"the request could not be taken in: {_brief(error)}")]
                self._deliver(events)
                told |= bool(events)

    def _execute(self, plan: StepPlan, failures: list[Event]) -> list[Sampled]:
        # Once, and before a row is written. Whoever was copied from may have been put out of the batch in the planning
        # of this very step, and its block given to one of the rows: copied again, it would be what that row wrote.
        self._executor.copy_blocks(plan.copies)
        try:
            return self._executor.execute(replace(plan, copies=[]))
        except Exception:
            logger.exception("a step of %d sequences failed; they are run one by one", len(plan.rows))
        # Only the culprit shall fail: the others' results do not depend on whom they run with.
        sampled = []
        for row in plan.rows:
            if row.seq.status is not Status.RUNNING:  # it ended with another of its request, and holds no blocks
                sampled += [Sampled(-1)] * row.samples
                continue
            try:
                sampled += self._executor.execute(StepPlan([row], num_tokens=row.count))
            except Exception as error:
                message = f"the model failed on this request: {_brief(error)}"
                logger.exception("request %r failed alone", row.seq.request.id)
                with self._state:
                    failures += self._scheduler.fail(row.seq, message)
                if row.samples:
                    sampled.append(Sampled(-1, error=message))
        return sampled

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            ticket = self._known.get(event.request_id)
            if ticket is None:
                continue
            if event.done:
                del self._known[event.request_id]
                with self._wake:
                    # The id is free again, unless an abort has freed it and somebody else has taken it.
                    if self._tickets.get(event.request_id) is ticket:
                        del self._tickets[event.request_id]
            if ticket.aborted:
                continue
            try:
                ticket.on_event(event)
            except Exception:
                logger.exception("on_event of request %r raised", event.request_id)

    def _end_all(self, message: str, *, closing: bool = False) -> None:
        if closing:
            self._read_notes()
        for request_id, ticket in list(self._known.items()):
            try:
                with self._state:
                    events = self._scheduler.fail(request_id, message)
            except Exception:
                logger.exception("request %r could not be taken out", request_id)
                events = [_ending(ticket.request, message)]
            self._deliver([replace(event, finish_reason="abort") for event in events] if closing else events)


def _ending(request: Request, message: str) -> Event:
    """The last event of a request that the scheduler cannot tell us about."""
    return Event(
        request_id=request.id,
        choice=0,
        index=0,
        token_ids=[],
        texts=[],
        logprobs=None,
        finish_reason="error",
        stop_match=None,
        done=True,
        error=message,
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=0,
    )


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
