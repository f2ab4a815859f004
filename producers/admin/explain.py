"""Explains a task: where it is, what keeps it, and when it will start and end; in data and in words.

    record ─▶ `producers.admin.observation` ─▶ Observation ─▶ reasons: what keeps it, the one that decides first
                                                           ─▶ estimate: when it starts and ends
                                                           ─▶ attempts, phases: its course so far    ─▶ Explanation

It reads broker and store, and changes nothing. What nobody measured or tells is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from redis.asyncio import Redis

from producers.admin.observation import Lease, Observation, look
from producers.broker.base import Broker
from producers.connection.storage import STARTED
from producers.contract import keys, levels
from producers.contract.profile import sane
from producers.contract.record import BROKEN, Record, Run

#: Phases in order, and the time at which each begins. The last one ends when the task is settled.
PHASES: Final = ("submit", "queue", "worker", "first_token", "output", "settle")


@dataclass(frozen=True, slots=True)
class Preemption:
    """The engine took a task's room; it went on later. `at`: unix seconds; `why`: see `engine.request.Course`."""

    at: float
    why: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start. None stands for what nobody knows, as for a worker that died before its first token."""

    worker: str | None
    """The worker's incarnation."""
    why: str
    """The cause of end: `died`, `drained`, `preempted`, `lease_lost`, `breaker`; `failed`: the engine failed it, and
    Celery tries it again; `ended`: the task ended. Or `running`."""
    at: float | None = None
    """Time at which that end was known, unix seconds."""
    duration_s: float | None = None
    """From the claim until then, or until now."""
    entries: int | None = None
    """Entries of its stream by then, where the task went on elsewhere."""
    first_step_at: float | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the prefix cache had."""
    preemptions: int = 0
    preempted: list[Preemption] = field(default_factory=list)
    """The first of them."""


def attempts(record: Record, now_ms: float, orphaned: bool = False) -> list[Attempt]:
    """Those that are kept in the record: the first 32 deaths, the first 32 times that it was given back, and the last
    start. `orphaned`: the last one's worker died, and nobody has written that yet."""
    runs = record.runs
    found: list[tuple[int, Attempt]] = []
    for name in ("lost", "given_back"):
        said = record.json(name)
        for one in said if isinstance(said, list) else ():
            with suppress(*BROKEN):  # what is none is left out
                found.append(_ended(one, runs))
    last = record.count("claims")
    if last and record.status != "queued" and all(start != last for start, _ in found):
        found.append((last, _last(record, runs.get(last), now_ms, orphaned)))
    return [attempt for _, attempt in sorted(found, key=lambda one: (one[1].at or now_ms, one[0]))]


def _ended(said: Mapping[str, Any], runs: Mapping[int, Run]) -> tuple[int, Attempt]:
    """One that ended before the task did, with its number; 0: an earlier release wrote no number."""
    start, began, at = int(said.get("start", 0)), said.get("began"), int(said["at"])
    why = str(said.get("why", "died"))
    return start, _attempt(runs.get(start), str(said["owner"]), why, began, at, at, int(said["entries"]))


def _last(record: Record, run: Run | None, now_ms: float, orphaned: bool) -> Attempt:
    began, finished = record.time("began"), record.time("finished") if record.final else None
    owner = record.fields.get("owner") or (run.owner if run else None)
    why = "ended" if record.final else "died" if orphaned else "running"
    return _attempt(run, owner, why, began, finished, finished or now_ms)


def _attempt(
    run: Run | None,
    owner: str | None,
    why: str,
    began: int | None,
    at: int | None,
    until: float,
    entries: int | None = None,
) -> Attempt:
    return Attempt(
        owner,
        why,
        _seconds(at),
        None if began is None else round(max(0.0, until - began) / 1000, 3),
        entries,
        _seconds(run.step) if run else None,
        run.cached if run and run.step is not None else None,
        run.preemptions if run else 0,
        [Preemption(at / 1000, why) for at, why in run.preempted] if run else [],
    )


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000


