"""The server's time for looks at neighbours (docs/failover.md): `python -m tests.bench.looks --workers 200`.

So many incarnations are heard and have leases on one server. Each looks at two others, and renews its lease. Printed is
the server's own time for a script call (INFO commandstats), and its share of a core at their rates.
"""

from __future__ import annotations

import argparse
import json
from itertools import islice

from redis import Redis

from producers.connection.alive import Seen, look, read_look
from producers.connection.script import Call, run
from producers.contract import keys
from producers.store import protocol
from tests.processes import valkey
from workers.leases.housekeeper import ROUND_S
from workers.leases.neighbours import LOOK_S, LOOKED_AT
from workers.settings import WorkerSettings

#: As long as the lease's text of a real worker.
ABOUT = json.dumps({"worker": "w", "profile": "x" * 1500})


def took(redis: Redis, calls: list[Call]) -> float:
    """The server's mean time (s) for one of these."""
    run(redis, calls[0])
    redis.config_resetstat()
    for call in calls:
        redis.execute_command(*call.command)
    return float(redis.info("commandstats")["cmdstat_evalsha"]["usec_per_call"]) / 1e6


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
        rings = [look(name, [*islice([*names, *names], at + 1, at + 1 + LOOKED_AT)]) for at, name in enumerate(names)]
        found = read_look(run(redis, rings[0]), names[1 : 1 + LOOKED_AT])
        assert found == dict.fromkeys(names[1 : 1 + LOOKED_AT], Seen.LIVES)
        each = asked.calls // asked.workers
        renewals = [protocol.lease(name, "q", ABOUT, 600_000, take=False) for name in names]
        rate = 1 / min(ROUND_S, WorkerSettings("", "", "").lease / 4)
        for what, calls, per_s in (("LOOK", rings, 1 / LOOK_S), ("LEASE", renewals, rate)):
            seconds = took(redis, calls * each)
            share = seconds * per_s * asked.workers
            print(f"{what}: {seconds * 1e6:.1f} us a call, {per_s:g} a second of each worker: {share:.2%} of a core")
        ear.close()


if __name__ == "__main__":
    main()
