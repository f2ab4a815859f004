"""Observes a task: its record, its place in the queue, the workers that may run it.

    record ─▶ look: fleet, place in the queue, the tenants that wait ─▶ Observation ─▶ `producers.admin.explain`
    last rows of the ledger ─▶ tasks that ended lately; with those that wait: how many come ─▶ Arrivals

A broker's list shows many tenants only by samples, so the store's counts of their waiting tasks are read, too. All of
it is a number of commands that does not grow with tasks or tenants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from producers.admin.fleet import Fleet, Pool, read_fleet
from producers.broker.base import Broker
from producers.broker.values import NO_COUNTS, QueuePosition, TenantCounts
from producers.connection.script import aexecute, aexecute_many, text
from producers.connection.storage import read_storage
from producers.contract import keys, levels
from producers.contract.keys import takes_from
from producers.contract.message import Message
from producers.contract.profile import Profile, sane
from producers.contract.record import Record
from producers.store.fleet.scaling import is_fresh

#: With more tenants than this, reading their counts would take too long.
MAX_TENANTS: Final = 4000
#: The least share of a tenant's waiting tasks that lists must show to estimate the others.
LISTED_SHARE: Final = 0.9
#: The tenant's tasks whose tokens are looked up: in so many places of its list, so many at each.
SAMPLE_OFFSETS, SAMPLE_SIZE = 16, 16
#: Rows of the ledger by which arrivals are counted, and how long ago (s) the tasks came that count.
ENDED_ROWS: Final = 200
ARRIVED_S: Final = 6.0
#: No worker runs more tasks, whatever its lease says.
MOST_RUNNING: Final = 1e6
#: A worker's lease, as `workers.runtime.assembly` writes it, with its incarnation under `worker`.
Lease = Mapping[str, Any]


async def count_tenants(store: Redis, message: Message, since: float) -> TenantCounts:
    """`since`: when the task that has waited longest in its tier was submitted, unix s. Raises
    redis.exceptions.RedisError or OSError.

    The part of the tenant's tasks that came before it is that of those since then that lists show, if they are most of
    those that wait: lists show neither responses nor tasks whose caller waits on the connection.
    """
    index, first = keys.tasks(message.tenant), str(int(since * 1000))
    spans = (("-inf", f"({first}"), (first, f"({message.at}"), (first, "+inf"))
    commands = [("HLEN", keys.WAITING_TENANTS), *(("ZCOUNT", index, *span) for span in spans)]
    tenants, skipped, before, whole = await aexecute_many(store, commands)
    if not 0 < tenants <= MAX_TENANTS:
        return NO_COUNTS
    sizes_of = _look_up(index, skipped, before) if message.tenant else ()
    counts, *samples = await aexecute_many(store, [("HGETALL", keys.WAITING_TENANTS), *sizes_of])
    waiting = {text(name): int(number) for name, number in counts.items()}
    sizes = [int(size) for sample in samples for size in sample if size is not None and size.isdigit()]
    share = before / whole if whole and whole >= LISTED_SHARE * waiting.get(message.tenant or "", 0) else None
    tokens = sum(sizes) / len(sizes) if sizes else None
    return TenantCounts(waiting, share, tokens)


def _look_up(index: str, first: int, count: int) -> Iterator[tuple[str | int, ...]]:
    """Commands for the tokens of tasks from all over `count` of an index, the first of which has the place `first`."""
    samples = min(SAMPLE_OFFSETS, -(-count // SAMPLE_SIZE))
    for sample in range(samples):
        at = first + sample * count // samples
        each = min(SAMPLE_SIZE, count - sample * count // samples)
        yield ("SORT_RO", index, "BY", "nosort", "LIMIT", at, each, "GET", f"{keys.task('*')}->tokens")


@dataclass(frozen=True, slots=True)
class EndedTask:
    """A row of the ledger. `created`: unix s; None where nobody knows. `ended`: unix s."""

    model: str
    version: str
    tier: str
    created: float | None
    ended: float


async def read_ended(store: Redis) -> list[EndedTask]:
    """The tasks that ended last, ENDED_ROWS at most, the last one first; none where the server's user may not read
    them. Raises redis.exceptions.RedisError or OSError."""
    try:
        rows: Any = await aexecute(store, "XREVRANGE", keys.LEDGER, "+", "-", "COUNT", ENDED_ROWS)
    except NoPermissionError:
        return []
    tasks = []
    for entry, fields in rows:
        row = dict(zip(fields[::2], fields[1::2], strict=True))
        names = (b"model", b"version", b"tier", b"created")
        model, version, tier, created = (row.get(name, b"").decode(errors="replace") for name in names)
        came = int(created) / 1000 if created.isdecimal() and len(created) < 16 else None
        tasks.append(EndedTask(model, version, tier, came, int(text(entry).partition("-")[0]) / 1000))
    return tasks


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Tasks that came in the last seconds, and may go before a waiting one if more come. `better`: tasks a second of
    better tiers; `beside`: of other tenants of its own tier. `for_s`: for how long there have been tasks that wait."""

    better: float = 0.0
    beside: float = 0.0
    for_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The data of an explanation."""

    record: Record
    now_ms: float
    """The store's clock."""
    pool: Pool
    """The queue of the task's version: what waits there, by tier."""
    workers: list[Lease] = field(default_factory=list)
    """Workers that serve the version and can do what it needs."""
    queue_position: QueuePosition | None = None
    """Its place in its tier; None if it does not wait there, or the broker has no order."""
    profile: Profile = field(default_factory=Profile)
    scaling: Mapping[str, Any] | None = None
    """The latest decision of the autoscaler that leads, on this version; None if there is none."""
    led: bool = False
    """Whether an autoscaler leads."""
    fetched: bool = False
    """It is queued, and the broker finds its message in no queue."""
    orphaned: bool = False
    """It is in progress, and its worker's lease has ended."""
    unable: list[Lease] = field(default_factory=list)
    """Workers that serve the version, of releases that cannot do what it needs."""
    level: int = 0
    """The level that it needs (`producers.contract.levels`)."""
    others: Mapping[int, Pool] = field(default_factory=dict)
    """Level -> the queue of the tasks of its version that need that level, where some wait; without its own."""
    used: float = 0.0
    """The share of the store's `maxmemory` that is in use; 0 without a bound."""
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """`<tier> <queue>` -> tasks that wait there as the store counts them, and the KV tokens that they may need."""
    arrivals: Arrivals = Arrivals()

    @property
    def ready(self) -> list[Lease]:
        """Workers that take tasks."""
        return [worker for worker in self.workers if not worker.get("draining") and not worker.get("unready")]

    @property
    def tokens(self) -> int:
        """KV tokens that it may need; 0 where its record does not say."""
        tokens = self.record.fields.get("tokens", "")
        return int(tokens) if tokens.isdecimal() else 0

    @property
    def better(self) -> int:
        """Tasks of better tiers that wait for the same version, as far as its workers take them."""
        return sum(count for _, count in self._better())

    def _better(self) -> Iterator[tuple[str, int]]:
        rank = keys.TIERS.get(self.record.tier, keys.TIERS["default"])[0]
        queues = [self.pool, *(queue for level, queue in self.others.items() if level <= self._common_level)]
        for queue in queues:
            for tier, count in queue.queued.items():
                if keys.TIERS[tier][0] < rank:
                    yield f"{tier} {keys.model_queue(queue.name)}", count

    @property
    def later(self) -> int:
        """Tasks of its tier that go before it because they need a later release. What was begun goes before those."""
        return sum(count for _, count in self._later())

    def _later(self) -> Iterator[tuple[str, int]]:
        if "fingerprint" in self.record.fields:
            return
        for level, queue in self.others.items():
            if self.level < level <= self._common_level:
                yield f"{self.record.tier} {keys.model_queue(queue.name)}", queue.queued.get(self.record.tier, 0)

    def tokens_before(self, mean: float) -> float:
        """KV tokens that the tasks of `better` and `later` may need together. `mean`: of a task that the store does not
        count: one whose sender is a plain Celery program."""
        total = 0.0
        for name, count in (*self._better(), *self._later()):
            tasks, tokens = self.sizes.get(name, (0, 0))
            total += count * (tokens / tasks if tasks else mean)
        return total

    def arriving(self, ended: Sequence[EndedTask], tenants: Mapping[str, int]) -> Arrivals:
        """Tasks of its version that have come lately: those that ended, wait or run. `ended`: see `read_ended`;
        `tenants`: tenant -> waiting tasks."""
        now, version = self.now_ms / 1000, self.record.fields.get("version", "")
        pools = [self.pool, *self.others.values()]
        oldest = max((since for pool in pools for since in pool.oldest_s.values()), default=0.0)
        # Where tasks wait since a moment ago, a rush has begun then: before it fewer came.
        window = min(ARRIVED_S, max(1.0, oldest))
        if len(ended) == ENDED_ROWS:
            window = min(window, max(1.0, now - ended[-1].ended))
        counts = Counter(
            task.tier
            for task in ended
            if (task.model, task.version) == (self.record.model, version) and now - window <= (task.created or 0.0)
        )
        for pool in pools:
            for tier, waiting in pool.queued.items():
                # Tasks of a tier begin in the order in which they came, more or less, so those that wait came last.
                since = pool.oldest_s.get(tier)
                if since is not None:
                    counts[tier] += round(waiting * min(1.0, window / max(since, 1e-3)))
        # Of those that run nobody tells the tiers: they are taken to be as the others'.
        times = self.profile.task_times
        running = sum(min(sane(worker.get("running")) or 0.0, MOST_RUNNING) for worker in self.workers)
        if times is not None and times.task > window:
            running *= window / times.task
        seconds = window / (1 + running / max(1, counts.total()))
        task_tier = self.record.tier
        rank = keys.TIERS.get(task_tier, keys.TIERS["default"])[0]
        mine, all_waiting = tenants.get(self.record.fields.get("tenant", ""), 0), sum(tenants.values())
        return Arrivals(
            sum(count for tier, count in counts.items() if tier in keys.TIERS and keys.TIERS[tier][0] < rank) / seconds,
            counts[task_tier] / seconds * (1 - mine / all_waiting if all_waiting else 0.0),
            oldest,
        )

    @property
    def _common_level(self) -> int:
        """The highest level from which all that may take it take tasks; another worker may come to it at once."""
        workers = self.ready or self.workers
        return min((int(sane(worker.get("level")) or 0) for worker in workers), default=max(self.level, levels.LEVEL))

    @property
    def ahead(self) -> int | None:
        """All tasks that go before it; None if that is not known."""
        if self.queue_position is None or self.queue_position.due_s is not None:
            return None
        return self.better + self.later + self.queue_position.ahead


