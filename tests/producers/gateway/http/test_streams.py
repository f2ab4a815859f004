"""Open streams are bounded by key, by tenant, by address where no keys are asked for, and in all; more are refused at
once."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from redis import Redis
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from producers.contract import keys
from producers.gateway import app
from producers.gateway.http.errors import Problem
from producers.gateway.http.sse import Bounds, Streams
from producers.store.access.api_keys import Limits, Principal
from tests.producers.gateway.conftest import Door, Make, Open, until
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture
from tests.producers.gateway.test_metrics import figures
from tests.waiting import PATIENCE_S

TASK = {"model": "tiny", "prompt": [1, 2, 3]}
WAIT = {"prefer": "wait=60"}
#: What opens a stream -> how it is asked for. None of them could succeed: they are refused before anybody looks.
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "events": ("GET", "/v1/tasks/none/events", {}),
    "a task's end": ("GET", "/v1/tasks/none", {"headers": WAIT}),
    "a submit's end": ("POST", "/v1/tasks", {"headers": WAIT, "json": {"model": "none"}}),
    "a retry's end": ("POST", "/v1/tasks/none/retry", {"headers": WAIT}),
    "a chat": ("POST", "/v1/chat/completions", {"content": b"no JSON"}),
    "a completion": ("POST", "/v1/completions", {"content": b"no JSON"}),
    "a response": ("POST", "/v1/responses", {"content": b"no JSON"}),
    "a response's events": ("GET", "/v1/responses/none?stream=true", {}),
    "a file": ("GET", "/v1/files/none/content", {}),
    "a test of a webhook": ("POST", "/v1/webhook_endpoints/none/test", {"content": b"no JSON"}),
}


@pytest.fixture
def door(open_door: Open, model: str) -> Door:
    return open_door(auth="keys", max_streams=4, max_streams_per_tenant=2)


@pytest.fixture
def task_of(door: Door) -> Callable[[str], str]:
    """Submits a task, which waits for ever, with a key; gives its id."""

    def submitted(token: str) -> str:
        answer = httpx.post(f"{door.url}/v1/tasks", json=TASK, headers=as_caller(token), timeout=PATIENCE_S)
        return str(answer.json()["id"])

    return submitted


@contextmanager
def streams(door: Door, task_id: str, count: int, headers: dict[str, str]) -> Iterator[list[httpx.Response]]:
    """So many open streams of a task's events."""
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(base_url=door.url, timeout=PATIENCE_S, headers=headers))
        yield [stack.enter_context(client.stream("GET", f"/v1/tasks/{task_id}/events")) for _ in range(count)]


def refused(answer: httpx.Response) -> tuple[int, str]:
    assert answer.headers["retry-after"] == "1"
    return answer.status_code, answer.json()["error"]["code"]


def test_a_tenants_streams_are_bounded_whichever_key_opens_them(
    door: Door, make: Make, task_of: Callable[[str], str], valkey: Redis
) -> None:
    one, two, other = make("acme"), make("acme"), make("other")
    task_id, others = task_of(one), task_of(other)
    with (
        httpx.Client(base_url=door.url, timeout=PATIENCE_S) as http,
        streams(door, task_id, 2, as_caller(one)) as opened,
    ):
        assert [answer.status_code for answer in opened] == [200, 200]
        before = valkey.dbsize()
        for method, path, more in ASKED.values():
            headers = {**as_caller(two), **more.get("headers", {})}
            answer = http.request(method, path, **{**more, "headers": headers})
            assert refused(answer) == (429, "too_many_streams"), path
        with pytest.raises(InvalidStatus) as error:
            connect(
                f"ws://127.0.0.1:{door.port}/v1/tasks/{task_id}/events",
                open_timeout=PATIENCE_S,
                additional_headers=as_caller(two),
            )
        assert error.value.response.status_code == 429
        assert valkey.dbsize() == before
        assert http.get("/v1/tasks", headers=as_caller(two)).status_code == 200, "what does not wait goes on"
        assert http.post("/v1/tasks", json=TASK, headers=as_caller(two)).status_code == 202
        with streams(door, others, 2, as_caller(other)) as theirs:
            assert [answer.status_code for answer in theirs] == [200, 200]
        opened[0].close()
        until(lambda: len(door.app.state.streams) == 1)
        assert http.get(f"/v1/tasks/{task_id}", headers={**as_caller(two), "prefer": "wait=0"}).status_code == 200
    until(lambda: len(door.app.state.streams) == 0)


