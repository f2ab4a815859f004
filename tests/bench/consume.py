"""How many one-token tasks a second one worker consumes, engine apart: `python -m tests.bench.consume`.

A real Valkey, a real worker process with the stub engine, the whole protocol: FETCH, CLAIM, APPEND, FINISH, SETTLE,
ACK. The queue is filled first; the rate is taken from the records' own times, and the worker's processor time from when
a tenth of them is fetched.

`--kind embed`: tasks of one text each, in the same way; with `both` they take turns.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from producers.contract import keys
from tests.bench.gateways import cpu_s
from tests.processes import Worker, fill, queues_of, valkey

#: Kind -> the factory of its stub engine, and the fields of a task.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "generate": ("tests.stub_engine:load", {"max_tokens": 1}),
    "embed": ("tests.stub_embedder:load", {"kind": "embed", "input": [[1, 2, 3, 4]]}),
}


def measure(tasks: int, kind: str = "generate") -> dict[str, float]:
    factory, fields = KINDS[kind]
    with valkey() as (url, redis):
        with Worker(url, engine_factory=factory, STUB_SEQS="512") as worker:
            worker.wait_ready()
        queue = queues_of(redis, "stub")[1]
        ids = fill(redis, queue, tasks, **fields)
        with Worker(url, engine_factory=factory, STUB_SEQS="512") as worker:
            worker.wait_until(lambda: redis.llen(queue) <= tasks * 9 // 10, 120)
            cpu, waiting = cpu_s(worker.process.pid), redis.llen(queue)
            worker.wait_until(lambda: redis.llen(queue) == 0 and redis.hget(keys.task(ids[-1]), "settled"), 120)
            cpu = cpu_s(worker.process.pid) - cpu
        pipe = redis.pipeline(transaction=False)
        for task_id in ids:
            pipe.hmget(keys.task(task_id), "started", "settled", "status")
        rows = pipe.execute()
        assert all(status == "completed" for _, _, status in rows), "not every task was completed"
        start, end = min(int(r[0]) for r in rows), max(int(r[1]) for r in rows)
        return {
            "tasks": tasks,
            "seconds": (end - start) / 1000,
            "tasks_per_s": tasks / (end - start) * 1000,
            "cpu_us_per_task": 1e6 * cpu / max(1, waiting),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--kind", choices=[*KINDS, "both"], default="generate")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, with both")
    args = parser.parse_args()
    if args.kind != "both":
        print(json.dumps(measure(args.tasks, args.kind)))
        return
    for _ in range(args.rounds):
        print(json.dumps({kind: measure(args.tasks, kind) for kind in KINDS}), flush=True)


if __name__ == "__main__":
    main()
