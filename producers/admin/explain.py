"""Explains a task: where it is, what keeps it, and when it will start and end; in data and in words.

    record ─▶ `producers.admin.observation` ─▶ Observation ─▶ reasons: what keeps it, the one that decides first
                                                           ─▶ estimate: when it starts and ends
                                                           ─▶ attempts, phases: its course so far    ─▶ Explanation

It reads broker and store, and changes nothing. Values that nobody measured or wrote are None, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

from redis.asyncio import Redis

from producers.admin.eta import Eta, Forecast, KnownGroups, forecast, known_groups
from producers.admin.observation import Lease, Observation, look
from producers.broker.base import Broker
from producers.connection.storage import STARTED
from producers.contract import keys, levels
from producers.contract.profile import sane
from producers.contract.record import BROKEN, Record, Run
from producers.store.chunks import chunk_id

#: Phases in order, and the time at which each begins. The last one ends when the task is settled.
PHASES: Final = ("submit", "queue", "worker", "first_token", "output", "settle")
#: The most workers that are named for one reason.
NAMED: Final = 20


@dataclass(frozen=True, slots=True)
class Preemption:
    """The engine took a task's room; it went on later. `at`: unix seconds; `why`: see `engine.request.Course`."""

    at: float
    why: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """A start. None: unknown, as for a worker that died before its first token."""

    worker: str | None
    """The worker's incarnation."""
    why: str
    """The cause of end: `died`, `drained`, `preempted`, `lease_lost`, `breaker`; `adapter_loading`: its adapter was not
    loaded yet; `failed`: the engine failed it, and Celery tries it again; `ended`: the task ended. Or `running`."""
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
    """The starts that the record has: the first 32 deaths, the first 32 times that it was given back, and the last
    start. `orphaned`: the last one's worker died, and nobody has written that yet."""
    runs = record.runs
    numbered: list[tuple[int, Attempt]] = []
    for name in ("lost", "given_back"):
        entries = record.json(name)
        for entry in entries if isinstance(entries, list) else ():
            with suppress(*BROKEN):  # what is none is left out
                numbered.append(_ended(entry, runs))
    last = record.count("claims")
    if last and record.status != "queued" and all(start != last for start, _ in numbered):
        numbered.append((last, _last(record, runs.get(last), now_ms, orphaned)))
    return [attempt for _, attempt in sorted(numbered, key=lambda entry: (entry[1].at or now_ms, entry[0]))]


def _ended(entry: Mapping[str, Any], runs: Mapping[int, Run]) -> tuple[int, Attempt]:
    """One that ended before the task did, with its number; 0: an earlier release wrote no number."""
    start, began, at = int(entry.get("start", 0)), entry.get("began"), int(entry["at"])
    why = str(entry.get("why", "died"))
    return start, _attempt(runs.get(start), str(entry["owner"]), why, began, at, at, int(entry["entries"]))


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
    """Seconds that each phase took so far; a phase that has not begun, or that nobody wrote, is absent. If no
    worker wrote its first step, `first_token` begins at the start."""
    started, first, finished = (record.time(name) for name in ("started", "first", "finished"))
    last = record.last_token if record.final else None
    begins = [record.time("created"), record.time("queued"), started, record.first_step, first, last or finished]
    if begins[3] is None and first is not None:
        begins[2:4] = [None, started]
    begun = [(name, at) for name, at in zip(PHASES, begins, strict=True) if at is not None]
    settled = record.time("settled")
    ends = [at for _, at in begun[1:]] + [settled if settled is not None else now_ms]
    return {name: round(max(0.0, end - at) / 1000, 3) for (name, at), end in zip(begun, ends, strict=False)}


@dataclass(frozen=True, slots=True)
class Reason:
    """`name`: for programs."""

    name: str
    message: str


def reasons(observed: Observation) -> list[Reason]:
    """Empty for a task that does not wait, or that nothing keeps but the moment that it takes to be fetched."""
    if observed.record.status == "in_progress":
        return [*(_workers if observed.orphaned else _inside)(observed)]
    if observed.record.status != "queued":
        return []
    if observed.record.fields["status"] == "submitting":
        return [Reason("submitting", "its message is on its way into the queue; a sweeper sends it if its sender died")]
    if observed.queue_position is not None and observed.queue_position.due_s is not None:
        text = f"its message was given back with a delay, and is due in {observed.queue_position.due_s:.1f} s"
        return [*_adapter(observed), Reason("delayed", text), *_workers(observed)]
    if observed.fetched:
        text = "its message is in no queue: a worker has fetched it and not begun, or is giving it back"
        return [*_adapter(observed), Reason("fetched", text), *_workers(observed)]
    waits = (_adapter, _workers, _left_to_holder, _tasks_ahead, _room, _held_back)
    return [reason for each in waits for reason in each(observed)]


