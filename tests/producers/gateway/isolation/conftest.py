"""A gateway that asks for keys, a tenant `acme` who has one of everything, and a tenant `other` who looks for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from producers.connection.script import run
from producers.contract import keys
from producers.store import files
from producers.store.blobs import open_blobs
from producers.store.files import File
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Make
from tests.producers.gateway.test_keys import as_caller
from tests.producers.gateway.test_keys import make as make  # the fixture
from tests.producers.store.test_s3 import put
from tests.waiting import PATIENCE_S

TASK = {"model": "tiny", "prompt": "def f"}
ENDPOINT = {"url": "http://127.0.0.1:9/hook", "event_types": ["response.completed"]}
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}'


@pytest.fixture(scope="module")
def shared_settings() -> dict[str, Any]:
    return {"auth": "keys", "webhook_allow": ("127.0.0.0/8",), "heartbeat": 300.0}  # a stream that opens times out


@pytest.fixture
def caller(door: Door, make: Make) -> Iterator[Callable[..., httpx.Client]]:
    """A client with a new key of a tenant."""
    clients: list[httpx.Client] = []

    def called(tenant: str, **fields: Any) -> httpx.Client:
        headers = as_caller(make(tenant, **fields))
        clients.append(httpx.Client(base_url=door.url, timeout=PATIENCE_S, headers=headers))
        return clients[-1]

    yield called
    for client in clients:
        client.close()


@pytest.fixture
def acme(caller: Callable[..., httpx.Client]) -> httpx.Client:
    return caller("acme")


@pytest.fixture
def other(caller: Callable[..., httpx.Client]) -> httpx.Client:
    return caller("other")


@dataclass(frozen=True)
class Made:
    """Ids of what a tenant has made, by what they are ids of."""

    task: str
    running: str
    response: str
    file: str
    output: str
    batch: str
    endpoint: str

    def ids(self) -> tuple[str, ...]:
        return (self.task, self.running, self.response, self.file, self.output, self.batch, self.endpoint)


def posted(client: httpx.Client, path: str, **sent: Any) -> Any:
    answer = client.post(path, **sent)
    assert answer.is_success, answer.text
    return answer.json()


def upload(client: httpx.Client, **sent: Any) -> str:
    file = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", LINE)}}
    return str(posted(client, "/v1/files", **file, **sent)["id"])


def batch(client: httpx.Client, file_id: str, **sent: Any) -> str:
    asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(posted(client, "/v1/batches", json=asked, **sent)["id"])


def one_of_each(client: httpx.Client, worker: FakeWorker, folder: Path, tenant: str) -> Made:
    task, running = (posted(client, "/v1/tasks", json=TASK | {"metadata": {"m": "1"}})["id"] for _ in range(2))
    response = posted(client, "/v1/responses", json={"model": "tiny", "input": "hi", "background": True})["id"]
    worker.serve(task)
    worker.serve(response.removeprefix("resp_"))
    worker.claim(running)
    worker.append(running, 0, ["a secret"])
    file_id = upload(client)
    return Made(
        task,
        running,
        response,
        file_id,
        _output(worker.redis, folder, tenant),
        batch(client, file_id),
        posted(client, "/v1/webhook_endpoints", json=ENDPOINT)["id"],
    )


def _output(valkey: Redis, folder: Path, tenant: str) -> str:
    """A file as the end of a batch makes it."""
    file_id = files.new_id(time.time_ns() // 1_000_000)
    put(open_blobs(str(folder)), file_id, b"a secret")
    valkey.zadd(keys.FILE_NOTES, {file_id: int(time.time())})
    run(valkey, files.file_made(File(file_id, 8, "out.jsonl", files.BATCH_OUTPUT, int(time.time()), tenant=tenant)))
    return file_id


@pytest.fixture
def theirs(acme: httpx.Client, worker: FakeWorker, files_dir: Path) -> Made:
    """What `acme` has made."""
    return one_of_each(acme, worker, files_dir, "acme")
