"""`penstock webhooks`: from a task over HTTP to a receiver that verifies, and what operators do with deliveries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Door
from tests.receiver import Process, Receiver
from tests.waiting import until
from tests.workers.cli.conftest import Run
from workers.cli import webhooks
from workers.cli.webhooks import SigningSecrets

PAGE = (Path(__file__).parents[3] / "docs" / "use" / "webhooks.md").read_text("utf-8")
LOCAL = "127.0.0.0/8"


@pytest.fixture
def door(open_door: Callable[..., Door], model: str) -> Door:
    return open_door(webhook_allow=(LOCAL,))


@pytest.fixture
def process(valkey_url: str) -> Iterator[Process]:
    arguments = ("webhooks", "run", "--webhook-allow", LOCAL, "--health-port", "0")
    with Process("workers.cli", *arguments, BROKER_URL=valkey_url) as one:
        yield one


class Listener(Process):
    """`penstock webhooks listen`, with the secret of tasks without a tenant."""

    def __init__(self, url: str, *args: str) -> None:
        super().__init__("workers.cli", "webhooks", "listen", "--port", "0", "--json", *args, BROKER_URL=url)
        self.url: str = self.until(lambda: re.search(r"http://[\d.:]+/", self.log.read_text()))[0]

    def events(self, count: int) -> list[dict[str, Any]]:
        """The events that were verified, once there are so many."""

        def said() -> list[dict[str, Any]] | None:
            found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
            return found if len(found) >= count else None

        found: list[dict[str, Any]] = self.until(said)
        return found


def finished(worker: FakeWorker, task_id: str) -> str:
    """The id of a task, which a worker has completed."""
    assert worker.take(QUEUE, 30) == task_id
    worker.serve(task_id)
    return task_id


def test_a_task_calls_back_and_its_delivery_is_shown_and_replayed(
    valkey_url: str, door: Door, worker: FakeWorker, process: Process, operate: Run
) -> None:
    events = ["response.completed", "response.in_progress"]
    with Listener(valkey_url) as listener:
        body = {"model": "tiny", "prompt": "def", "webhook": {"url": listener.url, "events": events}}
        task_id = finished(worker, httpx.post(f"{door.url}/v1/tasks", json=body).json()["id"])
        first = {event["type"]: event for event in listener.events(2)}
        assert sorted(first) == events
        assert {event["data"]["id"] for event in first.values()} == {task_id}

        webhook_id, other = (first[name]["id"] for name in events)

        def all_delivered() -> bool:
            """Written down once the receiver has answered, which has told of them before."""
            told = operate("webhooks", "ls", "--state", "delivered", "--endpoint", "own").out
            return webhook_id in told and other in told

        until(all_delivered)
        assert "  200 " in operate("webhooks", "show", webhook_id).out
        old = operate("webhooks", "secret").out
        assert operate("webhooks", "secret", "--rotate").out != old
        assert "1 deliveries" in operate("webhooks", "replay", webhook_id).out
        assert listener.events(3)[-1]["id"] == webhook_id  # signed with both secrets
        until(all_delivered)
        assert (
            "2 deliveries"
            in operate("webhooks", "replay", "--all", "--state", "delivered", "--since", "2026-01-01").out
        )
        assert {event["id"] for event in listener.events(5)[-2:]} == {event["id"] for event in first.values()}
        port = process.until(lambda: re.search(r"/readyz on port (\d+)", process.log.read_text()))[1]
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").json() == {"status": "ready"}
        assert process.stop() == 0


def test_a_listener_hears_of_tasks_of_every_tenant_that_is_named_since(
    valkey_url: str, door: Door, worker: FakeWorker, process: Process
) -> None:
    with Listener(valkey_url) as listener:
        for tenant in (None, "acme", "beta"):
            body = {"model": "tiny", "prompt": "def", "tenant": tenant, "webhook": {"url": listener.url}}
            task_id = finished(worker, httpx.post(f"{door.url}/v1/tasks", json=body).json()["id"])
            listener.until(lambda seen=task_id: seen in listener.log.read_text())
        assert len(listener.events(3)) == 3
        forged = {"webhook-id": "x", "webhook-timestamp": "1", "webhook-signature": "v1,AAAA"}
        assert httpx.post(listener.url, content=b"{}", headers=forged).status_code == 400


def test_bad_signatures_have_the_secrets_read_again_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, reads = [100.0], list[float](), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def read() -> list[str]:
        reads.append(now[0])
        return ["first", "new"]

    monkeypatch.setattr(webhooks, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    secrets = SigningSecrets(["first"], read)
    for _ in range(3):  # all came before the read
        assert secrets.read_again() == secrets.secrets == ["first", "new"]
    assert (reads, slept) == ([100.0], [0.0])
    now[0] += 0.25
    secrets.read_again()
    assert (reads, slept) == ([100.0, 101.0], [0.0, 0.75])
    assert SigningSecrets(["of an endpoint"], None).read_again() == ["of an endpoint"]


def test_what_the_page_says_verifies_an_event(
    door: Door, worker: FakeWorker, process: Process, operate: Run, run: Run
) -> None:
    (source,) = [one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "unwrap" in one]
    (placeholder,) = re.findall(r"whsec_[A-Za-z0-9+/=]+", source)
    with Receiver() as receiver:
        asked = run("submit", "tiny", "def", "--webhook", f"{receiver.url}/ok", "--url", door.url)
        task_id = finished(worker, asked.out.strip())
        event = receiver.event()
    names: dict[str, Any] = {}
    exec(source.replace(placeholder, operate("webhooks", "secret").out.strip()), names)
    assert names["received"](event.body.encode(), event.headers) == f"response.completed {task_id}"


def test_an_endpoint_is_tested_by_the_way_that_events_take(
    valkey_url: str, door: Door, process: Process, operate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = openai.OpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0)
    types: Any = ["response.completed"]
    with Listener(valkey_url) as listener:  # it has another secret than the endpoint
        one = client.webhooks.create(name="ours", url=listener.url, event_types=types)
        assert client.webhooks.test(one.id, event_type="batch.completed").status_code == 400
        assert one.id in operate("webhooks", "endpoints").out
        tested = operate("webhooks", "test", one.id)
        assert (tested.status, "  last: 400" in tested.out) == (1, True)
    with pytest.raises(openai.APIStatusError) as nobody:
        client.webhooks.test(one.id, event_type="batch.completed")
    assert (nobody.value.status_code, nobody.value.code) == (424, "webhook_failed")
    process.stop()
    monkeypatch.setattr("producers.gateway.webhooks.TEST_S", 0.1)
    with pytest.raises(openai.APIStatusError) as stopped:
        client.webhooks.test(one.id, event_type="batch.completed")
    assert (stopped.value.status_code, stopped.value.code) == (503, "webhooks_stopped")


def test_what_cannot_be_done_is_said(operate: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no delivery evt_x" in operate("webhooks", "show", "evt_x").err
    assert "not both" in operate("webhooks", "replay").err
    assert "not both" in operate("webhooks", "replay", "evt_x", "--all").err
    assert "no endpoint whe_x" in operate("webhooks", "test", "whe_x").err
    monkeypatch.setenv("WEBHOOK_SECRET", "whsec_x")
    refused = operate("webhooks", "listen").err
    assert "WEBHOOK_SECRET is not base64" in refused
    assert "whsec_x" not in refused
    for bad in (("ls", "--state", "x"), ("ls", "--since", "yesterday"), ("run", "--webhook-allow", "10.0.0.1/8")):
        assert operate("webhooks", *bad).status == 2
    assert operate("webhooks", "ls").out == "There are no such deliveries.\n"
