"""`DELETE /v1/tasks/{id}`: afterwards no key and no file has anything of the task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message
from producers.store import outbox, protocol
from producers.store.blobs import open_blobs
from producers.sweeper.compact import Offload, compact
from producers.sweeper.retention import erase, remove_files
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Door
from tests.producers.leftovers import contents, kept, leftovers
from tests.waiting import PATIENCE_S

#: In prompt, output, metadata and webhook URL.
WORD = "xyzzy"
PROMPT = [17, 19, 23, 29, 31]
PROMPT_JSON = json.dumps(PROMPT, separators=(",", ":"))
HOOK = {"url": f"https://93.184.216.34/{WORD}", "secret": "whsec_" + "A" * 32, "events": ["response.completed"]}
ENDPOINT = {
    "id": "we_1",
    "url": "https://93.184.216.34/all",
    "event_types": ["response.completed", "response.failed", "response.cancelled"],
    "tenant": None,
}
BODY = {"model": "tiny", "prompt": PROMPT, "metadata": {"a": WORD}, "webhook": HOOK, "tenant": "acme"}

Life = Callable[[FakeWorker, str], None]


def running(worker: FakeWorker, task_id: str) -> None:
    assert worker.claim(task_id).answer == "go"
    worker.append(task_id, 0, [WORD])


def orphaned(worker: FakeWorker, task_id: str) -> None:
    running(worker, task_id)
    worker.die()


def ended(worker: FakeWorker, task_id: str) -> None:
    running(worker, task_id)
    assert worker.finish(task_id, [1])[0] == "won"


def settled(worker: FakeWorker, task_id: str) -> None:
    worker.serve(task_id, [WORD])


def failed(worker: FakeWorker, task_id: str) -> None:
    running(worker, task_id)
    worker.finish(task_id, [1], status="failed", reasons=[], error={"code": "engine_error", "message": WORD})


def given_up(worker: FakeWorker, task_id: str) -> None:
    """It leaves a dead letter."""
    running(worker, task_id)
    worker.finish(task_id, [1], status="failed", reasons=[], error={"code": "dead_lettered", "message": WORD})
    message = Message(task_id, QUEUE, "default", 1, 9).envelope()
    for one in (message, message.replace(task_id, "another")):
        worker.redis.rpush(broker_keys.DEAD, json.dumps({"reason": "r", "list": QUEUE, "at": 1, "message": one}))


def called_back(worker: FakeWorker, task_id: str) -> None:
    """One of its webhooks was delivered, one is dead."""
    worker.redis.hset(keys.WEBHOOK_ENDPOINTS, "we_1", json.dumps(ENDPOINT))
    settled(worker, task_id)
    first, second = outbox.read_take(run(worker.redis, outbox.take("d", 9, 60_000))).rows
    run(worker.redis, outbox.delivered(first, "d", outbox.Attempt(1, 1, 200, WORD)))
    run(worker.redis, outbox.dead(second, "d", outbox.Attempt(1, 1, 500, WORD)))
    worker.redis.delete(keys.WEBHOOK_ENDPOINTS)  # its rows are found all the same


def cancelled(worker: FakeWorker, task_id: str) -> None:
    assert run(worker.redis, protocol.cancel(task_id)) == [1, b"cancelled"]


LIVES: dict[str, Life] = {
    "queued": lambda worker, task_id: None,
    **{life.__name__: life for life in (running, orphaned, ended, settled, failed, given_up, called_back, cancelled)},
}


def deleted(http: httpx.Client, task_id: str) -> None:
    answer = http.delete(f"/v1/tasks/{task_id}")
    assert (answer.status_code, answer.json()) == (200, {"id": task_id, "object": "task.deleted", "deleted": True})
    unknown = http.delete(f"/v1/tasks/{task_id}")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "task_not_found")
    assert unknown.json() == http.get(f"/v1/tasks/{task_id}").json()


@pytest.mark.parametrize("life", LIVES)
def test_nothing_of_it_is_in_the_store(
    http: httpx.Client, door: Door, worker: FakeWorker, valkey: Redis, life: str
) -> None:
    before = set(contents(valkey))
    task_id = http.post("/v1/tasks", json=BODY, headers={"idempotency-key": "k"}).json()["id"]
    valkey.delete(broker_keys.tier_list(QUEUE, "default"))  # its message: it holds the id alone, and is dropped
    LIVES[life](worker, task_id)
    assert WORD in str(leftovers(valkey, WORD, PROMPT_JSON))
    deleted(http, task_id)
    door.run(erase(door.app.state.gateway.client))
    assert leftovers(valkey, WORD, PROMPT_JSON, "whsec_", "idempotency:") == {}
    assert set(leftovers(valkey, task_id)) == kept(task_id)
    rest = set(contents(valkey)) - before - kept(task_id)
    others = ("penstock:drain:", "penstock:kept:", "penstock:idempotent:", "penstock:webhooks:endpoints:")
    others += ("penstock:waiting:memory",)  # how full the server is
    assert {name for name in rest if not name.startswith(others)} <= {keys.lease("fake"), broker_keys.DEAD}
    assert valkey.llen(broker_keys.DEAD) == (life == "given_up"), "another task's letter stays"
    (row,) = valkey.xrange(keys.LEDGER)
    assert row[1][b"id"] == task_id.encode()


def test_what_a_worker_still_says_of_it_is_refused(http: httpx.Client, worker: FakeWorker, valkey: Redis) -> None:
    ids = [http.post("/v1/tasks", json=BODY).json()["id"] for _ in range(2)]
    for task_id in ids:
        running(worker, task_id)
    with valkey.pubsub() as told:
        told.subscribe(keys.control("fake"))
        assert told.get_message(timeout=PATIENCE_S)
        deleted(http, ids[0])
        assert (told.get_message(timeout=PATIENCE_S) or {})["data"] == f"cancel {ids[0]}".encode()
    assert worker.append(ids[0], 1, [WORD])[0] == "gone"
    assert worker.finish(ids[0], [1]) == ["gone"]
    assert worker.claim(ids[0]).answer == "done"
    assert worker.append(ids[1], 1, ["y"]) == ("ok", 2)
    assert set(leftovers(valkey, ids[0])) <= {*kept(ids[0]), QUEUE}


def test_a_reader_gets_its_end(http: httpx.Client, worker: FakeWorker) -> None:
    task_id = http.post("/v1/tasks", json=BODY).json()["id"]
    running(worker, task_id)
    with http.stream("GET", f"/v1/tasks/{task_id}/events") as events:
        lines = events.iter_lines()
        assert next(line for line in lines if line.startswith("event")) == "event: token"
        deleted(http, task_id)
        assert [line for line in lines if line.startswith("event")] in (["event: end"], ["event: error"])


def test_the_next_request_with_its_key_makes_another_task(http: httpx.Client, valkey: Redis) -> None:
    def post() -> httpx.Response:
        return http.post("/v1/tasks", json=BODY, headers={"idempotency-key": "k"})

    first = post().json()["id"]
    deleted(http, first)
    answer = post()
    assert (answer.status_code, "idempotent-replayed" in answer.headers) == (202, False)
    assert answer.json()["id"] != first
    assert valkey.ttl(keys.erased(first)) > 20 * 3600, "as long as the key was to be kept"
    deleted(http, answer.json()["id"])


def test_a_request_that_comes_late_does_not_make_it_again(http: httpx.Client, door: Door, valkey: Redis) -> None:
    """A gateway was told the id by the key's entry, and slept until now."""
    first = http.post("/v1/tasks", json=BODY, headers={"idempotency-key": "k"}).json()["id"]
    entry = next(name for name in contents(valkey) if name.startswith("penstock:idempotency:"))
    known = valkey.hgetall(entry)
    deleted(http, first)
    valkey.hset(entry, mapping={name: value for name, value in known.items() if name != b"made"})
    answer = http.post("/v1/tasks", json=BODY, headers={"idempotency-key": "k"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "task_not_found")
    assert "deleted" in answer.json()["error"]["message"]
    assert not valkey.exists(keys.task(first))


def test_a_key_that_stands_for_another_request_by_now_is_left(http: httpx.Client, valkey: Redis) -> None:
    old = http.post("/v1/tasks", json=BODY, headers={"idempotency-key": "k"}).json()["id"]
    entry = valkey.hget(keys.task(old), "idempotency")
    valkey.delete(entry)  # its day is over
    valkey.hset(keys.task(old), "created", 1)
    new = http.post("/v1/tasks", json=BODY, headers={"idempotency-key": "k"}).json()["id"]
    deleted(http, old)
    assert valkey.hget(entry, "id") == new.encode()
    assert valkey.ttl(keys.erased(old)) <= 3600


def test_a_result_in_a_file_goes_with_it(
    http: httpx.Client, door: Door, worker: FakeWorker, valkey: Redis, tmp_path: Path
) -> None:
    task_id = http.post("/v1/tasks", json=BODY).json()["id"]
    settled(worker, task_id)
    blobs, client = open_blobs(tmp_path), door.app.state.gateway.client
    assert door.run(compact(client, 0, Offload(blobs, 1))).moved == 1
    assert [path for path in tmp_path.iterdir() if path.is_file()]
    deleted(http, task_id)
    assert set(leftovers(valkey, task_id)) <= {*kept(task_id), QUEUE}
    door.run(remove_files(client.store, blobs))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not valkey.exists(keys.FILE_NOTES)


def test_a_compacted_result_goes_with_it(http: httpx.Client, door: Door, worker: FakeWorker, valkey: Redis) -> None:
    task_id = http.post("/v1/tasks", json=BODY).json()["id"]
    settled(worker, task_id)
    assert door.run(compact(door.app.state.gateway.client, 0, None)).streams == 1
    assert WORD.encode() in contents(valkey)[keys.result(task_id)]
    deleted(http, task_id)
    assert leftovers(valkey, WORD) == {}


def test_a_batchs_line_is_refused_and_stays(http: httpx.Client, valkey: Redis) -> None:
    task_id = http.post("/v1/tasks", json=BODY).json()["id"]
    valkey.hset(keys.task(task_id), mapping={"batch": "batch_7", "line": 3})
    before = contents(valkey)
    answer = http.delete(f"/v1/tasks/{task_id}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "task_in_batch")
    assert "batch_7" in answer.json()["error"]["message"]
    assert contents(valkey) == before


def test_a_retry_of_it_is_a_task_of_its_own(http: httpx.Client, worker: FakeWorker, valkey: Redis) -> None:
    first = http.post("/v1/tasks", json=BODY).json()["id"]
    settled(worker, first)
    again = http.post(f"/v1/tasks/{first}/retry").json()["id"]
    deleted(http, first)
    assert http.get(f"/v1/tasks/{again}").json()["retried_from"] == first
    listed = [task["id"] for task in http.get("/v1/tasks?tenant=acme").json()["data"]]
    assert listed == [again]
    assert valkey.zrange(keys.TASKS, 0, -1) == valkey.zrange(keys.tasks("acme"), 0, -1) == [again.encode()]


def test_a_response_with_its_conversation(client: OpenAI, door: Door, worker: FakeWorker, valkey: Redis) -> None:
    asked: dict[str, Any] = {"model": "tiny", "input": f"Say {WORD}.", "background": True, "metadata": {"a": WORD}}
    made = client.responses.create(**asked, extra_headers={"idempotency-key": "k"})
    task_id = made.id.removeprefix("resp_")
    settled(worker, task_id)
    assert client.responses.retrieve(made.id).output_text == WORD
    valkey.delete(broker_keys.tier_list(QUEUE, "default"))
    client.responses.delete(made.id)
    door.run(erase(door.app.state.gateway.client))
    assert leftovers(valkey, WORD, "idempotency:") == {}
    assert set(leftovers(valkey, task_id)) == kept(task_id)
    again = client.responses.create(**asked, extra_headers={"idempotency-key": "k"})
    assert again.id != made.id
