"""One trace of a task, from its caller's span through gateway, queue, workers and webhook, at a real collector."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from celery import Celery

from producers import Client
from producers.client.aio import AsyncClient
from producers.contract import keys
from producers.gateway import GatewaySettings
from producers.sweeper.traces import SOURCE, TaskTraces
from producers.tracing.export import Tracer
from tests.collector import Collector, Received
from tests.producers.contract.test_record import GOOD, TRACE
from tests.producers.gateway.conftest import Door
from tests.receiver import Receiver
from tests.waiting import PATIENCE_S
from tests.webhooks_process import WebhooksProcess
from tests.workers.rig import Rig
from tests.workers.test_failover import HELD, SOON

SPAN = GOOD.split("-")[2]
#: What nobody may find in a span.
SECRET = "the words of a prompt"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """This process sends its traces there."""
    with Collector() as collector:
        for name, value in collector.environment().items():
            monkeypatch.setenv(name, value)
        yield collector


def sweep(rig: Rig, *, begin: bool = False) -> None:
    """What the leading sweeper does each second. `begin`: it has not led before."""

    async def run() -> None:
        async with AsyncClient(rig.url, rig.store_url) as client:
            traces = TaskTraces(client, Tracer("sweeper"), after_ms=0)
            counts = await traces.sweep()
            traces.close()
            assert begin or counts == {"traces_sent": 1, "traces_dropped": 0}

    asyncio.run(run())


def by_name(spans: list[Received]) -> dict[str, list[Received]]:
    """The spans of the caller's trace."""
    names: dict[str, list[Received]] = {}
    for span in sorted((span for span in spans if span.trace_id == TRACE), key=lambda span: span.start):
        assert span.start <= span.end
        assert SECRET not in str(span)
        names.setdefault(span.name, []).append(span)
    return names


def test_one_trace_from_the_caller_to_the_webhook_also_through_a_kill(rig: Rig, collector: Collector) -> None:
    rig.publish_card()
    sweep(rig, begin=True)
    door = Door(GatewaySettings(rig.url, rig.url, webhook_allow=("127.0.0.0/8",)))
    with Receiver() as receiver, WebhooksProcess(rig.url):
        first = rig.worker(**HELD)
        task = {"model": "stub", "prompt": [1, 2, 3, 4], "max_tokens": 60, "metadata": {"x": SECRET}}
        task["webhook"] = {"url": f"{receiver.url}/ok"}
        made = door.http.post("/v1/tasks", json=task, headers={"traceparent": GOOD, "x-tenant": "acme"})
        task_id = made.json()["id"]
        rig.until(lambda: rig.tokens(task_id) > 5)
        second = rig.worker(**SOON)
        rig.kill(first)
        rig.until_settled([task_id])
        receiver.event()
        collector.until(lambda: any(span.name == "webhook" for span in collector.spans))
    assert door.http.get(f"/v1/tasks/{task_id}").json()["engine_seconds"] >= 0
    door.close()
    sweep(rig)
    names = by_name(collector.spans)
    ((request,), (root,), (webhook,)) = names["POST /v1/tasks"], names["generate stub"], names["webhook"]
    assert (request.parent_id, root.parent_id, webhook.parent_id) == (SPAN, request.span_id, root.span_id)
    assert (request.kind, request.attributes["http.response.status_code"]) == ("server", 202)
    assert webhook.attributes["http.response.status_code"] == 204
    assert root.attributes["gen_ai.usage.output_tokens"] == 60
    assert root.attributes["gen_ai.response.id"] == root.attributes["penstock.task.id"] == task_id
    assert root.resource["service.name"] == "penstock"
    for name in ("submit", "queue", "attempt", "settle"):
        assert {span.parent_id for span in names[name]} == {root.span_id}
    waits, attempts = names["queue"], names["attempt"]
    lost, final = attempts
    assert [span.attributes["penstock.outcome"] for span in attempts] == ["died", "ended"]
    assert lost.attributes["penstock.worker"].startswith(first.name)
    assert final.attributes["penstock.worker"].startswith(second.name)
    assert lost.attributes["penstock.published_tokens"] > 5
    assert (lost.links, final.links) == ([], [lost.span_id])
    assert len(waits) == 2
    for name in ("schedule", "prefill", "decode"):
        assert {span.parent_id for span in names[name]} == {lost.span_id, final.span_id}
    assert [span.parent_id for span in names["publish"]] == [final.span_id]
    decode = names["decode"][-1]
    assert 1 < len(decode.events) < 8
    assert all(before <= after for (_, before), (_, after) in pairwise(decode.events))
    assert [names["prefill"][-1].end, decode.end] == [decode.start, names["publish"][0].start]


def test_a_plain_celery_senders_trace_goes_on(served: Rig, app: Celery, collector: Collector) -> None:
    sweep(served, begin=True)
    sent = app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 4}, headers={"traceparent": GOOD})
    served.until_settled([sent.id])
    sweep(served)
    names = by_name(collector.spans)
    (root,), (attempt,) = names["generate stub"], names["attempt"]
    assert (root.kind, root.parent_id, attempt.parent_id) == ("consumer", SPAN, root.span_id)
    assert names.keys() >= {"schedule", "prefill", "decode", "publish", "settle"}
    assert not names.keys() & {"submit", "queue"}


def test_a_trace_that_its_caller_does_not_record_is_not_sent(served: Rig, app: Celery, collector: Collector) -> None:
    sweep(served, begin=True)
    unsampled, sampled = (
        app.send_task(keys.TASK_NAME, kwargs={"prompt": [1], "max_tokens": 2}, headers={"traceparent": header})
        for header in (f"{GOOD[:-1]}0", GOOD)
    )
    served.until_settled([unsampled.id, sampled.id])
    sweep(served)
    assert {span.attributes.get("penstock.task.id") for span in collector.spans} == {None, sampled.id}
    assert f"Task {unsampled.id} is claimed" not in served.logs()
    assert served.store.get(keys.metrics_mark(SOURCE))


def test_lines_of_a_workers_log_as_json(rig: Rig) -> None:
    """Task, trace and tenant are fields; the prompt is in none."""
    worker = rig.worker(PENSTOCK_LOG_FORMAT="json")
    rig.publish_card()
    task: dict[str, Any] = {"prompt": [1], "max_tokens": 2, "tenant": "acme", "metadata": {"x": SECRET}}
    with Client(rig.url) as client:
        handle = client.submit(model="stub", **task, traceparent=GOOD)
        assert handle.result(PATIENCE_S).status == "completed"
    rig.until(lambda: "has ended" in worker.log.read_text())
    lines = [json.loads(line) for line in worker.log.read_text().splitlines() if line.startswith("{")]
    (claimed,) = [line for line in lines if line["message"] == f"Task {handle.id} is claimed"]
    assert (claimed["level"], claimed["logger"]) == ("info", "workers.flow.claimer")
    assert (claimed["task_id"], claimed["trace_id"], claimed["tenant"]) == (handle.id, TRACE, "acme")
    assert SECRET not in worker.log.read_text()