def phases(record: Record, now_ms: float) -> dict[str, float]:
    """Seconds that each phase took so far; one that has not begun, or of which nobody tells, is not there. Where no
    worker told of its first step, `first_token` begins at the start."""
    started, first, finished = (record.time(name) for name in ("started", "first", "finished"))
    last = record.last_token if record.final else None
    begins = [record.time("created"), record.time("queued"), started, record.first_step, first, last or finished]
    if begins[3] is None and first is not None:
        begins[2:4] = [None, started]
    known = [(name, at) for name, at in zip(PHASES, begins, strict=True) if at is not None]
    settled = record.time("settled")
    ends = [at for _, at in known[1:]] + [settled if settled is not None else now_ms]
    return {name: round(max(0.0, end - at) / 1000, 3) for (name, at), end in zip(known, ends, strict=False)}


@dataclass(frozen=True, slots=True)
class Reason:
    """`name`: for programs."""

    name: str
    message: str


def reasons(seen: Observation) -> list[Reason]:
    """Empty for a task that does not wait, or that nothing keeps but the moment that it takes to be fetched."""
    if seen.record.status == "in_progress":
        return [*(_workers if seen.orphaned else _inside)(seen)]
    if seen.record.status != "queued":
        return []
    if seen.record.fields["status"] == "submitting":
        return [Reason("submitting", "its message is on its way into the queue; a sweeper sends it if its sender died")]
    if seen.standing is not None and seen.standing.due_s is not None:
        said = f"its message was given back with a delay, and is due in {seen.standing.due_s:.1f} s"
        return [Reason("delayed", said), *_workers(seen)]
    if seen.fetched:
        said = "its message is in no queue: a worker has fetched it and not begun, or is giving it back"
        return [Reason("fetched", said), *_workers(seen)]
    return [*_workers(seen), *_tasks_ahead(seen), *_room(seen), *_held_back(seen)]


def _inside(seen: Observation) -> Iterator[Reason]:
    """Why its worker does not compute it, as of the worker's latest heartbeat."""
    for worker in seen.workers:
        waits = worker.get("waits")
        why = waits.get(seen.record.fields.get("claim")) if isinstance(waits, dict) else None
        if why is None:
            continue
        name = worker.get("worker")
        if why != "not_begun":
            yield Reason("preempted", f"worker {name} took its room for others, and goes on with it later ({why})")
        elif _busy(worker):
            yield Reason("workers_full", f"the worker is full: {_load(worker)}")
        else:
            free = _free_tokens(seen, worker)
            has = "too little is" if free is None else f"{free} are"
            yield Reason("kv_room", f"it may need {seen.tokens} tokens of KV cache, and {has} free in worker {name}")


def _busy(worker: Lease) -> bool:
    """Whether as many sequences run as can."""
    running, capacity = sane(worker.get("running")), sane(worker.get("capacity"))
    return running is not None and capacity is not None and running >= capacity


def _workers(seen: Observation) -> Iterator[Reason]:
    """Why nobody takes tasks of its version."""
    if seen.ready:
        return
    if not seen.workers and seen.unable:
        up = ", ".join(sorted({str(worker.get("release") or "before 0.2.0") for worker in seen.unable}))
        needed = levels.release_of(seen.level) or "a later one"
        yield Reason("release_missing", f"it needs a worker of release {needed}, and those that are up are of {up}")
        return
    if not seen.workers:
        yield Reason("no_worker", f"no worker serves {seen.pool.name}")
    for worker in seen.workers:
        why = ", ".join(map(str, worker.get("unready") or ())) or "it drains"
        yield Reason("worker_not_ready", f"worker {worker.get('worker')} takes no tasks: {why}")
    yield from _scaling(seen)


def _held_back(seen: Observation) -> Iterator[Reason]:
    """Workers that take no tasks where others do."""
    held = [worker for worker in seen.workers if worker.get("unready")]
    if held and seen.ready:
        why = "; ".join(f"{worker.get('worker')}: {', '.join(map(str, worker['unready']))}" for worker in held)
        verb = "takes" if len(held) == 1 else "take"
        yield Reason("workers_held_back", f"{len(held)} of {len(seen.workers)} workers {verb} no tasks: {why}")


