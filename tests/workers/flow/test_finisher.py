"""For which ends Celery's tracer runs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from celery import signals

from producers.contract import keys
from workers.flow.finisher import _announce, _Ending, needs_tracer
from workers.state.delivery import Delivery, Incarnation, Job, Plain

#: As the messages of clients and gateways have them.
NATIVE = {"ignore_result": True, "callbacks": None, "errbacks": None, "chain": None, "chord": None, "group": None}


def delivery(**fields: Any) -> Delivery:
    return Delivery("uuid", "task", Incarnation("worker"), **fields)


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_a_native_task_that_succeeds_needs_none(status: str) -> None:
    assert not needs_tracer(delivery(), status, NATIVE)


@pytest.mark.parametrize("status", ["failed", "retry", "dead"])
def test_what_does_not_succeed_needs_it(status: str) -> None:
    assert needs_tracer(delivery(), status, NATIVE)


@pytest.mark.parametrize(
    "asked",
    [{"ignore_result": False}, {"callbacks": [{}]}, {"errbacks": [{}]}, {"chain": [{}]}, {"chord": {}, "group": "g"}],
)
def test_what_is_to_be_stored_or_sent_needs_it(asked: dict[str, Any]) -> None:
    assert needs_tracer(delivery(), "completed", NATIVE | asked)


def test_a_plain_task_needs_it() -> None:
    assert needs_tracer(delivery(plain=Plain({})), "completed", NATIVE)


@pytest.mark.parametrize("signal", [signals.task_prerun, signals.task_postrun, signals.task_success])
def test_a_receiver_of_its_signals_gets_them(signal: Any) -> None:
    def receive(**_: Any) -> None: ...

    signal.connect(receive)
    try:
        assert needs_tracer(delivery(), "completed", NATIVE)
    finally:
        signal.disconnect(receive)
    assert not needs_tracer(delivery(), "completed", NATIVE)


def test_without_it_monitors_and_log_are_told_the_same(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []
    caplog.set_level(logging.INFO, "celery.app.trace")
    _announce(_Ending(delivery(), "completed"), Job(lambda: None, (), told.append, None))
    assert told == [(False, "'completed'", 0.0)]
    (record,) = caplog.records
    assert record.getMessage() == f"Task {keys.TASK_NAME}[task] succeeded in 0.0s: 'completed'"
    assert record.__dict__["data"]["id"] == "task"
