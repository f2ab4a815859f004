"""`/livez`, `/readyz`, and what callers are told while the store or the broker is away."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.gateway import health
from producers.gateway.fair_share import FairShare
from producers.store.fleet.cards import publish
from tests.processes import valkey as another_valkey
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import CARD, Open
from tests.producers.gateway.http.test_sse import follow
from tests.producers.proxy import Proxy
from tests.waiting import until

#: Nothing listens there.
NOWHERE = "redis://127.0.0.1:1/0"


def test_a_gateway_with_store_and_broker_is_alive_and_ready(http: httpx.Client) -> None:
    assert http.get("/livez").json() == {"status": "ok"}
    for path in ("/readyz", "/health"):
        answer = http.get(path)
        said = {"status": "ready", "degraded": False, "checks": {"store": "ok", "broker": "ok"}}
        assert (answer.status_code, answer.json()) == (200, said)


def test_workers_that_do_not_come_up_are_said_by_a_gateway_that_is_ready(http: httpx.Client, valkey: Redis) -> None:
    now, trouble = int(valkey.time()[0]), "5 tries in a row failed: no GPU (given up)"
    for pool, at in {"tiny": now, "old": now - 3600}.items():
        valkey.hset(keys.SCALE_POOLS, pool, json.dumps({"at": at, "trouble": trouble}))
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]["workers"]) == (200, f"tiny: {trouble}")


def test_a_gateway_that_waits_for_models_is_ready_once_each_is_published_or_was_served(
    open_door: Open, valkey: Redis, model: str
) -> None:
    """A card of a worker that ended does not count; and a worker that ends later is waited for by tasks alone."""
    door = open_door(awaited=(model, "other", "published"))
    http = door.http
    error = http.get("/readyz").json()["error"]
    assert error["code"] == "not_ready"
    assert error["message"].startswith("other, published, tiny: not published, and served by no worker yet; ")
    publish(valkey, {**json.loads(CARD.to_json()), "name": "published"}, {})
    valkey.hset(keys.MODELS, "other", json.dumps({**json.loads(CARD.to_json()), "name": "other"}))
    serve(valkey, model, "w1")
    answer = http.get("/readyz")
    assert (answer.status_code, answer.json()["checks"]["models"]) == (
        503,
        "other: not published, and served by no worker yet",
    )
    serve(valkey, "other", "w2")
    until(lambda: http.get("/readyz").status_code == 200)
    valkey.flushall()
    assert http.get("/readyz").status_code == 200


def test_a_gateway_that_is_ready_has_loaded_what_an_awaited_model_needs(
    open_door: Open, valkey: Redis, model: str
) -> None:
    """And one whose files are damaged keeps it from nothing: its requests say what is wrong."""
    damaged = {**json.loads(CARD.to_json()), "name": "damaged"}
    damaged["files"] = dict.fromkeys(damaged["files"], "0" * 64)
    valkey.hset(keys.MODELS, "damaged", json.dumps(damaged))
    door = open_door(awaited=(model, "damaged"))
    serve(valkey, model, "w1")
    serve(valkey, "damaged", "w2")
    until(lambda: door.http.get("/readyz").status_code == 200)
    valkey.delete(*map(keys.blob, CARD.files.values()))
    asked = {"messages": [{"role": "user", "content": "Hello"}]}
    codes = {
        name: door.http.post("/v1/tasks", json={"model": name, **asked}).status_code for name in (model, "damaged")
    }
    assert codes == {model: 202, "damaged": 503}


def serve(valkey: Redis, model: str, worker: str) -> None:
    """A worker's lease, as `pools` reads it."""
    queue = keys.pool_queue(model, "v", "test")
    valkey.hset(keys.POOLS, queue, json.dumps({"model": model, "version": "v"}))
    valkey.hset(broker_keys.INCARNATIONS, worker, queue)
    valkey.set(keys.lease(worker), json.dumps({"worker": worker}))


