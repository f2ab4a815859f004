"""What one gateway process carries to many readers: `python -m tests.bench.readers`.

A real Valkey and a gateway process. Each of 1,000 event streams reads a task of its own. The tasks are spread over 16
workers, in whose place this process publishes: one APPEND is one step, with a token of each of a worker's tasks. First
the next step comes when all readers but a few have the last one: that gives the most events a second. Then steps come
at 70% of that rate, and each token says when it was published: that gives the time until its reader has it, of which
the publisher's own call is a part.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing as mp
import re
import selectors
import socket
import statistics
import time
from multiprocessing.synchronize import Event
from typing import Any

from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store.protocol import Append, admit, append
from tests.bench.gateways import connections, cpu_s, gateway, rss_mb
from tests.processes import valkey

CLAIM = "bench"
STAMP = re.compile(rb'"text":"([0-9.]+)"')
WORKERS = 16
#: Steps under way at once while the most is looked for: enough that the gateway never waits.
AHEAD = 8


def read(port: int, ids: list[str], seen: Any, stop: Event, found: Any) -> None:
    """A process that reads all streams: counts their tokens in `seen`, and puts the seconds that each took into
    `found`."""
    poll = selectors.DefaultSelector()
    for task_id in ids:
        link = socket.create_connection(("127.0.0.1", port))
        link.sendall(f"GET /v1/tasks/{task_id}/events HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
        poll.register(link, selectors.EVENT_READ)
    took: list[float] = []
    while not stop.is_set():
        for key, _ in poll.select(0.2):
            stamps = STAMP.findall(key.fileobj.recv(1 << 16))  # type: ignore[union-attr]
            now = time.monotonic()
            took += [now - float(stamp) for stamp in stamps]
        seen.value = len(took)
    found.put(took)


class Publisher:
    def __init__(self, redis: Redis, ids: list[str]) -> None:
        self._redis = redis
        self._workers = [ids[k::WORKERS] for k in range(WORKERS)]
        self.steps = 0
        self.events = 0

    def step(self) -> None:
        """One new token of each task of the next worker; its text is the time."""
        at, ids = self.steps // WORKERS, self._workers[self.steps % WORKERS]
        entry = f'[0,{at},{at % 1000},"{time.monotonic():.6f}"]'
        run(self._redis, append([Append(task_id, CLAIM, 0, at, [entry]) for task_id in ids]))
        self.steps += 1
        self.events += len(ids)


def measure(readers: int, tokens: int, share: float) -> dict[str, float]:
    with valkey() as (url, redis), gateway(url) as (port, pid):
        ids = [f"reader-{k}" for k in range(readers)]
        now = int(redis.time()[0] * 1000)  # type: ignore[index]
        for task_id in ids:
            run(
                redis, admit(task_id, "", now, {"task": "{}", "model": "stub", "queue": "q", "tier": "default", "n": 1})
            )
            redis.hset(keys.task(task_id), mapping={"status": "in_progress", "claim": CLAIM, "started": now})
        spawn = mp.get_context("spawn")
        seen, stop, found = spawn.Value("q", 0), spawn.Event(), spawn.Queue()
        # By its module's name, which is another one than `__main__` wherever it is run.
        process = spawn.Process(
            target=importlib.import_module("tests.bench.readers").read, args=(port, ids, seen, stop, found)
        )
        process.start()
        publisher = Publisher(redis, ids)
        for _ in range(WORKERS):
            publisher.step()
        _until(seen, readers)
        cpu, began = cpu_s(pid), time.monotonic()
        for _ in range(tokens * WORKERS):
            publisher.step()
            _until(seen, publisher.events - AHEAD * readers // WORKERS)
        _until(seen, publisher.events)
        seconds, used = time.monotonic() - began, cpu_s(pid) - cpu
        most = tokens * readers / seconds
        links, before, began = connections(redis, pid), publisher.events, time.monotonic()
        for _ in range(tokens * WORKERS):
            time.sleep(max(0.0, began + (publisher.events - before) / (share * most) - time.monotonic()))
            publisher.step()
        _until(seen, publisher.events)
        stop.set()
        took = found.get()[before:]
        process.join()
        return {
            "readers": readers,
            "rss_mb": rss_mb(pid),
            "connections": links,
            "events_per_s": most,
            "events_per_cpu_s": tokens * readers / used,
            "share": share,
            "latency_ms_p50": 1000 * statistics.median(took),
            "latency_ms_p99": 1000 * statistics.quantiles(took, n=100)[98],
        }


def _until(seen: Any, wanted: int) -> None:
    limit = time.monotonic() + 120
    while seen.value < wanted:
        if time.monotonic() > limit:
            raise SystemExit(f"{seen.value} events came of {wanted}")
        time.sleep(0.0005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=100, help="tokens that each reader gets, twice")
    parser.add_argument("--share", type=float, default=0.7, help="of the most events a second, for the latency")
    args = parser.parse_args()
    print(json.dumps(measure(args.readers, args.tokens, args.share)))


if __name__ == "__main__":
    main()
