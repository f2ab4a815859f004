"""Who is let in where a gateway asks for keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers.admin import keys as admin
from producers.contract import keys
from producers.store.access import api_keys
from producers.store.access.api_keys import Key
from producers.store.access.audit import Change
from producers.store.access.principal import Limits
from tests.producers.gateway.conftest import Door, until

#: The documented paths that are open to all.
OPEN = {"/", "/livez", "/readyz"}
BARE = str.maketrans("", "", "{}")


@pytest.fixture
def door(open_door: Callable[..., Door], model: str) -> Door:
    return open_door(auth="keys")


@pytest.fixture
def make(valkey_url: str, valkey: Redis) -> Callable[..., str]:
    """Makes a key and gives its text; fields and limits by name."""

    def made(tenant: str = "acme", scopes: tuple[str, ...] = ("submit", "read", "cancel"), **more: Any) -> str:
        limits = Limits(**{name: more.pop(name) for name in admin.LIMITS if name in more})
        key, token = api_keys.new_key(tenant, "a key", scopes, limits=limits, **more)

        async def create() -> None:
            async with AsyncRedis.from_url(valkey_url) as store:
                await api_keys.create(store, key, Change("test", "key.create", key.id))

        asyncio.run(create())
        return token

    return made


def as_caller(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def change(valkey: Redis, token: str, how: Callable[[Key], Key]) -> None:
    key_id = token.split("_")[1]
    key = Key.parse(valkey.hget(keys.API_KEYS, key_id))
    assert key is not None
    valkey.hset(keys.API_KEYS, key_id, how(key).to_json())


def test_every_endpoint_asks_for_a_key_but_those_named_here(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert len(paths) > 20
    asked = [(path, http.request(method, path.translate(BARE))) for path in paths for method in paths[path]]
    unasked = {path for path, answer in asked if answer.status_code != 401}
    assert unasked == OPEN
    assert {path for path, methods in paths.items() for one in methods.values() if "security" not in one} == OPEN


def test_a_key_opens_what_its_scopes_say(http: httpx.Client, make: Callable[..., str], model: str) -> None:
    submits, reads = make(scopes=("submit",)), make(scopes=("read",))
    task = {"model": model, "prompt": "def f"}
    made = http.post("/v1/tasks", json=task, headers=as_caller(submits))
    assert (made.status_code, made.json()["tenant"]) == (202, "acme")
    refused = http.post("/v1/tasks", json=task, headers=as_caller(reads))
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "missing_scope"
    assert "submit" in refused.json()["error"]["message"]
    url = f"/v1/tasks/{made.json()['id']}"
    assert http.get(url, headers=as_caller(submits)).status_code == 403
    assert http.get(url, headers=as_caller(reads)).status_code == 200
    assert http.get("/metrics", headers=as_caller(reads)).status_code == 403
    assert http.get("/metrics", headers=as_caller(make(scopes=("admin",)))).status_code == 200


def test_keys_that_do_not_work_are_answered_alike(http: httpx.Client, make: Callable[..., str], valkey: Redis) -> None:
    good = make()
    last = "A" if good[-1] != "A" else "B"
    wrong = [
        good[:-1] + last,
        "psk_" + "a" * 16 + good[20:],
        "nonsense",
        "psk_",
        "é",
        make(expires_at=int(time.time())),
    ]
    for field in ("disabled_at", "revoked_at"):
        wrong.append(make())
        change(valkey, wrong[-1], lambda key, field=field: replace(key, **{field: 1}))  # type: ignore[misc]
    answers = [http.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}) for key in wrong]
    assert {(answer.status_code, answer.text) for answer in answers} == {(401, answers[0].text)}
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert http.get("/v1/models").json()["error"]["code"] == "missing_api_key"
    assert http.get("/v1/models", headers=as_caller(good)).status_code == 200
    assert http.get("/v1/models", headers={"x-api-key": good}).status_code == 200


def test_a_key_that_is_revoked_ends_though_it_was_just_used(
    http: httpx.Client, make: Callable[..., str], valkey: Redis
) -> None:
    token = make()
    assert http.get("/v1/models", headers=as_caller(token)).status_code == 200
    change(valkey, token, lambda key: replace(key, revoked_at=1))
    until(lambda: http.get("/v1/models", headers=as_caller(token)).status_code == 401)


def test_after_a_rotation_both_secrets_work_until_the_overlap_ends(
    http: httpx.Client, make: Callable[..., str], valkey: Redis
) -> None:
    old, new = make(), []

    def rotate(key: Key) -> Key:
        key, token = api_keys.rotated(key, 3600, time.time())
        new.append(token)
        return key

    change(valkey, old, rotate)
    assert [http.get("/v1/models", headers=as_caller(key)).status_code for key in (old, *new)] == [200, 200]
    change(valkey, old, lambda key: replace(key, old_until=0))
    until(lambda: http.get("/v1/models", headers=as_caller(old)).status_code == 401)
    assert http.get("/v1/models", headers=as_caller(new[0])).status_code == 200


def test_a_key_is_for_its_models_and_tiers(http: httpx.Client, make: Callable[..., str], model: str) -> None:
    def code(token: str, **more: Any) -> str:
        answer = http.post("/v1/tasks", json={"model": model, "prompt": "def f", **more}, headers=as_caller(token))
        return "" if answer.status_code == 202 else str(answer.json()["error"]["code"])

    assert code(make(models=("other",))) == "model_not_allowed"
    assert http.get("/v1/models", headers=as_caller(make(models=("other",)))).json()["data"] == []
    flex = make(models=(model,), tiers=("flex", "batch"))
    assert (code(flex), code(flex, tier="flex")) == ("tier_not_allowed", "")


def test_a_key_names_no_tenant_but_its_own(http: httpx.Client, make: Callable[..., str], model: str) -> None:
    task, headers = {"model": model, "prompt": "def f"}, as_caller(make())
    assert http.post("/v1/tasks", json={**task, "tenant": "acme"}, headers=headers).status_code == 202
    other = http.post("/v1/tasks", json={**task, "tenant": "other"}, headers=headers)
    named = http.get("/v1/files", headers={**headers, "penstock-tenant": "other"})
    assert [(one.status_code, one.json()["error"]["code"]) for one in (other, named)] == [(403, "wrong_tenant")] * 2
