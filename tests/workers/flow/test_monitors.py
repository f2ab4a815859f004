"""Tasks in which Celery has no part, as its monitors see them."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, signals
from celery.worker import state

from producers.contract import keys
from producers.contract.message import Message
from producers.contract.record import error_json
from workers.flow.celery_side import CelerySide
from workers.flow.deliveries import Acker, Deliveries, Size
from workers.flow.monitors import WAITING, Monitors
from workers.pool.app import register
from workers.settings import WorkerSettings
from workers.state.delivery import Delivery, Native
from workers.state.served import Served

AWAY = "redis://127.0.0.1:1/0"


class Eventer:
    """Celery's dispatcher, which keeps what it is told."""

    enabled = True

    def __init__(self, *groups: str) -> None:
        self.groups = set(groups)
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.sent.append((kind, fields))


@pytest.fixture
def books() -> Deliveries:
    engine: Any = SimpleNamespace(max_num_seqs=4, kv_tokens_total=400, abort=lambda _: None)
    pool = keys.Pool("stub", "1", "x")
    served = Served(WorkerSettings(AWAY, AWAY, "stub", name="w"), engine, {"name": "stub"}, {}, pool)
    return Deliveries(served, Acker(served.connect_broker(), AWAY))


@pytest.fixture
def monitors(books: Deliveries) -> Monitors:
    app = Celery("one", set_as_current=False)
    register(app, 3)
    return Monitors(app, books, "w")


def enter(books: Deliveries, task_id: str) -> Delivery:
    payload = json.loads(Message(task_id, "queue", "flex", 1, 10).envelope())
    delivery = Delivery(f"d-{task_id}", task_id, books.life, native=Native(payload, 6))
    assert books.enter(delivery, Size(2, 1, 10))
    return delivery


def test_nobody_who_listens_is_told(books: Deliveries, monitors: Monitors) -> None:
    nudges: list[str] = []
    monitors.nudge = lambda: nudges.append("!")
    eventer = monitors.eventer = Eventer("worker")
    delivery = enter(books, "t")
    monitors.begun(delivery)
    monitors.ended(delivery, "completed", "null", 0.0)
    monitors.send()
    assert (eventer.sent, nudges, monitors.begun_count) == ([], [], 1)


def test_who_listens_hears_all_in_one_batch(books: Deliveries, monitors: Monitors) -> None:
    nudges: list[str] = []
    monitors.nudge = lambda: nudges.append("!")
    eventer = monitors.eventer = Eventer("worker", "task")
    for task_id, status in (("a", "completed"), ("b", "cancelled"), ("c", "failed")):
        delivery = enter(books, task_id)
        monitors.begun(delivery)
        monitors.ended(delivery, status, error_json("engine_error", "It broke."), delivery.began_at)
    assert eventer.sent == []
    monitors.send()
    assert len(nudges) == 1
    monitors.begun(delivery)
    assert len(nudges) == 2, "it is nudged again for what comes after a batch"
    told = [(kind, fields["uuid"]) for kind, fields in eventer.sent]
    ends = {"a": "task-succeeded", "b": "task-revoked", "c": "task-failed"}
    assert told == [(kind, one) for one in "abc" for kind in ("task-received", "task-started", ends[one])]
    received, failed = eventer.sent[0][1], eventer.sent[-1][1]
    assert (received["name"], received["root_id"], received["args"]) == (keys.TASK_NAME, "a", "()")
    assert "It broke." in failed["exception"]


def test_events_that_nobody_sends_take_a_bounded_room(books: Deliveries, monitors: Monitors) -> None:
    eventer = monitors.eventer = Eventer()
    delivery = enter(books, "t")
    for _ in range(WAITING):
        monitors.begun(delivery)
    monitors.send()
    assert len(eventer.sent) == WAITING


def test_the_log_has_what_celery_s_tracer_would_say(
    books: Deliveries, monitors: Monitors, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "celery.app.trace")
    monitors.ended(enter(books, "t"), "completed", "null", 0.0)
    (record,) = caplog.records
    assert record.getMessage() == f"Task {keys.TASK_NAME}[t] succeeded in 0.0s: 'completed'"
    assert record.__dict__["data"]["id"] == "t"


def test_celery_s_books_have_a_task_once_somebody_looks_until_it_is_put_down(
    books: Deliveries, monitors: Monitors
) -> None:
    one, other = enter(books, "one"), enter(books, "other")
    assert (monitors.unseen, len(state.active_requests)) == (2, 0)
    monitors.show({"one", "unknown"})
    assert [request.info()["id"] for request in state.active_requests] == ["one"]
    assert (monitors.unseen, other.job) == (1, None)
    job = one.job
    monitors.show()
    assert one.job is job
    info = {request.id: request.info() for request in state.active_requests}
    assert info["one"]["hostname"] == "penstock@w"
    assert info["one"]["delivery_info"]["priority"] == 6
    assert info["one"]["time_start"] > 1e9
    books.done(one)
    books.life_is_over(books.life)
    assert (list(state.active_requests), list(state.reserved_requests), state.requests) == ([], [], {})


def test_a_task_that_was_put_down_meanwhile_is_not_shown(
    books: Deliveries, monitors: Monitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    delivery = enter(books, "t")
    make = monitors.job

    def ends_meanwhile(delivery: Delivery) -> Any:
        books.done(delivery)
        return make(delivery)

    monkeypatch.setattr(monitors, "job", ends_meanwhile)
    monitors.show()
    assert (delivery.job, list(state.active_requests), state.requests) == (None, [], {})


def test_who_receives_celery_s_signals_gets_them_also_of_failures_alone() -> None:
    payload = json.loads(Message("t", "queue", "flex", 1, 10).envelope())
    assert CelerySide.is_apart(payload)

    def receiver(**_: Any) -> None: ...

    for signal in (signals.task_prerun, signals.task_failure):
        signal.connect(receiver)
        try:
            assert not CelerySide.is_apart(payload)
        finally:
            signal.disconnect(receiver)
    assert CelerySide.is_apart(payload)
