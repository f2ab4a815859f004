"""What a worker process under test does besides: named by the environment variable WORKER_PLUGINS."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Reject
from celery.result import AsyncResult
from celery.worker import state as celery_state
from celery.worker.control import control_command, inspect_command
from redis import Redis

import workers.pool.app
from tests.stub_engine import StubEngine
from workers.flow import claimer, intake
from workers.flow.claimer import Claimer
from workers.flow.finisher import Finisher
from workers.flow.publisher import Publisher
from workers.leases import control
from workers.leases.control import Control
from workers.leases.housekeeper import Housekeeper
from workers.pool.transport import LINK, QoS
from workers.runtime import assembly as runtime
from workers.runtime import aws, gpu_facts, watchdog
from workers.runtime.gpu_facts import GpuFacts


def a_later_kind() -> None:
    """A kind of message that a later release knows."""
    make_app = workers.pool.app.make_app

    def with_kind(*args: Any) -> Celery:
        app = make_app(*args)

        @app.task(name="penstock.later")
        def later(x: int) -> int:
            return x + 1

        return app

    workers.pool.app.make_app = with_kind


def ordinary_tasks() -> None:
    """Celery tasks that are not the engine's, as an application adds them."""
    make_app = workers.pool.app.make_app

    def with_tasks(*args: Any) -> Celery:
        app = make_app(*args)

        @app.task(name="app.add")
        def add(x: int, y: int) -> int:
            return x + y

        @app.task(name="app.texts")
        def texts(results: list[dict[str, Any]]) -> list[str]:
            return [result["text"] for result in results]

        @app.task(name="app.text")
        def text(result: dict[str, Any], prefix: str = "") -> str:
            return prefix + str(result["text"])

        @app.task(name="app.failed", bind=True)
        def failed(self: Any, task_id: str) -> str:
            result = AsyncResult(task_id, app=self.app)
            self.app.backend.client.rpush("seen:failed", task_id)
            return f"{task_id} {result.state}"

        @app.task(name="app.note")
        def note(key: str, pause: float = 0, go: str = "") -> None:
            """`go`: the file that it waits for."""
            app.backend.client.rpush(f"seen:{key}", "begun")
            time.sleep(pause)
            while go and not os.path.exists(go):
                time.sleep(0.02)
            app.backend.client.rpush(f"seen:{key}", "done")

        @app.task(name="app.reject_once", bind=True)
        def reject_once(self: Any) -> str:
            if app.backend.client.incr(f"rejected:{self.request.id}") == 1:
                raise Reject("not now", requeue=True)
            return "taken the second time"

        @app.task(name="app.retry_once", bind=True)
        def retry_once(self: Any) -> str:
            if not self.request.retries:
                raise self.retry(countdown=0)
            return "done at the second try"

        @app.task(name="app.kept", bind=True)
        def kept(self: Any) -> list[str]:
            """Ids of the messages that kombu and Celery think somebody is at, but for this one's."""
            queues = (found for found in gc.get_objects() if isinstance(found, QoS))
            messages = [message.headers["id"] for qos in queues for message in qos._delivered.values()]
            return [found for found in {*messages, *celery_state.requests} if found != self.request.id]

        @app.task(name="app.exits")
        def exits() -> None:
            raise SystemExit(3)

        @app.task(name="app.deadly")
        def deadly() -> None:
            os._exit(9)

        return app

    workers.pool.app.make_app = with_tasks


def dies_before_claim() -> None:
    """The process dies with a message in hand whose task's id begins with `deadly`, before it is claimed.

    As a message does that kills whoever decodes it: one that is claimed unread (condemned) goes by.
    """
    call = Claimer._call

    def deadly(self: Claimer, delivery: Any) -> Any:
        if delivery.task_id.startswith("deadly") and not delivery.condemned:
            os._exit(9)
        return call(self, delivery)

    Claimer._call = deadly  # type: ignore[method-assign]


