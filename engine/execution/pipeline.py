"""Runs step plans. With an overlap of 1, it plans and launches the next step while one runs.

With an overlap of 0, a step is planned, executed and entered before the next is planned. With 1, the device always has
work queued; a model of N stages has an overlap of N - 1, and there no sequence that waits for a token is in a step:

    foresee N, schedule N+1, launch N+1, collect N, update N, events of N, notes of callers, foresee N+1, ...

So N+1 is planned and queued on the device before any result of N is known. During planning, and only then, sequences
end in an UNKNOWN token. Sequences that need that token are not in N+1 (Scheduler.foresee). From `update N` to
`foresee N+1` the scheduler's state is that of a step that is planned and not yet entered, as it always is while a step
runs. Callers' aborts are read in that time.

- **The device works in order.** All reads and writes of N are done before N+1 begins. So N+1 may share and copy blocks
 that N fills. It may zero, write and copy into blocks that sequences of N have released since.
- **A sequence that N ends**, by a stop token or string, is already in N+1. Its blocks are free when N is entered. A
 plan that gives them to other sequences comes after N+1 on the device. The token that N+1 samples for the ended
 sequence is dropped and appears in no stream, count or usage. Blocks enter the prefix cache when their step is
 foreseen, and then hold known tokens only. Tokens computed past an end never enter it, because nothing of an ended
 sequence is foreseen.
- **A sequence preempted while N+1 is planned** gets the token that N sampled while it waits. It is not admitted again
 before N+2.
- **N+1 cannot be launched**: N is entered first. Then the remaining rows of N+1 run in halves, and failing halves are
 halved again, with known tokens, so that only the culprit fails. A step that fails when none was planned after it is
 handled in the same way.
- **The device has no memory for N+1**: N is entered; then N+1 is planned again, smaller (`Shrink`).
- **The device is lost** (`check`, after any failure), or it has no memory for two sequences in turn, each alone, and
 the owner of the engine can run the requests elsewhere: nothing is run again, and the loop ends.
- **N fails when it is collected** and N+1 was planned: blocks have been reassigned, so the rows of N cannot run again.
 The pipeline waits for N+1 and ignores it. The sequences of both are preempted with the tokens that are known
 (Scheduler.take_back). Steps do not overlap until each of these sequences has advanced, so that the culprit is found
 as above.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from engine.errors import DeviceLostError, EngineError, brief
from engine.grammar.matcher import Grammars
from engine.plan import Sampled, StepPlan, StepWork
from engine.request import Event, Request
from engine.scheduling.scheduler import Held, SchedulerStats
from engine.sequence import Sequence, Status
from engine.speculate import Speculation

logger = logging.getLogger("penstock.engine")


class Executor(Protocol):
    """The interface that executes plans, such as Runner. Each executor has its own type for a launched plan."""

    def launch(self, plan: StepPlan) -> Any:
        """Begin a plan after those launched before it, if possible without waiting for the device.

        A `pending` row takes the token that the plan launched before this one samples for its slot.
        """

    def collect(self, launched: Any) -> list[Sampled]:
        """Wait for a launched plan; call it in the order of launches. Returns one result for each sampling row, in
        order."""

    def copy_blocks(self, copies: list[tuple[int, int, int]]) -> None:
        """Copy blocks for the plan launched next, after the work launched before it."""

    def needs_token(self, sequence: Sequence) -> bool:
        """Whether the host must know the last token of `sequence` before a step with it is launched."""

    def forget(self) -> None:
        """Discard all cached state of sequences' tokens, because results were given up."""


class StepScheduler(Protocol):
    """The interface that decides what a step computes: Scheduler, or that of texts (engine.pooling)."""

    @property
    def speculation(self) -> Speculation | None: ...
    @property
    def grammars(self) -> Grammars | None: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def step_tokens(self) -> int: ...
    def check(self, request: Request) -> None: ...
    def add(self, request: Request) -> list[Event]: ...
    def abort(self, request_id: str) -> bool: ...
    def fail(self, target: Sequence | str, message: str) -> list[Event]: ...
    def schedule(self, now: float) -> StepPlan | None: ...
    def foresee(self, plan: StepPlan, needs_token: Callable[[Sequence], bool]) -> None: ...
    def take_back(self, plans: Iterable[StepPlan], now: float) -> None: ...
    def shrink(self, now: float, *, tried: bool) -> bool: ...
    def update(self, plan: StepPlan, sampled: list[Sampled], now: float) -> list[Event]: ...
    def stats(self) -> SchedulerStats: ...
    def largest(self, count: int) -> list[Held]: ...
    def preempted(self, now: float) -> list[tuple[str, float]]: ...
    def check_idle(self) -> None: ...