def _inside(observed: Observation) -> Iterator[Reason]:
    """Why its worker does not compute it, as of the worker's latest heartbeat."""
    for worker in observed.workers:
        waits = worker.get("waits")
        why = waits.get(observed.record.fields.get("claim")) if isinstance(waits, dict) else None
        if why is None:
            continue
        name = worker.get("worker")
        if why != "not_begun":
            yield Reason("preempted", f"worker {name} took its room for others, and goes on with it later ({why})")
        elif not _generates(worker):
            yield Reason("workers_full", f"worker {name} computes other texts first")
        elif _busy(worker):
            yield Reason("workers_full", f"the worker is full: {_load(worker)}")
        else:
            free = _free_tokens(observed, worker)
            has = "too little is" if free is None else f"{free} are"
            yield Reason(
                "kv_room", f"it may need {observed.tokens} tokens of KV cache, and {has} free in worker {name}"
            )


def _adapter(observed: Observation) -> Iterator[Reason]:
    """Workers that load its adapter."""
    adapter = observed.record.fields.get("adapter")
    if adapter is None:
        return
    loading = [worker for worker in observed.workers if adapter in _loading(worker)]
    for worker in loading[:NAMED]:
        yield Reason("adapter_loading", f"worker {worker.get('worker')} loads its adapter, version {adapter}")
    if (more := len(loading) - NAMED) > 0:
        yield Reason("adapter_loading", f"{more} more {_workers_do(more, 'load')} it")


def _loading(worker: Lease) -> Sequence[Any]:
    """The versions of adapters that a worker loads."""
    adapters = worker.get("adapters")
    loading = adapters.get("loading") if isinstance(adapters, dict) else None
    return loading if isinstance(loading, list) else ()


def _workers_do(count: int, verb: str) -> str:
    return f"worker {verb}s" if count == 1 else f"workers {verb}"


def _listed(parts: Sequence[str]) -> str:
    """The first NAMED of them, and how many more there are."""
    more = len(parts) - NAMED
    return "; ".join(parts[:NAMED]) + (f"; and {more} more" if more > 0 else "")


def _left_to_holder(observed: Observation) -> Iterator[Reason]:
    """The worker that it is left to (docs/how/placement.md)."""
    if observed.queue_position is not None and (holder := observed.queue_position.left_to):
        advantage = "has a longer part of its prompt cached, or its adapter loaded, and has room"
        yield Reason("left_to_holder", f"it is left to worker {holder} for at most 50 ms, which {advantage}")


def output_at_end(record: Record) -> str | None:
    """Why nothing of its output can be read before its end; None if its tokens are published as they are made."""
    with suppress(*BROKEN):  # a record that is broken says nothing of it
        task = record.task
        if task.get("kind", "generate") != "generate":
            return "what a task makes of texts can be read once all are computed"
        if task.get("beam_width") is not None:
            return f"a beam search compares its {record.width} beams to the end, and publishes the best then"
        if record.width > record.n:
            return f"the best of {record.width} outputs are chosen, and published, once all have ended"
    return None


def _generates(worker: Lease) -> bool:
    """Whether its model generates text. Others have no KV cache."""
    return bool(worker.get("kind", "generate") == "generate")


def _busy(worker: Lease) -> bool:
    """Whether as many sequences run as can."""
    running, capacity = sane(worker.get("running")), sane(worker.get("capacity"))
    return running is not None and capacity is not None and running >= capacity


def _workers(observed: Observation) -> Iterator[Reason]:
    """Why nobody takes tasks of its version."""
    if observed.ready:
        return
    if not observed.workers and observed.unable:
        up = ", ".join(sorted({str(worker.get("release") or "before 0.2.0") for worker in observed.unable}))
        needed = levels.release_of(observed.level) or "a later one"
        yield Reason("release_missing", f"it needs a worker of release {needed}, and those that are up are of {up}")
        return
    if not observed.workers:
        yield Reason("no_worker", f"no worker serves {observed.pool.name}")
    for worker in observed.workers[:NAMED]:
        why = ", ".join(map(str, worker.get("unready") or ())) or "it drains"
        yield Reason("worker_not_ready", f"worker {worker.get('worker')} takes no tasks: {why}")
    if (more := len(observed.workers) - NAMED) > 0:
        yield Reason("worker_not_ready", f"{more} more {_workers_do(more, 'take')} no tasks")
    yield from _scaling(observed)


