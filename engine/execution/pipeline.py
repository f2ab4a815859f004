"""Plans through their execution; with an overlap, the next is planned while one runs.

With an overlap of 0 a step is planned, executed and entered before the next is planned. With 1 the device always has
work queued:

    foresee N, schedule N+1, launch N+1, collect N, update N, events of N, notes of callers, foresee N+1, ...

So N+1 is planned and put on the device's queue before anything that N found out is known. While it is planned, and
only then, sequences end in a token that is UNKNOWN; those that cannot go on so sit N+1 out (Scheduler.foresee). From
`update N` to `foresee N+1` the state is that of a step planned and not yet entered, as it always is while a step runs:
then callers' aborts are read.

- **The device works in order.** What N reads and writes is done before N+1 begins. So N+1 may share and copy blocks
  that N fills, and zero, write and copy into those that sequences of N have let go of since.
- **A sequence that N ends**, by a stop token or string, is already in N+1. Its blocks are free when N is entered; a
  plan that gives them to others comes after N+1 on the device. What N+1 samples for it is passed over: no stream, count
  or usage hears of it. The prefix cache learns of blocks when their step is foreseen, all of known tokens; what is
  computed past an end it never learns of, because nothing of an ended sequence is foreseen.
- **A sequence put out of the batch to plan N+1** gets the token that N sampled where it waits. It is not let in again
  before N+2.
- **N+1 cannot be launched**: N is entered first; then the rows of N+1 that are left run in halves, and in halves of
  those that fail, with tokens that are known, so that only the culprit fails. The same is done for any step that fails
  when none was planned after it.
- **The device has no memory for N+1**: N is entered; then N+1 is planned anew, smaller (engine/execution/shrink.py).
- **The device is lost** (`check`, after any failure), or has no memory for two sequences one after the other, each by
  itself, and somebody takes them elsewhere: nothing can be run again, here or later, and the loop ends.
- **N fails when it is collected** and N+1 was planned: memory has changed hands, so that the rows of N cannot run
  again. N+1 is waited for and ignored; the sequences of both are put out of the batch with the tokens that are known
  (Scheduler.take_back). Steps do not overlap until each of them has got on, so that the culprit is found as above.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.errors import DeviceLostError, EngineError, brief
from engine.execution.shrink import Shrink
from engine.plan import Sampled, StepPlan
from engine.request import Event
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Sequence, Status
from engine.speculate import Speculation

logger = logging.getLogger("penstock.engine")


class Executor(Protocol):
    """What executes plans: a Runner. A launched plan is known by what its own executor says it is."""

    def launch(self, plan: StepPlan) -> Any:
        """Begin a plan, after those that were launched before it; at best without waiting for the device.

        Rows that are `pending` take the token that the plan launched before this one samples for their slot.
        """

    def collect(self, launched: Any) -> list[Sampled]:
        """Wait for a launched plan, in the order of launches: one result for each row that samples, in its order."""

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """Those of the plan that is launched next, after what was launched before it."""

    def needs_token(self, sequence: Sequence) -> bool:
        """Whether a step cannot be launched for `sequence` before its last token is known to the host."""

    def forget(self) -> None:
        """Results were given up: nothing that was kept of sequences' tokens is to be trusted."""


@dataclass(slots=True)
class _Flight:
    plan: StepPlan
    began: float
    launched: Any = None
    error: Exception | None = None
    """With which it failed."""
    guessing: float = 0.0
    """Seconds in which its drafts were made."""


