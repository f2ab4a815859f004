"""A worker's log names the trace of a task whose caller named one."""

from __future__ import annotations

from celery import Celery

from producers import Client
from producers.contract import keys
from tests.producers.contract.test_record import GOOD, TRACE
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig


def test_from_celery(served: Rig, app: Celery) -> None:
    """By the message's header; one that is refused, too."""
    good, bad, untraced = (
        app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4} | more, headers={"traceparent": given})
        for given, more in ((GOOD, {}), (GOOD, {"max_tokenz": 4}), ("00-0-0-00", {}))
    )
    served.until_settled([one.id for one in (good, bad, untraced)])
    served.until(lambda: f"Task {good.id} has ended: completed trace={TRACE}\n" in served.logs())
    assert f"Task {good.id} is claimed trace={TRACE}\n" in served.logs()
    assert f"Task {bad.id} has ended: failed trace={TRACE}\n" in served.logs()
    assert f"Task {untraced.id} " not in served.logs()


def test_from_a_client(served: Rig) -> None:
    served.publish_card()
    with Client(served.url) as client:
        handle = client.submit(model="stub", prompt=[1], max_tokens=2, traceparent=GOOD)
        assert handle.result(PATIENCE_S).status == "completed"
    served.until(lambda: f"Task {handle.id} has ended: completed trace={TRACE}\n" in served.logs())
