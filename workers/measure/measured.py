"""All that a worker measures of itself while it serves, the profile that it makes of that, and the one that is kept.

`Keeper` keeps the profile with the model's version, so that it is known with no worker up. A store that does not take
it, or holds something else there, is no reason to serve less: it is logged and tried again.

| dies after | state | who repairs it |
| --- | --- | --- |
| it measured | an older profile, or none | the next worker that serves |
| HSET, before this worker knows | the new profile | nothing to repair: merged again, it changes little |
"""

from __future__ import annotations

import logging
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from math import ceil
from operator import itemgetter
from typing import Any, Final

from redis import Redis

from engine.plan import StepWork
from producers.connection.log_throttle import warn_throttled
from producers.contract.profile import Profile
from producers.store.fleet.cards import keep_profile, profile_field
from workers.connect import LOST
from workers.measure.increments import Increments
from workers.measure.steps import Knee, Mix, StepTimes
from workers.state.served import Served

#: The seconds that the duty cycle is about.
DUTY_S: Final = 10.0
#: Steps are noted at most so often (s).
NOTED_S: Final = 0.25
#: Tasks over which their size is averaged.
MEMORY: Final = 200
#: First tokens of the last so many seconds count, and at most so many of them.
FIRST_S: Final = 180.0
FIRST: Final = 512
logger = logging.getLogger(__name__)


class Duty:
    """The share of the last seconds in which the engine had work. One thread writes, others read. Times are
    monotonic."""

    def __init__(self, now: float) -> None:
        self._busy = 0.0
        self._began = now
        #: (time, seconds of all steps until then).
        self._notes: deque[tuple[float, float]] = deque([(now, 0.0)], maxlen=int(4 * DUTY_S / NOTED_S))

    def take(self, ended: float, seconds: float) -> None:
        """Enter one step."""
        before, self._busy = self._busy, self._busy + seconds
        if ended - self._notes[-1][0] >= NOTED_S:
            if seconds >= NOTED_S:
                self._notes.append((max(ended - seconds, self._notes[-1][0]), before))
            self._notes.append((ended, self._busy))

    def share(self, now: float, stepping: float = 0.0) -> float:
        """The share of the window that ends now. `stepping`: seconds that the present step has run."""
        since = max(self._began, now - DUTY_S)
        busy = self._busy - self._until(since) + min(stepping, now - since)
        return min(1.0, max(0.0, busy / (now - since))) if now > since else 0.0

    def _until(self, then: float) -> float:
        """Seconds of all steps until then."""
        notes = tuple(self._notes)
        index = bisect_left(notes, then, key=itemgetter(0))
        if index == len(notes):
            return self._busy if then - notes[-1][0] >= NOTED_S else notes[-1][1]
        if index == 0:
            return notes[0][1]
        (early, less), (late, more) = notes[index - 1], notes[index]
        return less + (more - less) * (then - early) / (late - early)


class TaskSizes:
    """Means over the last tasks that ended."""

    def __init__(self) -> None:
        self.ended = 0
        self._mix = Mix(0.0, 0.0, 0.0)

    @property
    def mix(self) -> Mix | None:
        """None before a task has ended."""
        return self._mix if self.ended else None

    def take(self, prompt: int, cached: int, generated: int) -> None:
        """Enter a task that ended. `cached`: prompt tokens that were not computed."""
        self.ended += 1
        share, was = 1 / min(self.ended, MEMORY), self._mix
        self._mix = Mix(
            was.prompt + share * (prompt - cached - was.prompt),
            was.generated + share * (generated - was.generated),
            was.kept + share * (prompt + generated - was.kept),
        )