def event_loop_sticks() -> None:
    """`control stick`: the main thread waits, for as long as the file `go` is not there."""

    @control_command(args=[("go", str)])
    def stick(state: Any, go: str = "") -> None:
        print("stuck", flush=True)
        while not os.path.exists(go):
            time.sleep(0.02)


def loads_for_ever(model: str, options: dict[str, Any]) -> Any:
    """An engine's factory, within a call in which Python's own handlers of signals do not get a turn."""
    print("loads for ever", flush=True)
    while True:  # a signal cuts a sleep short
        ctypes.CDLL(None).sleep(600)


def waits_for_steps() -> None:
    """The engine takes no step while the file STEPS_HELD is there and some output has as many tokens as it says.

    It goes on to hear of new requests and of cancellations: only its steps wait.
    """
    from engine.execution.pipeline import Pipeline  # with torch

    step, held = Pipeline.step, Path(os.environ["STEPS_HELD"])

    def waiting(pipeline: Pipeline) -> bool:
        try:
            limit = int(held.read_text())
        except FileNotFoundError:
            return step(pipeline)
        groups: Any = pipeline._scheduler._groups  # type: ignore[attr-defined]
        if all(len(seq.tokens) - seq.prompt_len < limit for group in groups.values() for seq in group.seqs):
            return step(pipeline)
        time.sleep(0.005)
        return True

    Pipeline.step = waiting  # type: ignore[method-assign]


def looks_often_for_notices() -> None:
    """That the machine is to go."""
    aws.NOTICE_PERIOD_S = 0.1  # type: ignore[misc]


def pings_often() -> None:
    """On connections that listen, so that one whose peer has vanished is given up soon; and wakes by them alone."""
    control.PING_S = 0.4
    never_looks_idly()


def short_tempered() -> None:
    """The watchdog waits half a second, and the event loop can be made to stick."""
    watchdog.STUCK_S = 0.5  # type: ignore[misc]
    event_loop_sticks()


def gpu_of_a_file() -> None:
    """A driver that counts as many errors of memory as the file ECC_ERRORS says."""
    errors = Path(os.environ["ECC_ERRORS"])
    gpu_facts.PERIOD_S = 0.05  # type: ignore[misc]
    gpu_facts._uuid = lambda device: "a0"
    gpu_facts.open_nvml = lambda uuid: lambda: {"uuid": uuid, "ecc_uncorrected": int(errors.read_text())}
    runtime.GpuFacts = lambda device: GpuFacts("cuda")  # type: ignore[assignment, misc]


def claimer_waits() -> None:
    """What comes while something runs is not claimed."""
    take = Claimer._claim

    def waiting(self: Claimer, deliveries: Any) -> Any:
        while self._deliveries.running and not self._stopping:
            time.sleep(0.01)
        return take(self, deliveries)

    Claimer._claim = waiting  # type: ignore[method-assign]


def claimer_dies() -> None:
    """One of the worker's threads ends with an error that nobody foresaw."""

    def broken(self: Claimer, deliveries: Any) -> Any:
        raise ZeroDivisionError("a fault in the worker itself")

    Claimer._claim = broken  # type: ignore[method-assign]


def claims_one_by_one() -> None:
    """And takes long to RELEASE: what it claims while a suspect runs, it still holds when that one kills the worker."""
    release = Claimer._release

    def slowly(self: Claimer, deliveries: list[Any]) -> None:
        time.sleep(0.2 if deliveries else 0.0)
        release(self, deliveries)

    claimer.BATCH = 1
    Claimer._release = slowly  # type: ignore[method-assign]


def counts_steps() -> None:
    """Into the list `steps`, of each request that is not wanted here any more: why, and how many steps that began after
    this was heard computed it still. Looked at before each step."""
    heard: dict[str, list[Any]] = {}
    step, word, not_ok = StubEngine._step, Control._handle, Publisher._not_ok
    seen = Redis.from_url(os.environ["SEEN_URL"])

    def stepping(self: StubEngine) -> None:
        for uuid, found in list(heard.items()):
            if uuid in self._running:
                found[1] += 1
            else:
                seen.rpush("steps", json.dumps(heard.pop(uuid)))
        step(self)

    def hears(self: Control, message: str) -> None:
        for delivery in self._deliveries.running.values():
            if message == f"cancel {delivery.task_id}":
                heard.setdefault(delivery.uuid, ["word", 0])
        word(self, message)

    def told(self: Publisher, delivery: Any, answer: str, ends: Any) -> None:
        heard.setdefault(delivery.uuid, [answer, 0])
        not_ok(self, delivery, answer, ends)

    StubEngine._step = stepping  # type: ignore[method-assign]
    Control._handle = hears  # type: ignore[method-assign]
    Publisher._not_ok = told  # type: ignore[method-assign]