def _held_back(observed: Observation) -> Iterator[Reason]:
    """Workers that take no tasks where others do."""
    unready = [worker for worker in observed.workers if worker.get("unready")]
    if unready and observed.ready:
        why = _listed([f"{worker.get('worker')}: {', '.join(map(str, worker['unready']))}" for worker in unready])
        verb = "takes" if len(unready) == 1 else "take"
        yield Reason("workers_held_back", f"{len(unready)} of {len(observed.workers)} workers {verb} no tasks: {why}")


def _scaling(observed: Observation) -> Iterator[Reason]:
    state = observed.scaling
    if state is None and observed.led:
        yield Reason("not_scaled", "the autoscaler has not decided on it yet, or does not scale it")
    elif state is None:
        yield Reason("not_scaled", "no autoscaler starts one: start a worker, or `penstock autoscaler`")
    elif state.get("trouble"):
        yield Reason("start_failed", f"workers do not come up: {state['trouble']}")
    elif not sane(state.get("wanted")):
        yield Reason("not_worth_a_start", f"the autoscaler wants no worker now: {state.get('reason')}")
    else:
        yield Reason("cold_start", f"a worker is starting{_last_start(observed)}")


def _last_start(observed: Observation) -> str:
    phases = dict(observed.profile.cold_start)
    total = phases.pop("total", None)
    if total is None:
        return ""
    longest = max(phases, key=lambda name: phases[name], default="")
    part = f", of which {longest} {phases[longest]:.1f} s" if longest else ""
    return f"; the last start took {total:.1f} s{part}"


def _tasks_ahead(observed: Observation) -> Iterator[Reason]:
    """Tasks that go first."""
    tier = observed.record.tier
    if observed.better:
        yield Reason("better_tiers", f"{counted(observed.better)} of better tiers {_go(observed.better)} first")
    if observed.later:
        tasks = f"{counted(observed.later)} of the tier {tier}"
        yield Reason("later_release", f"{tasks} that need a later release {_go(observed.later)} first")
    position = observed.queue_position
    if position is not None and position.ahead:
        tasks, verb = f"{counted(position.ahead)} of the tier {tier}", _go(position.ahead)
        if position.exact:
            yield Reason("same_tier", f"{tasks} came before it")
        else:
            yield Reason("turns", f"{tasks} {verb} first, by time or because it is others' turn")


def _go(count: int) -> str:
    return "goes" if count == 1 else "go"


def _room(observed: Observation) -> Iterator[Reason]:
    """Workers that have no room for it."""
    if not observed.ready:
        return
    if observed.used >= STARTED[keys.TIERS.get(observed.record.tier, keys.TIERS["default"])[0]]:
        text = f"the store is full ({observed.used:.0%} of its maxmemory), and workers start no task of its tier"
        yield Reason("storage_full", text)
    full = [worker for worker in observed.ready if _full(worker)]
    if len(full) == len(observed.ready):
        count = f"all {len(full)} workers are" if len(full) > 1 else "the worker is"
        yield Reason("workers_full", f"{count} full: {_listed([*map(_load, full)])}")
        return
    free = [room for worker in observed.ready if (room := _free_tokens(observed, worker)) is not None]
    if free and len(free) == len(observed.ready) and observed.tokens > max(free):
        text = f"it may need {observed.tokens} tokens of KV cache, and no worker has more than {max(free)} free"
        yield Reason("kv_room", text)


def _full(worker: Lease) -> bool:
    running, capacity = sane(worker.get("running")), sane(worker.get("capacity"))
    return running is not None and capacity is not None and running + (sane(worker.get("waiting")) or 0) >= capacity


def _load(worker: Lease) -> str:
    does, unit = ("generates", "sequences") if _generates(worker) else ("computes", "texts")
    return f"{worker.get('worker')} {does} {worker.get('running')} of {worker.get('capacity')} {unit}"


def _free_tokens(observed: Observation, worker: Lease) -> int | None:
    """KV tokens that a worker has free, as far as its blocks say; None where it does not say."""
    used, blocks = sane(worker.get("kv_blocks_used")), sane(worker.get("kv_blocks_total"))
    capacity = sane(observed.profile.kv_capacity)
    if used is None or not blocks or capacity is None:
        return None
    return int((blocks - used) / blocks * capacity)


