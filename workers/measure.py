"""A worker's measurements of itself, for whoever decides how many workers there should be.

    engine's thread   a step's work ─▶ StepTimes (seconds by size), Duty, Increments
    publisher         first token of a task, end of a task ─▶ FirstTokens, TaskSizes, TaskTimesMeter
                      gaps between tokens ─▶ Increments
    housekeeper       about them all ─▶ Measured.profile ─▶ the lease, and `penstock:profiles` (Keeper)
                      Increments ─▶ `penstock:metrics:*`, for the gateways' counters and histograms

All of it takes constant memory. A step costs a few microseconds.

**Steps.** Times of the engine's steps by their size, and what they say of it: its knee, and the tokens per second
there.

A task has P prompt tokens to be computed and G tokens to be generated. With n sequences at once, an engine whose decode
step takes t(n), makes g tokens per sequence in it, and needs p for a prompt's token, makes

    X(n) = (P + G) / (P p + G / g * t(m) / m)   tokens per second,   m = min(n, G / g * budget / P)

Of many sequences some compute their prompts: at most m decode at once where prompts fill the `budget` of each step.
X grows with n as long as sequences share what a step costs, and less and less so. The knee is the smallest n with
X(n) >= KNEE_SHARE * X(capacity), where `capacity` is what the engine holds at once: its slots, or its KV cache divided
by the tokens of a task.

t is measured for sizes that occurred (`Curve`: smoothed, for a few sizes that span a wide range), interpolated, and
continued by its last slope. So a knee is found before load has reached it. From fewer than MIN_MEASURED sequences at
once no slope is taken. Further sequences then count as free, so that the knee is overestimated, and given only
if even that is within what was measured.

**Increments.** What this worker adds to its model's counters and histograms in the store
(`producers.store.measurements`).

    engine's thread: a step ─┐
    publisher: token gaps ───┼▶ Tally ─ housekeeper, each second: send ─▶ MEASURE
    engine's statistics ─────┘

Increments that were sent and not acknowledged are sent again as they were, under the same number, before any others: so
a lost reply counts nothing twice, and whatever comes meanwhile waits in constant memory.

**The profile.** `Keeper` keeps the profile with the model's version, so that it is known with no worker up. A store
that does not take it, or holds something else there, is no reason to serve less: it is logged and tried again.

| dies after | state | who repairs it |
| --- | --- | --- |
| it measured | an older profile, or none | the next worker that serves |
| HSET, before this worker knows | the new profile | nothing to repair: merged again, it changes little |
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from operator import itemgetter
from typing import Any, Final

from redis import Redis

from engine.plan import StepWork
from producers.connection.log_throttle import warn_throttled
from producers.connection.script import run
from producers.contract import keys
from producers.contract.profile import Profile
from producers.store.fleet.cards import keep_profile, profile_field
from producers.store.measurements import (
    ALL,
    ENERGY,
    ENGINE_COUNTERS,
    INTER_TOKEN,
    LOST_IN_ENGINE,
    LOST_TIME,
    PROCESSOR_TIME,
    START_PHASES,
    START_TIME,
    STARTS,
    STEP,
    STEP_SEQUENCES,
    STEP_TOKENS,
    WORKER_STATES,
    WORKER_TIME,
    Tally,
    measure,
)
from workers.connect import LOST
from workers.energy import EnergyAccount
from workers.state.delivery import Delivery
from workers.state.served import Served
from workers.task_times import TaskTimesMeter

#: One bucket for each power of two: sizes 1, 2-3, 4-7, ...
BUCKETS: Final = 21
#: Steps after which a bucket is believed.
TRUSTED: Final = 32
#: Steps over which a bucket is smoothed.
MEMORY: Final = 128
#: A step counts as at most so many times the mean of its bucket: what took longer was the machine's doing.
OUTLIER: Final = 4.0
#: The slope beyond the largest size is that of the sizes from this share of it on.
NEAR: Final = 1 / 8
#: Share of the best throughput that the knee has.
KNEE_SHARE: Final = 0.85
#: Sequences at once that must have been seen before more are extrapolated.
MIN_MEASURED: Final = 4
#: Share of each new step in the mean cost of a prompt's token, and in the tokens that a decode makes.
SMOOTHING: Final = 1 / 128


class Curve:
    """Written by one thread; others read it, a step early or late."""

    def __init__(self) -> None:
        self._sizes = [0.0] * BUCKETS
        self._seconds = [0.0] * BUCKETS
        self._count = [0] * BUCKETS

    def take(self, size: int, seconds: float) -> float:
        """Enter one step. Returns the seconds that it counts as."""
        bucket = min(size.bit_length(), BUCKETS) - 1
        count = self._count[bucket]
        mean = self._seconds[bucket]
        if count and seconds > OUTLIER * mean:
            seconds = OUTLIER * mean
        elif count < TRUSTED and OUTLIER * seconds < mean:
            count = 0  # those before were the outliers
        share = 1.0 / (count + 1) if count < MEMORY else 1.0 / MEMORY
        self._seconds[bucket] = mean + share * (seconds - mean)
        self._sizes[bucket] += share * (size - self._sizes[bucket])
        self._count[bucket] = count + 1
        return seconds

    def near(self, size: int) -> float | None:
        """The mean of the size's bucket; None until that is believed. Quick, for every step."""
        bucket = min(size.bit_length(), BUCKETS) - 1
        return self._seconds[bucket] if self._count[bucket] >= TRUSTED else None

    def points(self) -> list[tuple[float, float]]:
        """(size, seconds) of the believed buckets. Seconds do not fall with size: buckets that say so share their mean,
        each by its number of steps, as far as these are remembered."""
        sizes: list[float] = []
        runs: list[tuple[float, int, int]] = []
        for size, seconds, count in zip(self._sizes, self._seconds, self._count, strict=True):
            if count < TRUSTED:
                continue
            sizes.append(size)
            run = (seconds, min(count, MEMORY), 1)
            while runs and runs[-1][0] > run[0]:
                run = _joined(runs.pop(), run)
            runs.append(run)
        level = [seconds for seconds, _, buckets in runs for _ in range(buckets)]
        return list(zip(sizes, level, strict=True))


