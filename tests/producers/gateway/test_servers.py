"""What befalls the gateway's server: a connection that is forgotten on the way, and one that has no room."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from redis import Redis

from producers.client import aio, hub, reader
from producers.contract import keys
from tests.chaos.links import Links
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Open, until
from tests.producers.gateway.http.test_sse import follow


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links()
    yield links
    links.close()


def test_a_stream_goes_on_though_its_connections_were_forgotten(
    links: Links,
    open_door: Open,
    model: str,
    valkey: Redis,
    valkey_url: str,
    worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody closes them, and nothing passes: neither of the listening one, nor of the calls', nor of the one that was
    made in the listening one's place."""
    for module in (aio, hub):
        monkeypatch.setattr(module, "SILENT_S", 0.5)
    monkeypatch.setattr(hub, "PING_S", 0.2)
    monkeypatch.setattr(reader, "SILENCE_S", 60.0)  # the reader is to hear of the end, not to look for it
    url = f"redis://127.0.0.1:{links.add('gateway', urlsplit(valkey_url).port or 0)}/0"
    door = open_door(broker=url, store=url, patience=10)
    http = door.http
    task_id = http.post("/v1/tasks", json={"model": model, "prompt": "x", "max_tokens": 4}).json()["id"]
    assert worker.take(QUEUE) == task_id
    worker.claim(task_id)
    with follow(http, task_id) as events:
        worker.append(task_id, 0, ["a"])
        assert next(events)["data"]["text"] == "a"
        newest = max(int(one["id"]) for one in valkey.client_list())
        links.make("gateway", "silence")
        until(lambda: any(int(one["id"]) > newest for one in valkey.client_list()))
        links.make("gateway", "forget")
        worker.append(task_id, 1, ["b", "c"])
        worker.append(task_id, 3, ["d"], finish_reason="length")
        worker.finish(task_id, [4])
        assert [event["data"].get("text") for event in events] == ["b", "c", "d", None]
    assert http.post("/v1/tasks", json={"model": model, "prompt": "x"}).status_code == 202


@pytest.mark.parametrize("path", ["/v1/tasks", "/v1/completions"])
def test_a_full_server_takes_no_task_and_the_caller_is_told(
    http: httpx.Client, model: str, valkey: Redis, path: str
) -> None:
    valkey.config_set("maxmemory", "1")
    try:
        answer = http.post(path, json={"model": model, "prompt": "x"})
    finally:
        valkey.config_set("maxmemory", "0")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], answer.headers["retry-after"]) == (503, "storage_full", "1")
    assert "refuse" in error["message"], "it is not said to be away"
    assert not valkey.keys(keys.task("*"))
    assert http.post("/v1/tasks", json={"model": model, "prompt": "x"}).status_code == 202
