"""A batch's lines run as its key's: its tenant, its models and tiers, though a sweeper makes their tasks later."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from producers import AsyncClient
from producers.contract import keys
from producers.gateway.batch_endpoints import LineEndpoints
from producers.store.blobs import open_blobs
from producers.sweeper.batches.duty import Batches
from tests.producers.gateway.conftest import CARD, until
from tests.producers.gateway.isolation.conftest import posted
from tests.producers.gateway.isolation.test_ids import UNKNOWN
from tests.producers.gateway.openai.conftest import Answering
from tests.producers.gateway.openai.conftest import answering as answering  # the fixture

pytestmark = pytest.mark.usefixtures("sweeping")

Caller = Callable[..., httpx.Client]


@pytest.fixture
def sweeping(valkey_url: str, model: str, files_dir: Path) -> Iterator[None]:
    """The leading sweeper's part in batches."""
    stop = threading.Event()

    async def counted(done: dict[str, int]) -> None:
        pass

    async def sweep() -> None:
        async with AsyncClient(valkey_url) as client:
            endpoints = LineEndpoints(client)
            duty = asyncio.create_task(Batches(client, open_blobs(str(files_dir)), endpoints, counted).run(0.02))
            await asyncio.to_thread(stop.wait)
            duty.cancel()
            endpoints.close()

    thread = threading.Thread(target=lambda: asyncio.run(sweep()))
    thread.start()
    yield
    stop.set()
    thread.join()


def run(client: httpx.Client, *bodies: dict[str, Any], model: str = "tiny") -> dict[str, Any]:
    """The batch of these lines once it has ended."""
    lines = [
        {
            "custom_id": f"r{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": model, "prompt": "x"} | body,
        }
        for n, body in enumerate(bodies)
    ]
    file = ("in.jsonl", "\n".join(map(json.dumps, lines)).encode())
    file_id = posted(client, "/v1/files", data={"purpose": "batch"}, files={"file": file})["id"]
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch_id = posted(client, "/v1/batches", json=asked)["id"]

    def ended() -> Any:
        seen = client.get(f"/v1/batches/{batch_id}").json()
        return seen if seen["status"] in ("completed", "failed") else None

    found: dict[str, Any] = until(ended)
    return found


def test_lines_and_files_are_their_keys_tenants(caller: Caller, answering: Answering, valkey: Redis) -> None:
    acme, other = caller("acme"), caller("other")
    batch = run(acme, {}, {"temperature": "hot"})
    (record,) = answering.records
    assert (record.fields["tenant"], record.task["tenant"]) == ("acme", "acme")
    (key_id,) = [name.decode() for name in valkey.hkeys(keys.API_KEYS) if b"acme" in valkey.hget(keys.API_KEYS, name)]
    assert record.fields["key"] == key_id
    for file_id in (batch["output_file_id"], batch["error_file_id"]):
        for path in ("", "/content"):
            assert acme.get(f"/v1/files/{file_id}{path}").status_code == 200
            answers = [other.get(f"/v1/files/{one}{path}") for one in (file_id, UNKNOWN["file"])]
            assert [answer.status_code for answer in answers] == [404, 404]
            assert answers[0].text.replace(file_id, UNKNOWN["file"]) == answers[1].text
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("POST", "/retry")):
        assert other.request(method, f"/v1/tasks/{record.id}{path}").status_code == 404
    assert other.get("/v1/files").json()["data"] == []


def test_a_line_runs_in_no_tier_that_its_key_may_not_use(caller: Caller, answering: Answering) -> None:
    client = caller("acme", tiers=("flex",))
    batch = run(client, {"service_tier": "priority"}, {"service_tier": "flex"}, {})
    assert [record.tier for record in answering.records] == ["flex"]
    errors = client.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
    told = {one["custom_id"]: one["response"] for one in map(json.loads, errors)}
    assert {name: (one["status_code"], one["body"]["error"]["code"]) for name, one in told.items()} == {
        "r0": (403, "tier_not_allowed"),
        "r2": (403, "tier_not_allowed"),
    }


def test_a_line_runs_no_model_that_its_key_may_not_use(caller: Caller, answering: Answering, valkey: Redis) -> None:
    """Whether there is one, or not: the batch fails as for a model that there is not, and names no other."""
    valkey.hset(keys.MODELS, "secret", json.dumps(json.loads(CARD.to_json()) | {"name": "secret"}))
    client = caller("acme", models=("tiny",))
    failed = [run(client, {"model": model})["errors"]["data"][0] for model in ("secret", "no-such")]
    assert {one["code"] for one in failed} == {"model_not_found"}
    assert failed[0]["message"].replace("secret", "no-such") == failed[1]["message"]
    assert answering.records == []
