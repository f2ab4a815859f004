"""`/v1/webhook_endpoints` with OpenAI's client, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.sealing import KEY_FILE, new_key
from producers.contract.webhook import EVENT_TYPES, new_secret
from producers.store.endpoints import MAX_ENDPOINTS

URL = "https://1.1.1.1/hook"


def test_endpoints_are_made_listed_changed_and_deleted(client: openai.OpenAI) -> None:
    made = client.webhooks.create(name="ours", url=URL, event_types=["response.completed", "batch.failed"])
    assert made.signing_secret.startswith("whsec_")
    assert (made.name, made.url, made.event_types) == ("ours", URL, ["response.completed", "batch.failed"])

    other = client.webhooks.create(name="other", url=f"{URL}/2", event_types=["response.failed"])
    assert other.signing_secret != made.signing_secret
    assert [one.id for one in client.webhooks.list(limit=1)] == [other.id, made.id]

    changed = client.webhooks.update(made.id, url=f"{URL}/3", event_types=["response.failed"])
    assert (changed.url, changed.event_types, changed.name) == (f"{URL}/3", ["response.failed"], "ours")
    looked = client.webhooks.retrieve(made.id)
    assert looked == changed
    assert looked.signing_secret_hint == f"whsec_...{made.signing_secret[-4:]}"
    assert "signing_secret" not in looked.model_extra  # type: ignore[operator]

    assert client.webhooks.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError, match=made.id):
        client.webhooks.retrieve(made.id)
    assert client.webhooks.event_types.list().data == list(EVENT_TYPES)


def test_a_rotation_keeps_the_old_secret_for_a_day_unless_told_not_to(client: openai.OpenAI, valkey: Redis) -> None:
    made = client.webhooks.create(name="ours", url=URL, event_types=["response.completed"])
    kept = client.webhooks.rotate_secret(made.id)
    stored = str(valkey.hget(keys.WEBHOOK_ENDPOINTS, made.id))
    assert made.signing_secret in stored
    assert kept.signing_secret in stored
    last = client.webhooks.rotate_secret(made.id, keep_old_secret_active_for_24_hours=False)
    stored = str(valkey.hget(keys.WEBHOOK_ENDPOINTS, made.id))
    assert last.signing_secret in stored
    assert kept.signing_secret not in stored


def test_an_idempotency_key_makes_one_endpoint_and_repeats_its_secret(http: httpx.Client, valkey: Redis) -> None:
    body = {"url": URL, "event_types": ["response.completed"]}
    first, second = (
        http.post("/v1/webhook_endpoints", json=body, headers={"idempotency-key": "k"}).json() for _ in range(2)
    )
    assert first == second
    assert first["name"] == "1.1.1.1"
    other = http.post("/v1/webhook_endpoints", json=body | {"name": "x"}, headers={"idempotency-key": "k"})
    assert other.status_code == 422
    assert valkey.hlen(keys.WEBHOOK_ENDPOINTS) == 1


#: (body, param, code)
BAD: list[tuple[Any, str | None, str]] = [
    ([], None, "invalid_type"),
    ({"event_types": ["response.failed"]}, "url", "missing_parameter"),
    ({"url": URL}, "event_types", "missing_parameter"),
    ({"url": URL, "event_types": []}, "event_types", "invalid_value"),
    ({"url": URL, "event_types": ["eval.run.failed"]}, "event_types", "invalid_value"),
    ({"url": URL, "event_types": ["response.failed"], "secret": "x"}, "secret", "unknown_parameter"),
    ({"url": URL, "event_types": ["response.failed"], "name": ""}, "name", "invalid_value"),
    ({"url": URL, "event_types": ["response.failed"], "celery": 1}, "celery", "invalid_type"),
    ({"url": "http://1.1.1.1/", "event_types": ["response.failed"]}, "url", "webhook_refused"),
    ({"url": "https://1.1.1.1:8443/", "event_types": ["response.failed"]}, "url", "webhook_refused"),
    ({"url": "https://127.0.0.1/", "event_types": ["response.failed"]}, "url", "webhook_refused"),
    ({"url": "https://localhost/", "event_types": ["response.failed"]}, "url", "webhook_refused"),
    ({"url": "https://[::ffff:169.254.169.254]/", "event_types": ["response.failed"]}, "url", "webhook_refused"),
    ({"url": "https://nowhere.invalid/", "event_types": ["response.failed"]}, "url", "webhook_refused"),
]


def test_bad_endpoints_are_refused_by_name_and_leave_nothing(http: httpx.Client, valkey: Redis) -> None:
    for body, param, code in BAD:
        answer = http.post("/v1/webhook_endpoints", json=body)
        assert answer.status_code == 400, body
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (param, code), body
    assert not valkey.exists(keys.WEBHOOK_ENDPOINTS)
    for path in ("", "/rotate_secret", "/test"):
        body = {"event_type": "batch.failed"} if path == "/test" else {}
        assert http.post(f"/v1/webhook_endpoints/whe_x{path}", json=body).status_code == 404
    assert http.delete("/v1/webhook_endpoints/whe_x").status_code == 404
    assert http.get("/v1/webhook_endpoints", params={"limit": 0}).status_code == 400


def test_a_tasks_webhook_that_may_not_be_called_is_refused_before_anything_is_written(
    http: httpx.Client, valkey: Redis, model: str
) -> None:
    task = {"model": model, "prompt": "def", "webhook": {"url": "https://10.0.0.1/"}}
    answer = http.post("/v1/tasks", json=task)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "webhook.url")
    assert not valkey.keys("penstock:task:*")


def test_the_allow_list_opens_private_addresses(open_door: Any, model: str) -> None:
    door = open_door(webhook_allow=("127.0.0.0/8",))
    http = door.http
    task = {"model": model, "prompt": "def", "webhook": {"url": "http://127.0.0.1:9/hook"}}
    assert http.post("/v1/tasks", json=task).status_code == 202
    task["webhook"] = {"url": "http://10.0.0.1/"}
    assert http.post("/v1/tasks", json=task).status_code == 400


def test_there_is_a_most_of_endpoints(http: httpx.Client, valkey: Redis) -> None:
    body = {"url": URL, "event_types": ["response.failed"]}
    valkey.hset(keys.WEBHOOK_ENDPOINTS, mapping={str(number): "{}" for number in range(MAX_ENDPOINTS - 1)})
    assert http.post("/v1/webhook_endpoints", json=body).status_code == 200
    answer = http.post("/v1/webhook_endpoints", json=body)
    assert answer.json()["error"]["code"] == "too_many_endpoints"
    assert "all tenants" in answer.json()["error"]["message"]


def test_a_tenant_has_a_most_of_its_own_that_others_do_not_share(http: httpx.Client) -> None:
    def made(**more: str) -> httpx.Response:
        name = '"tenant": "acme"'  # a text of another field says nothing
        return http.post(
            "/v1/webhook_endpoints", json={"url": URL, "event_types": ["response.failed"], "name": name, **more}
        )

    assert {made(tenant="acme").status_code for _ in range(20)} == {200}
    refused = made(tenant="acme")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "too_many_endpoints")
    assert "acme" in refused.json()["error"]["message"]
    assert {made(tenant="other").status_code, made().status_code} == {200}


def test_the_most_of_a_tenant_can_be_set_and_ten_tenants_take_no_others_place(open_door: Any, valkey: Redis) -> None:
    valkey.hset(keys.TENANT_LIMITS, "large", json.dumps({"max_endpoints": 25}))
    http = open_door(max_endpoints=21).http

    def made(tenant: str) -> int:
        body = {"url": URL, "event_types": ["response.failed"], "tenant": tenant}
        return http.post("/v1/webhook_endpoints", json=body).status_code

    for number in range(10):
        assert [made(f"hostile-{number}") for _ in range(22)] == [200] * 21 + [400]
    assert [made("large") for _ in range(26)] == [200] * 25 + [400]
    assert made("other") == 200


def test_changes_of_endpoints_push_no_change_of_a_key_out_of_the_audit_log(http: httpx.Client, valkey: Redis) -> None:
    key = http.post("/v1/keys", json={"tenant": "acme"}).json()["id"]
    before = valkey.xlen(keys.AUDIT)
    body = {"url": URL, "event_types": ["response.failed"]}
    made = http.post("/v1/webhook_endpoints", json=body).json()["id"]
    for _ in range(3):
        http.post(f"/v1/webhook_endpoints/{made}/rotate_secret")
    assert valkey.xlen(keys.AUDIT) == before
    told = [(change["did"], change["what"]) for change in http.get("/v1/audit").json()["data"]]
    assert told == [("endpoint.rotate_secret", made)] * 3 + [("endpoint.create", made), ("key.create", key)]
    assert http.get("/v1/audit", params={"limit": 2}).json()["data"][1]["did"] == "endpoint.rotate_secret"


def test_a_gateway_without_the_key_tells_so_and_stores_nothing_in_plain(
    http: httpx.Client, valkey: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secrets.key").write_text(new_key())
    monkeypatch.setenv(KEY_FILE, str(tmp_path / "secrets.key"))
    body, again = {"url": URL, "event_types": ["response.completed"]}, {"idempotency-key": "k"}
    made = http.post("/v1/webhook_endpoints", json=body, headers=again).json()
    path = f"/v1/webhook_endpoints/{made['id']}"
    assert http.get(path).json()["signing_secret_hint"] == f"whsec_...{made['signing_secret'][-4:]}"
    assert http.post("/v1/webhook_endpoints", json=body, headers=again).json() == made
    before = valkey.hgetall(keys.WEBHOOK_ENDPOINTS)

    monkeypatch.delenv(KEY_FILE)
    assert http.get(path).json()["signing_secret_hint"] == "whsec_..."
    for answer in (
        http.post("/v1/webhook_endpoints", json=body, headers=again),
        http.post(f"{path}/rotate_secret", json={"keep_old_secret_active_for_24_hours": False}),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "secret_unreadable")
        assert answer.headers["retry-after"] == "1"
    assert valkey.hgetall(keys.WEBHOOK_ENDPOINTS) == before

    monkeypatch.setenv(KEY_FILE, str(tmp_path / "none"))
    for path, asked in (
        ("/v1/webhook_endpoints", body),
        ("/v1/tasks", {"model": "tiny", "prompt": "x", "webhook": {"url": URL, "secret": new_secret()}}),
    ):
        answer = http.post(path, json=asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "secret_unreadable")
        assert str(tmp_path) not in answer.text
    assert valkey.hgetall(keys.WEBHOOK_ENDPOINTS) == before
    assert list(valkey.scan_iter("penstock:task:*")) == []
