"""`/v1/batches`, by OpenAI's own client and by hand. Nothing runs here: that is the sweeper's part."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from redis import Redis

from engine.errors import ErrorText, FieldName
from producers.client.aio import AsyncClient
from producers.connection.script import run
from producers.contract import keys
from producers.contract.record import Record, error_json, read_error
from producers.contract.stream import End
from producers.gateway.batch_endpoints import LineEndpoints
from producers.store import batches
from producers.store.access.api_keys import Key, Limits
from producers.sweeper.batches.endpoint import Answer, Finished, PlannedTask
from tests.producers.contract.test_record import GOOD
from tests.producers.gateway.conftest import Ask, Open
from tests.producers.gateway.openai.conftest import MESSAGES

DAY = 24 * 3600
CHATS = "/v1/chat/completions"


@pytest.fixture
def file_id(client: openai.OpenAI) -> str:
    return client.files.create(file=b"{}", purpose="batch").id


class TestOpenaisClient:
    def test_a_batch_is_made_looked_at_and_cancelled(self, client: openai.OpenAI, file_id: str, valkey: Redis) -> None:
        made = client.batches.create(
            input_file_id=file_id,
            endpoint=CHATS,
            completion_window="24h",
            metadata={"for": "me"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
            extra_headers={"traceparent": GOOD},
        )
        assert (made.object, made.status, made.endpoint, made.input_file_id) == ("batch", "validating", CHATS, file_id)
        assert (made.completion_window, made.metadata) == ("24h", {"for": "me"})
        assert made.expires_at == made.created_at + DAY
        assert made.request_counts is not None
        assert made.request_counts.total == made.request_counts.completed == made.request_counts.failed == 0
        assert made.errors is made.output_file_id is made.in_progress_at is made.cancelled_at is None
        run(valkey, batches.begin(made.id, 7))
        seen = client.batches.retrieve(made.id)
        assert (seen.status, seen.request_counts and seen.request_counts.total) == ("in_progress", 7)
        for _ in range(2):
            cancelled = client.batches.cancel(made.id)
            assert (cancelled.status, cancelled.cancelling_at is None) == ("cancelling", False)
        stored = {name.decode(): value.decode() for name, value in valkey.hgetall(keys.batch(made.id)).items()}
        assert (stored["output_kept"], stored["traceparent"]) == ("3600", GOOD)

    def test_a_failed_batch_says_why(self, client: openai.OpenAI, file_id: str, valkey: Redis) -> None:
        made = client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h")
        reason = {"code": "invalid_json_line", "message": "no JSON", "line": 3, "param": None}
        run(valkey, batches.fail(made.id, [reason]))
        failed = client.batches.retrieve(made.id)
        assert failed.status == "failed"
        assert failed.errors is not None
        assert [error.to_dict() for error in failed.errors.data or ()] == [reason]
        with pytest.raises(openai.ConflictError, match="is failed already"):
            client.batches.cancel(made.id)

    def test_batches_are_listed_in_pages(self, client: openai.OpenAI, file_id: str) -> None:
        made = [
            client.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="7d").id for _ in range(5)
        ]
        assert [batch.id for batch in client.batches.list(limit=2)] == made[::-1]
        page = client.batches.list(limit=2, after=made[3])
        assert ([batch.id for batch in page.data], page.has_more) == ([made[2], made[1]], True)
        assert list(client.batches.list(extra_headers={"penstock-tenant": "acme"})) == []

    def test_an_unknown_batch_is_not_found(self, client: openai.OpenAI) -> None:
        for batch_id in ("batch_1", "batch_" + "0" * 32):
            for call in (client.batches.retrieve, client.batches.cancel):
                with pytest.raises(openai.NotFoundError, match=batch_id):
                    call(batch_id)


@pytest.fixture
def send(http: httpx.Client, file_id: str) -> Ask:
    def send(headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"input_file_id": file_id, "endpoint": CHATS, "completion_window": "24h"} | fields
        return http.post("/v1/batches", json=body, headers=headers)

    return send


@pytest.mark.parametrize(
    ("field", "value", "status"),
    [
        ("input_file_id", None, 400),
        ("input_file_id", 7, 400),
        ("input_file_id", "file-" + "0" * 32, 404),
        ("input_file_id", "../../etc/passwd", 404),
        ("endpoint", None, 400),
        ("endpoint", "/v1/images/generations", 400),
        ("endpoint", [CHATS], 400),
        *(
            ("completion_window", window, 400)
            for window in (None, 24, "24", "0h", "8d", "1e3h", "59s", "99999d", "²4h")
        ),
        ("metadata", "text", 400),
        ("metadata", {"a": 1}, 400),
        ("metadata", {"a": "x" * 513}, 400),
        ("metadata", {"x" * 65: "a"}, 400),
        ("metadata", {str(k): "" for k in range(17)}, 400),
        ("output_expires_after", 3600, 400),
        ("output_expires_after", {"anchor": "created_at"}, 400),
        ("output_expires_after", {"anchor": "created_at", "seconds": True}, 400),
        ("output_expires_after", {"anchor": "created_at", "seconds": 60}, 400),
        ("model", "tiny", 400),
    ],
)
def test_bad_input_is_named_and_nothing_is_made(send: Ask, valkey: Redis, field: str, value: Any, status: int) -> None:
    answer = send(**{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)
    assert valkey.keys("penstock:batch*") == []


def test_a_file_that_a_batch_wrote_is_no_input(send: Ask, file_id: str, valkey: Redis) -> None:
    valkey.hset(keys.file(file_id), "purpose", "batch_output")
    assert send().json()["error"]["param"] == "input_file_id"


def test_a_key_makes_one_batch(send: Ask, valkey: Redis) -> None:
    key = {"idempotency-key": "k"}
    first, again = send(key), send(key)
    assert (first.status_code, again.json()) == (200, first.json())
    assert send(key, completion_window="1h").status_code == 422
    assert len(valkey.zrange(keys.BATCHES, 0, -1)) == 1
    valkey.delete(keys.batch(first.json()["id"]))
    assert send(key).json()["error"]["code"] == "batch_not_found"


async def test_a_line_of_text_is_counted_where_there_are_limits(valkey: Redis, valkey_url: str, model: str) -> None:
    limits = Limits(max_prompt=60, max_output=50, rpm=5)
    key = Key("k" * 16, "acme", "a key", ("submit",), 0, "", limits=limits)
    valkey.hset(keys.API_KEYS, key.id, key.to_json())
    chats = [{"model": model, "messages": [{"role": "user", "content": "word " * number}]} for number in (1, 90)]
    async with AsyncClient(valkey_url) as client:
        endpoints = LineEndpoints(client)
        fits, long = await endpoints.tasks("/v1/chat/completions", chats, key.principal(), "acme")
        endpoints.close()
    assert isinstance(fits, PlannedTask)
    assert fits.charge is not None
    assert (fits.task.max_tokens, fits.charge.names, fits.charge.shortens) == (50, [key.id], True)
    assert 0 < (fits.task.prompt_tokens or 0) <= 60
    assert isinstance(long, Answer)
    error = json.loads(long.body)["error"]
    assert (error["code"], error["param"], long.worked) == ("prompt_too_long", "messages", True)


@pytest.mark.parametrize(
    ("path", "asked", "ours", "theirs"),
    [
        (CHATS, {"messages": MESSAGES, "max_completion_tokens": 9}, "max_tokens", "max_completion_tokens"),
        (CHATS, {"messages": MESSAGES}, "prompt_ids", "messages"),
        ("/v1/completions", {"prompt": "a"}, "prompt_ids", "prompt"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 9}, "max_tokens", "max_output_tokens"),
        ("/v1/responses", {"input": "a"}, "messages", "input"),
    ],
)
async def test_a_worker_s_refusal_is_told_in_the_line_s_words(
    valkey_url: str, path: str, asked: dict[str, Any], ours: str, theirs: str
) -> None:
    stored = error_json("invalid_value", ErrorText.of("{} is too much", FieldName(ours)), ours)
    end = End(0, "failed", (None,), {}, read_error(json.loads(stored)))
    async with AsyncClient(valkey_url) as client:
        endpoints = LineEndpoints(client)
        (answer,) = await endpoints.answers(
            path, [Finished({"model": "tiny", **asked}, Record("a", {"task": "{}"}), [end])]
        )
        endpoints.close()
    error = json.loads(answer.body)["error"]
    assert (error["param"], error["message"]) == (theirs, f"{theirs} is too much")


def test_a_tenant_may_have_so_many_open_batches(open_door: Open, model: str, valkey: Redis) -> None:
    http = open_door(max_batches=2).http

    def make(tenant: str) -> httpx.Response:
        tenant_ = {"penstock-tenant": tenant}
        file = http.post("/v1/files", data={"purpose": "batch"}, files={"file": b"{}"}, headers=tenant_).json()["id"]
        body = {"input_file_id": file, "endpoint": CHATS, "completion_window": "24h"}
        return http.post("/v1/batches", json=body, headers=tenant_)

    first, _, third = (make("acme") for _ in range(3))
    assert (third.status_code, third.json()["error"]["code"]) == (429, "too_many_batches")
    assert "2 batches" in third.json()["error"]["message"]
    assert make("other").status_code == 200
    run(valkey, batches.fail(first.json()["id"], []))
    assert make("acme").status_code == 200
    valkey.hset(keys.TENANT_LIMITS, "large", json.dumps({"max_batches": 3}))
    assert [make("large").status_code for _ in range(4)] == [200, 200, 200, 429]
