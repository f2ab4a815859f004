"""What tenants have in common, such as names of requests and a queue, carries nothing from one to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Make, Open
from tests.producers.gateway.isolation.conftest import ENDPOINT, TASK, Made, batch, posted, upload
from tests.producers.gateway.openai.conftest import Answering
from tests.producers.gateway.openai.conftest import answering as answering  # the fixture
from tests.producers.gateway.test_keys import as_caller

KEY = {"headers": {"idempotency-key": "the-same"}}
FOREGROUND: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", TASK),
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"model": "tiny", "input": "hi"}),
    ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}),
]
WAYS: dict[str, Callable[[httpx.Client], str]] = {
    "task": lambda client: str(posted(client, "/v1/tasks", json=TASK, **KEY)["id"]),
    "file": lambda client: upload(client, **KEY),
    "endpoint": lambda client: str(posted(client, "/v1/webhook_endpoints", json=ENDPOINT, **KEY)["id"]),
}


@pytest.mark.parametrize("what", WAYS)
def test_an_idempotency_key_of_another_tenant_is_a_new_one(
    acme: httpx.Client, other: httpx.Client, caller: Callable[..., httpx.Client], what: str
) -> None:
    theirs = WAYS[what](acme)
    assert WAYS[what](other) != theirs
    assert WAYS[what](caller("acme")) == theirs, "of another key of the same tenant it is the same"


def test_nor_is_the_idempotency_key_of_a_batch(acme: httpx.Client, other: httpx.Client) -> None:
    assert batch(acme, upload(acme), **KEY) != batch(other, upload(other), **KEY)


@pytest.mark.parametrize(("path", "body"), FOREGROUND)
def test_an_answer_is_replayed_to_its_own_tenant_alone(
    acme: httpx.Client, other: httpx.Client, answering: Answering, path: str, body: dict[str, Any]
) -> None:
    theirs = posted(acme, path, json=body, **KEY)
    mine = other.post(path, json=body, **KEY)
    assert mine.is_success, mine.text
    assert mine.json()["id"] != theirs["id"]
    assert "idempotent-replayed" not in mine.headers
    assert [record.fields["tenant"] for record in answering.records] == ["acme", "other"]


def test_a_conflict_of_idempotency_keys_is_within_a_tenant(acme: httpx.Client, other: httpx.Client) -> None:
    posted(acme, "/v1/tasks", json=TASK, **KEY)
    assert other.post("/v1/tasks", json=TASK | {"prompt": "another"}, **KEY).status_code == 202
    assert acme.post("/v1/tasks", json=TASK | {"prompt": "another"}, **KEY).status_code == 422


@pytest.mark.parametrize("celery", [False, True])
def test_an_endpoint_hears_of_its_own_tenants_ends_alone(
    acme: httpx.Client, other: httpx.Client, worker: FakeWorker, valkey: Redis, celery: bool
) -> None:
    named = {"name": "acme", "celery": celery}
    mine = posted(other, "/v1/webhook_endpoints", json=ENDPOINT | named)["id"]
    for client in (acme, other):
        worker.serve(posted(client, "/v1/tasks", json=TASK)["id"])
    (row,) = valkey.keys(keys.webhook_row("*"))
    assert row.decode().endswith(mine)
    assert valkey.hget(row, "tenant") == b"other"


def test_an_endpoint_of_all_tenants_is_an_operators(
    acme: httpx.Client, other: httpx.Client, caller: Callable[..., httpx.Client], valkey: Redis
) -> None:
    admin = caller("ops", scopes=("admin",))
    all_of_them = posted(admin, "/v1/webhook_endpoints", json=ENDPOINT)
    assert all_of_them["tenant"] is None
    url = f"/v1/webhook_endpoints/{all_of_them['id']}"
    asks: list[tuple[str, str, Any]] = [
        ("GET", url, None),
        ("POST", url, {"enabled": False}),
        ("POST", f"{url}/rotate_secret", {}),
        ("POST", f"{url}/test", {"event_type": "response.completed"}),
        ("DELETE", url, None),
    ]
    before = valkey.dump(keys.WEBHOOK_ENDPOINTS)
    assert {acme.request(method, path, json=body).status_code for method, path, body in asks} == {404}
    assert valkey.dump(keys.WEBHOOK_ENDPOINTS) == before
    assert posted(other, "/v1/webhook_endpoints", json=ENDPOINT | {"tenant": "other"})["tenant"] == "other"
    assert posted(other, "/v1/webhook_endpoints", json=ENDPOINT)["tenant"] == "other", "unset is not all tenants"
    assert len(admin.get("/v1/webhook_endpoints").json()["data"]) == 3


def test_what_others_have_waiting_is_not_counted_and_not_told(
    open_door: Open, make: Make, model: str, valkey: Redis
) -> None:
    door = open_door(auth="keys", max_queued_per_tenant=2)

    def submit(tenant: str) -> httpx.Response:
        return httpx.post(f"{door.url}/v1/tasks", json=TASK, headers=as_caller(make(tenant)))

    valkey.hset(keys.WAITING_TENANTS, "acme", 2)
    assert [submit(tenant).status_code for tenant in ("acme", "other")] == [429, 202]
    valkey.hset(keys.WAITING_TENANTS, "other", 2)
    refused = submit("other")
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "tenant_queue_full"
    assert "acme" not in refused.text + str(refused.headers)


def test_a_request_id_of_others_opens_nothing(acme: httpx.Client, other: httpx.Client, theirs: Made) -> None:
    seen = acme.get(f"/v1/tasks/{theirs.task}").headers["x-request-id"]
    answer = other.get(f"/v1/tasks/{theirs.task}", headers={"x-request-id": seen})
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, seen)


def test_anothers_api_key_is_as_an_unknown_one(other: httpx.Client, make: Make, valkey: Redis) -> None:
    key_id = make("acme").split("_")[1]
    before = valkey.dump(keys.API_KEYS)
    for path in ("", "/rotate", "/revoke", "/disable", "/enable"):
        method = "POST" if path else "GET"
        answers = [other.request(method, f"/v1/keys/{one}{path}") for one in (key_id, "0" * 16)]
        assert [answer.status_code for answer in answers] == [403, 403]
        assert answers[0].text == answers[1].text
    assert valkey.dump(keys.API_KEYS) == before


@pytest.mark.parametrize(("path", "body"), [("/v1/tasks", TASK), *FOREGROUND])
def test_a_key_for_some_models_learns_of_no_others(
    caller: Callable[..., httpx.Client], path: str, body: dict[str, Any]
) -> None:
    client = caller("acme", models=("its-own",))
    answers = [client.post(path, json=body | {"model": model}) for model in ("tiny", "no-such")]
    assert [answer.status_code for answer in answers] == [403, 403]
    errors = [str(answer.json()["error"]) for answer in answers]
    assert errors[0].replace("tiny", "no-such") == errors[1]
    looked = [client.get(f"/v1/models/{model}") for model in ("tiny", "no-such")]
    assert looked[0].text.replace("tiny", "no-such") == looked[1].text
    assert "tiny" not in client.post(path, json=body | {"model": "its-own"}).text, "nor where its own is away"


def test_an_operator_sees_what_all_tenants_have(caller: Callable[..., httpx.Client], theirs: Made) -> None:
    admin = caller("ops", scopes=("admin",))
    paths = [
        *(f"/v1/tasks/{theirs.task}{more}" for more in ("", "/events", "/explain")),
        *(f"/v1/responses/{theirs.response}{more}" for more in ("", "/input_items")),
        *(f"/v1/files/{theirs.file}{more}" for more in ("", "/content")),
        f"/v1/batches/{theirs.batch}",
        f"/v1/webhook_endpoints/{theirs.endpoint}",
    ]
    assert {path: admin.get(path).status_code for path in paths} == dict.fromkeys(paths, 200)
