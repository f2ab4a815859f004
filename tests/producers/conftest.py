"""Fixtures of the client library's tests: a published model, a worker for it, and both clients behind one face."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient, Client
from producers.contract import keys
from tests.producers.faces import AsyncFace, Face
from tests.producers.fake_worker import FakeWorker
from tests.producers.proxy import Proxy

CARD: dict[str, Any] = {
    "v": 1,
    "name": "tiny",
    "version": "0123456789ab",
    "architecture": "LlamaForCausalLM",
    "context_length": 512,
    "vocab_size": 1000,
    "parameters": 1_000_000,
    "capabilities": ["generate"],
    "eos_token_ids": [0],
    "bos_token_id": None,
    "defaults": {"temperature": 0.6},
    "files": {},
    "created": 1_790_000_000,
}
POOL = keys.Pool("tiny", "0123456789ab", "deadbeef")
QUEUE = POOL.version_queue


def subscribers(valkey: Redis, task_id: str) -> int:
    """Processes that hear of a task: on its channel, or on their own."""
    ((_, count),) = valkey.pubsub_numsub(keys.channel(task_id))
    return max(int(count), len((valkey.hget(keys.task(task_id), "followers") or b"").split()))


@pytest.fixture
def model(valkey: Redis) -> str:
    """The model `tiny` is published."""
    valkey.hset(keys.MODELS, "tiny", json.dumps(CARD))
    return "tiny"


@pytest.fixture
def worker(valkey: Redis) -> FakeWorker:
    return FakeWorker(valkey)


@pytest.fixture(params=["blocking", "asyncio"])
def make_client(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Makes clients (broker, store=None, patience=...) of both kinds, and closes them."""
    made: list[Face] = []

    def make(*args: Any, **options: Any) -> Face:
        made.append(Client(*args, **options) if request.param == "blocking" else AsyncFace(*args, **options))
        return made[-1]

    yield make
    for client in made:
        client.close()


@pytest.fixture
def client(make_client: Any, valkey_url: str, model: str) -> Face:
    """A client of either kind on the test's Valkey, where `tiny` is published."""
    face: Face = make_client(valkey_url)
    return face


@pytest.fixture
async def aclient(valkey_url: str, model: str) -> AsyncIterator[AsyncClient]:
    """An asyncio client on the test's own loop, which soon gives up a server that is away."""
    async with AsyncClient(valkey_url, patience=0.2) as client:
        yield client


@pytest.fixture
def proxy(valkey_url: str) -> Iterator[Proxy]:
    """A way to the test's Valkey that can be told to fail."""
    with Proxy(valkey_url) as proxy:
        yield proxy