def _joined(left_run: tuple[float, int, int], right_run: tuple[float, int, int]) -> tuple[float, int, int]:
    """Two neighbouring runs of buckets as one: (mean seconds, steps, buckets)."""
    steps = left_run[1] + right_run[1]
    return (left_run[0] * left_run[1] + right_run[0] * right_run[1]) / steps, steps, left_run[2] + right_run[2]


def at(points: list[tuple[float, float]], size: float) -> float:
    """Seconds of a step of this size: between points by interpolation, beyond the last by its slope."""
    index = bisect_left(points, (size, 0.0))
    if index == len(points):
        last, seconds = points[-1]
        return seconds + slope(points) * (size - last)
    if index == 0:
        return points[0][1]
    (before, lower), (after, upper) = points[index - 1], points[index]
    return lower + (upper - lower) * (size - before) / (after - before)


def slope(points: list[tuple[float, float]]) -> float:
    """Seconds per size at the end of the curve: a line through the last points, each as exact as it is large. Not
    negative; 0 with one point."""
    last = points[-1][0]
    near = [(size, seconds, 1 / seconds**2) for size, seconds in points if size >= NEAR * last and seconds > 0]
    total = sum(weight for _, _, weight in near)
    if len(near) < 2:
        return 0.0
    middle = sum(size * weight for size, _, weight in near) / total
    level = sum(seconds * weight for _, seconds, weight in near) / total
    spread = sum(weight * (size - middle) ** 2 for size, _, weight in near)
    return max(0.0, sum(weight * (size - middle) * (seconds - level) for size, seconds, weight in near) / spread)


@dataclass(frozen=True, slots=True)
class Mix:
    """Means over tasks. `prompt`: prompt tokens that were computed; `generated`: of all choices; `kept`: KV tokens."""

    prompt: float
    generated: float
    kept: float


@dataclass(frozen=True, slots=True)
class Knee:
    concurrency: int
    tokens_per_s: float