def _scaling(seen: Observation) -> Iterator[Reason]:
    state = seen.scaling
    if state is None and seen.led:
        yield Reason("not_scaled", "the autoscaler has not decided on it yet, or does not scale it")
    elif state is None:
        yield Reason("not_scaled", "no autoscaler starts one: start a worker, or `penstock autoscaler`")
    elif state.get("trouble"):
        yield Reason("start_failed", f"workers do not come up: {state['trouble']}")
    elif not sane(state.get("wanted")):
        yield Reason("not_worth_a_start", f"the autoscaler wants no worker now: {state.get('reason')}")
    else:
        yield Reason("cold_start", f"a worker is starting{_last_start(seen)}")


def _last_start(seen: Observation) -> str:
    phases = dict(seen.profile.cold_start)
    total = phases.pop("total", None)
    if total is None:
        return ""
    longest = max(phases, key=lambda name: phases[name], default="")
    part = f", of which {longest} {phases[longest]:.1f} s" if longest else ""
    return f"; the last start took {total:.1f} s{part}"


def _tasks_ahead(seen: Observation) -> Iterator[Reason]:
    """Tasks that go first."""
    if seen.better:
        yield Reason("better_tiers", f"{counted(seen.better)} of better tiers {_go(seen.better)} first")
    if seen.later:
        said = f"{counted(seen.later)} of the tier {seen.record.tier} that need a later release {_go(seen.later)} first"
        yield Reason("later_release", said)
    if seen.standing is not None and seen.standing.ahead:
        same, goes = counted(seen.standing.ahead), _go(seen.standing.ahead)
        whose = "came before it" if seen.standing.exact else f"{goes} first, by time or because it is others' turn"
        yield Reason("same_tier" if seen.standing.exact else "turns", f"{same} of the tier {seen.record.tier} {whose}")


def _go(count: int) -> str:
    return "goes" if count == 1 else "go"


def _room(seen: Observation) -> Iterator[Reason]:
    """Workers that have no room for it."""
    if not seen.ready:
        return
    if seen.used >= STARTED[keys.TIERS.get(seen.record.tier, keys.TIERS["default"])[0]]:
        said = f"the store is full ({seen.used:.0%} of its maxmemory), and workers start no task of its tier"
        yield Reason("storage_full", said)
    full = [worker for worker in seen.ready if _full(worker)]
    if len(full) == len(seen.ready):
        count = f"all {len(full)} workers are" if len(full) > 1 else "the worker is"
        yield Reason("workers_full", f"{count} full: {'; '.join(map(_load, full))}")
        return
    free = [room for worker in seen.ready if (room := _free_tokens(seen, worker)) is not None]
    if free and len(free) == len(seen.ready) and seen.tokens > max(free):
        said = f"it may need {seen.tokens} tokens of KV cache, and no worker has more than {max(free)} free"
        yield Reason("kv_room", said)


def _full(worker: Lease) -> bool:
    running, capacity = sane(worker.get("running")), sane(worker.get("capacity"))
    return running is not None and capacity is not None and running + (sane(worker.get("waiting")) or 0) >= capacity


def _load(worker: Lease) -> str:
    return f"{worker.get('worker')} generates {worker.get('running')} of {worker.get('capacity')} sequences"


def _free_tokens(seen: Observation, worker: Lease) -> int | None:
    """KV tokens that a worker has free, as far as its blocks say; None where it does not say."""
    used, blocks = sane(worker.get("kv_blocks_used")), sane(worker.get("kv_blocks_total"))
    capacity = sane(seen.profile.kv_capacity)
    if used is None or not blocks or capacity is None:
        return None
    return int((blocks - used) / blocks * capacity)


