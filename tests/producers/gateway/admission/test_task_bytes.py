"""The bytes of a tenant's tasks in the store: counted where records are made and end, and bounded."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol
from tests.producers.conftest import CARD
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Open


def total(valkey: Redis, tenant: str = "acme") -> int:
    return int(valkey.hget(keys.kept(tenant), "total") or 0)


def post(http: httpx.Client, model: str, tenant: str = "acme", **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": "def f", "tenant": tenant, **fields}
    return http.post("/v1/tasks", json=body)


def test_a_tenant_keeps_so_many_bytes_of_tasks_waiting_or_not(open_door: Open, model: str, valkey: Redis) -> None:
    http = open_door(max_task_bytes=6000).http
    taken = []
    while (answer := post(http, model, metadata={"a": "x" * 500})).status_code == 202:
        taken.append(answer.json()["id"])
        assert http.post(f"/v1/tasks/{taken[-1]}/cancel").json()["status"] == "cancelled"
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], answer.headers["x-should-retry"]) == (
        429,
        "too_many_task_bytes",
        "false",
    )
    assert "6000" in error["message"]
    assert 3 <= len(taken) <= 12
    assert post(http, model, "other").status_code == 202
    assert valkey.hget(keys.WAITING_TENANTS, "acme") is None
    for task_id in taken:
        run(valkey, protocol.delete(task_id, "n"))
    assert post(http, model).status_code == 202


def test_a_tenants_own_limit_goes_before_the_gateways(open_door: Open, model: str, valkey: Redis) -> None:
    valkey.hset(keys.TENANT_LIMITS, "acme", json.dumps({"max_task_bytes": 1}))
    http = open_door(max_task_bytes=0).http
    assert [post(http, model).status_code for _ in range(2)] == [202, 429]
    assert [post(http, model, "other").status_code for _ in range(2)] == [202, 202]


@pytest.mark.parametrize(("ttl", "step"), [(60, 60), (7200, 900), (86_401, 21_600)])
def test_what_has_expired_counts_no_more(open_door: Open, model: str, valkey: Redis, ttl: int, step: int) -> None:
    http = open_door(max_task_bytes=1).http
    task_id = post(http, model, ttl=ttl).json()["id"]
    before = total(valkey)
    record = valkey.hgetall(keys.task(task_id)) | {b"status": b"submitting"}
    assert before == sum(len(name) + len(value) for name, value in record.items() if name not in LATER)
    run(valkey, protocol.cancel(task_id))
    run(valkey, protocol.orphan(task_id, gone=True))
    (end,) = [int(name) for name in valkey.hkeys(keys.kept("acme")) if name.isdigit()]
    assert end % step == 0
    assert time.time() + ttl <= end <= time.time() + ttl + 60 + step
    assert total(valkey) == before + 32, "an entry of its stream: its end"
    assert post(http, model).status_code == 429
    valkey.hset(keys.kept("acme"), mapping={"next": 1, "1": total(valkey)})
    valkey.hdel(keys.kept("acme"), end)
    assert post(http, model).status_code == 202, "the end has come"


#: Fields that a record gets after ADMIT, or that say what is counted.
LATER = {b"kept", b"waits", b"queued"}


def test_a_result_is_counted_until_both_go(open_door: Open, model: str, valkey: Redis, worker: FakeWorker) -> None:
    http = open_door().http
    task_id = post(http, model).json()["id"]
    before = total(valkey)
    worker.serve(task_id, ["x"] * 10)
    assert total(valkey) == before + 32 * 11
    assert run(valkey, protocol.delete(task_id, "n")) == [b"completed"]
    assert total(valkey) == 120 + len(task_id), "its id is kept for an hour"


def test_a_result_that_was_not_made_counts_no_more(open_door: Open, valkey: Redis) -> None:
    card = {**CARD, "name": "vectors", "capabilities": ["embed"], "pooling": {"dimensions": 768}}
    valkey.hset(keys.MODELS, "vectors", json.dumps(card))
    body = {"model": "vectors", "kind": "embed", "input": ["x"] * 250, "tenant": "acme"}
    task_id = open_door().http.post("/v1/tasks", json=body).json()["id"]
    before = total(valkey)
    assert before > 250 * 768 * 4
    run(valkey, protocol.cancel(task_id))
    run(valkey, protocol.orphan(task_id, gone=True))
    assert total(valkey) == before - 250 * 768 * 4 * 4 // 3 + 32


def test_who_submits_and_deletes_keeps_no_more_than_others(open_door: Open, model: str, valkey: Redis) -> None:
    http, began = open_door(max_task_bytes=3000).http, time.time()
    deleted = 0
    while (answer := post(http, model)).status_code == 202:
        task_id = answer.json()["id"]
        before = total(valkey)
        assert http.delete(f"/v1/tasks/{task_id}").is_success
        assert total(valkey) < before, "a DELETE makes room"
        deleted += 1
    assert answer.json()["error"]["code"] == "too_many_task_bytes"
    assert 15 < deleted < 3000 / (120 + 36) + 1
    ends = [int(name) for name in valkey.hkeys(keys.kept("acme")) if name.isdigit()]
    assert all(end % 60 == 0 and began + 3600 <= end <= time.time() + 3720 for end in ends), (
        "one, or two as a minute ended"
    )
    assert len(ends) <= 1 + (time.time() - began) // 60 + 1
