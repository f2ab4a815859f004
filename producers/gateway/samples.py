"""The state of the system, read once for all who look at it, and its last quarter of an hour as a series.

    consoles ─▶ Samples.latest(age) ─▶ a reading that is young enough, or one new one for all who wait
             └▶ Samples.follow(age) ─▶ each new reading, as long as somebody follows
                every INTERVAL_S one reading becomes a Point ─▶ series

A reading is that of /metrics: some thirty commands, and one for each worker. However many consoles are open, each
gateway reads the store every two seconds at most.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from producers.admin.fleet import Fleet, read_fleet
from producers.broker.values import ListedWorker
from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.connect import SILENT_S
from producers.connection.storage import Storage
from producers.contract import keys
from producers.contract.profile import sane
from producers.gateway.admission.limits import Admission
from producers.gateway.metrics import read_measured, read_servers
from producers.store.measurements import ALL, FIRST_TOKEN, QUEUE_WAIT, TASKS, Histogram
from producers.store.usage.ledger import STATUSES
from producers.store.waiting import Pressure

#: Time (s) between two points, and the number that is kept: a quarter of an hour.
INTERVAL_S, POINTS = 10.0, 91
#: Points from one to the other of which percentiles and rates of models are taken: a minute.
WINDOW: Final = 6
#: The counter of the tokens that all workers of a model have generated.
GENERATED: Final = f"model_generated_tokens {ALL} n"
Measured = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The system at one moment. `read_at`: when it was read, on this process's monotonic clock (s)."""

    read_at: float
    fleet: Fleet
    listed: list[ListedWorker]
    overload: Mapping[str, Pressure]
    storage: Mapping[str, Storage]
    measured: Measured


async def read(client: AsyncClient, admission: Admission) -> Reading:
    """Read it. Raises redis.exceptions.RedisError or OSError."""
    began = time.monotonic()
    async with asyncio.timeout(SILENT_S):
        return Reading(
            began,
            await read_fleet(client.store, client.broker),
            await client.broker.workers(),
            await admission.overload.all(client.reserved),
            await read_servers(client),
            await read_measured(client.store),
        )


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers of one reading. `at`: by the store's clock (unix s). Those below `capacity` have counted since ever."""

    at: float
    waiting: int
    running: int
    capacity: int
    ended: int
    failed: int
    generated: int
    first_token: tuple[int, ...]
    queue_wait: tuple[int, ...]

    @classmethod
    def of(cls, reading: Reading) -> Point:
        leases = [lease for pool in reading.fleet.pools for lease in pool.workers]
        counts = reading.measured.values()
        return cls(
            at=reading.fleet.at,
            waiting=sum(sum(pool.queued.values()) for pool in reading.fleet.pools),
            running=_sum(leases, "running"),
            capacity=_sum(leases, "capacity"),
            ended=sum(sum(outcomes(model).values()) for model in counts),
            failed=sum(outcomes(model)["failed"] for model in counts),
            generated=sum(model.get(GENERATED, 0) for model in counts),
            first_token=_added(counts, FIRST_TOKEN),
            queue_wait=_added(counts, QUEUE_WAIT),
        )