class StepTimes:
    """Written by the engine's thread; any thread reads."""

    def __init__(self) -> None:
        self.steps = 0
        self._decode = Curve()
        self._prompt = Curve()
        #: Decodes beside prompts. Where tasks generate few tokens, hardly a step is without a prompt: then each decode
        #: has its share of them beside it, and their time is in this curve.
        self._mixed = Curve()
        self._per_decode = 1.0
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    def take(self, work: StepWork) -> None:
        """Enter one step."""
        self.steps += 1
        decodes = work.decodes
        if not work.prompt_tokens:
            if decodes:
                self._decode.take(decodes, work.seconds)
                self._per_decode += SMOOTHING * (work.generated / decodes - self._per_decode)
        elif decodes == 0:
            self._take_prompt(work.prompt_tokens, work.seconds)
        elif (beside := self._decode.near(decodes)) is not None:
            self._take_prompt(work.prompt_tokens, max(0.0, work.seconds - beside))
        else:
            self._mixed.take(decodes, work.seconds)

    @property
    def reached(self) -> int:
        """The most sequences at once of which enough steps were measured; 0 without any."""
        return round(
            max((points[-1][0] for curve in (self._decode, self._mixed) if (points := curve.points())), default=0)
        )

    def _take_prompt(self, tokens: int, seconds: float) -> None:
        seconds = self._prompt.take(tokens, seconds)
        self._prompt_tokens += tokens - SMOOTHING * self._prompt_tokens
        self._prompt_seconds += seconds - SMOOTHING * self._prompt_seconds

    def knee(self, mix: Mix, seqs: int, kv_tokens: float, budget: int) -> Knee | None:
        """The knee for such tasks, with so many slots and KV tokens; None while it is unknown. `budget`: the tokens of
        one step."""
        tokens = mix.prompt + mix.generated
        prompt = mix.prompt * self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else 0.0
        decodes = max(0.0, mix.generated - 1) / max(self._per_decode, 0.1)  # the first token comes with the prompt
        if not decodes:
            return Knee(1, tokens / prompt) if prompt else None
        capacity = max(1, min(seqs, int(kv_tokens / mix.kept)))
        together = max(1.0, decodes * budget / mix.prompt) if mix.prompt else float(capacity)
        alone, mixed = self._decode.points(), self._mixed.points()
        return _knee(alone, tokens, decodes, prompt, together, capacity) or _knee(
            mixed, tokens, decodes, 0.0, together, capacity
        )


def _knee(
    points: list[tuple[float, float]], tokens: float, decodes: float, prompt: float, together: float, capacity: int
) -> Knee | None:
    """The knee of a decode's curve, for tasks of so many tokens, decodes, and seconds for their prompts."""
    if not points:
        return None
    largest = points[-1][0]
    unsure = largest < min(MIN_MEASURED, capacity)
    if unsure:
        points = [*points, (float(capacity) + 1, points[-1][1])]
    rates: dict[int, float] = {}
    for n in _sizes(capacity):
        m = min(n, together)
        rates[n] = tokens / (decodes * at(points, m) / m + prompt)
    knee = next(n for n, rate in rates.items() if rate >= KNEE_SHARE * max(rates.values()))
    return None if unsure and knee > MIN_MEASURED else Knee(knee, rates[knee])