@dataclass(slots=True)
class _Flight:
    plan: StepPlan
    began: float
    launched: Any = None
    error: Exception | None = None
    """The exception with which the step failed."""
    guessing: float = 0.0
    """The seconds that making its drafts took."""


class Pipeline:
    """Runs steps. Used by one thread, the only one that changes the scheduler."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor,
        state: threading.Lock,
        entered: Callable[[list[Event]], None],
        overlap: int,
        release: Callable[[BaseException], bool] | None = None,
        check: Callable[[], None] = lambda: None,
        elsewhere: Callable[[], bool] = lambda: False,
        on_under_way: Callable[[tuple[StepPlan, ...]], None] = lambda plans: None,
    ) -> None:
        """`state`: the lock held while the scheduler changes, not while a step computes. `entered`: called with each
        step's events. `release`: see Shrink. `check`: called after every failure; raises DeviceLostError if no step can
        succeed any more, which the pipeline's methods pass on. `elsewhere`: whether the engine's owner runs the
        requests of a lost device elsewhere. If so, a device without memory for any sequence also counts as lost.
        `on_under_way`: called with the plans of all steps under way, before one of them is launched."""
        self._scheduler = scheduler
        self._executor = executor
        self._state = state
        self._entered = entered
        self._overlap = overlap
        self._check = check
        self._speculation = scheduler.speculation
        self._elsewhere = elsewhere
        self._on_under_way = on_under_way
        # Steps launched and not collected: at most `overlap` between calls of `step`, one more within.
        self._flights: deque[_Flight] = deque()
        self._last = 0.0
        self.last_step_s = 0.0
        #: The last step that went well; another object after each.
        self.last_work: StepWork | None = None
        self.recompute_s = 0.0
        """The part of all steps' time (s) for tokens that had been computed before: by an earlier worker, or before a
        preemption."""
        #: Power (W) that the device draws in steps; whoever has a meter sets it.
        self.watts = 0.0
        # When the last step was entered, unless the loop has rested since.
        self._at_work_since: float | None = None
        # The sequences of a step that failed when it was collected, with their lengths at that time.
        self._suspects: dict[Sequence, int] = {}
        self._shrink = Shrink(scheduler, state, release)
        self._under_way: tuple[StepPlan, ...] = ()

    def suspects(self) -> set[str]:
        """Ids of the requests in the current step. If the step never returns, one of them may be to blame. Any thread
        may call this."""
        return {row.seq.request.id for plan in self._under_way for row in plan.rows}

    def _note_under_way(self, *plans: StepPlan) -> None:
        self._under_way = plans
        self._on_under_way(plans)

    @property
    def in_flight(self) -> bool:
        return bool(self._flights)

    def step(self) -> bool:
        """Plan and launch a step, and enter the oldest one if more than `overlap` are in flight; without overlap, this
        one. Returns False if there was nothing to do."""
        began = time.monotonic()
        running = len(self._flights)
        with self._state:
            for flight in self._flights:
                self._scheduler.foresee(flight.plan, self._executor.needs_token)
            plan = self._scheduler.schedule(began)
        planned = None if plan is None else _Flight(plan, began)
        # Before drafts are made, which computes, too.
        self._note_under_way(*(flight.plan for flight in self._flights), *(() if plan is None else (plan,)))
        if planned is not None and self._speculation is not None:
            planned.guessing = self._speculation.propose(planned.plan)
        if planned is None:
            if running:
                self._enter_oldest([])
            elif self._scheduler.has_work:
                raise EngineError("the scheduler has work and plans nothing")
            return running > 0
        launched = self._launch(planned)
        unlaunched = [] if launched else [planned.plan]
        # A step that could not be launched runs again after all before it.
        for _ in range(running + 1 - self._overlap if launched and self._overlap else running):
            if not self._enter_oldest(unlaunched):
                return True
        if launched and self._overlap > 0 and not self._suspected():
            return True
        while self._flights and self._flights[0] is not planned:
            if not self._enter_oldest([]):
                return True
        sampled_now = self._collect() if launched else None
        if self._shrink.on_failure(planned.error):
            return True
        failures: list[Event] = []
        self._enter(planned, self._run_apart(planned.plan, failures) if sampled_now is None else sampled_now, failures)
        return True

    def pause(self) -> None:
        """There is no work: the time until there is some belongs to no step."""
        self._at_work_since = None

    def finish(self) -> None:
        """Collect and enter the steps in flight, so that the device is free."""
        while self._flights and self._enter_oldest([]):
            pass

    def drop(self) -> None:
        """Wait for all steps in flight and ignore their results."""
        while self._flights:
            self._collect()
        if self._overlap:
            with self._state:
                self._scheduler.take_back((), time.monotonic())  # none is in flight any more

    def _enter_oldest(self, unlaunched: list[StepPlan]) -> bool:
        """Collect and enter the oldest step in flight. Returns False if it failed: then it is taken back with those
        after it, of which some may be `unlaunched`."""
        flight = self._flights[0]
        sampled = self._collect()
        if sampled is None:
            self._take_back([flight.plan, *(later.plan for later in self._flights), *unlaunched])
            self._shrink.on_failure(flight.error)
            return False
        self._enter(flight, sampled, [])
        return True

    def _launch(self, flight: _Flight) -> bool:
        # Copy once, before any row is written. The source's sequence may have been preempted while this step was
        # planned, and its block given to one of the rows. A second copy would copy what that row wrote.
        self._executor.copy_blocks(flight.plan.copies)
        try:
            flight.launched = self._executor.launch(replace(flight.plan, copies=[]))
        except Exception as error:
            logger.exception("a step of %d sequences could not be launched", len(flight.plan.rows))
            self._check()
            flight.error = _bare(error)
            return False
        self._flights.append(flight)
        return True

    def _collect(self) -> list[Sampled] | None:
        """Wait for the oldest step in flight. Returns its results, or None if it failed."""
        flight = self._flights.popleft()
        try:
            sampled = self._executor.collect(flight.launched)
        except Exception as error:
            logger.exception("a step of %d sequences failed", len(flight.plan.rows))
            self._check()
            flight.error, flight.launched = _bare(error), None
            return None
        self._shrink.went_well()
        return sampled

    def _enter(self, flight: _Flight, sampled: list[Sampled], failures: list[Event]) -> None:
        generated = self._scheduler.generated_tokens
        with self._state:
            events = self._scheduler.update(flight.plan, sampled, time.monotonic())
        now = time.monotonic()
        if flight.error is None:
            self._note_work(flight, now, self._scheduler.generated_tokens - generated)
        self._at_work_since = now
        self.last_step_s = now - max(flight.began, self._last)
        self._last = now
        if self._speculation is not None and flight.error is None:
            self._speculation.record(flight.plan, self.last_step_s - flight.guessing, flight.guessing)
        self._entered(failures + events)

    def _note_work(self, flight: _Flight, now: float, generated: int) -> None:
        plan, since = flight.plan, self._at_work_since
        seconds = now - (flight.began if since is None else since)
        decodes, context, each = len(plan.rows) - plan.prompts, 0, seconds / plan.num_tokens
        energy = each * self.watts
        for row in plan.rows:
            context += row.start + row.count
            course = row.seq.request.course
            course.engine_s += each * row.count
            course.joules += energy * row.count
        for row in plan.rows if plan.prompts else ():
            row.seq.request.course.chunks += row.start < len(row.seq.request.prompt_ids)
            self.recompute_s += each * max(0, min(row.count, row.seq.computed_before - row.start))
        counts = plan.prompt_tokens, generated, plan.num_tokens, context, plan.prompts
        self.last_work = StepWork(now, seconds, decodes, *counts)

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

    def _run_apart(self, plan: StepPlan, failures: list[Event]) -> list[Sampled]:
        """Run the rows of a failed step in halves, and halve those that fail again. Takes 2 log2 N steps if one of N
        rows is to blame. The results of the other rows do not depend on the rows they run with."""
        logger.error("the rows of a failed step are run in halves, to find whose fault it is")
        results: dict[int, Sampled] = {}
        middle = max(1, len(plan.rows) // 2)
        waiting = [part for part in (plan.rows[middle:], plan.rows[:middle]) if part]
        while waiting:
            # A sequence that ended meanwhile, maybe with another choice of its request, holds no blocks.
            rows = [row for row in waiting.pop() if row.seq.status is Status.RUNNING]
            if not rows:
                continue
            part = StepPlan(rows, num_tokens=sum(row.count for row in rows))
            self._note_under_way(part)
            try:
                sampled = self._executor.collect(self._executor.launch(part))
            except Exception as error:
                self._check()
                if len(rows) > 1:
                    waiting += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
                    continue
                logger.exception("request %r failed alone", rows[0].seq.request.id)
                failures += self._fail_alone(rows[0].seq, plan, _bare(error))
                continue
            self._shrink.had_memory()
            results |= zip((id(row) for row in rows if row.samples), sampled, strict=True)
        # The scheduler passes over the rows of sequences that have failed.
        return [results.get(id(row), Sampled(-1)) for row in plan.rows if row.samples]

    def _fail_alone(self, seq: Sequence, plan: StepPlan, error: Exception) -> list[Event]:
        """End a sequence that failed alone. Raises DeviceLostError if the device is to blame and the request can run
        elsewhere, like all of `plan`."""
        if self._shrink.failed_alone(seq.request.id, error) and self._elsewhere():
            self._note_under_way(plan)
            raise DeviceLostError(
                f"the device has no memory for the step of a single sequence, whichever: {brief(error)}"
            ) from None
        with self._state:
            return self._scheduler.fail(seq, f"the model failed on this request: {brief(error)}")


def _bare(error: Exception) -> Exception:
    """The error without its traceback, whose frames hold the step's tensors; who logged it may keep these frames."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return error.with_traceback(None)


