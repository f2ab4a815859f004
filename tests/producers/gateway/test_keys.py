"""Who is let in where a gateway asks for keys."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import httpx
import pytest
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from producers import Client
from producers.admin import keys as admin
from producers.contract import keys
from producers.gateway.fair_share import FairShare
from producers.store import shadows
from producers.store.access import api_keys
from producers.store.access.api_keys import SCOPES, Key, Limits
from producers.store.access.audit import Change
from producers.store.fleet.adapters import StoredAdapter
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Make, Open, until
from tests.waiting import PATIENCE_S

#: The documented paths that are open to all.
OPEN = {"/", "/livez", "/readyz"}
BARE = str.maketrans("", "", "{}")


@pytest.fixture
def door(open_door: Open, model: str) -> Door:
    return open_door(auth="keys")


@pytest.fixture
def make(valkey_url: str, valkey: Redis) -> Make:
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


def scope_of(method: str, path: str) -> str:
    """The scope that docs/run/security.md names for this."""
    if path == "/v1/whoami":
        return "any"
    if path == "/metrics" or re.match(
        "/v1/(fleet|overview|overview/events|scaling/decisions|rollouts(/.*/report)?|routing|sources|shadows/.*"
        "|workers/[^/]*)$",
        path,
    ):
        return "metrics"
    if re.match("/v1/(keys|audit|tenants|dead_letters|scaling|workers|webhook_deliveries|routing|rollouts)", path):
        return "admin"
    if method == "delete" or path.endswith("/cancel"):
        return "cancel"
    return "read" if method == "get" else "submit"


def begun(http: httpx.Client, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    """An answer, whose body is read where it refuses: some streams have no end."""
    with http.stream(method, path, headers=headers) as answer:
        if answer.status_code == 403:
            answer.read()
    return answer


def told_of(answer: httpx.Response) -> str:
    """An error's message, in the form of its path."""
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]


def test_a_key_opens_what_its_scopes_say_and_nothing_else(http: httpx.Client, make: Make) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    asked = [(method, path) for path in paths if path not in OPEN for method in paths[path]]
    for scope in SCOPES:
        key = as_caller(make(scopes=(scope,)))
        answers = {one: begun(http, one[0], one[1].translate(BARE), key) for one in asked}
        refused = {one: told_of(answer) for one, answer in answers.items() if answer.status_code == 403}
        assert refused.keys() == {one for one in asked if scope != "admin" and scope_of(*one) not in ("any", scope)}
        told = {one: f"This key lacks the scope {scope_of(*one)}; it has {scope}." for one in refused}
        assert refused == told


def test_nobody_is_let_in_by_the_body_the_url_a_trailer_or_several_keys(
    door: Door, http: httpx.Client, make: Make
) -> None:
    """A body is not waited for either: who has no key cannot have one read."""
    good, other = make(), make("other")
    paths = http.get("/openapi.json").json()["paths"]
    posts = [path.translate(BARE) for path in paths if "post" in paths[path]]
    heads = [f"POST {path} HTTP/1.1\r\nContent-Length: 1000000" for path in posts]
    heads.append(f"GET /v1/files?api_key={good} HTTP/1.1")
    chunked = "GET /v1/files HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked"
    heads.append(f"{chunked}\r\n\r\n0\r\nx-api-key: {good}")
    for headers in (
        f"authorization: {good}",
        f"authorization: Basic {good}",
        f"authorization: Bearer {good}, Bearer {good}",
        f"authorization: Bearer {good}\r\nauthorization: Bearer {other}",
        f"authorization: Bearer {good}\r\nx-api-key: {other}",
        f"cookie: authorization=Bearer {good}",
    ):
        heads.append(f"GET /v1/files HTTP/1.1\r\n{headers}")
    assert {status(door, head) for head in heads} == {401}
    assert status(door, f"GET /v1/files HTTP/1.1\r\nauthorization: bEARER  {good}\r\nx-api-key: {good} ") == 200


def status(door: Door, head: str) -> int:
    """What is answered to a request of which nothing comes but this."""
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"{head}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return int(connection.recv(1 << 16).split()[1])


def test_a_key_is_asked_for_by_each_request_of_a_connection(door: Door, make: Make) -> None:
    requests = f"GET /v1/files HTTP/1.1\r\nHost: x\r\nauthorization: Bearer {make()}\r\n\r\n"
    requests += "GET /v1/files HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with socket.create_connection(("127.0.0.1", door.port), timeout=PATIENCE_S) as connection:
        connection.sendall(requests.encode())
        answers = connection.makefile("rb").read()
    assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [b"200", b"401"]


def test_who_guesses_is_one_address_whatever_headers_say(http: httpx.Client, door: Door) -> None:
    wrong = as_caller("psk_" + "a" * 16 + "_" + "b" * 43)
    for number in range(3):
        named = f"10.0.0.{number}"
        forged = {"x-forwarded-for": named, "forwarded": f"for={named}", "x-real-ip": named, "x-client-ip": named}
        assert http.get("/v1/models", headers=wrong | forged).status_code == 401
    counts = door.app.state.gateway.callers._wrong
    assert {address: count for address, (count, _) in counts.items()} == {"127.0.0.1": 3}


