"""What the ledger costs: FINISH with and without its row, FOLD, and the room of a row: `python -m tests.bench.ledger`.

A real Valkey, the real scripts, no worker. Both forms of FINISH take turns on records of their own, `--batch` in a
round trip. Times are those of the server alone, as it counts them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from dataclasses import replace

from redis import Redis

from producers.connection.script import Call, Script, run, run_many
from producers.contract import keys
from producers.store import protocol
from producers.store.usage.ledger import BATCH_SIZE, fold
from tests.processes import valkey

ROW = "  ledger_row(task, id, status, prompt, cached, out)\n"
POOL = keys.Pool("m", "1", "bench")


def without(call: Call) -> Call:
    """The same call of a script that writes no row."""
    text = call.script.text.replace(ROW, "")
    return replace(call, script=Script(text, hashlib.sha1(text.encode()).hexdigest()))


def running(redis: Redis, number: int, batch: int) -> list[Call]:
    """Tasks that are about to end: their FINISH."""
    now = int(redis.time()[0]) * 1000
    fields = {"task": "{}", "model": "m", "version": "1", "tier": "default", "n": 1, "tenant": "acme", "key": "k" * 16}
    ids = [f"{number}.{k}" for k in range(batch)]
    run_many(redis, [protocol.admit(one, "", now, fields) for one in ids])
    run_many(redis, [protocol.claim(one, "c", "w", POOL) for one in ids])
    return [
        protocol.finish(one, "c", "completed", reasons='["stop"]', nexts=[0], prompt_tokens=100 + k)
        for k, one in enumerate(ids)
    ]


def server_us(redis: Redis, calls: list[Call]) -> float:
    """The server's time for one of these calls (microseconds)."""
    run(
        redis, replace(calls[0], keys=("penstock:task:none", "penstock:stream:none"))
    )  # it knows the script from now on
    redis.config_resetstat()
    run_many(redis, calls)
    return float(redis.info("commandstats")["cmdstat_evalsha"]["usec_per_call"])


def measure(redis: Redis, rounds: int, batch: int) -> dict[str, float]:
    redis.set(keys.lease("w"), "{}")
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds * 2):
        calls, row = running(redis, number, batch), number % 2 == 1
        times[row].append(server_us(redis, calls if row else [without(call) for call in calls]))
    size, rows = redis.memory_usage(keys.LEDGER, samples=0), redis.xlen(keys.LEDGER)
    folds = []
    while run(redis, fold(-1)) == BATCH_SIZE:
        folds.append(float(redis.slowlog_get(1)[0]["duration"]))
    plain, rowed = (statistics.median(times[row]) for row in (False, True))
    return {
        "finish_us": round(plain, 2),
        "finish_with_row_us": round(rowed, 2),
        "ratio": round(rowed / plain, 3),
        "row_bytes": round(size / rows, 1),
        f"fold_{BATCH_SIZE}_ms": round(statistics.median(folds) / 1000, 2) if folds else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What the ledger costs.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--batch", type=int, default=500)
    asked = parser.parse_args()
    with valkey(**{"slowlog-log-slower-than": "0"}) as (_, redis):
        print(json.dumps(measure(redis, asked.rounds, asked.batch)))


if __name__ == "__main__":
    main()
