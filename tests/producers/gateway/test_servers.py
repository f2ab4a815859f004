"""What befalls the gateway's server: a connection that is forgotten on the way, one that has no room, memory and disk
that are full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from redis import Redis
from redis.exceptions import RedisError

from producers.client import aio, hub, reader
from producers.contract import keys
from tests.chaos.links import Links
from tests.chaos.servers import Server
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Open, until
from tests.producers.gateway.http.test_sse import follow
from tests.producers.gateway.test_metrics import figures


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


@pytest.mark.parametrize(
    ("share", "state"), [(0.5, None), (0.82, "filling"), (0.93, "nearly full"), (1.05, "full")], ids=str
)
def test_how_full_the_store_is_stands_in_readyz_and_metrics(
    http: httpx.Client, model: str, valkey: Redis, share: float, state: str | None
) -> None:
    """It stays ready: a gateway that is taken out of service would cut its streams."""
    valkey.setrange("ballast", 50_000_000, "x")  # else what connections take makes a difference
    valkey.config_set("maxmemory", int(valkey.info("memory")["used_memory"] / share))
    try:
        answer = http.get("/readyz").json()
        found = figures(http)
    finally:
        valkey.config_set("maxmemory", "0")
        valkey.delete("ballast")
    assert (answer["status"], answer["degraded"]) == ("ready", state is not None)
    assert answer["checks"].get("storage", "").startswith("" if state is None else f"store: {state}: ")
    assert found["penstock_storage_used_ratio", "store"] == pytest.approx(share, rel=0.2)
    assert found["penstock_storage_writable", "store"] == 1
    assert found["penstock_up",] == 1


def test_a_full_store_keeps_no_gateway_from_seeing_overload(open_door: Open, model: str, valkey: Redis) -> None:
    http = open_door(max_queued=10).http
    valkey.hset(keys.WAITING, mapping={"default": 9, f"default {QUEUE}": 9})
    valkey.config_set("maxmemory", "1")
    try:
        checks = http.get("/readyz").json()["checks"]
    finally:
        valkey.config_set("maxmemory", "0")
    assert checks["overload"].endswith(": shorten")
    assert checks["storage"].startswith("store: full: ")


def test_a_store_that_cannot_write_its_file_is_named(open_door: Open, tmp_path: Path) -> None:
    server = Server("server", tmp_path / "server", None)
    try:
        door = open_door(broker=server.url, store=server.url)
        assert door.http.get("/readyz").json()["degraded"] is False
        server.fill_disk()
        with Redis.from_url(server.url) as redis:
            until(lambda: _refused(redis))
        answer = door.http.get("/readyz").json()
        assert (answer["status"], answer["degraded"]) == ("ready", True)
        assert "the append-only file cannot be written" in answer["checks"]["storage"]
        assert figures(door.http)["penstock_storage_writable", "store"] == 0
        server.free_disk()
        until(lambda: door.http.get("/readyz").json()["degraded"] is False)
    finally:
        server.stop()


def _refused(redis: Redis) -> bool:
    try:
        redis.set("probe", 1)
    except RedisError:
        return True
    return False