def test_who_may_cancel_and_not_read_is_shown_no_output(
    http: httpx.Client, make: Make, worker: FakeWorker, model: str
) -> None:
    cancels = as_caller(make(scopes=("cancel",)))
    for path, body in (("/v1/tasks", {"prompt": "x"}), ("/v1/responses", {"input": "x", "background": True})):
        made = http.post(path, json={"model": model} | body, headers=as_caller(make())).json()["id"]
        worker.serve(made.removeprefix("resp_"))
        told = http.post(f"{path}/{made}/cancel", headers=cancels).json()
        assert (told["id"], told["status"]) == (made, "completed")
        assert not told.get("choices", told.get("output"))
        whole = http.post(f"{path}/{made}/cancel", headers=as_caller(make())).json()
        assert whole.get("choices") or whole.get("output")


def test_keys_that_do_not_work_are_answered_alike(http: httpx.Client, make: Make, valkey: Redis) -> None:
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


def test_after_a_rotation_both_secrets_work_until_the_overlap_ends(
    http: httpx.Client, make: Make, valkey: Redis
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


def test_a_key_is_for_its_models_and_tiers(http: httpx.Client, make: Make, model: str) -> None:
    def code(token: str, **more: Any) -> str:
        answer = http.post("/v1/tasks", json={"model": model, "prompt": "def f", **more}, headers=as_caller(token))
        return "" if answer.status_code == 202 else str(answer.json()["error"]["code"])

    assert code(make(models=("other",))) == "model_not_allowed"
    assert http.get("/v1/models", headers=as_caller(make(models=("other",)))).json()["data"] == []
    flex = make(models=(model,), tiers=("flex", "batch"))
    assert (code(flex), code(flex, tier="flex")) == ("tier_not_allowed", "")
    for path, field in (("/v1/tasks", "tier"), ("/v1/completions", "service_tier")):
        asked = {"model": model, "prompt": "def f", field: "priority"}
        assert http.post(path, json=asked, headers=as_caller(flex)).json()["error"]["param"] == field


def test_a_key_for_an_adapter_may_name_it_with_its_base(
    http: httpx.Client, make: Make, model: str, valkey: Redis
) -> None:
    mine = StoredAdapter("mine", model, "0123456789ab", 8, 1, 0)
    valkey.hset(keys.ADAPTERS, "mine", json.dumps(asdict(mine)))
    card = json.loads(valkey.hget(keys.MODELS, model) or "")
    valkey.hset(keys.MODELS, "other:mine", json.dumps({**card, "name": "other:mine"}))
    headers = as_caller(make(models=("mine",)))

    def status(name: str) -> int:
        return http.post("/v1/tasks", json={"model": name, "prompt": "def f"}, headers=headers).status_code

    named = ("mine", f"{model}:mine", model, "other:mine", f"{model}:theirs")
    assert [status(name) for name in named] == [202, 202, 403, 403, 403]


def test_a_key_names_no_tenant_but_its_own(http: httpx.Client, make: Make, model: str) -> None:
    task, headers = {"model": model, "prompt": "def f"}, as_caller(make())
    assert http.post("/v1/tasks", json={**task, "tenant": "acme"}, headers=headers).status_code == 202
    other = http.post("/v1/tasks", json={**task, "tenant": "other"}, headers=headers)
    named = {**headers, "penstock-tenant": "other"}
    refused = [other, http.post("/v1/tasks", json=task, headers=named)]
    refused += [http.get(path, headers=named) for path in ("/v1/files", "/v1/tasks", "/v1/usage", "/v1/models")]
    assert {(one.status_code, one.json()["error"]["code"]) for one in refused} == {(403, "wrong_tenant")}
    twice = [*headers.items(), ("penstock-tenant", "acme"), ("penstock-tenant", "other")]
    assert http.get("/v1/files", headers=twice).status_code == 400
    body = b'{"model": "tiny", "prompt": "x", "tenant": "acme", "tenant": "other"}'
    both = http.post("/v1/tasks", content=body, headers={**headers, "content-type": "application/json"})
    assert (both.status_code, both.json()["error"]["code"]) == (403, "wrong_tenant")


def test_a_key_that_comes_for_the_first_time_is_one_caller_and_not_two(
    open_door: Open, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FairShare, "look", lambda *_: None)
    door = open_door(auth="keys")
    fair = door.app.state.fair_share
    assert httpx.get(f"{door.url}/v1/models", headers=as_caller(make("acme")), timeout=PATIENCE_S).status_code == 200
    assert until(lambda: fair.of(("tenant", "acme")).last_request_at > 0)
    assert fair.of("127.0.0.1").last_request_at < 0


def test_a_key_of_the_tenant_of_copies_opens_nothing(door: Door, make: Make, valkey_url: str) -> None:
    """An earlier release let an operator make one. Copies have the prompts of all tenants; so has their prefix cache,
    of which `cached_tokens` would tell."""
    with Client(valkey_url) as client:
        copy = client.submit(model="tiny", prompt=[1], tenant=shadows.TENANT)
    own, operators = as_caller(make(shadows.TENANT)), as_caller(make("ops", ("admin",)))
    url, task = f"{door.url}/v1/tasks", {"model": "tiny", "prompt": [1]}
    assert httpx.get(f"{url}/{copy.id}", headers=operators).status_code == 200
    answers = [
        httpx.get(f"{url}/{copy.id}", headers=own),
        httpx.get(f"{door.url}/v1/usage", headers=own),
        httpx.post(url, json=task, headers=own),
        httpx.post(f"{url}/{copy.id}/cancel", headers=own),
    ]
    assert {answer.json()["error"]["code"] for answer in answers} == {"missing_scope"}
