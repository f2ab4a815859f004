"""A message is acknowledged once, whichever threads come for it at once."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from celery import Celery
from kombu import Message

from producers.contract.keys import TASK_NAME
from workers.pool.app import EngineRequest, EngineTask


@pytest.mark.parametrize("way", ["acknowledge", "reject"])
def test_two_threads_that_put_a_task_down_acknowledge_it_once(way: str) -> None:
    said: list[str] = []
    others: list[threading.Thread] = []

    def on_ack(*args: Any) -> None:
        """While one thread is at it, another one comes: it has time enough to do the same."""
        said.append(way)
        if not others:
            others.append(threading.Thread(target=request.acknowledge))
            others[0].start()
            others[0].join(0.2)

    app = Celery("one", set_as_current=False)
    task = app.register_task(EngineTask())
    request = EngineRequest(
        Message(body="[]", headers={"id": "t1", "task": TASK_NAME}),
        app=app,
        task=task,
        on_ack=on_ack,
        on_reject=on_ack,
        decoded=True,
        body=((), {}, {}),
    )
    request._eventer = None
    getattr(request, way)()
    others[0].join()
    assert said == [way]
    assert request.acknowledged