@pytest.mark.parametrize("away", [{"store"}, {"broker"}, {"store", "broker"}])
def test_a_gateway_without_one_is_alive_not_ready_and_says_which(open_door: Open, away: set[str]) -> None:
    door = open_door(**dict.fromkeys(away, NOWHERE))
    http = door.http
    assert http.get("/livez").status_code == 200
    answer = http.get("/readyz")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    checks = answer.json()["checks"]
    assert {name for name, state in checks.items() if state != "ok"} == away
    assert all(name in answer.json()["error"]["message"] for name in away)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/tasks"),
        ("GET", "/v1/tasks/x"),
        ("GET", "/v1/tasks/x/events"),
        ("POST", "/v1/tasks/x/cancel"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
    ],
)
def test_without_a_store_callers_are_told_to_come_back(open_door: Open, method: str, path: str) -> None:
    door = open_door(store=NOWHERE, patience=0.1)
    http = door.http
    answer = http.request(method, path, json={"model": "tiny", "prompt": "x"} if path == "/v1/tasks" else None)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "service_unavailable")
    assert "127.0.0.1" not in error["message"]


def test_a_server_that_answers_and_refuses_is_named_with_the_reason(open_door: Open) -> None:
    with another_valkey() as (url, redis):
        door = open_door(broker=url, store=url)
        assert door.http.get("/readyz").status_code == 200
        redis.replicaof("127.0.0.1", "1")
        redis.client_kill_filter(_type="normal", skipme=True)
        until(lambda: door.http.get("/readyz").status_code == 503)
        answer = door.http.get("/readyz").json()
        assert answer["error"]["message"].startswith("The store cannot be used: the server at 127.0.0.1:")
        assert all("is a replica" in answer["checks"][name] for name in ("store", "broker"))


def test_without_a_broker_a_task_is_recorded_and_the_caller_told_so(open_door: Open, model: str, valkey: Redis) -> None:
    door = open_door(broker=NOWHERE, patience=0.1)
    http = door.http
    answer = http.post("/v1/tasks", json={"model": model, "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "submit_failed")
    assert "sweeper" in answer.json()["error"]["message"]
    assert valkey.zcard("penstock:submitting") == 1


def test_streams_and_requests_survive_connections_that_break(
    proxy: Proxy, open_door: Open, model: str, worker: FakeWorker
) -> None:
    door = open_door(store=proxy.url, broker=proxy.url, patience=10)
    http = door.http
    task_id = http.post("/v1/tasks", json={"model": model, "prompt": "x"}).json()["id"]
    worker.claim(task_id)
    with follow(http, task_id) as events:
        for index in range(6):
            proxy.cut()
            worker.append(task_id, index, ["x"])
            assert next(events)["data"]["position"] == index
            assert http.get(f"/v1/tasks/{task_id}").status_code == 200
        worker.finish(task_id, [6])
        assert [event["event"] for event in events] == ["end"]


def test_while_a_gateway_is_behind_all_who_ask_are_told_the_same_for_a_while(
    open_door: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FairShare, "look", lambda *_: None)
    monkeypatch.setattr(health, "AGE_S", 60.0)
    looked, looks = health._looked, []
    monkeypatch.setattr(health, "_looked", lambda gateway: (looks.append(gateway), looked(gateway))[1])
    door = open_door()
    looks.clear()
    for cap in (None, 0.5):
        door.app.state.fair_share.cap = cap
        assert [door.http.get("/readyz").status_code for _ in range(3)] == [200] * 3
        assert len(looks) == 3
    monkeypatch.setattr(health, "AGE_S", 0.0)
    door.http.get("/readyz")
    assert len(looks) == 4


async def test_all_who_ask_while_an_answer_is_made_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, done = list[Any](), asyncio.Event()

    async def look(gateway: Any) -> health.Answer:
        looks.append(gateway)
        await done.wait()
        return {"status": "ready"}, 200, None

    monkeypatch.setattr(health, "_looked", look)
    readiness, gateway = health.Readiness(), cast("Any", object())
    asking = [asyncio.create_task(readiness.answer(gateway, behind=False)) for _ in range(64)]
    await asyncio.sleep(0)
    done.set()
    assert await asyncio.gather(*asking) == [({"status": "ready"}, 200, None)] * 64
    assert len(looks) == 1
    await readiness.answer(gateway, behind=False)
    assert len(looks) == 2, "who asks later gets a later one"
