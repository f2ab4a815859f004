"""`/v1/keys` and `/v1/audit`: who may do what, and who changed it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from tests.producers.gateway.conftest import Door, Make, Open, until
from tests.producers.gateway.test_keys import as_caller
from tests.waiting import PATIENCE_S


@pytest.fixture
def admin(door: Door, make: Make) -> httpx.Client:
    """A client with a key of the scope admin."""
    return httpx.Client(base_url=door.url, timeout=PATIENCE_S, headers=as_caller(make("ops", ("admin",))))


def works(door: Door, token: str) -> bool:
    return httpx.get(f"{door.url}/v1/models", headers=as_caller(token)).status_code == 200


def test_a_key_is_shown_once_and_kept_hashed(admin: httpx.Client, door: Door, valkey: Redis) -> None:
    made = admin.post("/v1/keys", json={"tenant": "acme", "models": ["tiny"], "tiers": ["flex"]}).json()
    assert made["scopes"] == ["submit", "read", "cancel"]
    assert (made["name"], made["state"], made["expires_at"]) == ("acme", "active", None)
    assert works(door, made["key"])
    secret = made.pop("key").split("_", 2)[2]
    assert admin.get(f"/v1/keys/{made['id']}").json() == made
    for prefix in (made["id"][:5], made["id"], f"psk_{made['id']}"):
        assert admin.get("/v1/keys", params={"prefix": prefix, "tenant": "acme"}).json()["data"] == [made]
    assert admin.get("/v1/keys", params={"tenant": "other"}).json()["data"] == []
    kept = [*valkey.hvals(keys.API_KEYS), *(entry[b"e"] for _, entry in valkey.xrange(keys.AUDIT))]
    assert not any(secret.encode() in one for one in kept)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": " "}, "tenant"),
        ({"tenant": "x" * 201}, "tenant"),
        ({"tenant": "\ud800"}, "tenant"),
        ({"tenant": 5}, "tenant"),
        ({"tenant": "~shadow"}, "tenant"),
        ({"tenant": "a\n2026-11-23  key.revoke"}, "tenant"),
        ({"tenant": "a", "name": "\x1b[2J"}, "name"),
        ({"tenant": "a", "name": "\u202eemca"}, "name"),
        ({"tenant": "a", "scopes": []}, "scopes"),
        ({"tenant": "a", "scopes": ["write"]}, "scopes"),
        ({"tenant": "a", "scopes": "read"}, "scopes"),
        ({"tenant": "a", "tiers": ["gold"]}, "tiers"),
        ({"tenant": "a", "rpm": 0}, "rpm"),
        ({"tenant": "a", "tpm": -1}, "tpm"),
        ({"tenant": "a", "budget_tokens": 10**12 + 1}, "budget_tokens"),
        ({"tenant": "a", "max_in_flight": True}, "max_in_flight"),
        ({"tenant": "a", "max_output": 1.5}, "max_output"),
        ({"tenant": "a", "max_streams": 0}, "max_streams"),
        ({"tenant": "a", "max_streams": 5, "scopes": ["metrics"]}, "max_streams"),
        ({"tenant": "a", "max_prompt": 11, "tpm": 10}, "max_prompt"),
        ({"tenant": "a", "max_output": 11, "budget_tokens": 10}, "max_output"),
        *(
            ({"tenant": "a", "budget_money": wrong}, "budget_money")
            for wrong in (0, -1, "x", "nan", 1e-10, "1000001", [])
        ),
        ({"tenant": "a", "rpm": 5, "scopes": ["read"]}, "rpm"),
        ({"tenant": "a", "models": [""]}, "models"),
        ({"tenant": "a", "models": ["m"] * 101}, "models"),
        ({"tenant": "a", "expires_at": int(time.time())}, "expires_at"),
        ({"tenant": "a", "expires_at": -1}, "expires_at"),
        ({"tenant": "a", "expires_at": 10**400}, "expires_at"),
        ({"tenant": "a", "expires_at": 1.5}, "expires_at"),
        ({"tenant": "a", "scopes": ["read"], "models": ["m"]}, "models"),
        ({"tenant": "a", "digest": "0" * 64}, "digest"),
    ],
)
def test_a_bad_key_is_refused_and_nothing_is_written(
    admin: httpx.Client, valkey: Redis, asked: dict[str, Any], param: str
) -> None:
    before = valkey.hlen(keys.API_KEYS), valkey.xlen(keys.AUDIT)
    answer = admin.post("/v1/keys", content=json.dumps(asked), headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (valkey.hlen(keys.API_KEYS), valkey.xlen(keys.AUDIT)) == before


def test_a_keys_limits_are_changed_on_every_gateway_and_what_it_used_counts(
    admin: httpx.Client, open_door: Open, model: str
) -> None:
    key = admin.post("/v1/keys", json={"tenant": "acme", "max_in_flight": 1, "tpm": 100, "models": [model]}).json()
    other, body = open_door(auth="keys"), {"model": model, "prompt": [1], "max_tokens": 1}

    def submit() -> int:
        return httpx.post(f"{other.url}/v1/tasks", json=body, headers=as_caller(key["key"])).status_code

    def change(**fields: Any) -> httpx.Response:
        return admin.post(f"/v1/keys/{key['id']}", json=fields)

    assert (submit(), submit()) == (202, 429)
    changed = change(max_in_flight=2, tpm=None, name="CI", tiers=["default"], expires_at=int(time.time()) + 1000).json()
    assert [changed[name] for name in ("max_in_flight", "tpm", "name", "tiers")] == [2, None, "CI", ["default"]]
    until(lambda: submit() == 202)
    assert submit() == 429
    for field, wrong in (("rpm", 0), ("tpm", "5"), ("scopes", ["admin"]), ("name", None), ("expires_at", 5)):
        refused = change(**{field: wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert change(max_prompt=50, max_streams=7).json()["max_streams"] == 7
    assert change(tpm=49).json()["error"]["param"] == "max_prompt"
    assert [change(budget_money=one).json()["budget_money"] for one in (12.5, "0.10", None)] == ["12.5", "0.1", None]
    assert change(models=None).json()["models"] == []
    until(lambda: change(max_in_flight=None) and submit() == 202)
    did = [one["did"] for one in admin.get("/v1/audit").json()["data"]]
    assert did.count("key.change") == 7
    admin.post(f"/v1/keys/{key['id']}/revoke")
    assert change(rpm=5).status_code == 409


def test_a_keys_life_is_in_the_audit_log(admin: httpx.Client, door: Door, valkey: Redis) -> None:
    made = admin.post("/v1/keys", json={"tenant": "acme"}).json()
    url, opened = f"/v1/keys/{made['id']}", [made["key"]]
    opened.append(admin.post(f"{url}/rotate", json={"overlap": 60}).json()["key"])
    assert [works(door, key) for key in opened] == [True, True]
    rotated = admin.post(f"{url}/rotate", json={"overlap": 0}).json()
    assert rotated["old_secret_until"] is None
    until(lambda: [works(door, key) for key in opened] == [False, False])
    assert works(door, rotated["key"])
    assert admin.post(f"{url}/disable").json()["state"] == "disabled"
    assert admin.post(f"{url}/disable").json()["state"] == "disabled"
    until(lambda: not works(door, rotated["key"]))
    assert admin.post(f"{url}/enable").json()["state"] == "active"
    until(lambda: works(door, rotated["key"]))
    assert admin.post(f"{url}/revoke").json()["state"] == "revoked"
    until(lambda: not works(door, rotated["key"]))
    for verb in ("rotate", "disable", "enable"):
        refused = admin.post(f"{url}/{verb}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "key_ended")
    told = [one for one in admin.get("/v1/audit").json()["data"] if one["what"] == made["id"]]
    did = ["create", "rotate", "rotate", "disable", "enable", "revoke"]
    assert [one["did"] for one in told] == [f"key.{verb}" for verb in reversed(did)]
    mine = admin.headers["authorization"].split("_")[1]
    assert {(one["by"], one["address"], one["tenant"]) for one in told} == {(mine, "127.0.0.1", "acme")}
    assert len(admin.get("/v1/audit", params={"limit": 2}).json()["data"]) == 2


def test_unknown_keys_and_bad_questions_are_refused(admin: httpx.Client) -> None:
    answers = [admin.get("/v1/keys/none")]
    answers += [admin.post(f"/v1/keys/none/{verb}") for verb in ("rotate", "disable", "enable", "revoke")]
    assert [(one.status_code, one.json()["error"]["code"]) for one in answers] == [(404, "key_not_found")] * 5
    for overlap in (-1, 1e9, 10**400, "1", True):
        answer = admin.post("/v1/keys/none/rotate", json={"overlap": overlap})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "overlap")
    assert admin.post("/v1/keys/none/rotate", json={"for": 1}).json()["error"]["code"] == "unknown_parameter"
    refused = admin.get("/v1/keys", params={"prefix": "psk_" + "a" * 16 + "_hush"})  # URLs are in logs
    assert (refused.status_code, "hush" in refused.text) == (400, False)
    unknown = admin.get("/v1/keys/psk_" + "a" * 16 + "_hush")
    assert (unknown.status_code, "hush" in unknown.text) == (404, False)
    assert admin.get("/v1/audit", params={"limit": 0}).status_code == 400


def test_changes_of_webhook_endpoints_are_in_the_audit_log(door: Door, make: Make, admin: httpx.Client) -> None:
    mine = httpx.Client(base_url=door.url, headers=as_caller(make()))
    asked = {"url": "https://192.0.2.1/", "event_types": ["response.completed"]}
    made = mine.post("/v1/webhook_endpoints", json={**asked, "url": "https://1.1.1.1/hook?token=hush"}).json()
    url = f"/v1/webhook_endpoints/{made['id']}"
    mine.post(url, json={"name": "new"})
    mine.post(url, json={"name": "new"})  # changes nothing
    mine.post(f"{url}/rotate_secret")
    mine.delete(url)
    told = admin.get("/v1/audit").json()["data"][:4]
    assert [one["did"] for one in told] == [
        f"endpoint.{did}" for did in ("delete", "rotate_secret", "update", "create")
    ]
    assert {(one["what"], one["tenant"]) for one in told} == {(made["id"], "acme")}
    assert "hush" not in json.dumps(told)


def test_a_key_that_is_revoked_at_one_gateway_ends_at_another(admin: httpx.Client, open_door: Open) -> None:
    made, other = admin.post("/v1/keys", json={"tenant": "acme"}).json(), open_door(auth="keys")
    assert works(other, made["key"])
    admin.post(f"/v1/keys/{made['id']}/revoke")
    until(lambda: not works(other, made["key"]))
