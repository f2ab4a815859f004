"""The engine's thread: takes in requests, runs steps, delivers events and survives faults."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from engine.errors import DeviceLostError, EngineClosedError, EngineError, RequestError, brief
from engine.execution.forms import FormThreads, Ticket
from engine.execution.pipeline import Executor, Pipeline, StepScheduler
from engine.execution.turns import Turns
from engine.plan import StepPlan, StepWork
from engine.request import Event, Request
from engine.scheduling.scheduler import Held, SchedulerStats

logger = logging.getLogger("penstock.engine")


class StepLoop:
    """Runs steps on its own thread. Any thread may call `submit` and `abort`, which only leave a note for that thread.

    The loop's thread alone changes the scheduler, so that a plan is consistent when it is launched. Blocks that a
    running step uses may be reassigned meanwhile, but are not written before the step is done (pipeline).
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor,
        on_start: Callable[[], None],
        *,
        overlap: int = 0,
        release: Callable[[BaseException], bool] | None = None,
        check: Callable[[], None] = lambda: None,
        on_idle: Callable[[], bool] | None = None,
        batching_wait: Callable[[float], float] = lambda now: 0.0,
        turns: Turns | None = None,
    ) -> None:
        """`on_start`: called once on the loop's thread. `overlap`: steps planned ahead of the running one, 0 or 1.
        `release`: see Shrink. `check`: see Pipeline. `on_idle`: called on the loop's thread while there is no work,
        until it returns False; a new request waits for at most one such call. `batching_wait(now)`: the seconds for
        which the next step waits for more requests; asked again after each that comes. `turns`: those of the engines
        that share the device; None: it has the device for itself."""
        self._scheduler = scheduler
        self._on_start = on_start
        self._on_idle = on_idle
        self._batching_wait = batching_wait
        self._turns = turns
        #: Called on the loop's thread after all events of a step were delivered.
        self.on_step: Callable[[], None] | None = None
        #: Called on the loop's thread, with the reason and the ids of suspect requests, when the device is lost for
        #: good. Requests then get no further event: the owner of this callback must run them elsewhere.
        self.on_lost: Callable[[str, set[str]], None] | None = None
        #: Called on the loop's thread with the ids of the requests of all steps under way, before one of them is
        #: launched, and with none once all are entered.
        self.on_under_way: Callable[[list[str]], None] | None = None
        #: The plan whose requests were named last, and their ids.
        self._named: tuple[StepPlan | None, list[str]] = None, []
        self._stepping_since: float | None = None
        self._wake = threading.Condition()
        # Guarded by _wake: the unfinished tickets by id, and the tickets to add to or remove from the scheduler.
        self._tickets: dict[str, Ticket] = {}
        self._notes: deque[Ticket] = deque()
        self._closing = False
        self._looking = False
        self._check = check
        # Held while the scheduler's state changes, not while a step computes.
        self._state = threading.Lock()
        # Used by the loop's thread alone: the tickets that the scheduler knows.
        self._scheduled: dict[str, Ticket] = {}
        grammars = scheduler.grammars
        self._forms = None if grammars is None else FormThreads(grammars, self._prepared)
        self._pipeline = Pipeline(
            scheduler,
            executor,
            self._state,
            self._end_step,
            overlap,
            release,
            check,
            lambda: self.on_lost is not None,
            self._tell_under_way,
        )
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)
        self._thread.start()

    # ---- any thread

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        """Queue `request` and return at once. The loop's thread calls `on_event` until `Event.done`.

        Raises RequestError, in the caller's thread, for a request that could never run (over-long, id in use, ...), and
        EngineClosedError if the loop is closed. A form takes time to read, so one that cannot be followed is refused by
        an event. An exception raised by `on_event` is logged and has no other effect.
        """
        self._scheduler.check(request)
        ticket = Ticket(request, on_event)
        with self._wake:
            if self._closing:
                raise EngineClosedError("the engine is closed")
            if request.id in self._tickets:
                raise RequestError(f"request id {request.id!r} is in use", param="id", code="duplicate_request")
            self._tickets[request.id] = ticket
            if self._forms is None or not request.params.forms:
                self._notes.append(ticket)
                self._wake.notify()
                return
        self._forms.put(ticket)

    def _prepared(self, ticket: Ticket) -> None:
        """A request has its matchers, or cannot have them. A thread of `_forms`."""
        with self._wake:
            if not self._closing and not ticket.aborted:
                self._notes.append(ticket)
                self._wake.notify()

    def abort(self, request_id: str) -> bool:
        """End a request. Its blocks are free before the next step is planned. No event follows, except one that may be
        on its way. Returns False if the id is unknown."""
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
            stats = self._scheduler.stats()
        forms = 0 if self._forms is None else self._forms.waiting
        return replace(stats, waiting=stats.waiting + forms, recompute_s=self._pipeline.recompute_s)

    def largest(self, count: int) -> list[Held]:
        """The running sequences that hold most KV blocks, up to `count`, the largest first."""
        with self._state:
            return self._scheduler.largest(count)

    def preempted(self) -> list[tuple[str, float]]:
        """(request id, seconds since) of preempted requests of which no choice runs."""
        with self._state:
            return self._scheduler.preempted(time.monotonic())

    def stepping(self) -> tuple[float, set[str]]:
        """Seconds that the current step has run so far (0.0 if none runs), and the ids of its requests."""
        since = self._stepping_since
        return (0.0, set()) if since is None else (time.monotonic() - since, self._pipeline.suspects())

    @property
    def last_step_s(self) -> float:
        """The duration of the last step in seconds: from the results of the step before it, or from its planning if
        that was later, to its own results."""
        return self._pipeline.last_step_s

    @property
    def last_work(self) -> StepWork | None:
        """The last step's work and time; another object after each. `on_step` comes also without a new one. Takes no
        lock."""
        return self._pipeline.last_work

    def draws(self, watts: float) -> None:
        """Say what power the device draws in steps, from the next one on: requests get their part of its energy."""
        self._pipeline.watts = watts

    def look(self) -> None:
        """Check the device now, also while there is no work: it may be lost."""
        with self._wake:
            self._looking = True
            self._wake.notify()

    @property
    def turn_wait_s(self) -> float | None:
        """The seconds for which it has waited for its turn on a device that it shares; None if it shares none."""
        return None if self._turns is None else self._turns.waited_s

    @property
    def turn_due_s(self) -> float:
        """The seconds for which it has waited for its turn now; 0.0 if it does not wait."""
        since = None if self._turns is None else self._turns.waits_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Stop after the running step. Unfinished requests get a last event with finish_reason "abort"."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the loop's thread

    def _run(self) -> None:
        """Run until the loop is closed. If the device is lost, call `on_lost`; without one, end all requests and raise
        DeviceLostError."""
        self._on_start()
        try:
            self._run_steps()
        except DeviceLostError as error:
            with self._wake:
                self._closing = True
            if self.on_lost is not None:
                self.on_lost(brief(error), self._pipeline.suspects())
                return
            self._read_notes()
            self._end_all(f"the engine failed: {brief(error)}")
            self._end_unprepared(f"the engine failed: {brief(error)}")
            raise
        finally:
            if self._turns is not None:
                self._turns.close()

    def _run_steps(self) -> None:
        while self._wait_for_work():
            try:
                delivered = self._read_notes()
                if self._waits_for_more():
                    if delivered:
                        self._call_on_step()
                    continue
                if self._turns is not None and not self._turns.holds:
                    if not self._take_turn(self._turns):
                        continue
                    delivered |= self._read_notes()  # what came meanwhile
                # Not before it is our turn: another engine's step that hangs is not this one's.
                self._stepping_since = time.monotonic()
                if not self._pipeline.step() and delivered:
                    self._call_on_step()
                self._end_turn_if_due()
            except DeviceLostError:
                raise
            except BaseException as error:  # a panic in Rust is no Exception
                # A fault of the engine, not of one request (those fail alone): the whole step is given up.
                logger.exception("a step failed as a whole; its requests are ended")
                self._pipeline.drop()
                self._end_all(f"the engine failed: {brief(error)}")
            finally:
                self._stepping_since = None
                if not self._pipeline.in_flight:
                    self._tell_under_way(())
        try:
            self._pipeline.finish()
        except Exception:
            logger.exception("the last step failed")
        self._end_all("the engine was closed", closing=True)
        self._end_unprepared("the engine was closed", closing=True)

    def _take_turn(self, turns: Turns) -> bool:
        """Wait for the turn to compute. Returns False if the loop is to end."""
        if turns.take(lambda: self._closing):
            self._pipeline.pause()  # the time of another engine's steps belongs to no step of this one
        return turns.holds

    def _end_turn_if_due(self) -> None:
        """Hand the turn over, after what is in flight, if it is another engine's."""
        if self._turns is not None:
            self._turns.charge()
            if self._turns.due():
                self._pipeline.finish()
                self._turns.hand_over()

    def _wait_for_work(self) -> bool:
        """Wait until there is work. Returns False if the loop is to end."""
        while not self._has_calls():
            self._pipeline.pause()
            if self._on_idle is not None and self._turns is not None and not self._take_turn(self._turns):
                break
            if self._run_idle_work():
                self._end_turn_if_due()
                continue
            if self._turns is not None:
                self._turns.hand_over()
            try:
                self._scheduler.check_idle()
            except EngineError:
                logger.exception("the KV cache is not whole although nothing runs")
            with self._wake:
                self._wake.wait_for(lambda: self._closing or self._notes or self._looking)
                looking, self._looking = self._looking, False
            if looking:
                self._check()
        return not self._closing

    def _waits_for_more(self) -> bool:
        """Wait for more requests, if the next step is to have more. Returns False if it is to begin now."""
        seconds = self._batching_wait(time.monotonic())
        if seconds <= 0:
            return False
        self._pipeline.pause()
        if self._turns is not None:
            self._turns.hand_over()
        with self._wake:
            self._wake.wait_for(lambda: self._closing or self._notes, seconds)
        return True

    def _has_calls(self) -> bool:
        with self._wake:
            return self._closing or bool(self._notes) or self._scheduler.has_work or self._pipeline.in_flight

    def _run_idle_work(self) -> bool:
        if self._on_idle is None:
            return False
        try:
            return self._on_idle()
        except Exception:
            logger.exception("what is done while nothing runs failed, and is left")
            self._on_idle = None
            return False

    def _end_step(self, events: list[Event]) -> None:
        self._deliver(events)
        self._call_on_step()

    def _tell_under_way(self, plans: tuple[StepPlan, ...]) -> None:
        if self.on_under_way is None:
            return
        ids: list[str] = []
        for plan in plans:
            if plan is not self._named[0]:
                self._named = plan, [row.seq.request.id for row in plan.rows]
            # Nearly always the same as in the step before, which is still under way.
            if ids != self._named[1]:
                ids = ids + self._named[1]
        if not plans:
            self._named = None, []
        self.on_under_way(ids)

    def _call_on_step(self) -> None:
        if self.on_step is not None:
            try:
                self.on_step()
            except Exception:
                logger.exception("on_step raised")

    def _read_notes(self) -> bool:
        """Add or abort the requests of all notes. Returns whether this delivered events, for choices that had already
        ended."""
        delivered = False
        while True:
            with self._wake:
                if not self._notes:
                    return delivered
                ticket = self._notes.popleft()
            request_id = ticket.request.id
            if self._scheduled.get(request_id) is ticket:
                del self._scheduled[request_id]
                with self._state:
                    self._scheduler.abort(request_id)
            elif not ticket.aborted:
                self._scheduled[request_id] = ticket
                if ticket.refusal is not None or ticket.fault:
                    self._deliver([_refused(ticket)])
                    delivered = True
                    continue
                try:
                    with self._state:
                        events = self._scheduler.add(ticket.request)
                except Exception as error:
                    logger.exception("request %r could not be taken in", request_id)
                    events = [_last_event(ticket.request, f"the request could not be taken in: {brief(error)}")]
                self._deliver(events)
                delivered |= bool(events)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            ticket = self._scheduled.get(event.request_id)
            if ticket is None:
                continue
            if event.done:
                del self._scheduled[event.request_id]
                with self._wake:
                    # Free the id, unless an abort has freed it and another submission has taken it.
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
        for request_id, ticket in list(self._scheduled.items()):
            try:
                with self._state:
                    events = self._scheduler.fail(request_id, message)
            except Exception:
                logger.exception("request %r could not be taken out", request_id)
                events = []
            # The request's last event may have been lost with the step.
            events = events or [_last_event(ticket.request, message)]
            self._deliver([replace(event, finish_reason="abort") for event in events] if closing else events)
        self._call_on_step()

    def _end_unprepared(self, message: str, *, closing: bool = False) -> None:
        """End the requests whose matchers are being made. The loop is closed, so no more come."""
        if self._forms is not None:
            self._forms.close()
        with self._wake:
            unfinished = [ticket for ticket in self._tickets.values() if not ticket.aborted]
        for ticket in unfinished:
            self._scheduled[ticket.request.id] = ticket
            event = _last_event(ticket.request, message)
            self._deliver([replace(event, finish_reason="abort") if closing else event])


def _refused(ticket: Ticket) -> Event:
    """The only event of a request that was found after its submission to be none that can run."""
    if ticket.refusal is None:
        return _last_event(ticket.request, ticket.fault)
    event = _last_event(ticket.request, ticket.refusal.message)
    return replace(event, refused=True, param=ticket.refusal.param, code=ticket.refusal.code)


def _last_event(request: Request, message: str) -> Event:
    """Make the last event of a request for which the scheduler has none."""
    return Event(request.id, finish_reason="error", done=True, error=message, prompt_tokens=len(request.prompt_ids))