class Pipeline:
    """Used by one thread, which is the only one to change the scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        state: threading.Lock,
        entered: Callable[[list[Event]], None],
        overlap: int,
        release: Callable[[BaseException], bool] | None = None,
        check: Callable[[], None] = lambda: None,
        speculation: Speculation | None = None,
        elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """`state` is held while the scheduler changes, not while a step computes. `entered` is called with the events
        of each step. `release`: see Shrink. `check` is called after every failure, and raises DeviceLostError where no
        step can go well any more; so does, then, whichever method was at it. `elsewhere`: whether somebody takes the
        requests of a lost device to another; then one that has memory for nobody counts as lost, too."""
        self._scheduler = scheduler
        self._executor = executor
        self._state = state
        self._entered = entered
        self._overlap = overlap
        self._check = check
        self._speculation = speculation
        self._elsewhere = elsewhere
        # Launched and not collected: at most one between steps, two within.
        self._flights: deque[_Flight] = deque()
        self._last = 0.0
        self.last_step_s = 0.0
        # Sequences of a step that failed when it was collected, and their lengths then.
        self._suspects: dict[Sequence, int] = {}
        self._shrink = Shrink(scheduler, state, release)
        self._under_way: tuple[StepPlan, ...] = ()

    def suspects(self) -> set[str]:
        """Ids of the requests that the step under way computes: whatever it does not come back from, they may be to
        blame for. Any thread."""
        return {row.seq.request.id for plan in self._under_way for row in plan.rows}

    @property
    def in_flight(self) -> bool:
        return bool(self._flights)

    def step(self) -> bool:
        """Plan and launch a step, and enter the one before it; with no overlap also this one. False where there was
        nothing to do."""
        began = time.monotonic()
        under = self._flights[0] if self._flights else None
        with self._state:
            if under is not None:
                self._scheduler.foresee(under.plan, self._executor.needs_token)
            plan = self._scheduler.schedule(began)
        over = None if plan is None else _Flight(plan, began)
        if over is not None and self._speculation is not None:
            over.guessing = self._speculation.propose(over.plan)
        self._under_way = tuple(flight.plan for flight in (under, over) if flight is not None)
        if over is None and under is None:
            if self._scheduler.has_work:
                raise EngineError("the scheduler has work and plans nothing")
            return False
        launched = over is not None and self._launch(over)
        if under is not None:
            sampled = self._collect()
            if sampled is None:
                self._take_back([flight.plan for flight in (under, over) if flight is not None])
                self._shrink.answer(under.error)
                return True
            self._enter(under, sampled, [])
        if over is None or (launched and self._overlap > 0 and not self._suspected()):
            return True
        found = self._collect() if launched else None
        if self._shrink.answer(over.error):
            return True
        failures: list[Event] = []
        self._enter(over, self._apart(over.plan, failures) if found is None else found, failures)
        return True

    def finish(self) -> None:
        """Enter the step in flight, if there is one."""
        if self._flights:
            flight = self._flights[0]
            sampled = self._collect()
            if sampled is not None:
                self._enter(flight, sampled, [])

    def drop(self) -> None:
        """Wait for what is in flight and ignore it."""
        while self._flights:
            self._collect()

    def _launch(self, flight: _Flight) -> bool:
        # Once, and before a row is written. Whoever was copied from may have been put out of the batch in the planning
        # of this very step, and its block given to one of the rows: copied again, it would be what that row wrote.
        self._executor.copy_blocks(flight.plan.copies)
        try:
            flight.launched = self._executor.launch(replace(flight.plan, copies=[]))
        except Exception as error:
            logger.exception("a step of %d sequences could not be launched", len(flight.plan.rows))
            self._check()
            # Without the traceback, whose frames hold the step's tensors.
            flight.error = error.with_traceback(None)
            return False
        self._flights.append(flight)
        return True

    def _collect(self) -> list[Sampled] | None:
        """The results of the oldest step in flight; None if it failed."""
        flight = self._flights.popleft()
        try:
            found = self._executor.collect(flight.launched)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(flight.plan.rows))
            self._check()
            flight.error = error.with_traceback(None)
            return None
        self._shrink.went_well()
        return found

    def _enter(self, flight: _Flight, sampled: list[Sampled], failures: list[Event]) -> None:
        with self._state:
            events = self._scheduler.update(flight.plan, sampled, time.monotonic())
        now = time.monotonic()
        self.last_step_s = now - max(flight.began, self._last)
        self._last = now
        if self._speculation is not None and flight.error is None:
            self._speculation.took(flight.plan, self.last_step_s - flight.guessing, flight.guessing)
        self._entered(failures + events)

    def _take_back(self, plans: list[StepPlan]) -> None:
        logger.error("the sequences of %d steps compute again what was lost", len(plans))
        self.drop()
        self._executor.forget()
        with self._state:
            self._scheduler.take_back(plans, time.monotonic())
        self._suspects |= {row.seq: len(row.seq.tokens) for plan in plans for row in plan.rows}

    def _suspected(self) -> bool:
        if self._suspects:
            self._suspects = {
                seq: length
                for seq, length in self._suspects.items()
                if seq.status is not Status.FINISHED and len(seq.tokens) == length
            }
        return bool(self._suspects)

    def _apart(self, plan: StepPlan, failures: list[Event]) -> list[Sampled]:
        """The rows of a step that failed, in halves, and those that fail in halves again: 2 log2 N steps where one of N
        is to blame. The others' results do not depend on whom they run with."""
        logger.error("the rows of a failed step are run in halves, to find whose fault it is")
        found: dict[int, Sampled] = {}
        middle = max(1, len(plan.rows) // 2)
        waiting = [part for part in (plan.rows[middle:], plan.rows[:middle]) if part]
        while waiting:
            # Who ended meanwhile, maybe with another of its request, holds no blocks.
            rows = [row for row in waiting.pop() if row.seq.status is Status.RUNNING]
            if not rows:
                continue
            part = StepPlan(rows, num_tokens=sum(row.count for row in rows))
            self._under_way = (part,)
            try:
                sampled = self._executor.collect(self._executor.launch(part))
            except Exception as error:
                self._check()
                if len(rows) > 1:
                    waiting += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
                    continue
                seq, message = rows[0].seq, f"the model failed on this request: {brief(error)}"
                logger.exception("request %r failed alone", seq.request.id)
                if self._shrink.alone(seq.request.id, error) and self._elsewhere():
                    self._under_way = (plan,)
                    raise DeviceLostError(
                        f"the device has no memory for the step of a single sequence, whichever: {brief(error)}"
                    ) from None
                with self._state:
                    failures += self._scheduler.fail(seq, message)
                sampled = [Sampled(-1, error=message)] * rows[0].samples
            else:
                self._shrink.had_memory()
            found |= zip((id(row) for row in rows if row.samples), sampled, strict=True)
        return [found.get(id(row), Sampled(-1)) for row in plan.rows if row.samples]