async def look(
    store: Redis,
    broker: Broker,
    record: Record,
    fleet: Fleet | None = None,
    ended: Sequence[EndedTask] | None = None,
) -> Observation:
    """Observe a task. `fleet`, `ended`: readings some seconds old will do. Raises redis.exceptions.RedisError or
    OSError."""
    if fleet is None:
        fleet = await read_fleet(store, broker)
    observed, message = observed_in(fleet, record), _message(record)
    position, arrivals = None, Arrivals()
    if message is not None:
        since = fleet.at - observed.pool.oldest_s.get(record.tier, fleet.at)
        counted = await count_tenants(store, message, since)
        position = await _queue_position(broker, record, message, counted)
        arrivals = observed.arriving(await read_ended(store) if ended is None else ended, counted.tenants)
    return replace(
        observed,
        queue_position=position,
        fetched=message is not None and position is None and broker.capabilities.front_of_queue,
        orphaned=await _orphaned(store, record),
        used=(await read_storage(store)).ratio,
        sizes=await _sizes(store, [observed.pool, *observed.others.values()]),
        arrivals=arrivals,
    )


async def _sizes(store: Redis, queues: Sequence[Pool]) -> dict[str, tuple[int, int]]:
    names = [f"{tier} {keys.model_queue(queue.name)}" for queue in queues for tier in keys.TIERS]
    tasks, tokens = await aexecute_many(store, [("HMGET", key, *names) for key in (keys.WAITING, keys.WAITING_TOKENS)])
    return {name: (int(count or 0), int(need or 0)) for name, count, need in zip(names, tasks, tokens, strict=True)}


