"""What a sweeper is to finish, and processes that sweep it, forked from one that has everything imported."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from multiprocessing.process import BaseProcess
from typing import Any, Self

from redis import Redis

from producers import Event
from producers.client.aio import AsyncClient
from producers.connection.script import run
from producers.contract import keys
from producers.contract.stream import encode_token
from producers.store import protocol
from producers.store.usage.ledger import COUNTS
from producers.sweeper.retention import Ages
from producers.sweeper.sweeper import SweeperSettings
from tests.waiting import PATIENCE_S
from tests.warm import template
from workers.cli.background import sweep

POOL = keys.Pool("tiny", "1", "chaos")
QUEUE = POOL.version_queue


class Sweeper:
    """A process that sweeps as `penstock sweeper` does, at short intervals."""

    def __init__(self, url: str, name: str, **settings: Any) -> None:
        """`settings`: those of a SweeperSettings that are to be others."""
        fields = {"lease": 1.0, "every": 0.05, "seldom": 0.1, "usage": Ages(fold=0.0, roll=0.0)} | settings
        args = (url, name, fields, dict(os.environ))
        self._process: BaseProcess = template().Process(target=_sweep, args=args, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.exitcode

    def signal(self, sig: signal.Signals) -> None:
        os.kill(self.pid, sig)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)


def _sweep(url: str, name: str, fields: dict[str, Any], env: dict[str, str]) -> None:
    os.environ.update(env)  # AWS's credentials, which came after the process that this one is forked from
    asyncio.run(sweep(SweeperSettings(url, url, name, **fields)))


class Left:
    """Tasks of each kind that others left, and what became of them."""

    def __init__(self, redis: Redis, *, streams: tuple[int, ...] = (3, 1100)) -> None:
        self.redis = redis
        redis.flushall()
        redis.set(keys.lease("w"), "{}")
        self.ids = {f"stream{k}": self._finished(f"stream{k}", count) for k, count in enumerate(streams)}
        for name in ("cancelled", "died", "unsent", "late"):
            self._admit(name, **({"deadline": 1} if name == "late" else {}))
        for name in ("cancelled", "died", "late"):
            run(redis, protocol.queued(name))
        run(redis, protocol.cancel("cancelled"))
        self._finished("died", 2, settle=False)
        redis.delete(keys.lease("w"))
        for index in (keys.SUBMITTING, keys.SETTLED):
            redis.zadd(index, dict.fromkeys(redis.zrange(index, 0, -1), self._a_while_ago()))
        self.age()
        self.tokens = sum(streams) + 2
        self.whole = self.events()

    def _admit(self, task_id: str, **fields: Any) -> None:
        now = int(self.redis.time()[0]) * 1000
        record = {"task": json.dumps({"prompt": [1]}), "model": "tiny", "queue": QUEUE, "tier": "default", "n": 1}
        run(self.redis, protocol.admit(task_id, task_id, now, record | {"tokens": 9} | fields))

    def _finished(self, task_id: str, count: int, settle: bool = True) -> str:
        if settle:
            self._admit(task_id)
        run(self.redis, protocol.claim(task_id, "c", "w", POOL))
        for start in range(0, count, 500):
            entries = [encode_token(0, k, k, f" {k}") for k in range(start, min(count, start + 500))]
            run(self.redis, protocol.append([protocol.Append(task_id, "c", 0, start, entries)]))
        run(self.redis, protocol.finish(task_id, "c", "completed", reasons='["stop"]', nexts=[count]))
        if settle:
            run(self.redis, protocol.settle(task_id))
        return task_id

    def age(self) -> None:
        """What became final just now did so long ago."""
        for name in self.redis.zrange(keys.UNSETTLED, 0, -1):
            self.redis.zadd(keys.UNSETTLED, {name: self._a_while_ago()}, xx=True)

    def _a_while_ago(self) -> int:
        """So long that a sweeper takes it up."""
        return int(self.redis.time()[0]) * 1000 - 120_000

    def events(self) -> dict[str, list[Event]]:
        """What a reader of each finished task is given."""
        url = f"redis://127.0.0.1:{self.redis.connection_pool.connection_kwargs['port']}/0"

        async def read() -> dict[str, list[Event]]:
            async with AsyncClient(url) as client:
                return {task_id: [e async for e in client.get(task_id).stream()] for task_id in [*self.ids, "died"]}

        return asyncio.run(read())

    def done(self) -> bool:
        """Nothing is left to do: what else there is became final a moment ago, and waits for its time."""
        self.age()
        pipe = self.redis.pipeline(transaction=True)
        for index in (keys.SUBMITTING, keys.UNSETTLED, keys.DEADLINES):
            pipe.zcard(index)
        for task_id in self.ids:
            pipe.exists(keys.stream(task_id))
        pipe.xlen(keys.LEDGER)
        return not any(pipe.execute()) and not any(b"hour:" in name for name in self.redis.zrange(keys.USAGE, 0, -1))

    def faults(self) -> list[str]:
        """What is wrong, once all is done."""
        found = []
        if self.events() != self.whole:
            found.append("a reader is given something else than before")
        for name, status in {
            "cancelled": "cancelled",
            "died": "completed",
            "late": "failed",
            "unsent": "queued",
        }.items():
            fields = self.redis.hgetall(keys.task(name))
            if fields.get(b"status") != status.encode() or (b"settled" in fields) != (name != "unsent"):
                found.append(f"{name} is {fields}")
        if self.redis.llen(QUEUE) not in (1, 2):  # the sweeper may have died between send and QUEUED
            found.append(f"{self.redis.llen(QUEUE)} messages were sent")
        days = [name.decode() for name in self.redis.zrange(keys.USAGE, 0, -1)]
        hashes = [
            keys.usage(day, tenant.decode()) for day in days for tenant in self.redis.smembers(keys.usage_tenants(day))
        ]
        sums = [list(map(int, said.split())) for name in hashes for said in self.redis.hvals(name)]
        tasks, tokens = (sum(said[k] for said in sums for k in at) for at in (range(4), [COUNTS.index("output")]))
        if (tasks, tokens) != (len(self.ids) + 3, self.tokens):
            found.append(f"the ledger counts {tasks} tasks of {tokens} tokens, not {self.tokens}: {sums}")
        for task_id in self.ids:
            if not 0 < self.redis.ttl(keys.result(task_id)) <= protocol.DEFAULT_TTL_S + 60:
                found.append(f"the result of {task_id} lives for {self.redis.ttl(keys.result(task_id))} s")
        return found
