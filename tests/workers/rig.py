"""A Valkey with real workers on it, and eyes to see what became of each task."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from celery import Celery
from redis import Redis

from producers import Client
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.record import Record
from producers.store.protocol import cancel
from tests.processes import Worker, fill, valkey
from tests.stub_engine import StubEngine, token
from tests.waiting import PATIENCE_S, pauses

POOL = keys.Pool("stub", "v1", "stub")
QUEUE = POOL.version_queue
MODEL = keys.model_queue("stub")
#: Longer than any test waits, seconds: no lease lapses because a machine is busy. Who is killed is buried (`kill`).
LEASE = 300.0
#: What a worker does now and then it does often, and it throttles no warnings; and it may take long to hand things
#: back, on a machine that is busy.
TIMES = {
    "workers.leases.housekeeper:ROUND_S": 0.25,
    "workers.leases.housekeeper:KEEP_S": 0.25,
    "workers.runtime.drain:HAND_BACK_S": 20.0,
    "workers.runtime.drain:EXIT_S": 40.0,
    "producers.connection.log_throttle:EVERY_S": 0.0,
}


class Rig:
    """`redis` is the broker, `store` the store: one server unless two are given."""

    def __init__(self, url: str, redis: Redis, store_url: str | None = None, store: Redis | None = None) -> None:
        self.url = url
        self.redis = redis
        self.store_url = store_url or url
        self.store = store or redis
        self.workers: list[Worker] = []
        self._senders: list[Celery] = []

    # ---- workers ----------------------------------------------------------------------------------------------

    def worker(self, **fields: Any) -> Worker:
        """A worker that is up. Killed with the rig, unless it is stopped before."""
        worker = self.begin_worker(**fields)
        worker.wait_ready()
        self.until(self.redis.pubsub_numpat)  # it listens to remote control
        return worker

    def begin_worker(self, *, times: Mapping[str, float] = TIMES, **fields: Any) -> Worker:
        """A worker that may not be up yet. `times`: of the product's constants, where they are to be others."""
        fields = {"lease": LEASE, "LOG_LEVEL": "INFO", "warm": True, "WORKER_TIMES": json.dumps(times), **fields}
        worker = Worker(self.url, store=self.store_url, eyes=self.redis, **fields)
        self.workers.append(worker)
        return worker

    def kill(self, worker: Worker) -> None:
        """With SIGKILL, if it is not dead already, and its lease is over at once: as when it has lapsed."""
        worker.stop(signal.SIGKILL)
        self.lapse(worker)

    def lapse(self, worker: Worker) -> None:
        """Its leases are over, whether it lives or not."""
        for server in {self.redis, self.store}:
            if leases := server.keys(keys.lease(f"{worker.name}.*")):
                server.delete(*leases)

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
            worker.process.wait()
            worker.log.unlink(missing_ok=True)
        for app in self._senders:  # results that live longer would seek the server for 20 s, to end a subscription
            app.backend.result_consumer.subscribed_to.clear()

    def until(self, condition: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
        """Wait for it; what the workers' logs say is in the error otherwise."""
        deadline, pause = time.monotonic() + seconds, pauses(0.02)
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {seconds} s; the workers say:\n{self.logs()}")
            time.sleep(next(pause))

    def logs(self) -> str:
        return "\n".join(f"--- {w.name} ({w.process.poll()})\n{w.log.read_text()[-5000:]}" for w in self.workers)

    # ---- tasks ------------------------------------------------------------------------------------------------

    def fill(self, count: int, **task: Any) -> list[str]:
        """As a client does, into the version's queue."""
        return fill(self.redis, QUEUE, count, **task)

    def begun(self, count: int, *, more_than: int = 0, **task: Any) -> list[str]:
        """As `fill`, once each has made more than so many tokens."""
        ids = self.fill(count, **task)
        self.until(lambda: all(self.tokens(task_id) > more_than for task_id in ids))
        return ids

    def publish_card(self) -> None:
        """As a worker does: clients know a model by it."""
        engine = StubEngine()
        self.store.hset(keys.MODELS, "stub", engine.card.to_json())
        engine.close()

    def submit(self, count: int, **task: Any) -> list[str]:
        """Through the client library; the seed is the task's number."""
        with Client(self.url, self.store_url) as client:
            task = {"model": "stub", "prompt": [1, 2, 3, 4], "max_tokens": 16, **task}
            return [client.submit(seed=seed, **task).id for seed in range(count)]

    def sender(self, **conf: Any) -> Celery:
        """A plain Celery application with stock settings, which knows the servers and nothing of Penstock."""
        app = Celery("sender", broker=self.url, backend=self.store_url, set_as_current=False)
        app.conf.update(task_default_queue=MODEL, **conf)
        self._senders.append(app)
        return app

    def record(self, task_id: str) -> dict[str, str]:
        return dict(self.store.hgetall(keys.task(task_id)))

    def status(self, task_id: str) -> str | None:
        return self.store.hget(keys.task(task_id), "status")

    def entries(self, task_id: str) -> list[Any]:
        return [json.loads(fields["e"]) for _, fields in self.store.xrange(keys.stream(task_id))]

    def tokens(self, task_id: str) -> int:
        """Entries in its stream."""
        return self.store.xlen(keys.stream(task_id))

    def waiting(self, list_name: str) -> int:
        """Messages that no worker has taken."""
        return int(self.redis.llen(list_name)) + int(self.redis.zcard(broker_keys.sorted_of(list_name)))

    def cancel(self, task_id: str) -> list[Any]:
        """Answers [accepted 0|1, status]."""
        accepted, status = run(self.store, cancel(task_id))
        return [accepted, status]

    def settled(self, ids: list[str]) -> bool:
        return all(self.store.hexists(keys.task(task_id), "settled") for task_id in ids)

    def until_settled(self, ids: list[str], seconds: float = PATIENCE_S) -> None:
        """Wait for each; one that was seen to be settled is not asked for again."""
        left = ids[::-1]

        def over() -> bool:
            while left and self.settled(left[-1:]):
                left.pop()
            return not left

        self.until(over, seconds)

    # ---- what must hold ---------------------------------------------------------------------------------------

    def check(self, ids: list[str], status: str = "completed") -> None:
        """Wait until they are settled: with this status, every token the right one at its place, and at the end one
        terminal entry."""
        self.until_settled(ids)
        for task_id in ids:
            record = Record.parse(task_id, self.record(task_id))
            assert record.fields["status"] == record.fields["end"] == status, record.fields
            assert not record.fields.keys() & {"claim", "owner"}
            *tokens, end = self.entries(task_id)
            assert end["end"] == status
            seed, max_tokens = record.task.get("seed", 0), record.task.get("max_tokens", 16)
            for choice in range(record.n):
                mine = [entry for entry in tokens if entry[0] == choice]
                assert [entry[1] for entry in mine] == list(range(len(mine))), "not contiguous from 0"
                assert [entry[2] for entry in mine] == [token(seed, choice, i) for i in range(len(mine))]
                assert record.nexts[choice] == len(mine)
                assert status != "completed" or len(mine) == max_tokens

    def check_nothing_left(self) -> None:
        """No message anywhere: neither waiting, nor in flight, nor held back. The last ACKs may be on their way."""
        self.until(lambda: not [name for name in self.redis.keys("penstock:*") if _holds_messages(name)])

    def dead(self) -> list[dict[str, Any]]:
        """The dead-letter list, oldest first."""
        with Redis.from_url(self.url) as raw:  # a message may hold any bytes
            letters: Any = raw.lrange(broker_keys.DEAD, 0, -1)
        return [json.loads(letter.decode(errors="replace")) for letter in letters]

    def leases(self) -> list[dict[str, Any]]:
        """What the living workers say of themselves."""
        found = [self.store.get(name) for name in self.store.keys(keys.lease("*"))]
        return [json.loads(said) for said in found if said]


def _holds_messages(name: str) -> bool:
    sorted_by_tenant = (
        broker_keys.sorted_of(""),
        broker_keys.turns(""),
        broker_keys.rested(""),
        "penstock:turn:",
        broker_keys.RETURNED,
    )
    return name.startswith((broker_keys.inflight(""), broker_keys.delayed(""), "penstock:queue:", *sorted_by_tenant))


@contextlib.contextmanager
def rig(**config: Any) -> Iterator[Rig]:
    """A rig on a server of its own."""
    with valkey(**config) as (url, redis), contextlib.closing(Rig(url, redis)) as made:
        yield made


@contextlib.contextmanager
def two_servers() -> Iterator[Rig]:
    """A rig whose broker and store are two servers."""
    with valkey() as (url, redis), valkey() as servers, contextlib.closing(Rig(url, redis, *servers)) as made:
        yield made