def starts_when_told() -> None:
    """What was claimed waits for the key `go`. The list `heard` has the words that came."""
    start, word = Claimer._start, Control._handle
    told = Redis.from_url(os.environ["SEEN_URL"])

    def starts(self: Claimer, delivery: Any) -> None:
        while not told.exists("go"):
            time.sleep(0.01)
        start(self, delivery)

    def hears(self: Control, message: str) -> None:
        word(self, message)
        told.rpush("heard", message)

    Claimer._start = starts  # type: ignore[method-assign]
    Control._handle = hears  # type: ignore[method-assign]


def settles_when_told() -> None:
    """Tasks that have ended are not settled before the key `go` is there; Celery's side of others goes on."""
    settle = Finisher._settle
    told = Redis.from_url(os.environ["SEEN_URL"])

    def settles(self: Finisher, ends: Any) -> None:
        if told.exists("go"):
            settle(self, ends)
            return
        for end in ends:
            self._clock.later(0.01, partial(self._queue.put, end))

    Finisher._settle = settles  # type: ignore[method-assign]


def hears_no_word() -> None:
    """Nothing comes by the control channel."""
    Control._handle = lambda self, message: None  # type: ignore[method-assign]


def tells_its_books() -> None:
    """`inspect books`: how much is held in the runtime's and in Celery's books."""

    @inspect_command()
    def books(state: Any) -> dict[str, int]:
        books, link = state.app.penstock.deliveries, state.app.conf.broker_transport_options[LINK]
        gc.collect()
        alive: Counter[str] = Counter(type(thing).__name__ for thing in gc.get_objects())
        qos = state.consumer.task_consumer.channel.qos
        return {
            "deliveries": len(books),
            "running": len(books.running),
            "held": books.ledger.count,
            "arrivals": len(link.arrivals._arrivals),
            "errands": len(books._acker._requests),
            "requests": len(celery_state.requests),
            "reserved": len(celery_state.reserved_requests),
            "active": len(celery_state.active_requests),
            "scheduled": len(celery_state.scheduled_requests),
            # the last ones may be in some thread's local variables
            "delivered": max(0, len(qos._delivered) - 4),
            "Delivery objects": max(0, alive["Delivery"] - 70),
            "Message objects": max(0, alive["Message"] - 70),
        }


def tells_what_is_collected() -> None:
    """`inspect collected`: of how many objects a collection asks whether anybody has them, and how many full ones there
    are until 150,000 objects have come and gone, while 12,000 stay."""

    @inspect_command()
    def collected(state: Any) -> tuple[int, int]:
        before = gc.get_stats()[2]["collections"]
        stay: list[list[Any]] = []
        for i in range(150_000):
            one: list[Any] = []
            one.append(one)
            if i % 12 == 0:
                stay.append(one)
        return len(gc.get_objects()) - len(stay), gc.get_stats()[2]["collections"] - before


def is_told_to_end_at_its_first_lease() -> None:
    """SIGTERM comes while no thread of the worker runs yet; they start when the drain has stopped them all."""
    begin = Housekeeper.begin_life

    def told(self: Housekeeper, life: Any) -> None:
        begin(self, life)
        os.kill(os.getpid(), signal.SIGTERM)
        while not life.over:
            time.sleep(0.01)

    Housekeeper.begin_life = told  # type: ignore[method-assign]


def never_looks_idly() -> None:
    """The intake looks only when it is woken."""
    intake.IDLE_S = 1e6