def observed_in(fleet: Fleet, record: Record, used: float = 0.0) -> Observation:
    """The observation of a task from a reading of the fleet alone: without its place in the queue, and without whether
    its worker died."""
    queue = record.fields.get("queue", "")
    name = queue.removeprefix(keys.model_queue(""))
    version, level = levels.split(name)
    pools = [pool for pool in fleet.pools if takes_from(levels.split(pool.name)[0], version)]
    workers: list[Lease] = [worker for pool in pools for worker in pool.workers]
    able: list[Lease] = []
    unable: list[Lease] = []
    for worker in workers:
        (able if not level or (sane(worker.get("level")) or 0) >= level else unable).append(worker)
    return Observation(
        record,
        fleet.at * 1000,
        next((pool for pool in pools if pool.name == name), Pool(name, record.model)),
        able,
        profile=fleet.scaling.profiles.get(version, Profile()),
        scaling=_scaling(fleet, record.model, version),
        led=bool(fleet.scaling.leads),
        unable=unable,
        level=level,
        others=_others(pools, version, level),
        used=used,
    )


def _others(pools: Sequence[Pool], version: str, own_level: int) -> dict[int, Pool]:
    """The version's queues by their levels, but for its own."""
    named = [(*levels.split(pool.name), pool) for pool in pools]
    return {level: pool for queue, level, pool in named if queue == version and level != own_level}


async def _orphaned(store: Redis, record: Record) -> bool:
    """A worker that ended in order gave the task away first: so its record is looked at once more, after the lease."""
    owner = record.fields.get("owner")
    if record.status != "in_progress" or owner is None:
        return False
    commands = [("EXISTS", keys.lease(owner)), ("HMGET", record.key, "status", "owner")]
    lives, now = await aexecute_many(store, commands)
    return not lives and [text(value) for value in now] == ["in_progress", owner]


def _message(record: Record) -> Message | None:
    """The message of a task that waits; None for another, or where nobody knows its message."""
    if record.status != "queued" or record.tier not in keys.TIERS:
        return None
    try:
        return Message.of(record)
    except (KeyError, ValueError):  # a broken record, or one that is no client's
        return None


async def _queue_position(
    broker: Broker, record: Record, message: Message, counted: TenantCounts
) -> QueuePosition | None:
    if "fingerprint" in record.fields:  # it was begun: its message goes back to its pool, while that has a worker
        queue = keys.Pool(record.model, record.fields.get("version", ""), record.fields["fingerprint"]).queue
        queue = levels.queue_of(queue, levels.split(message.queue)[1])
        if (position := await broker.queue_position(replace(message, queue=queue), counted)) is not None:
            return position
    return await broker.queue_position(message, counted)


def _scaling(fleet: Fleet, model: str, version: str) -> Mapping[str, Any] | None:
    for pool in (version, model):
        state = fleet.scaling.states.get(pool)
        if state is not None and is_fresh(state.get("at"), fleet.at):
            return state
    return None
