"""What Celery's monitors see of a worker, and its remote control: `celery events`, Flower, `inspect` and `control`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.workers.rig import Rig

SEEDS = itertools.count(5000)
#: Requests with this seed fail in the engine, the first time.
FAULTY = 77


@pytest.fixture
def app(rig: Rig) -> Iterator[Celery]:
    app = rig.sender()
    yield app
    app.close()


class Heard:
    """The events that a monitor receives, from when it listens."""

    def __init__(self, rig: Rig, app: Celery) -> None:
        self.rig = rig
        self.events: list[dict[str, Any]] = []
        self._receiver = app.events.Receiver(app.connection_for_read(), handlers={"*": self.events.append})

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        patterns = self.rig.redis.pubsub_numpat()
        with self._receiver.consumer_context() as (self._connection, _, _):
            self.rig.until(lambda: self._drain() or self.rig.redis.pubsub_numpat() > patterns)
            yield

    def of(self, task_id: str) -> list[str]:
        return [event["type"] for event in self.events if event.get("uuid") == task_id]

    def of_workers(self) -> list[str]:
        return [event["type"] for event in self.events if event["type"].startswith("worker-")]

    def until(self, condition: Callable[[], bool]) -> None:
        self.rig.until(lambda: self._drain() or condition())

    def _drain(self) -> None:
        with contextlib.suppress(TimeoutError):
            self._connection.drain_events(timeout=0.1)


def generate(app: Celery, max_tokens: int = 4, **options: Any) -> Any:
    kwargs = {"prompt": [1, 2, 3], "seed": next(SEEDS), "max_tokens": max_tokens}
    return app.send_task(keys.TASK_NAME, kwargs=kwargs, **options)


def test_a_worker_comes_lives_and_goes_before_a_monitor_s_eyes(rig: Rig, app: Celery) -> None:
    heard = Heard(rig, app)
    with heard.listening():
        worker = rig.worker(STUB_STEP_S=0.01)
        heard.until(lambda: "worker-heartbeat" in heard.of_workers())
        quiet = generate(app)
        rig.until_settled([quiet.id])
        worker.stop()
        heard.until(lambda: "worker-offline" in heard.of_workers())
    assert heard.of_workers()[0] == "worker-online"
    assert heard.of_workers()[-1] == "worker-offline"
    assert {event["hostname"] for event in heard.events} == {f"penstock@{worker.name}"}
    assert heard.of(quiet.id) == [], "nobody asked for the events of tasks"


def test_task_events_begin_and_end_at_run_time(rig: Rig, app: Celery) -> None:
    rig.worker(STUB_STEP_S=0.01)
    heard = Heard(rig, app)
    with heard.listening():
        control(app, "enable_events")
        plain, (ours,) = generate(app), rig.submit(1)
        heard.until(lambda: "task-succeeded" in heard.of(plain.id) and "task-succeeded" in heard.of(ours))
        assert heard.of(plain.id) == heard.of(ours) == ["task-received", "task-started", "task-succeeded"]
        control(app, "disable_events")
        later = generate(app)
        rig.until_settled([later.id])
        beats = heard.of_workers().count("worker-heartbeat")
        heard.until(lambda: heard.of_workers().count("worker-heartbeat") > beats)
        assert heard.of(later.id) == []


def test_remote_control_finds_tasks_that_pass_celery_by(rig: Rig, app: Celery) -> None:
    worker = rig.worker(STUB_STEP_S=0.01)
    hostname = f"penstock@{worker.name}"
    inspect = app.control.inspect(destination=[hostname], timeout=60)
    heard = Heard(rig, app)
    with heard.listening():
        first, second = rig.begun(2, max_tokens=4000)
        heard.until(lambda: any(event.get("active") == 2 for event in heard.events))
        (active,) = inspect.active().values()
        assert {task["id"] for task in active} == {first, second}
        assert {task["name"] for task in active} == {keys.TASK_NAME}
        assert inspect.query_task(first)[hostname][first][0] == "active"
        assert inspect.stats()[hostname]["total"] == {keys.TASK_NAME: 2}
        control(app, "enable_events")
        app.control.revoke(first, terminate=True)
        assert rig.cancel(second) == [1, "in_progress"]
        rig.check([first, second], "cancelled")
        (failed,) = rig.fill(1, prompt=[1] * 100_000)
        heard.until(lambda: len(heard.of(failed)) == 3)
    assert heard.of(first) == heard.of(second) == ["task-revoked"]
    assert heard.of(failed) == ["task-received", "task-started", "task-failed"]
    rig.until(lambda: inspect.active()[hostname] == [])
    assert any(event.get("processed") == 2 for event in heard.events)


def test_a_task_s_runtime_is_its_engine_s_and_not_the_tracer_s(rig: Rig, app: Celery) -> None:
    rig.worker(events=True, STUB_STEP_S=0.05)
    heard = Heard(rig, app)
    with heard.listening():
        result = generate(app, 40)
        heard.until(lambda: "task-succeeded" in heard.of(result.id))
    (event,) = [event for event in heard.events if event["type"] == "task-succeeded"]
    record = rig.record(result.id)
    took_s = (int(record["finished"]) - int(record["started"])) / 1000
    assert event["runtime"] > took_s / 2


def test_task_events_tell_every_end(rig: Rig, app: Celery) -> None:
    rig.worker(events=True, STUB_STEP_S=0.01, STUB_FAULTS=1, STUB_FAULT_SEEDS=FAULTY)
    heard = Heard(rig, app)
    with heard.listening():
        bad = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "temperature": -1.0})
        faulty = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "seed": FAULTY, "max_tokens": 4})
        cancelled, revoked = generate(app, 4000), generate(app, 4000)
        rig.until(lambda: rig.tokens(cancelled.id) > 0 and rig.tokens(revoked.id) > 0)
        assert rig.cancel(cancelled.id)[0] == 1
        revoked.revoke(terminate=True)
        heard.until(lambda: "task-failed" in heard.of(bad.id))
        heard.until(lambda: "task-revoked" in heard.of(cancelled.id) and "task-revoked" in heard.of(revoked.id))
        heard.until(lambda: "task-succeeded" in heard.of(faulty.id))
    assert "task-retried" in heard.of(faulty.id)


def test_the_pool_s_size_cannot_be_changed_and_a_countdown_is_shown(rig: Rig, app: Celery) -> None:
    worker = rig.worker(STUB_SEQS=8)
    for command in ("pool_grow", "pool_shrink"):
        (answer,) = control(app, command, n=2)
        assert answer["error"].startswith("the pool is the engine's batch of 8 sequences"), answer
    assert "Traceback" not in worker.log.read_text()
    waiting = generate(app, countdown=600)
    rig.until(lambda: rig.redis.exists(broker_keys.delayed(keys.version_queue("stub", "v1"))))
    hostname = f"penstock@{worker.name}"
    (shown,) = app.control.inspect(destination=[hostname], timeout=60).scheduled()[hostname]
    assert (shown["request"]["id"], shown["request"]["name"]) == (waiting.id, keys.TASK_NAME)
    assert shown["eta"] > "2020"
    assert "max_tokens" in shown["request"]["kwargs"]
    (said,) = control(app, "breaker")
    assert (said["state"], said["openings"], said["figures"]["ended"]) == ("closed", 0, 0)


def test_a_rate_limit_holds_up_celery_s_senders_alone(rig: Rig, app: Celery) -> None:
    rig.worker()
    control(app, "rate_limit", task_name=keys.TASK_NAME, rate_limit="1/h")
    first, second = generate(app), generate(app)
    rig.until_settled([first.id])
    ours = rig.submit(3)
    rig.check(ours)
    assert "settled" not in rig.record(second.id)


def control(app: Celery, command: str, **arguments: Any) -> list[Any]:
    """The answers of the one worker, each of which is an `ok` or an `error`."""
    answers = app.control.broadcast(command, arguments=arguments, reply=True, timeout=60, limit=1)
    assert answers, "the worker does not answer"
    return [said for answer in answers for said in answer.values()]
