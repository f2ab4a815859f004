"""`GET /v1/tasks` over real HTTP: which tasks, in which order, in which parts; and what is refused."""

from __future__ import annotations

from itertools import chain
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.client import listing
from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Submit


def ids(http: httpx.Client, **query: Any) -> list[str]:
    answer = http.get("/v1/tasks", params=query)
    assert answer.status_code == 200, answer.text
    return [task["id"] for task in answer.json()["data"]]


def parts(http: httpx.Client, **query: Any) -> list[list[str]]:
    """All parts, as a client goes on with `last_id`."""
    found: list[list[str]] = []
    while True:
        page = http.get("/v1/tasks", params=query).json()
        found.append([task["id"] for task in page["data"]])
        if not page["has_more"]:
            return found
        query["after"] = page["last_id"]


def flat(found: list[list[str]]) -> list[str]:
    return list(chain.from_iterable(found))


def apart(valkey: Redis, made: list[str]) -> None:
    """Let them be submitted a millisecond after each other: within one, tasks are listed by id."""
    valkey.zadd(keys.TASKS, {task_id: 1_790_000_000_000 + n for n, task_id in enumerate(made)})


def test_tasks_are_listed_the_latest_first_without_their_outputs(
    http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis
) -> None:
    first, second = submit(metadata={"a": "b"}, tenant="acme"), submit(tier="flex")
    apart(valkey, [first, second])
    worker.serve(first, ["x"])
    page = http.get("/v1/tasks").json()
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == ("list", second, first, False)
    listed, looked = page["data"][1], http.get(f"/v1/tasks/{first}").json()
    assert listed == looked | {"choices": None}
    assert (listed["status"], listed["metadata"], listed["tenant"]) == ("completed", {"a": "b"}, "acme")