@pytest.mark.parametrize("whose", ["key", "tenant"])
def test_a_key_and_a_tenant_may_have_a_bound_of_their_own(
    door: Door, make: Make, task_of: Callable[[str], str], valkey: Redis, whose: str
) -> None:
    shared = whose == "tenant"
    if shared:
        valkey.hset(keys.TENANT_LIMITS, "acme", json.dumps({"max_streams": 1}))
    one, two = make("acme", **({} if shared else {"max_streams": 1})), make("acme")
    task_id = task_of(one)
    with (
        httpx.Client(base_url=door.url, timeout=PATIENCE_S) as http,
        streams(door, task_id, 1, as_caller(one)) as opened,
    ):
        assert [answer.status_code for answer in opened] == [200]
        answer = http.get(f"/v1/tasks/{task_id}/events", headers=as_caller(one))
        assert refused(answer) == (429, "too_many_streams")
        assert answer.json()["error"]["message"].startswith(f"This {whose} may have 1 streams")
        with http.stream("GET", f"/v1/tasks/{task_id}/events", headers=as_caller(two)) as answer:
            assert answer.status_code == (429 if shared else 200)
        opened[0].close()
        until(lambda: len(door.app.state.streams) == 0)
        with streams(door, task_id, 1, as_caller(one)) as opened:
            assert [answer.status_code for answer in opened] == [200]


async def test_of_requests_that_come_at_once_as_many_get_in_as_a_tenants_bound_lets() -> None:
    """Its limits are read while they are counted."""
    found, read = Streams(), asyncio.Event()

    async def limits_of(tenant: str | None) -> Limits:
        await read.wait()
        return Limits(max_streams=2)

    found.limits_of = limits_of
    holder = Principal("id", "acme", frozenset({"read"}))
    asked = [asyncio.create_task(found.enter({"state": {"principal": holder}}, "events")) for _ in range(5)]
    await asyncio.sleep(0)
    assert len(found) == 5
    read.set()
    ends = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(end, Problem) for end in ends].count(True) == 3
    assert len(found) == 2


def test_the_streams_of_all_are_bounded(door: Door, make: Make, task_of: Callable[[str], str]) -> None:
    tokens = [make(tenant) for tenant in ("one", "two", "three")]
    with ExitStack() as stack:
        for token in tokens[:2]:
            stack.enter_context(streams(door, task_of(token), 2, as_caller(token)))
        task_id = task_of(tokens[2])
        answer = httpx.get(f"{door.url}/v1/tasks/{task_id}/events", headers=as_caller(tokens[2]), timeout=PATIENCE_S)
        assert refused(answer) == (503, "gateway_full")


def test_without_keys_an_addresss_streams_are_bounded(open_door: Open, model: str) -> None:
    """Whatever tenant it names."""
    door = open_door(max_streams_per_tenant=2)
    task_id = door.http.post("/v1/tasks", json=TASK).json()["id"]
    with streams(door, task_id, 2, {}):
        assert figures(door.http)["penstock_gateway_open_streams", "events"] == 2
        answer = door.http.get(f"/v1/tasks/{task_id}/events", headers={"penstock-tenant": "another"})
        assert refused(answer) == (429, "too_many_streams")


def test_an_ipv6_host_is_one_address_whichever_of_its_own_it_sends_from(open_door: Open, model: str) -> None:
    """It has 2 ** 64 of them."""
    door = open_door(max_streams_per_tenant=2, proxy_headers=("127.0.0.1",))
    task_id = door.http.post("/v1/tasks", json=TASK).json()["id"]
    same, other = ({"x-forwarded-for": f"2001:db8:0:{network}::7"} for network in (1, 2))
    with streams(door, task_id, 1, {"x-forwarded-for": "2001:db8:0:1::1"}):
        with streams(door, task_id, 1, {"x-forwarded-for": "2001:db8:0:1:ffff::1"}):
            answer = door.http.get(f"/v1/tasks/{task_id}/events", headers=same)
            assert refused(answer) == (429, "too_many_streams")
        with streams(door, task_id, 1, other) as theirs:
            assert theirs[0].status_code == 200


def test_bodies_that_come_in_from_an_ipv6_host_are_of_one_address(
    open_door: Open, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_BYTES", (1 << 30, 100_000))
    door = open_door(proxy_headers=("127.0.0.1",))
    head = b"POST /v1/tasks HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90000\r\n"
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as slow:
        slow.sendall(head + b"X-Forwarded-For: 2001:db8:0:1::1\r\n\r\n" + b" " * 80_000)
        until(lambda: door.app.state.gateway.body_room._reserved.total() >= 80_000)
        large = json.dumps(TASK).encode().ljust(80_000)
        statuses = [
            door.http.post("/v1/tasks", content=large, headers={"content-type": "application/json"} | whose).status_code
            for whose in ({"x-forwarded-for": f"2001:db8:0:{network}::7"} for network in (1, 2))
        ]
    assert statuses == [429, 202]


def test_bounds_leave_connections_to_other_requests_and_streams_to_other_tenants() -> None:
    assert Bounds(4096, 1024).within(8192) == Bounds(4096, 1024)
    assert Bounds(4096, 1024).within(200) == Bounds(150, 75)
    assert Bounds(0, 0).within(8192) == Bounds(6144, 3072)
