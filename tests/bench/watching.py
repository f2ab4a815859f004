"""What /metrics and `penstock top` cost: `python -m tests.bench.watching [--workers 100] [--tasks 0]`.

Leases of so many workers with a GPU, all counters and histograms of a model in each of its buckets, and as many tasks
that have ended. Printed are a scrape's time and the gateway's processor time for it, and what `top` in a terminal uses
of a core, with its gateway's part.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from statistics import quantiles
from typing import Any

import httpx
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.gateway.metrics import GPU_FIGURES, WORKER_FIGURES
from producers.store.measurements import ALL, HISTOGRAMS, TASKS, Tally
from producers.store.usage.ledger import STATUSES
from tests.bench.gateways import cpu_s, gateway
from tests.processes import ROOT, valkey
from tests.producers.gateway.conftest import POOL, publish
from tests.producers.gateway.test_metrics import LEASE


def announce(store: Redis, workers: int) -> None:
    """Leases of workers that tell all that there is, for an hour; and all of a model's histograms."""
    publish(store)
    figures = {key: 3 for *_, key, _ in WORKER_FIGURES}
    gpu = {key: 7 for *_, key, _ in GPU_FIGURES} | {"slowed_by": ["power_cap"]}
    profile = {"ttft_p95": 0.3, "duty": 0.6, "knee": 8, "tokens_per_s": 900}
    lease: dict[str, Any] = {**figures, **LEASE, "version": POOL.version, "profile": profile, "release": "0.2.0"}
    tally = Tally()
    for histogram in HISTOGRAMS:
        for label in keys.TIERS if histogram.by_tier else (ALL,):
            for bound in (*histogram.bounds, 1e9):
                tally.observe(histogram, bound, label)
    for tier in keys.TIERS:
        for status in STATUSES:
            tally.add(TASKS, 5, tier, status)
    with store.pipeline() as pipe:
        pipe.hset(keys.metrics(POOL.model), mapping=tally.fields())
        for number in range(workers):
            pipe.hset(broker_keys.INCARNATIONS, f"w{number}.x", POOL.queue)
            its = {**lease, "worker": f"w{number}", "gpu": {**gpu, "uuid": f"a{number}"}}
            pipe.set(keys.lease(f"w{number}.x"), json.dumps(its), px=3_600_000)
        pipe.execute()


def ended_tasks(store: Redis, tasks: int) -> None:
    now = int(time.time() * 1000)
    with store.pipeline(transaction=False) as pipe:
        for number in range(tasks):
            name = f"task-{number}"
            fields = {"status": "completed", "model": POOL.model, "tier": "default", "task": '{"prompt": [1]}', "n": 1}
            pipe.hset(keys.task(name), mapping={**fields, "created": now - number, "finished": now - number})
            pipe.zadd(keys.TASKS, {name: now - number})
            if number % 1000 == 999:
                pipe.execute()
        pipe.execute()


def scraped(url: str, pid: int, scrapes: int) -> tuple[list[float], float, int]:
    """The time (s) of each scrape, the gateway's processor time (s) of one, and its bytes."""
    with httpx.Client(base_url=url, timeout=60) as http:
        size = len(http.get("/metrics").raise_for_status().content)
        before, times = cpu_s(pid), []
        for _ in range(scrapes):
            began = time.perf_counter()
            http.get("/metrics").raise_for_status()
            times.append(time.perf_counter() - began)
            time.sleep(0.05)
        return times, (cpu_s(pid) - before) / scrapes, size


def topped(url: str, pid: int, seconds: float) -> tuple[float, float]:
    """The shares of a core that `top` and its gateway use."""
    parent, child = pty.openpty()
    command = [sys.executable, "-P", "-m", "workers.cli", "top", "--url", url]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200", "LINES": "60"}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True)
    os.close(child)

    shown = threading.Event()

    def drain() -> None:
        with suppress(OSError):
            while b"w0" not in os.read(parent, 1 << 16):
                pass
            shown.set()
            while os.read(parent, 1 << 16):
                pass

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    shown.wait(60)
    time.sleep(2)  # what begins once has begun
    before, began = (cpu_s(process.pid), cpu_s(pid)), time.monotonic()
    time.sleep(seconds)
    after, took = (cpu_s(process.pid), cpu_s(pid)), time.monotonic() - began
    process.send_signal(signal.SIGINT)
    process.wait(60)
    return (after[0] - before[0]) / took, (after[1] - before[1]) / took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--tasks", type=int, default=0, help="tasks that have ended")
    parser.add_argument("--scrapes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which top runs")
    options = parser.parse_args()
    with valkey() as (url, store), gateway(url) as (port, pid):
        announce(store, options.workers)
        ended_tasks(store, options.tasks)
        address = f"http://127.0.0.1:{port}"
        times, cpu, size = scraped(address, pid, options.scrapes)
        cuts = quantiles(times, n=20)
        print(f"/metrics: p50 {1000 * cuts[9]:.1f} ms, p95 {1000 * cuts[18]:.1f} ms, {size / 1000:.0f} KB;")
        print(f"          {1000 * cpu:.1f} ms of the gateway's processor time")
        top, its_gateway = topped(address, pid, options.seconds)
        print(f"top: {top:.1%} of a core, and {its_gateway:.1%} of its gateway's")


if __name__ == "__main__":
    main()
