"""One round: a worker is killed, suspended or told to drain, and its streams go on at another."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.bench.failover.load import Load, Stream
from tests.bench.failover.system import PATIENCE_S, Process, System
from tests.chaos.kills import Blow

SIGNALS: Final = {"kill": signal.SIGKILL, "suspend": signal.SIGSTOP, "drain": signal.SIGTERM}
#: Time (s) between two looks at the leases and at who owns the streams.
LOOK_S: Final = 0.004
#: Who is spared has been up for so long (s): it has joined, and the others have renewed.
SPARED_S: Final = 2.0
#: A stream with fewer tokens left may end before it is interrupted.
LEFT: Final = 100


#: Stream -> when it was seen to be claimed elsewhere (monotonic s), and the position from which it goes on.
Claims = dict[str, tuple[float, int]]


@dataclass(slots=True)
class Round:
    """Times in s from the signal; of each stream: the last token before, the claim by another, the next token."""

    lease: float = 0.0
    """Until the lease is gone from the store."""
    reaped: float = 0.0
    """Until the broker lists the worker no more."""
    streams: list[tuple[float, float, float]] = field(default_factory=list)


async def strike(system: System, load: Load, how: str) -> Round:
    """Do it to the worker that holds most streams, at a random time, and wait until each has gone on.

    Never to the oldest of three or more, which has stood for a lease.
    """
    await asyncio.sleep(random.uniform(0.2, 1.5))
    victim, incarnation, held = await _victim(system, load)
    began = time.monotonic()
    if how == "rank":
        victim.kill_rank()
    else:
        victim.signal(SIGNALS[how])
    found = await _follow(system, incarnation, held, began)
    await asyncio.to_thread(_restore, system, victim, how)
    return found


async def blow_by_blow(system: System, load: Load, plan: Sequence[Blow]) -> list[Round]:
    """Kill by a plan, whatever became of the streams of those before. Each worker is replaced at once; a blow waits
    until its victim and another one, which is spared, are up."""
    slots, began = list(system.workers), time.monotonic()
    up = [began - SPARED_S] * len(slots)
    follows: list[asyncio.Task[Round]] = []
    starting: list[asyncio.Task[None]] = []

    async def replace(place: int) -> None:
        slots[place] = await asyncio.to_thread(system.add_worker)
        up[place] = time.monotonic()

    for blow in plan:
        await asyncio.sleep(max(0.0, began + blow.at - time.monotonic()))
        await asyncio.to_thread(_until_up, up, blow.victim)
        victim, up[blow.victim] = slots[blow.victim], math.inf
        incarnation = system.incarnation(victim)
        held, at = _held(system, load, incarnation), time.monotonic()
        victim.signal(signal.SIGKILL)
        system.workers.remove(victim)
        follows.append(asyncio.create_task(_follow(system, incarnation, held, at)))
        starting.append(asyncio.create_task(replace(blow.victim)))
        print(f"{at - began:.1f} s: {victim.name}", flush=True)
    await asyncio.gather(*starting)
    return list(await asyncio.gather(*follows))


def _until_up(up: Sequence[float], victim: int) -> None:
    """`up`: since when each is (monotonic s); it changes meanwhile."""
    others = [place for place in range(len(up)) if place != victim]
    while up[victim] == math.inf or min(up[place] for place in others) > time.monotonic() - SPARED_S:
        time.sleep(LOOK_S)


async def _follow(system: System, incarnation: str, held: list[Stream], began: float) -> Round:
    """Wait until each of the streams that it held has gone on."""
    found, claims = await asyncio.to_thread(_watch, system, incarnation, held, began)
    for stream in held:
        if stream.id in claims:
            at, mark = claims[stream.id]
            last, after = await stream.token(mark - 1), await stream.token(mark)
            found.streams.append((last - began, at - began, after - began))
    return found


async def _victim(system: System, load: Load) -> tuple[Process, str, list[Stream]]:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        held = {
            worker: _held(system, load, system.incarnation(worker))
            for worker in system.workers[max(0, len(system.workers) - 2) :]
        }
        victim = max(held, key=lambda worker: len(held[worker]))
        if held[victim]:
            return victim, system.incarnation(victim), held[victim]
        await asyncio.sleep(0.1)
    raise RuntimeError("no worker has streams")


def _held(system: System, load: Load, incarnation: str) -> list[Stream]:
    streams = [one for one in load.open if one.came and len(one.came) < load.tokens - LEFT]
    with system.redis.pipeline(transaction=False) as pipe:
        for stream in streams:
            pipe.hget(keys.task(stream.id), "owner")
        return [one for one, owner in zip(streams, pipe.execute(), strict=True) if owner == incarnation]


def _watch(system: System, incarnation: str, held: list[Stream], began: float) -> tuple[Round, Claims]:
    """Look until each stream has another owner or has ended."""
    found, claims, left = Round(), Claims(), {stream.id for stream in held}
    while left or not found.reaped:
        with system.redis.pipeline(transaction=False) as pipe:
            pipe.exists(keys.lease(incarnation))
            pipe.hexists(broker_keys.INCARNATIONS, incarnation)
            for task_id in (asked := sorted(left)):
                pipe.hmget(keys.task(task_id), "owner", "mark", "end")
            lease, listed, *records = pipe.execute()
        now = time.monotonic()
        if now - began > PATIENCE_S:
            raise RuntimeError(f"{len(left)} streams were not taken over; {incarnation} is listed: {listed}")
        found.lease = found.lease or (0.0 if lease else now - began)
        found.reaped = found.reaped or (0.0 if listed else now - began)
        for task_id, (owner, mark, end) in zip(asked, records, strict=True):
            if owner not in (incarnation, None):
                claims[task_id] = now, int(mark)
            if end or task_id in claims:
                left.discard(task_id)
        time.sleep(LOOK_S)
    return found, claims


def _restore(system: System, victim: Process, how: str) -> None:
    """Let another worker replace a dead one; a suspended one goes on."""
    if how == "suspend":
        victim.signal(signal.SIGCONT)
        victim.until(lambda: system.incarnation(victim))
        return
    victim.popen.wait(PATIENCE_S)
    system.workers.remove(victim)
    system.add_worker()


def plain(one: Round) -> dict[str, Any]:
    """As JSON."""
    return asdict(one)