class Samples:
    """One reader for all who look. `read_one` reads the system."""

    def __init__(self, read_one: Callable[[], Coroutine[Any, Any, Reading]]) -> None:
        self._read = read_one
        #: A reading is no caller's own: it is made in no caller's context.
        self._context = contextvars.copy_context()
        self._reading: asyncio.Task[Reading] | None = None
        self._last: Reading | None = None
        self._encoded: dict[str, tuple[Reading, bytes]] = {}
        self.points: deque[Point] = deque(maxlen=POINTS)
        self.recent: deque[tuple[float, Measured]] = deque(maxlen=WINDOW + 1)
        """(store's clock, counters of each model) of the last points."""

    async def latest(self, max_age_s: float) -> Reading:
        """A reading that is no older. Raises as `read` does."""
        if self._last is not None and time.monotonic() - self._last.read_at <= max_age_s:
            return self._last
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), context=self._context)
            self._reading.add_done_callback(self._done)
        return await asyncio.shield(self._reading)

    async def follow(self, every_s: float) -> AsyncGenerator[Reading]:
        """Each reading from now on, one every so many seconds for all who follow. Raises as `read` does."""
        last: Reading | None = None
        while True:
            reading = await self.latest(every_s)
            if reading is not last:
                yield reading
            last = reading
            # All who follow wake once it is too old, and wait for one new reading together.
            await asyncio.sleep(max(every_s / 100, reading.read_at + every_s - time.monotonic()))

    def _done(self, reading: asyncio.Task[Reading]) -> None:
        self._reading = None
        if not reading.cancelled() and reading.exception() is None:
            self._last = reading.result()
            if not self.points:
                self._enter(self._last)

    def encoded(self, name: str, reading: Reading, encode: Callable[[Reading], bytes]) -> bytes:
        """An answer's bytes, made once of each reading."""
        made_of, data = self._encoded.get(name, (None, b""))
        if made_of is not reading:
            data = encode(reading)
            self._encoded[name] = reading, data
        return data

    async def run(self) -> None:
        """Take points until it is cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            with suppress(*FAILURES):
                self._enter(await self.latest(INTERVAL_S / 4))

    def _enter(self, reading: Reading) -> None:
        if not self.points or reading.fleet.at > self.points[-1].at:
            self.points.append(Point.of(reading))
            self.recent.append((reading.fleet.at, reading.measured))

    def series(self, latest: Reading | None = None) -> dict[str, list[Any]]:
        """Columns by name, a value for each point: times, numbers, rates (a second) and percentiles (s). Null: there
        is nothing to take it from. `latest`: a reading that is the last point, unless there is one of about its time.
        """
        points = list(self.points)
        if latest is not None and points and latest.fleet.at - points[-1].at >= INTERVAL_S / 4:
            points.append(Point.of(latest))
        steps = [(new, old, max(new.at - old.at, 1e-3)) for old, new in pairwise(points)]
        spans = [(new, points[max(0, i - WINDOW)]) for i, new in enumerate(points)]
        return {
            "at": [round(point.at, 3) for point in points],
            "waiting": [point.waiting for point in points],
            "running": [point.running for point in points],
            "capacity": [point.capacity for point in points],
            "tokens_per_s": [None, *(rate(new.generated, old.generated, s) for new, old, s in steps)][: len(points)],
            "ended_per_s": [None, *(rate(new.ended, old.ended, s) for new, old, s in steps)][: len(points)],
            "failed_per_s": [None, *(rate(new.failed, old.failed, s) for new, old, s in steps)][: len(points)],
            "first_token_p95_s": [percentile(FIRST_TOKEN, new.first_token, old.first_token) for new, old in spans],
            "queue_wait_p95_s": [percentile(QUEUE_WAIT, new.queue_wait, old.queue_wait) for new, old in spans],
        }


def rate(new: int, old: int, seconds: float) -> float:
    """By the second; 0 where a counter began again."""
    return round(max(0, new - old) / seconds, 3)


def percentile(histogram: Histogram, new: Sequence[int], old: Sequence[int] = (), share: float = 0.95) -> float | None:
    """The value (s) below which this share of the observations between two counts of buckets lies, by a straight line
    within its bucket. The last bound for what is above it. None without any."""
    old = old or [0] * len(new)
    counts = [max(0, n - o) for n, o in zip(new, old, strict=True)]
    rank, below = share * sum(counts), 0.0
    if not rank:
        return None
    for count, low, high in zip(counts, (0.0, *histogram.bounds), histogram.bounds, strict=False):
        if count and below + count >= rank:
            return round(low + (high - low) * (rank - below) / count, 6)
        below += count
    return histogram.bounds[-1]


def outcomes(model: Mapping[str, int]) -> dict[str, int]:
    """Outcome -> a model's tasks that ended so."""
    return {status: sum(model.get(f"{TASKS} {tier} {status} n", 0) for tier in keys.TIERS) for status in STATUSES}


def buckets(model: Mapping[str, int], histogram: Histogram) -> tuple[int, ...]:
    """The observations of each bucket of a histogram, of all tiers."""
    labels = keys.TIERS if histogram.by_tier else (ALL,)
    names = histogram.buckets
    return tuple(sum(model.get(f"{histogram.name} {label} {name}", 0) for label in labels) for name in names)


def _added(models: Iterable[Mapping[str, int]], histogram: Histogram) -> tuple[int, ...]:
    none = (0,) * len(histogram.buckets)
    return tuple(map(sum, zip(none, *(buckets(model, histogram) for model in models), strict=True)))


def _sum(leases: Sequence[Mapping[str, Any]], name: str) -> int:
    return int(sum(min(sane(lease.get(name)) or 0, 2**31) for lease in leases))
