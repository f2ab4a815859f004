"""Which events are written, for whom, and what their rows say. That each end writes them: `tests/protocol`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import pytest
from redis import Redis

from producers.connection.script import run, text
from producers.contract import keys
from producers.contract.webhook import EVENT_TYPES, Webhook
from producers.store import batches, protocol
from tests.protocol.server import Server

POOL = keys.Pool("tiny", "1", "a")
SECRET = "whsec_c2VjcmV0"
OWN = Webhook("https://own.example/", secret=SECRET).fields()
ASKED = {"model": "tiny", "version": "1", "queue": POOL.version_queue, "n": 1, "tenant": "acme"}


@pytest.fixture
def server(valkey: Redis) -> Server:
    return Server(valkey)


def endpoint(server: Server, name: str, **fields: Any) -> None:
    said = {"id": name, "url": f"https://{name}.example/", "event_types": EVENT_TYPES, "tenant": None, "enabled": True}
    server.redis.hset(keys.WEBHOOK_ENDPOINTS, name, json.dumps(said | fields))


def cancelled(server: Server, task_id: str = "t", **fields: str) -> None:
    run(server.redis, protocol.admit(task_id, "n", server.now(), ASKED | fields))
    run(server.redis, protocol.queued(task_id))
    assert run(server.redis, protocol.cancel(task_id)) == [1, b"cancelled"]


def started(server: Server, plain: Mapping[str, str | int] | None, task_id: str = "t") -> None:
    server.lease("i", alive=True)
    answer = run(server.redis, protocol.claim(task_id, "c", "i", POOL, plain=plain))
    assert text(answer[0]) == "go"


def told(server: Server) -> set[tuple[str, str]]:
    return {(row.get("endpoint", "own"), row["type"].partition(".")[2]) for row in server.rows()}


def test_a_row_says_all_that_a_delivery_needs(server: Server) -> None:
    endpoint(server, "we_1")
    cancelled(server, origin="response", **OWN)
    created = text(server.redis.hget(keys.task("t"), "created"))
    server.redis.delete(keys.task("t"))
    webhook_id = "evt_" + hashlib.sha1(f"resp_t:{created}:response.cancelled".encode()).hexdigest()
    rows = {row.get("endpoint"): row for row in server.rows()}
    at = [int(row.pop("at")) for row in rows.values()]
    same = {"webhook_id": webhook_id, "type": "response.cancelled", "object": "resp_t", "state": "due"}
    same |= {"tenant": "acme", "model": "tiny"}
    assert rows == {
        None: {**same, "url": "https://own.example/", "secret": SECRET},
        "we_1": {**same, "url": "https://we_1.example/", "endpoint": "we_1"},
    }
    assert server.now() // 1000 - 60 < min(at) <= max(at) <= server.now() // 1000
    names = {text(name) for name in server.redis.zrange(keys.WEBHOOKS_DUE, 0, -1)}
    assert names == {f"{webhook_id}.own", f"{webhook_id}.we_1"}


@pytest.mark.parametrize("fields", [{}, {"origin": "batch"}])
def test_nobody_hears_of_what_its_caller_waits_for_or_a_batch_tells(server: Server, fields: dict[str, str]) -> None:
    endpoint(server, "we_1", celery=True)
    cancelled(server, **fields, **OWN)
    assert told(server) == set()
    assert not server.redis.keys("penstock:webhooks:row:*")


def test_endpoints_hear_what_they_ask_for_of_their_tenant(server: Server) -> None:
    endpoint(server, "all")
    endpoint(server, "mine", tenant="acme")
    endpoint(server, "others", tenant="other")
    endpoint(server, "off", enabled=False)
    endpoint(server, "starts", event_types=["response.in_progress"])
    endpoint(server, "ends", event_types=["response.completed", "response.cancelled"])
    cancelled(server, origin="task")
    assert told(server) == {(name, "cancelled") for name in ("all", "mine", "ends")}


def test_rows_of_a_deleted_task_are_counted_no_more(server: Server) -> None:
    """One that is due, and one that is dead from the beginning, since too many of its tenant are due."""
    cancelled(server, "t1", origin="task", **OWN)
    server.redis.hincrby(keys.WEBHOOKS_WAITING, "acme", 99_999)
    cancelled(server, "t2", origin="task", **OWN)
    rows = server.redis.keys(keys.webhook_row("*"))
    assert sorted(text(server.redis.hget(name, "state")) for name in rows) == ["dead", "due"]
    assert server.redis.zcard(keys.webhooks_ended("dead", "acme")) == 1
    for name in ("t1", "t2"):
        run(server.redis, protocol.delete(name, "n"))
    assert not server.redis.keys(keys.webhook_row("*"))
    assert server.redis.hget(keys.WEBHOOKS_WAITING, "acme") == b"99999"
    assert not server.redis.exists(keys.webhooks_ended("dead", "acme"), keys.WEBHOOKS_DEAD)


def test_endpoints_of_other_tenants_are_not_looked_at(server: Server) -> None:
    endpoint(server, "mine", tenant="acme")
    cancelled(server, origin="task")
    server.redis.delete(keys.endpoints_of("acme"))
    cancelled(server, "t2", origin="task")
    assert len(told(server)) == 1, "the set of its tenant is what is read"
    endpoint(server, "another", tenant="other")  # by an earlier release: the sets are made anew
    cancelled(server, "t3", origin="task")
    assert [row["endpoint"] for row in server.rows() if row["object"] == "t3"] == ["mine"]
    server.redis.hdel(keys.WEBHOOK_ENDPOINTS, "mine")
    cancelled(server, "t4", origin="task")
    assert len(server.rows()) == 2


@pytest.mark.parametrize("tenant", ["acme", 'ü & "co"', None])
def test_a_tenant_is_who_it_says(server: Server, tenant: str | None) -> None:
    for name in ("acme", 'ü & "co"', "other"):
        endpoint(server, name, tenant=name)
    run(
        server.redis,
        protocol.admit("t", "n", server.now(), {"origin": "task"} | ({"tenant": tenant} if tenant else {})),
    )
    run(server.redis, protocol.queued("t"))
    run(server.redis, protocol.cancel("t"))
    assert told(server) == ({(tenant, "cancelled")} if tenant else set())


def test_a_start_is_told_to_whoever_asks(server: Server) -> None:
    endpoint(server, "all")
    started(server, ASKED | OWN)
    assert told(server) == set()
    endpoint(server, "all", celery=True)
    started(server, ASKED | Webhook("https://own.example/", ("response.in_progress",)).fields(), "asks")
    assert told(server) == {("all", "in_progress"), ("own", "in_progress")}


@pytest.mark.parametrize("broken", ["", "{", "[]", "3", '{"url": 3}', '{"url": "https://x/", "events": 3}'])
def test_what_cannot_be_read_keeps_no_task_from_its_end(server: Server, broken: str) -> None:
    endpoint(server, "fine")
    server.redis.hset(keys.WEBHOOK_ENDPOINTS, "broken", broken + " response.cancelled")
    cancelled(server, origin="task", webhook=broken)
    assert told(server) - {("own", "cancelled")} == {("fine", "cancelled")}


def test_rows_are_written_when_memory_is_full(server: Server) -> None:
    run(server.redis, protocol.admit("t", "n", server.now(), ASKED | OWN | {"origin": "task"}))
    run(server.redis, protocol.queued("t"))
    server.redis.config_set("maxmemory", 1)
    try:
        assert run(server.redis, protocol.cancel("t")) == [1, b"cancelled"]
        assert told(server) == {("own", "cancelled")}
    finally:
        server.redis.config_set("maxmemory", 0)


def test_a_user_who_may_not_wake_deliverers_writes_all_rows(server: Server, valkey_url: str) -> None:
    server.redis.acl_setuser(
        "narrow", enabled=True, nopass=True, commands=["+@all"], keys=["*"], channels=["penstock:tokens:*"]
    )
    try:
        for name in ("one", "two"):
            endpoint(server, name)
        run(server.redis, protocol.admit("t", "n", server.now(), ASKED | OWN | {"origin": "task"}))
        run(server.redis, protocol.queued("t"))
        with Redis.from_url(valkey_url, username="narrow", password="none") as narrow:
            assert run(narrow, protocol.cancel("t")) == [1, b"cancelled"]
    finally:
        server.redis.acl_deluser("narrow")
    assert told(server) == {(name, "cancelled") for name in ("own", "one", "two")}


@pytest.mark.parametrize(
    ("status", "event"), [("finalizing", "completed"), ("cancelling", "cancelled"), ("", "failed")]
)
def test_the_end_of_a_batch_is_an_event(server: Server, status: str, event: str) -> None:
    endpoint(server, "mine", tenant="acme")
    endpoint(server, "others", tenant="other")
    batch = {"status": status, "total": 1, "written": 1, "outputs": 1, "errors": 0, "lapsed": 0}
    server.redis.hset(keys.batch("batch_1"), mapping={"created": 5, "tenant": "acme", **batch, "status": status or "x"})
    end = batches.end("batch_1", None, None) if status else batches.fail("batch_1", [])
    assert [text(run(server.redis, end)) for _ in range(2)] == [event, event]
    (row,) = server.rows()
    webhook_id = "evt_" + hashlib.sha1(f"batch_1:5:batch.{event}".encode()).hexdigest()
    assert (row["object"], row["type"], row["webhook_id"]) == ("batch_1", f"batch.{event}", webhook_id)
