"""What one FETCH costs with many tenants and a long backlog: `python -m tests.bench.fetch`.

A real Valkey, the real scripts, no worker. A backlog is sorted by tenant, then a worker with room for so many tasks
fetches and acknowledges, again and again. Times are those of the round trip; `server_us` is the server's own processor
time for a fetch and its acknowledgements, and for a sort. With `--placement prefix` messages have `--marks` marks, of
which this worker holds those of every second message, and another worker, which has no room, the others'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from redis import Redis

from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run, run_many
from producers.contract import keys
from producers.contract.message import Message
from tests.processes import valkey

QUEUE = keys.pool_queue("m", "1", "bench")
INC = "w.1"


#: Different prefixes.
PREFIXES = 1000


def measure(
    redis: Redis, tenants: int, backlog: int, batch: int, rounds: int, *, places: bool = False, marks: int = 0
) -> dict[str, float]:
    redis.flushall()
    prefixes = [[f"{number * 16 + k:016x}" for k in range(marks)] for number in range(PREFIXES)]
    for holder, inc in enumerate((INC, "w.2")):
        redis.set(keys.lease(inc), "{}")
        for number in range(holder, PREFIXES if places and marks else 0, 2):
            run(redis, broker.holds(inc, prefixes[number]))
    for start in range(0, backlog, 5000):
        with redis.pipeline(transaction=False) as pipe:
            for number in range(start, min(backlog, start + 5000)):
                tenant = f"tenant-{number % tenants}" if tenants > 1 else ""
                prefix = "".join(prefixes[number % PREFIXES])
                message = Message(f"t{number}", QUEUE, "default", 1, 100 + number % 500, tenant, prefix=prefix)
                pipe.lpush(broker_keys.list_of(message), message.envelope())
            pipe.execute()
    sorting, before = [], _used_s(redis)
    while redis.llen(QUEUE):
        sorting.append(_timed(redis, batch, 0, 0, places=places)[0])
    between = _used_s(redis)
    taking, acking = [], []
    for number in range(rounds):
        seconds, uuids = _timed(redis, batch, 10**6, number + 1, places=places)
        taking.append(seconds)
        start_s = time.perf_counter()
        run_many(redis, [broker.ack(INC, uuid, "", 80) for uuid in uuids])
        acking.append(time.perf_counter() - start_s)
    return {
        "tenants": tenants,
        "backlog": backlog,
        f"sort_{broker.SORT_LIMIT}_ms_p50": _ms(sorting or [0.0]),
        f"fetch_{batch}_ms_p50": _ms(taking),
        f"ack_{batch}_ms_p50": _ms(acking),
        "sort_server_us": round((between - before) / max(len(sorting), 1) * 1e6),
        "fetch_and_ack_server_us": round((_used_s(redis) - between) / rounds * 1e6),
    }


def _used_s(redis: Redis) -> float:
    """The server's processor time."""
    used = redis.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


def _timed(redis: Redis, batch: int, room: int, number: int, *, places: bool = False) -> tuple[float, list[str]]:
    uuids = [f"u{number}.{k}" for k in range(batch)]
    call = broker.fetch(
        INC,
        [QUEUE, keys.model_queue("m")],
        uuids,
        broker.Credit((room,) * 4, (10**9,) * 4),
        capacity=(10**6, 10**9),
        plain_tokens=512,
        ageing_ms=30_000,
        max_redeliveries=5,
        places=places,
    )
    start = time.perf_counter()
    answer = run(redis, call)
    seconds = time.perf_counter() - start
    fetched = broker.read_fetch(answer, broker.places([QUEUE, keys.model_queue("m")]))
    if fetched is None or len(fetched) != (batch if room else 0):
        raise RuntimeError(f"{fetched and len(fetched)} tasks were fetched")
    return seconds, uuids


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 100, 10_000])
    parser.add_argument("--backlog", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--trials", type=int, default=1, help="of each; the least times are those of a quiet machine")
    parser.add_argument("--placement", choices=("prefix", "off"), default="off")
    parser.add_argument("--marks", type=int, default=0, help="of each message, at most 16")
    args = parser.parse_args()
    with valkey() as (_, redis):
        for tenants in args.tenants:
            for _ in range(args.trials):
                more = {"places": args.placement == "prefix", "marks": args.marks}
                print(json.dumps(measure(redis, tenants, args.backlog, args.batch, args.rounds, **more)), flush=True)


if __name__ == "__main__":
    main()
