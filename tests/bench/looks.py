"""The cost of looks at neighbours and peers (docs/how/failover.md, breaker.md): `python -m tests.bench.looks`.

So many incarnations are heard and have leases on one server. Each looks at two others, renews its lease, and compares
itself with some peers. Printed is the server's own time for a call (INFO commandstats), and its share of a core at
their rates; and a worker's time for its figures, for comparing them, and for noting a step.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from typing import Any

from redis import Redis

from engine.plan import StepWork
from producers.connection.script import run
from producers.contract import keys
from producers.contract.leases import Liveness, join, observe
from producers.store import protocol
from tests.processes import valkey
from workers.breaker import SLICES, Figures, Window, judge
from workers.leases.housekeeper import ROUND_S
from workers.leases.neighbours import LOOK_S, LOOKED_AT, READ
from workers.settings import WorkerSettings

#: As long as the lease's text of a real worker.
ABOUT = json.dumps({"worker": "w", "profile": "x" * 1500})


def took(redis: Redis, commands: list[tuple[Any, ...]]) -> float:
    """The server's mean time (s) for one of these."""
    redis.config_resetstat()
    for command in commands:
        redis.execute_command(*command)
    stats = redis.info("commandstats").values()
    return sum(float(one["usec"]) for one in stats) / len(commands) / 1e6


def judging(calls: int) -> None:
    """Print a worker's own time, with steps of many sizes in every slice of its window."""
    now = [0.0]
    window = Window("a machine", lambda: now[0])
    works = [StepWork(0.0, 0.02, n, 0, n, n, n * length) for n in (1, 4, 9, 20, 40, 64) for length in (50, 900, 3000)]
    noting = 1e6 * _each(calls, lambda: window.on_step(works[0]))
    for _ in range(SLICES):
        now[0] += 5.0
        for work in works * 3:
            window.on_step(work)
    mine = window.figures()
    said = [json.dumps(mine.to_dict())] * READ
    telling = _each(100, lambda: window.figures().to_dict())
    judged = _each(100, lambda: judge(mine, [Figures.of(json.loads(one)) for one in said]))
    print(
        f"a worker: {noting:.1f} us a step, {1e3 * telling:.2f} ms to tell its figures, {1e3 * judged:.2f} ms to judge"
    )


def _each(calls: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20_000)
    asked = parser.parse_args()
    names = [f"host-{n}.12345.{n:012x}" for n in range(asked.workers)]
    with valkey() as (_, redis):
        ear = redis.pubsub()
        ear.subscribe(*map(keys.alive, names))
        while ear.get_message(timeout=0.5):
            pass
        leases = [protocol.lease(name, "q", ABOUT, 600_000, take=True) for name in names]
        for call in leases:
            run(redis, call)
        ring = [*names, *names]
        looks = [("PUBSUB", "NUMSUB", *map(keys.alive, ring[at : at + 1 + LOOKED_AT])) for at in range(len(names))]
        looked_at = ring[1 : 1 + LOOKED_AT]
        found = observe(redis, ring[0], looked_at)
        assert found is not None
        assert found.others == dict.fromkeys(looked_at, Liveness.LIVES)
        counts = [("GET", keys.JOINS)] * len(names)
        joins = [join(name) for name in names]
        run(redis, joins[0])
        each = asked.calls // asked.workers
        renewals = [protocol.lease(name, "q", ABOUT, 600_000, take=False).command for name in names]
        rate = 1 / min(ROUND_S, WorkerSettings("", "", "").lease / 4)
        peers: list[tuple[Any, ...]] = [
            ("MGET", *map(keys.lease, random.sample(names, min(READ, len(names))))) for _ in names
        ]
        for what, calls, per_s in (
            ("look", looks, 1 / LOOK_S),
            ("count of joins", counts, 1 / LOOK_S),
            ("LEASE", renewals, rate),
            ("LEASE while others join", renewals, 1 / LOOK_S),
            ("peers", peers, rate),
        ):
            seconds = took(redis, calls * each)
            share = seconds * per_s * asked.workers
            print(f"{what}: {seconds * 1e6:.1f} us a call, {per_s:g} a second of each worker: {share:.2%} of a core")
        print(f"JOIN: {took(redis, [call.command for call in joins]) * 1e6:.1f} us, once for each subscription")
        ear.close()
    judging(asked.calls)


if __name__ == "__main__":
    main()