class Shrink:
    """Recovers from a lack of device memory: makes steps smaller and preempts one sequence, instead of failing.

    a step fails -> half as large, planned again -> ... -> its sequences run alone -> one fails: it is to blame
                                                        -> two in turn fail: the device is to blame

    Used by the thread that runs the steps.
    """

    def __init__(
        self, scheduler: StepScheduler, state: threading.Lock, release: Callable[[BaseException], bool] | None
    ) -> None:
        """`state`: the lock held while the scheduler changes. `release`: returns whether an error is a lack of memory,
        and if so frees cached memory. None if that is never known."""
        self._scheduler = scheduler
        self._state = state
        self._release = release
        self._retried = False
        self._starved: set[str] = set()

    def on_failure(self, error: BaseException | None) -> bool:
        """React to a step's error. Returns True if its rows are to be planned again.

        That is so as long as steps can be made smaller, and else once, until a step succeeds. After that, each sequence
        runs alone, to find the one to blame. Steps stay small, because the lack of memory may come back.
        """
        if error is None or self._release is None or not self._release(error):
            return False
        with self._state:
            # The scheduler preempts no sequence of a plan whose rows are then run apart.
            again = self._scheduler.shrink(time.monotonic(), tried=self._retried)
            now = self._scheduler.step_tokens
        self._retried = True
        logger.warning(
            "the device has no memory for a step; steps are of %d tokens now, and %s",
            now,
            "this one is planned again" if again else "the sequences of this one run alone",
        )
        return again

    def failed_alone(self, request_id: str, error: BaseException) -> bool:
        """React to a sequence that failed alone. Returns True if it is not to blame: another request also failed alone
        for lack of memory, and no step has succeeded since. Then another process has taken the memory."""
        if self._release is None or not self._release(error):
            return False
        self._starved.add(request_id)
        return len(self._starved) > 1

    def went_well(self) -> None:
        """Note that a step succeeded."""
        self._retried = False
        self.had_memory()

    def had_memory(self) -> None:
        """Note that a part of a step succeeded."""
        self._starved.clear()
