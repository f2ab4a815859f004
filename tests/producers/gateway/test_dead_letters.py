"""`/v1/dead_letters`: pages of them, one, its replay and its removal; also of those that strangers wrote."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.admin import dead_letters as letters
from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.contract.message import Message
from producers.gateway import dead_letters
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import QUEUE, Submit

LIST = broker_keys.tier_list(QUEUE, "default")
NONE = "0123456789ab"


def bury(valkey: Redis, *messages: str, reason: str = "not JSON", of: str = LIST) -> None:
    entry = {"reason": reason, "list": of, "at": 1_790_000_000_000}
    valkey.rpush(broker_keys.DEAD, *(json.dumps({**entry, "message": message}) for message in messages))


def page(http: httpx.Client, **query: int) -> dict[str, Any]:
    answer = http.get("/v1/dead_letters", params=query)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_pages_have_all_of_them_oldest_first(http: httpx.Client, valkey: Redis) -> None:
    assert page(http) == {"object": "list", "data": [], "total": 0, "next": None}
    bury(valkey, *(Message(f"t{k}", QUEUE, "default", 1, 9).envelope() for k in range(letters.PAGE + 50)))
    tasks, start = [], 0
    while start is not None:
        body = page(http, start=start, limit=100)
        assert body["total"] == letters.PAGE + 50
        assert [letter["index"] for letter in body["data"]] == list(range(start, start + len(body["data"])))
        tasks += [letter["task_id"] for letter in body["data"]]
        start = body["next"]
    assert tasks == [f"t{k}" for k in range(letters.PAGE + 50)]
    assert page(http, start=10_000)["data"] == []


def test_a_page_ends_before_it_is_too_large(http: httpx.Client, valkey: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "MAX_BYTES", 5000)
    bury(valkey, *(f"{k}{'x' * 2000}" for k in range(5)))
    sizes, start = [], 0
    while start is not None:
        body = page(http, start=start)
        sizes.append(len(body["data"]))
        start = body["next"]
    assert sizes == [2, 2, 1]


def test_a_given_up_task_is_looked_at_and_replayed(http: httpx.Client, submit: Submit, valkey: Redis) -> None:
    task_id = submit(max_tokens=7)
    message = str(valkey.lindex(LIST, -1), "utf-8")
    valkey.rpop(LIST)
    for k in range(4):
        worker = FakeWorker(valkey, f"fake{k}")
        worker.claim(task_id)
        worker.die()
    bury(valkey, message, reason="Given up: 3 workers died while they held this task.")
    (letter,) = page(http)["data"]
    assert (letter["task_id"], letter["at"], letter["list"]) == (task_id, 1_790_000_000, LIST)
    details = http.get(f"/v1/dead_letters/{letter['key']}").json()
    assert (details["message"], details["record"]["status"], details["record"]["model"]) == (message, "failed", "tiny")
    assert [loss["worker"] for loss in details["record"]["lost"]] == ["fake0", "fake1", "fake2"]
    done = http.post(f"/v1/dead_letters/{letter['key']}/replay?index=0").json()
    assert (done["was"], done["new_task"]) == (task_id, True)
    assert http.get(f"/v1/tasks/{done['task_id']}").json()["status"] == "queued"
    assert http.get(f"/v1/tasks/{task_id}").json()["status"] == "failed"
    assert page(http)["total"] == 0
    again = http.post(f"/v1/dead_letters/{letter['key']}/replay")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "dead_letter_not_found")


def test_a_letter_is_found_where_it_was_where_it_moved_and_without_a_hint(http: httpx.Client, valkey: Redis) -> None:
    bury(valkey, *(f"m{k}" for k in range(3 * letters.PAGE)))
    last = page(http, start=3 * letters.PAGE - 1)["data"][0]
    for index in ("", "?index=599", "?index=700", "?index=3", "?index=99999"):
        assert http.get(f"/v1/dead_letters/{last['key']}{index}").json()["message"] == "m599", index
    valkey.ltrim(broker_keys.DEAD, 450, -1)
    assert http.delete(f"/v1/dead_letters/{last['key']}?index=599").json()["deleted"] is True
    assert page(http)["total"] == 149


@pytest.mark.parametrize("key", [NONE, "0123456789abc", "", "0" * 5000, "%00", "..%2f", "<b>"])
def test_what_is_not_there_is_neither_replayed_nor_removed(http: httpx.Client, valkey: Redis, key: str) -> None:
    bury(valkey, "{")
    before = valkey.lrange(broker_keys.DEAD, 0, -1)
    for method, path in (("GET", key), ("POST", f"{key}/replay"), ("DELETE", key)):
        answer = http.request(method, f"/v1/dead_letters/{path}")
        assert answer.status_code in (404, 405) or (method, key) == ("GET", ""), answer.text
    assert valkey.lrange(broker_keys.DEAD, 0, -1) == before


@pytest.mark.parametrize("query", ["start=-1", "start=x", "limit=0", "limit=1001", "start=99999999999"])
def test_bad_pages_are_refused(http: httpx.Client, query: str) -> None:
    answer = http.get(f"/v1/dead_letters?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_what_strangers_wrote_is_text_and_bounded(http: httpx.Client, valkey: Redis) -> None:
    bury(valkey, "<script>\x1b[2J" + "x" * 100_000, reason="\ud800" + "y" * 10_000)
    valkey.rpush(broker_keys.DEAD, b"\xff\xfe", b"", b'{"reason":"","list":"","at":1e400,"message":""}')
    bury(valkey, '{"headers": {"id": "\\ud800", "task": "penstock.generate"}, "properties": {}}')
    data = page(http)["data"]
    assert [letter["task_id"] for letter in data] == [None] * 5
    assert all(len(letter["reason"]) < 600 for letter in data)
    whole = http.get(f"/v1/dead_letters/{data[0]['key']}").json()
    assert (len(whole["message"]), whole["message_characters"]) == (dead_letters.MAX_MESSAGE, 100_012)
    for letter in data:
        assert http.get(f"/v1/dead_letters/{letter['key']}").status_code == 200
    refused = http.post(f"/v1/dead_letters/{data[1]['key']}/replay")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "not_replayed")
    assert "purge" in refused.json()["error"]["message"]
    assert page(http)["total"] == 5


def test_a_record_that_is_broken_is_told_of(http: httpx.Client, valkey: Redis) -> None:
    bury(valkey, Message("t1", QUEUE, "default", 1, 9).envelope())
    valkey.hset(keys.task("t1"), mapping={"status": "failed", "lost": "{"})
    (letter,) = page(http)["data"]
    details = http.get(f"/v1/dead_letters/{letter['key']}").json()
    assert details["record"] is None
    assert "cannot be used" in details["record_error"]
    assert http.post(f"/v1/dead_letters/{letter['key']}/replay").status_code == 409