def test_requests_of_openais_endpoints_are_listed_by_their_kind(
    http: httpx.Client, submit: Submit, model: str, valkey: Redis
) -> None:
    def admitted(task_id: str, **fields: str | int) -> str:
        now = int(valkey.time()[0]) * 1000
        run(valkey, protocol.admit(task_id, "n", now, {"model": model, "tier": "default", "n": 1} | fields))
        return task_id

    assert http.get("/v1/tasks", params={"kind": "all"}).json() == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    task, waiting = submit(), admitted("waiting", tenant="acme")
    response = admitted("response", origin="response")
    apart(valkey, [task])
    for index in (keys.REQUESTS, keys.requests("acme")):
        valkey.zadd(index, {waiting: 1_790_000_000_001}, xx=True)
    valkey.zadd(keys.REQUESTS, {response: 1_790_000_000_002})
    assert ids(http) == ids(http, kind="task") == [task]
    assert (ids(http, kind="request"), ids(http, kind="response")) == ([waiting], [response])
    assert ids(http, kind="all") == [response, waiting, task]
    assert ids(http, kind="all", order="asc", limit=2) == [task, waiting]
    assert ids(http, kind="all", tenant="acme") == [waiting]
    assert parts(http, kind="all", limit=1) == [[response], [waiting], [task]]
    kinds = [each["kind"] for each in http.get("/v1/tasks", params={"kind": "all"}).json()["data"]]
    assert kinds == ["response", "request", "task"]
    refused = http.get("/v1/tasks", params={"kind": "batch"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "kind")
    assert http.delete(f"/v1/tasks/{waiting}").status_code == 200
    assert ids(http, kind="all") == [response, task]
    assert not valkey.exists(keys.requests("acme"))
    assert b"acme" not in valkey.smembers(keys.TENANTS)


def test_of_requests_the_last_ten_thousand_are_known(valkey: Redis) -> None:
    for index in (keys.REQUESTS, keys.requests("acme")):
        valkey.zadd(index, {f"old-{number}": number for number in range(10_000)})
    now = int(valkey.time()[0]) * 1000
    run(valkey, protocol.admit("new", "n", now, {"tenant": "acme"}))
    for index in (keys.REQUESTS, keys.requests("acme")):
        assert valkey.zcard(index) == 10_000
        assert valkey.zrange(index, 0, 0) == [b"old-1"]
        assert valkey.zrange(index, -1, -1) == [b"new"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_parts_have_every_task_once_also_those_of_one_millisecond(
    http: httpx.Client, submit: Submit, valkey: Redis, order: str
) -> None:
    made = [submit() for _ in range(7)]
    valkey.zadd(keys.TASKS, dict.fromkeys(made[1:6], 1_790_000_000_000))
    valkey.zadd(keys.TASKS, {made[0]: 1_780_000_000_000})
    valkey.delete(keys.task(made[6]))
    whole = ids(http, limit=100, order=order)
    assert (sorted(whole), len(whole)) == (sorted(made[:6]), 6)
    for limit in (1, 2, 3, 6):
        assert flat(parts(http, limit=limit, order=order)) == whole
    assert [len(part) for part in parts(http, limit=3, order=order)][:2] == [3, 3]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_a_sparse_filter_looks_at_few_tasks_in_a_call_and_goes_on(
    http: httpx.Client, submit: Submit, valkey: Redis, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(listing, "MAX_SCANNED", 3)
    monkeypatch.setattr(listing, "PAGE", 2)
    made = [submit(tier="flex" if number in (0, 8) else "default") for number in range(9)]
    apart(valkey, made)
    found = parts(http, tier="flex", order=order)
    assert len(found) > 2
    assert [] in found
    assert flat(found) == ([made[0], made[8]] if order == "asc" else [made[8], made[0]])


@pytest.mark.parametrize(("field", "value"), [("n", 10**12), ("error", b"\xff"), ("status", "lost"), ("usage", "{")])
def test_a_record_that_cannot_be_read_is_left_out(
    http: httpx.Client, submit: Submit, valkey: Redis, field: str, value: Any
) -> None:
    first, spoilt, last = made = [submit() for _ in range(3)]
    apart(valkey, made)
    valkey.hset(keys.task(spoilt), field, value)
    assert ids(http) == [last, first]
    assert flat(parts(http, limit=1)) == [last, first], "also where it is the only one of its part"


def test_filters(http: httpx.Client, submit: Submit, worker: FakeWorker, valkey: Redis) -> None:
    done = submit(tier="priority", tenant="acme", metadata={"user": "1", "kind": "a[b]"})
    worker.serve(done, ["x"])
    waits = submit(tenant="other", metadata={"user": "2"})
    apart(valkey, [done, waits])
    for name, value in (
        ("status", "completed"),
        ("tier", "priority"),
        ("tenant", "acme"),
        ("metadata[user]", "1"),
        ("metadata[kind]", "a[b]"),
    ):
        assert ids(http, **{name: value}) == [done]
    assert ids(http, status="queued") == [waits]
    assert ids(http, model="tiny") == [waits, done]
    assert ids(http, model="huge") == ids(http, **{"metadata[user]": "1", "tenant": "other"}) == []
    valkey.zadd(keys.TASKS, {done: 1_790_000_000_250})
    assert ids(http, created_before=1_790_000_000.251) == ids(http, created_after=1_790_000_000) == [done, waits]
    assert ids(http, created_before=1_790_000_000.25) == [waits]
    assert ids(http, created_after=1_790_000_000.001) == [done]
    assert ids(http, created_after=9e9) == []


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("limit=0", 400, "limit"),
        ("limit=101", 400, "limit"),
        ("limit=ten", 400, "limit"),
        ("limit=%D9%A1", 400, "limit"),
        ("order=up", 400, "order"),
        ("status=done", 400, "status"),
        ("tier=gold", 400, "tier"),
        ("model=", 400, "model"),
        ("tenant=" + "x" * 201, 400, "tenant"),
        ("created_after=yesterday", 400, "created_after"),
        ("created_after=nan", 400, "created_after"),
        ("created_before=-1", 400, "created_before"),
        ("created_before=1e300", 400, "created_before"),
        ("stats=failed", 400, "stats"),
        ("metadata=x", 400, "metadata"),
        ("limit=5&limit=6", 400, "limit"),
        ("after=a%20b", 400, "after"),
        ("after=~", 400, "after"),
        ("after=nobody", 404, None),
    ],
)
def test_a_bad_parameter_is_refused_by_name(http: httpx.Client, query: str, status: int, param: str | None) -> None:
    answer = http.get(f"/v1/tasks?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