def counted(count: int) -> str:
    """A number of tasks, in words."""
    return {0: "no task", 1: "1 task"}.get(count, f"{count:,} tasks")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from now, reckoned from what workers measured of themselves. None: nobody can tell."""

    starts_in_s: float | None = None
    ends_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A task's place, what keeps it, and its times, in seconds."""

    id: str
    status: str
    summary: str
    """One sentence."""
    ahead: int | None = None
    """Tasks that go before it; None if it does not wait, or nobody can tell."""
    ahead_is_exact: bool = False
    waiting: int = 0
    """All tasks that wait for its version."""
    blocked_by: list[Reason] = field(default_factory=list)
    estimate: Estimate = Estimate()
    worker: str | None = None
    """The worker's incarnation that runs it."""
    starts: int = 0
    """Number of its starts."""
    attempts: list[Attempt] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Each one's duration; the last one may go on."""


async def explain(store: Redis, broker: Broker, record: Record) -> Explanation:
    """Explain a task. Raises redis.exceptions.RedisError or OSError."""
    return explanation(await look(store, broker, record))


def explanation(seen: Observation) -> Explanation:
    record, why = seen.record, reasons(seen)
    estimate = estimated(seen)
    return Explanation(
        record.id,
        record.status,
        summary(seen, why, estimate),
        seen.ahead,
        bool(seen.standing and seen.standing.exact and not seen.better and not seen.later),
        sum(seen.pool.queued.values()),
        why,
        estimate,
        record.fields.get("owner") if record.status == "in_progress" and not seen.orphaned else None,
        record.count("claims"),
        attempts(record, seen.now_ms, seen.orphaned),
        phases(record, seen.now_ms),
    )


def estimated(seen: Observation) -> Estimate:
    """Reckoned from the throughput that workers of the version measured, and what each task took of it on average, if
    this one may need as much. A task that runs for longer than that has no estimate of its end."""
    rate, per_task, knee = seen.profile.tokens_per_s, seen.profile.tokens_per_task, seen.profile.knee
    if not rate or not per_task or not knee or seen.record.final:
        return Estimate()
    service = knee * min(per_task, seen.tokens or per_task) / rate
    if seen.record.status == "in_progress" and not seen.orphaned:
        left = service - (seen.now_ms - (seen.record.time("started") or seen.now_ms)) / 1000
        return Estimate(0.0, left if left > 0 else None)
    start = _start(seen, rate / per_task, knee)
    return Estimate(start, None if start is None else start + service)


def _start(seen: Observation, tasks_per_s: float, knee: float) -> float | None:
    """Seconds until it starts. `tasks_per_s`, `knee`: of one worker."""
    wait = 0.0 if seen.standing is None else seen.standing.due_s or 0.0
    workers = len(seen.ready)
    if not workers:
        cold, state = seen.profile.cold_start.get("total"), seen.scaling or {}
        workers = int(sane(state.get("wanted")) or 0)
        if not workers or cold is None or state.get("trouble"):
            return None
        wait += cold
    if seen.ahead is None:
        return None if seen.standing is None else wait
    running = sum(sane(one.get(name)) or 0 for one in seen.ready for name in ("running", "waiting"))
    before = max(0.0, seen.ahead - max(0.0, workers * knee - running))
    return wait + before / (workers * tasks_per_s)


def summary(seen: Observation, why: list[Reason], estimate: Estimate) -> str:
    """One sentence."""
    record = seen.record
    if record.final:
        error = record.json("error")
        said = f": {error.get('message')}" if isinstance(error, dict) else ""
        return f"It has ended: {record.status}{said}"
    if seen.orphaned:
        because = f"; {why[0].message}" if why else ""
        return f"It waits for another worker: {record.fields.get('owner')} died, or was cut off{because}."
    if record.status == "in_progress":
        if why:
            return f"It is at {record.fields.get('owner')}, and waits there: {why[0].message}."
        end = _in(", and ends", estimate.ends_in_s)
        return f"It runs on {record.fields.get('owner')}; tokens so far: {sum(record.nexts)}{end}."
    place = "It waits" if seen.ahead is None else f"It waits, with {counted(seen.ahead)} before it,"
    because = f": {why[0].message}" if why else ", and is about to be taken" if seen.ahead == 0 else ""
    return f"{place} in the tier {record.tier}{because}{_in('; it starts', estimate.starts_in_s)}."


def _in(what: str, seconds: float | None) -> str:
    return "" if seconds is None else f"{what} in about {seconds:.1f} s"
