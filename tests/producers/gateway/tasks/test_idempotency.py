"""A POST with an Idempotency-Key makes nothing twice."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.stream import encode_rows
from producers.store import chunks, idempotency, protocol
from tests.producers.conftest import CARD
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Ask, Open
from tests.waiting import PATIENCE_S, until

KEY = {"idempotency-key": "order-7"}


def queued(valkey: Redis) -> int:
    return int(valkey.llen(broker_keys.tier_list(QUEUE, "default")))


@pytest.fixture
def post(http: httpx.Client, model: str) -> Ask:
    def send(headers: dict[str, str] = KEY, **fields: Any) -> httpx.Response:
        return http.post("/v1/tasks", json={"model": model, "prompt": "def f", **fields}, headers=headers)

    return send


def test_the_same_body_gets_the_same_task_as_it_is_now(post: Ask, valkey: Redis, worker: FakeWorker) -> None:
    first = post()
    worker.serve(first.json()["id"], ["x"])
    again = post()
    assert (first.status_code, again.status_code, queued(valkey)) == (202, 202, 1)
    assert again.json()["id"] == first.json()["id"]
    assert (first.json()["status"], again.json()["status"]) == ("queued", "completed")
    assert again.headers["location"] == first.headers["location"]
    assert ("idempotent-replayed" in first.headers, again.headers["idempotent-replayed"]) == (False, "true")
    (entry,) = valkey.keys("penstock:idempotency:*")
    assert 23 * 3600 < valkey.ttl(entry) <= idempotency.KEPT_S


def test_another_body_is_refused_and_another_key_or_tenant_is_not(post: Ask, valkey: Redis) -> None:
    post()
    other = post(prompt="def g")
    error = other.json()["error"]
    assert (other.status_code, error["code"], error["param"]) == (422, "idempotency_key_reused", "Idempotency-Key")
    assert queued(valkey) == 1
    assert post(tenant="acme").status_code == post({"idempotency-key": "order-8"}).status_code == 202
    assert queued(valkey) == 3


def test_a_packed_body_is_the_same_body(http: httpx.Client, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "def f"}).encode()
    head = KEY | {"content-type": "application/json"}
    packed = [
        http.post("/v1/tasks", content=gzip.compress(body, mtime=at), headers=head | {"content-encoding": "gzip"})
        for at in (1, 2)
    ]
    assert len({answer.json()["id"] for answer in (*packed, http.post("/v1/tasks", content=body, headers=head))}) == 1


def test_a_key_that_was_refused_is_free_for_a_better_body(post: Ask) -> None:
    assert post(prompt=[5] * 2000).status_code == 400
    assert post(prompt=[5]).status_code == 202


def test_what_was_begun_and_not_made_is_made_with_its_first_id(open_door: Open, model: str, valkey: Redis) -> None:
    """As after a gateway that was killed in between: here the first request found the queue full."""
    door = open_door(max_queued=1)
    body = {"model": model, "prompt": "def f"}
    http = door.http
    first = http.post("/v1/tasks", json=body).json()["id"]
    assert http.post("/v1/tasks", json=body, headers=KEY).status_code == 429
    (entry,) = valkey.keys("penstock:idempotency:*")
    chosen = valkey.hget(entry, "id").decode()
    run(valkey, protocol.cancel(first))
    valkey.delete(broker_keys.tier_list(QUEUE, "default"))
    while (answer := http.post("/v1/tasks", json=body, headers=KEY)).status_code == 429:
        pass
    assert (answer.status_code, answer.json()["id"], queued(valkey)) == (202, chosen, 1)
    assert valkey.hget(entry, "made") == b"1"


def test_a_task_that_is_gone_is_not_made_again(post: Ask, valkey: Redis) -> None:
    valkey.delete(keys.task(post().json()["id"]))
    answer = post()
    assert (answer.status_code, answer.json()["error"]["code"], queued(valkey)) == (404, "task_not_found", 1)


def test_equal_requests_to_two_gateways_at_once_make_one_task(open_door: Open, model: str, valkey: Redis) -> None:
    urls = [open_door().url, open_door().url]
    body = {"model": model, "prompt": "def f"}

    def send(number: int) -> str:
        answer = httpx.post(f"{urls[number % 2]}/v1/tasks", json=body, headers=KEY, timeout=PATIENCE_S)
        assert answer.status_code == 202, answer.text
        task_id: str = answer.json()["id"]
        return task_id

    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(send, range(32)))) == 1
    assert queued(valkey) == 1


@pytest.mark.parametrize("key", ["", "a b", "x" * 256, "é", "a\tb"])
def test_a_bad_key_is_refused_and_leaves_nothing(post: Ask, valkey: Redis, key: str) -> None:
    before = valkey.dbsize()
    answer = post({"idempotency-key": key.encode()})  # type: ignore[dict-item]  # httpx takes bytes, too
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", "Idempotency-Key")
    assert valkey.dbsize() == before


def test_an_entry_that_is_over_is_not_brought_back(valkey: Redis) -> None:
    assert run(valkey, idempotency.mark_made(idempotency.name(None, "k"))) == 0
    assert not valkey.keys("*")


def test_a_tenant_begins_so_many_keys_within_a_day(open_door: Open, model: str, valkey: Redis) -> None:
    http = open_door(max_idempotency_keys=3).http

    def post(key: str, tenant: str = "acme", **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "def", "tenant": tenant, **fields}
        return http.post("/v1/tasks", json=body, headers={"idempotency-key": key})

    assert [post(key).status_code for key in "abcb"] == [202] * 4
    refused = post("d")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_idempotency_keys")
    assert post("b").headers["idempotent-replayed"] == "true", "a key that there is counts no more"
    assert post("d", "other").status_code == 202
    assert len(valkey.keys("penstock:idempotency:*")) == 4
    name = keys.idempotency_keys("acme")
    (hour,) = map(int, valkey.hkeys(name))
    valkey.hset(name, mapping={str(hour - 24): 1, str(hour - 25): 50, str(hour): 1})
    assert [post(key).status_code for key in "ef"] == [202, 429]
    assert set(map(int, valkey.hkeys(name))) == {hour - 24, hour}
    assert 0 < valkey.ttl(name) <= 25 * 3600


def test_a_request_that_is_refused_later_takes_its_key_too(open_door: Open, model: str, valkey: Redis) -> None:
    """Its entry is kept, so it counts: else requests that a limit refuses would fill the store."""
    http = open_door(max_idempotency_keys=2, max_queued=1).http
    statuses = []
    for key in "abcd":
        body = {"model": model, "prompt": "def"}
        answer = http.post("/v1/tasks", json=body, headers={"idempotency-key": key})
        statuses.append((answer.status_code, answer.json().get("error", {}).get("code")))
    assert statuses[2:] == [(429, "too_many_idempotency_keys")] * 2
    assert len(valkey.keys("penstock:idempotency:*")) == 2


@pytest.mark.parametrize("path", ["/v1/tasks", "/v1/embeddings"])
def test_a_task_of_many_texts_that_a_dead_gateway_left_half_written_is_written_to_the_end(
    http: httpx.Client, worker: FakeWorker, valkey: Redis, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The next request with the key goes on with it: no chunk is made twice, and no other task is made."""
    card = {**CARD, "name": "vectors", "capabilities": ["embed"], "pooling": {"dimensions": 1}}
    valkey.hset(keys.MODELS, "vectors", json.dumps(card))
    body = {"model": "vectors", "input": ["x"] * 600} | ({"kind": "embed"} if path == "/v1/tasks" else {})
    write = chunks.write

    def dies(parent: str, first: int, *more: Any) -> Any:
        if first:
            raise RuntimeError("the gateway was killed")
        return write(parent, first, *more)

    monkeypatch.setattr("producers.client.submission.PORTION", 1)  # a chunk in each script
    with monkeypatch.context() as patched:
        patched.setattr(chunks, "write", dies)
        assert http.post(path, json=body, headers=KEY).status_code == 500
    (parent,) = (name.decode() for name in valkey.zrange(keys.PARENTS, 0, -1))
    ids = [chunks.chunk_id(parent, number) for number in range(3)]

    def written() -> bool:
        return valkey.exists(*map(keys.task, ids)) == 3

    assert not written()
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(http.post, path, json=body, headers=KEY)
        until(written)
        for name, size in zip(ids, (256, 256, 88), strict=True):
            until(lambda name=name: valkey.hget(keys.task(name), "status") == b"queued")
            assert worker.claim(name).answer == "go"
            worker.finish(name, [0], result=encode_rows([[1.0]] * size))
        answer = again.result()
    assert answer.headers["idempotent-replayed"] == "true"
    if path == "/v1/embeddings":
        assert len(answer.json()["data"]) == 600
    assert [int(valkey.hget(keys.task(name), "claims") or 0) for name in ids] == [1, 1, 1]
    assert (valkey.hget(keys.task(parent), "status"), valkey.zcard(keys.PARENTS)) == (b"completed", 1)