def _sizes(limit: int) -> list[int]:
    """1 to `limit`: all of the small ones, then in steps of a sixteenth."""
    sizes = [1]
    while sizes[-1] < limit:
        sizes.append(min(limit, sizes[-1] + max(1, sizes[-1] // 16)))
    return sizes


#: Increments are sent this often (s), if there are any.
SEND_S: Final = 1.0
#: Time (s) without work of which an idle worker tells at once, so that it seldom calls the store.
IDLE_S: Final = 10.0
logger = logging.getLogger(__name__)


#: The time that a worker's start took (s), and when it was over (monotonic); None until then.
Start = Callable[[], tuple[float, float] | None]


class WorkerTimes:
    """A worker's time and energy by state, and its processor time. Together the states are the time since its process
    began, but for the step under way. Not thread-safe. `start`: idle time begins with its end. `processor_time`: the
    worker's (s)."""

    def __init__(
        self,
        start: Start,
        energy: EnergyAccount | None = None,
        processor_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._start = start
        self.energy = energy
        self._processor_time = processor_time
        self.busy = 0.0
        """Seconds of all steps."""
        #: Counter and its label -> microseconds, or microjoules, that were added to a tally.
        self._added: Counter[tuple[str, str]] = Counter()

    def read_meter(self, stepping: float) -> None:
        """Read the energy meter, which takes longer than a step should wait."""
        if self.energy is not None:
            started = self._start()
            self.energy.update(self.busy, stepping, None if started is None else started[1])

    def add_to(self, tally: Tally, now: float, stepping: float) -> None:
        """Add what has come since. `now`: monotonic. `stepping`: seconds that the present step has run. Idle time alone
        waits until it is IDLE_S."""
        starting, ready_at = self._start() or (0.0, now)
        idle = max(0.0, now - ready_at - self.busy - stepping)
        times = {"busy": self.busy, "idle": idle, "starting": starting}
        values = {(WORKER_TIME, state): seconds for state, seconds in times.items()}
        values[PROCESSOR_TIME, ALL] = self._processor_time()
        if self.energy is not None:
            values |= {(ENERGY, state): getattr(self.energy, state) for state in WORKER_STATES}
        new = {name: max(0, round(1e6 * value) - self._added[name]) for name, value in values.items()}
        busy, idle_us, starting_us = (new[WORKER_TIME, state] for state in WORKER_STATES)
        if not tally and not busy and not starting_us and idle_us < 1e6 * IDLE_S:
            return
        for (counter, label), more in new.items():
            self._added[counter, label] += more
            tally.add(counter, more, label)


class Increments:
    """`model`: the name that tasks ask for; `engine`: its statistics are counted on from zero. Any thread."""

    def __init__(
        self,
        model: str,
        engine: Any,
        start: Start = lambda: None,
        energy: EnergyAccount | None = None,
        processor_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._model = model
        self._engine = engine
        self._source = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._tally = Tally()
        self._sending = threading.Lock()
        self._sequence = 0
        self._unacknowledged: Tally | None = None
        self._statistics = dict.fromkeys((statistic for *_, statistic in ENGINE_COUNTERS), 0)
        #: Microseconds of LOST_IN_ENGINE that are in a tally.
        self._lost_us = dict.fromkeys(LOST_IN_ENGINE, 0)
        self._times = WorkerTimes(start, energy, processor_time)

    def on_step(self, work: StepWork) -> None:
        """Enter an engine's step."""
        with self._lock:
            self._times.busy += work.seconds
            self._tally.observe(STEP, work.seconds)
            self._tally.observe(STEP_SEQUENCES, work.decodes + work.prompts)
            self._tally.observe(STEP_TOKENS, work.tokens)

    @property
    def busy(self) -> float:
        """Seconds of all steps. Any thread."""
        return self._times.busy

    def on_gaps(self, gaps: Mapping[tuple[str, float], int]) -> None:
        """Enter gaps between tokens. `gaps`: (tier, seconds) -> number."""
        with self._lock:
            for (tier, seconds), count in gaps.items():
                self._tally.observe(INTER_TOKEN, seconds, tier if tier in keys.TIERS else "default", count)

    def on_start(self, phases: Mapping[str, float], *, from_standby: bool) -> None:
        """Enter this worker's start. `phases`: phase -> seconds."""
        with self._lock:
            self._tally.add(STARTS, 1, "standby" if from_standby else "process")
            for phase in START_PHASES:
                self._tally.add(START_TIME, round(1e6 * phases.get(phase, 0.0)), phase)

    def on_lost_time(self, seconds: Mapping[str, float]) -> None:
        """Enter time that a task lost, by cause."""
        with self._lock:
            for cause, its in seconds.items():
                self._tally.add(LOST_TIME, round(1e6 * its), cause)

    def send(self, store: Redis) -> None:
        """Add what has come to the store. Raises nothing: what is not acknowledged is sent again next time."""
        with self._sending:
            try:
                if self._unacknowledged is not None:
                    self._call(store, self._unacknowledged)
                self._add_statistics()
                stepping, _ = self._engine.stepping()
                self._times.read_meter(stepping)
                if self._times.energy is not None:
                    self._engine.draws(self._times.energy.watts)
                with self._lock:
                    self._times.add_to(self._tally, time.monotonic(), stepping)
                    tally, self._tally = self._tally, Tally()
                if tally:
                    self._sequence, self._unacknowledged = self._sequence + 1, tally
                    self._call(store, tally)
            except LOST as exc:
                warn_throttled(logger, "What this worker measured is not added to the metrics, trying again: %s", exc)

    def _call(self, store: Redis, tally: Tally) -> None:
        run(store, measure(self._source, str(self._sequence), {self._model: tally}))
        self._unacknowledged = None

    def _add_statistics(self) -> None:
        statistics = self._engine.stats()
        with self._lock:
            for counter, _, name in ENGINE_COUNTERS:
                value = getattr(statistics, name)
                self._tally.add(counter, max(0, value - self._statistics[name]))
                self._statistics[name] = value
            for cause, name in LOST_IN_ENGINE.items():
                lost_us = round(1e6 * getattr(statistics, name))
                self._tally.add(LOST_TIME, max(0, lost_us - self._lost_us[cause]), cause)
                self._lost_us[cause] = lost_us


#: The seconds that the duty cycle is about.
DUTY_S: Final = 10.0
#: Steps are noted at most so often (s).
NOTED_S: Final = 0.25
#: Tasks over which their size is averaged.
TASKS_AVERAGED: Final = 200
#: First tokens of the last so many seconds count, and at most so many of them.
FIRST_S: Final = 180.0
FIRST: Final = 512


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


#: Time (s) of steps and of waits for turns after which their shares are taken, and the part of each in the mean.
TURNS_S, TURNS_SMOOTHING = 1.0, 0.3


class TurnShare:
    """The part of the time in which a worker had work that it had its turn, lately, on a device that it shares. One
    thread."""

    def __init__(self) -> None:
        self._worked = self._waited = 0.0
        self.value = 1.0

    def take(self, worked: float, waited: float) -> float:
        """Enter the seconds of all steps, and of all waits for turns. Returns the value."""
        more_work, more_waits = worked - self._worked, waited - self._waited
        if more_work + more_waits >= TURNS_S:
            self._worked, self._waited = worked, waited
            self.value += TURNS_SMOOTHING * (more_work / (more_work + more_waits) - self.value)
        return self.value


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
        share, was = 1 / min(self.ended, TASKS_AVERAGED), self._mix
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
    with each step's work on the engine's thread. `model`: the name that tasks ask for. `start`: see `Start`. `energy`:
    None without a meter."""

    def __init__(
        self,
        engine: Any,
        model: str = "",
        first_token: Callable[[float], None] = lambda claimed_at: None,
        work: Callable[[StepWork], None] = lambda work: None,
        start: Start = lambda: None,
        energy: EnergyAccount | None = None,
        processor_time: Callable[[], float] = time.process_time,
    ) -> None:
        self._engine = engine
        self._first_token = first_token
        self._work = work
        self.increments = Increments(model, engine, start, energy, processor_time)
        self._steps = StepTimes()
        self._tasks = TaskSizes()
        self._ttft = FirstTokens()
        self._task_times = TaskTimesMeter()
        self._duty = Duty(time.monotonic())
        self._last: StepWork | None = None
        self._turns = TurnShare()

    def turn_share(self, waited: float) -> float:
        """See `TurnShare`. `waited`: seconds of all waits for turns. One thread."""
        return self._turns.take(self.increments.busy, waited)

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

    def on_lost_time(self, delivery: Delivery) -> None:
        """A task has ended here. Enter the time that it lost between workers. One thread."""
        if delivery.record is None:
            return
        times = delivery.record.lost_ms(delivery.start, delivery.began)
        self.increments.on_lost_time({cause: ms / 1000 for cause, ms in times.items()})

    def on_completed(self, delivery: Delivery) -> None:
        """A task has completed. One thread. Tasks that were begun more than once are left out."""
        if delivery.record is None or delivery.start != 1 or any(delivery.base):
            return
        tokens = delivery.record.fields.get("tokens", "")
        self._task_times.take(
            time.monotonic() - delivery.began_at,
            need=int(tokens) if tokens.isdecimal() else delivery.used,
            prompt=delivery.prompt_tokens,
            output=delivery.generated / delivery.width,
            allowed=delivery.max_output,
            width=delivery.width,
            running=0 if self._last is None else self._last.decodes + self._last.prompts,
        )

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
            task_times=self._task_times.times(),
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
