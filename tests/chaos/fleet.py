"""Worker processes that are killed and replaced, and what it did to the streams that they were making."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from redis import Redis

from producers import keys
from producers.script import text
from tests.processes import Worker

#: Each has room for the whole load, so that a stream never waits for room but for a worker.
ENGINES: dict[str, dict[str, Any]] = {
    "bundled": {
        "model": "tiny",
        "engine_factory": "workers.serving:load_engine",
        "engine": {"dtype": "float32", "threads": 1, "max_num_seqs": 32, "kv_cache_bytes": 128 << 20},
    },
    "stub": {"model": "stub", "STUB_STEP_S": "0.02", "STUB_SEQS": "32"},
}


@dataclass(frozen=True, slots=True)
class Kill:
    """`stopped` are the streams that the worker was making, by task, each with how many entries it had."""

    at: float
    worker: str
    lease_left: float
    """For how long others had to believe that it lived, s."""
    stopped: dict[str, int]


class Fleet:
    """Workers on the server at `url`; `fields` as `tests.processes.Worker` takes them."""

    def __init__(self, url: str, **fields: Any) -> None:
        self._url, self._fields = url, fields
        self._redis = Redis.from_url(url, decode_responses=True)
        self._started = 0
        self.kills: list[Kill] = []
        self.workers: list[Worker] = []

    def start(self, size: int) -> None:
        """Returns when all are ready."""
        for _ in range(size):
            self.workers.append(self._one())
        for worker in self.workers:
            worker.wait_ready()

    def _one(self) -> Worker:
        self._started += 1
        return Worker(self._url, name=f"w{self._started}", **self._fields)

    def ready(self) -> list[Worker]:
        """Those that have their lease."""
        names = {text(name).rpartition(".")[0] for name in self._redis.hkeys(keys.INCARNATIONS)}
        return [worker for worker in self.workers if worker.name in names]

    def kill(self, worker: Worker, open_tasks: Iterable[str]) -> Kill:
        """SIGKILL, held still before, so that what it was at is known for certain. Another one takes its place."""
        worker.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, worker.process.pid, os.WSTOPPED | os.WNOWAIT)
        at, left = time.monotonic(), max(self._redis.pttl(keys.lease(name)) for name in worker.incarnations)
        kill = Kill(at, worker.name, left / 1000, self._running(worker, list(open_tasks)))
        worker.process.kill()
        worker.process.wait()
        worker.log.unlink()
        self.workers[self.workers.index(worker)] = self._one()
        self.kills.append(kill)
        return kill

    def _running(self, worker: Worker, task_ids: list[str]) -> dict[str, int]:
        pipe = self._redis.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hmget(keys.task(task_id), "owner", "end")
            pipe.xlen(keys.stream(task_id))
        answers = pipe.execute()
        return {
            task_id: length
            for task_id, (owner, end), length in zip(task_ids, answers[::2], answers[1::2], strict=True)
            if owner is not None and owner.startswith(f"{worker.name}.") and end is None
        }

    def stop(self) -> list[str]:
        """Drain all; say what went wrong with any."""
        for worker in self.workers:
            worker.process.terminate()
        codes = [worker.process.wait(60) for worker in self.workers]
        found = [f"worker {w.name} exited with {c}: {w.log}" for w, c in zip(self.workers, codes, strict=True) if c]
        for worker, code in zip(self.workers, codes, strict=True):
            if not code:
                worker.log.unlink()
        self._redis.close()
        return found
