"""Tenants on one worker: nobody's prompt comes from what another tenant has in its cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.store.access import api_keys
from producers.store.access.api_keys import Limits
from tests.conformance.conftest import System, gateway, sweeping
from tests.producers.gateway.test_keys import as_caller
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Ask = Callable[[httpx.Client, str], int]


def key_of(store: Redis, tenant: str) -> str:
    key, token = api_keys.new_key(tenant, tenant, ("submit", "read", "cancel"))
    store.hset(keys.API_KEYS, key.id, key.to_json())
    return token


@pytest.fixture(scope="module")
def tenants(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Two tenants of a gateway that asks for keys, with the worker that all have."""
    asks = gateway(system.store_url, files_dir=system.files_dir, auth="keys")
    with sweeping(system.store_url, system.files_dir, tmp_path_factory.mktemp("log")), asks as (url, _):
        first, second = (
            httpx.Client(base_url=url, timeout=PATIENCE_S, headers=as_caller(key_of(system.store, tenant)))
            for tenant in ("acme", "other")
        )
        with first, second:
            yield first, second


def told(client: httpx.Client, path: str, **body: Any) -> Any:
    answer = client.post(path, json={"model": "tiny", **body}, headers={"prefer": "wait=60"})
    assert answer.is_success, answer.text
    return answer.json()


def by_task(client: httpx.Client, text: str) -> int:
    return int(told(client, "/v1/tasks", prompt=text, max_tokens=2)["usage"]["cached_tokens"])


def by_completion(client: httpx.Client, text: str) -> int:
    usage = told(client, "/v1/completions", prompt=text, max_tokens=2)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def by_chat(client: httpx.Client, text: str) -> int:
    usage = told(client, "/v1/chat/completions", messages=[{"role": "user", "content": text}], max_tokens=2)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def by_response(client: httpx.Client, text: str) -> int:
    usage = told(client, "/v1/responses", input=text, max_output_tokens=2)["usage"]
    return int(usage["input_tokens_details"]["cached_tokens"])


def by_batch(client: httpx.Client, text: str) -> int:
    body = {"model": "tiny", "prompt": text, "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = client.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", json.dumps(line).encode())}
    ).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()

    def ended() -> Any:
        seen = client.get(f"/v1/batches/{batch['id']}").json()
        return seen if seen["status"] in ("completed", "failed") else None

    output = client.get(f"/v1/files/{until(ended)['output_file_id']}/content").json()
    return int(output["response"]["body"]["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("ask", [by_task, by_completion, by_chat, by_response, by_batch])
def test_a_prompt_is_cached_for_its_own_tenant_alone(tenants: tuple[httpx.Client, httpx.Client], ask: Ask) -> None:
    acme, other = tenants
    text = f"# {ask.__name__}\n" + "def add(first, second):\n    return first + second\n" * 8
    assert ask(acme, text) == 0
    assert ask(acme, text) > 0, "the prompt is long enough to be kept"
    assert ask(other, text) == 0
    assert ask(other, text) > 0


def test_a_worker_makes_no_more_than_a_budget_has_left(
    tenants: tuple[httpx.Client, httpx.Client], system: System
) -> None:
    key, token = api_keys.new_key("acme", "a budget", ("submit", "read"), limits=Limits(budget_tokens=40))
    system.store.hset(keys.API_KEYS, key.id, key.to_json())
    headers = {"prefer": "wait=60", **as_caller(token)}
    body = {"model": "tiny", "prompt": [5, 6, 7], "ignore_eos": True}
    made = tenants[0].post("/v1/tasks", json=body, headers=headers).json()
    assert made["usage"]["output_tokens"] == 37
    assert tenants[0].post("/v1/tasks", json=body, headers=headers).json()["error"]["code"] == "insufficient_quota"