def counted(count: int) -> str:
    """A number of tasks, in words."""
    return {0: "no task", 1: "1 task"}.get(count, f"{count:,} tasks")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds from now that a half of such tasks take, by `producers.admin.eta`. None: unknown."""

    starts_in_s: float | None = None
    ends_in_s: float | None = None

    @classmethod
    def of(cls, times: Forecast) -> Estimate:
        starts, ends = (None if eta is None else eta.p50_s for eta in (times.starts, times.ends))
        return cls(starts, ends)


@dataclass(frozen=True, slots=True)
class Explanation:
    """A task's place, what keeps it, and its times, in seconds."""

    id: str
    status: str
    summary: str
    """One sentence."""
    ahead: int | None = None
    """Tasks that go before it; None if it does not wait, or the number is unknown."""
    ahead_is_exact: bool = False
    waiting: int = 0
    """All tasks that wait for its version."""
    blocked_by: list[Reason] = field(default_factory=list)
    estimate: Estimate = Estimate()
    eta: Eta | None = None
    """Its end; None: unknown."""
    worker: str | None = None
    """The worker's incarnation that runs it."""
    starts: int = 0
    """Number of its starts."""
    attempts: list[Attempt] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    """Each one's duration; the last one may go on."""
    output_at_end: str | None = None
    """Why nothing of its output can be read before its end; None if its tokens are published as they are made."""


async def explain(store: Redis, broker: Broker, record: Record) -> Explanation:
    """Explain a task. Raises redis.exceptions.RedisError or OSError."""
    if record.chunks and not record.final:
        return await _of_chunks(store, broker, record)
    observed = await look(store, broker, record)
    return explanation(observed, known_groups(store, observed))


async def _of_chunks(store: Redis, broker: Broker, parent: Record) -> Explanation:
    """Explains a parent (`producers.store.chunks`) by the first of its chunks that has not completed."""
    number = min(await store.xlen(keys.stream(parent.id)), parent.chunks - 1)
    name = chunk_id(parent.id, number)
    record = Record.parse(name, await store.hgetall(keys.task(name)) or {"status": "submitting", "task": "{}"})
    observed = await look(store, broker, record)
    explained = explanation(observed, known_groups(store, observed))
    return replace(
        explained,
        id=parent.id,
        status=parent.status,
        summary=f"Of {parent.chunks} parts, {number} are done. Of the next one: {explained.summary}",
        phases=phases(parent, observed.now_ms),
        output_at_end=output_at_end(parent),
    )


def explanation(observed: Observation, groups_by_key: KnownGroups | None = None) -> Explanation:
    """`groups_by_key`: see `forecast`."""
    record, why = observed.record, reasons(observed)
    times = forecast(observed, groups_by_key)
    estimate = Estimate.of(times)
    return Explanation(
        record.id,
        record.status,
        summary(observed, why, estimate, times.ends),
        observed.ahead,
        bool(observed.queue_position and observed.queue_position.exact and not observed.better and not observed.later),
        sum(observed.pool.queued.values()),
        why,
        estimate,
        times.ends,
        record.fields.get("owner") if record.status == "in_progress" and not observed.orphaned else None,
        record.count("claims"),
        attempts(record, observed.now_ms, observed.orphaned),
        phases(record, observed.now_ms),
        None if record.final else output_at_end(record),
    )


def summary(observed: Observation, why: list[Reason], estimate: Estimate, ends: Eta | None) -> str:
    """One sentence."""
    record = observed.record
    if record.final:
        error = record.json("error")
        message = f": {error.get('message')}" if isinstance(error, dict) else ""
        return f"It has ended: {record.status}{message}"
    if observed.orphaned:
        because = f"; {why[0].message}" if why else ""
        return f"It waits for another worker: {record.fields.get('owner')} died, or was cut off{because}."
    if record.status == "in_progress":
        if why:
            return f"It is at {record.fields.get('owner')}, and waits there: {why[0].message}."
        end = _end(", and ends", ends)
        progress = output_at_end(record) or f"tokens so far: {sum(record.nexts)}"
        return f"It runs on {record.fields.get('owner')}; {progress}{end}."
    beginning = "It waits" if observed.ahead is None else f"It waits, with {counted(observed.ahead)} before it,"
    because = f": {why[0].message}" if why else ", and is about to be taken" if observed.ahead == 0 else ""
    times = f"{_in('; it starts', estimate.starts_in_s)}{_end('; it ends', ends)}"
    return f"{beginning} in the tier {record.tier}{because}{times}."


def _in(clause: str, seconds: float | None) -> str:
    return "" if seconds is None else f"{clause} in about {seconds:.1f} s"


def _end(clause: str, ends: Eta | None) -> str:
    return "" if ends is None else f"{_in(clause, ends.p50_s)}, in 9 of 10 cases within {ends.p90_s:.1f} s"