class FirstTokens:
    """Times (s) to the first token, from the claim."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=FIRST)

    def take(self, now: float, seconds: float) -> None:
        """`now`: monotonic."""
        self._recent.append((now, seconds))

    def p95(self, now: float) -> float | None:
        """The 95th percentile (nearest rank); None without any."""
        times = sorted(seconds for at, seconds in tuple(self._recent) if at >= now - FIRST_S)
        return times[ceil(0.95 * len(times)) - 1] if times else None


class Measured:
    """`first_token` is called with the time of each task's claim (monotonic) when its first token is published, `work`
    with each step's work on the engine's thread. `model`: the name that tasks ask for."""

    def __init__(
        self,
        engine: Any,
        model: str = "",
        first_token: Callable[[float], None] = lambda claimed_at: None,
        work: Callable[[StepWork], None] = lambda work: None,
    ) -> None:
        self._engine = engine
        self._first_token = first_token
        self._work = work
        self.increments = Increments(model, engine)
        self._steps = StepTimes()
        self._tasks = TaskSizes()
        self._ttft = FirstTokens()
        self._duty = Duty(time.monotonic())
        self._last: StepWork | None = None

    @property
    def evidence(self) -> tuple[int, int]:
        """Numbers of steps and of ended tasks: what a knee is known from."""
        return self._steps.steps, self._tasks.ended

    def on_step(self) -> None:
        """The engine's thread, after each step."""
        work: StepWork | None = self._engine.last_work
        if work is not None and work is not self._last:
            self._last = work
            self._steps.take(work)
            self._duty.take(work.ended, work.seconds)
            self.increments.on_step(work)
            self._work(work)

    def on_first_token(self, claimed_at: float) -> None:
        """A task's first token was published, which was claimed then (monotonic). One thread."""
        now = time.monotonic()
        self._ttft.take(now, now - claimed_at)
        self._first_token(claimed_at)

    def on_end(self, prompt: int, cached: int, generated: int) -> None:
        """A task has ended with so many tokens. One thread."""
        self._tasks.take(prompt, cached, generated)

    def profile(self, cold_start: dict[str, float]) -> Profile:
        """The figures now. `cold_start`: its phases (s). Any thread."""
        now, mix, knee = time.monotonic(), self._tasks.mix, self._knee()
        stepping, _ = self._engine.stepping()
        ttft = self._ttft.p95(now)
        return Profile(
            knee=None if knee is None else float(knee.concurrency),
            reached=float(self._steps.reached) or None,
            tokens_per_s=None if knee is None else round(knee.tokens_per_s, 1),
            tokens_per_task=None if mix is None else round(mix.prompt + mix.generated, 1),
            ttft_p95=None if ttft is None else round(ttft, 4),
            duty=round(self._duty.share(now, stepping), 3),
            kv_capacity=float(self._engine.kv_capacity),
            cold_start=cold_start,
        )

    def _knee(self) -> Knee | None:
        engine, mix = self._engine, self._tasks.mix
        if mix is None:
            return None
        return self._steps.knee(mix, engine.max_num_seqs, engine.kv_tokens_total, engine.step_tokens)


class Keeper:
    """`profile`: the worker's present profile. Any thread."""

    def __init__(self, served: Served, measured: Measured, profile: Callable[[], Profile]) -> None:
        self._name = profile_field(served.pool.model, served.pool.version)
        self._measured = measured
        self._profile = profile
        self._lock = threading.Lock()
        self._evidence = (0, 0)
        self._start: dict[str, float] = {}

    def keep(self, store: Redis) -> None:
        """Merge it into the kept profile. Raises nothing."""
        with self._lock:
            evidence, measured_now = self._measured.evidence, self._profile()
            fresh, started = (
                evidence != self._evidence,
                measured_now.cold_start != self._start and "total" in measured_now.cold_start,
            )
            try:
                if keep_profile(store, self._name, measured_now, fresh=fresh, started=started):
                    self._evidence = evidence
                    self._start = measured_now.cold_start if started else self._start
            except LOST as exc:
                warn_throttled(logger, "What this worker measured is not kept, trying again: %s", exc)

    def send(self, store: Redis) -> None:
        """Add what has come since to the model's counters and histograms. Raises nothing."""
        self._measured.increments.send(store)
