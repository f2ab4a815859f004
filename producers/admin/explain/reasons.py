"""Reasons that keep a task that waits: every one that holds now, the one that decides first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from producers.admin.explain.look import Lease, Seen
from producers.connection.storage import STARTED
from producers.contract import keys, levels
from producers.contract.profile import sane


@dataclass(frozen=True, slots=True)
class Reason:
    """`name`: for programs."""

    name: str
    message: str


def reasons(seen: Seen) -> list[Reason]:
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
    return [*_workers(seen), *_others(seen), *_room(seen), *_held_back(seen)]


def _inside(seen: Seen) -> Iterator[Reason]:
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


def _workers(seen: Seen) -> Iterator[Reason]:
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


def _held_back(seen: Seen) -> Iterator[Reason]:
    """Workers that take no tasks where others do."""
    held = [worker for worker in seen.workers if worker.get("unready")]
    if held and seen.ready:
        why = "; ".join(f"{worker.get('worker')}: {', '.join(map(str, worker['unready']))}" for worker in held)
        verb = "takes" if len(held) == 1 else "take"
        yield Reason("workers_held_back", f"{len(held)} of {len(seen.workers)} workers {verb} no tasks: {why}")


def _scaling(seen: Seen) -> Iterator[Reason]:
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


def _last_start(seen: Seen) -> str:
    phases = dict(seen.profile.cold_start)
    total = phases.pop("total", None)
    if total is None:
        return ""
    longest = max(phases, key=lambda name: phases[name], default="")
    part = f", of which {longest} {phases[longest]:.1f} s" if longest else ""
    return f"; the last start took {total:.1f} s{part}"


def _others(seen: Seen) -> Iterator[Reason]:
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


def _room(seen: Seen) -> Iterator[Reason]:
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


def _free_tokens(seen: Seen, worker: Lease) -> int | None:
    """KV tokens that a worker has free, as far as its blocks say; None where it does not say."""
    used, blocks = sane(worker.get("kv_blocks_used")), sane(worker.get("kv_blocks_total"))
    capacity = sane(seen.profile.kv_capacity)
    if used is None or not blocks or capacity is None:
        return None
    return int((blocks - used) / blocks * capacity)


def counted(count: int) -> str:
    """A number of tasks, in words."""
    return {0: "no task", 1: "1 task"}.get(count, f"{count:,} tasks")
