"""The server's time for looks at neighbours (docs/failover.md): `python -m tests.bench.looks --workers 200`.

So many incarnations are heard and have leases on one server. Each looks at two others, and renews its lease. Printed is
the server's own time for a call (INFO commandstats), and its share of a core at their rates.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from redis import Redis

from producers.connection.alive import Seen, seen
from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol
from tests.processes import valkey
from workers.leases.housekeeper import ROUND_S
from workers.leases.neighbours import LOOK_S, LOOKED_AT
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
        assert seen(redis, ring[0], ring[1 : 1 + LOOKED_AT]) == dict.fromkeys(ring[1 : 1 + LOOKED_AT], Seen.LIVES)
        each = asked.calls // asked.workers
        renewals = [protocol.lease(name, "q", ABOUT, 600_000, take=False).command for name in names]
        rate = 1 / min(ROUND_S, WorkerSettings("", "", "").lease / 4)
        for what, calls, per_s in (("look", looks, 1 / LOOK_S), ("LEASE", renewals, rate)):
            seconds = took(redis, calls * each)
            share = seconds * per_s * asked.workers
            print(f"{what}: {seconds * 1e6:.1f} us a call, {per_s:g} a second of each worker: {share:.2%} of a core")
        ear.close()


if __name__ == "__main__":
    main()
