"""What one sick worker of three costs callers, with breakers and without: `python -m tests.bench.breaker`.

Stub engines of 4 sequences, 10 ms a step, and tasks of 50 tokens at a steady rate. From a third of the time on, one
worker fails each task at once, or takes 50 ms longer for each step. Printed are, of the tasks that came after, those
that failed for good, and the time from submit to end; the latter also of the last half of these.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from redis import Redis

from producers.contract import keys
from producers.contract.record import FINAL
from tests.processes import Worker, fill, valkey

QUEUE = keys.version_queue("stub", "v1")
FAULTS = {"fails": "fail", "is slow": "slow 0.05"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=8.0, help="tasks a second")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    for what, fault in FAULTS.items():
        for _ in range(asked.rounds):
            for breaker in (True, False):
                said = "with breakers" if breaker else "without"
                print(f"one {what}, {said}: {one(fault, breaker, asked.seconds, asked.rate)}", flush=True)


def one(fault: str, breaker: bool, seconds: float, rate: float) -> str:
    """One run, in words."""
    with tempfile.TemporaryDirectory() as folder, valkey() as (url, redis):
        sick = Path(folder) / "sick"
        options = {"breaker": breaker, "STUB_SEQS": 4, "STUB_STEP_S": 0.01}
        workers = [Worker(url, **options), Worker(url, **options), Worker(url, STUB_SICK=sick, **options)]
        try:
            for worker in workers:
                worker.wait_ready()
            before = load(redis, seconds / 3, rate)
            sick.write_text(fault)
            ids = load(redis, 2 * seconds / 3, rate)
            return summary(redis, before, ids)
        finally:
            for worker in workers:
                worker.process.kill()
                worker.process.wait()


def load(redis: Redis, seconds: float, rate: float) -> list[str]:
    """Submit tasks for so long. Returns their ids."""
    ids: list[str] = []
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        ids += fill(redis, QUEUE, int(passed * rate) + 1 - len(ids), max_tokens=50)
        time.sleep(0.02)
    return ids


def summary(redis: Redis, before: list[str], ids: list[str]) -> str:
    records = [ended(redis, task_id) for task_id in before + ids][len(before) :]
    failed = sum(one["status"] == "failed" for one in records)
    return f"{failed} of {len(ids)} failed; {times(records)}; of the last half {times(records[len(ids) // 2 :])}"


def times(records: list[dict[str, str]]) -> str:
    took = sorted((int(one["finished"]) - int(one["queued"])) / 1000 for one in records)
    p50, p95 = (took[int(share * (len(took) - 1))] for share in (0.5, 0.95))
    return f"p50 {p50:.2f} s, p95 {p95:.2f} s, most {took[-1]:.2f} s"


def ended(redis: Redis, task_id: str) -> dict[str, str]:
    while (record := redis.hgetall(keys.task(task_id))).get("status") not in FINAL:
        time.sleep(0.05)
    found: dict[str, str] = record
    return found


if __name__ == "__main__":
    main()
