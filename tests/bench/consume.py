"""How many one-token tasks a second one worker consumes, engine apart: `python -m tests.bench.consume`.

A real Valkey, a real worker process with the stub engine, the whole protocol: FETCH, CLAIM, APPEND, FINISH, SETTLE,
ACK. The queue is filled first; the rate is taken from the records' own times, and the worker's processor time from when
a tenth of them is fetched.
"""

from __future__ import annotations

import argparse
import json

from producers.contract import keys
from tests.bench.gateways import cpu_s
from tests.processes import Worker, fill, queues_of, valkey


def measure(tasks: int) -> dict[str, float]:
    with valkey() as (url, redis):
        with Worker(url, STUB_SEQS="512") as worker:
            worker.wait_ready()
        queue = queues_of(redis, "stub")[1]
        ids = fill(redis, queue, tasks, max_tokens=1)
        with Worker(url, STUB_SEQS="512") as worker:
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
    print(json.dumps(measure(parser.parse_args().tasks)))


if __name__ == "__main__":
    main()
