"""Over HTTP a compacted task is what it was: whole, and from every position."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from redis import Redis

from producers.contract import keys
from producers.contract.stream import BLOCK
from producers.store.blobs import open_blobs
from producers.sweeper.compact import Offload
from tests.producers.fake_worker import FakeWorker
from tests.producers.gateway.conftest import Door, Open, Submit
from tests.producers.sweeper.test_compact import squeeze


@pytest.fixture
def door(open_door: Open, model: str) -> Door:
    """One whose files the test loses."""
    return open_door()


@pytest.mark.parametrize("to_files", [False, True])
@pytest.mark.parametrize("count", [3, BLOCK + 5])
def test_the_same_bytes_are_answered(
    http: httpx.Client,
    submit: Submit,
    worker: FakeWorker,
    valkey: Redis,
    valkey_url: str,
    tmp_path: Path,
    count: int,
    to_files: bool,
) -> None:
    task_id = submit()
    worker.claim(task_id)
    worker.prompt(task_id, [1, 2], [None, (-0.5, ((7, -0.25),))])
    worker.append(task_id, 0, ["é"] * count, logprobs=[(-1.0, ((3, -1.0),))] * count)
    worker.finish(task_id, [count])
    worker.settle(task_id)

    def answers() -> list[tuple[int, bytes]]:
        url = f"/v1/tasks/{task_id}"
        asked = [http.get(url), http.get(f"{url}/events")]
        for start in (0, 1, count, count + 1, count + 2, 5 * BLOCK):
            asked.append(http.get(f"{url}/events", params={"from": start}))
            asked.append(http.get(f"{url}/events", headers={"last-event-id": str(start)}))
        return [(answer.status_code, answer.content) for answer in asked]

    moving = Offload(open_blobs(tmp_path / "files"), 1) if to_files else None
    before = answers()
    assert squeeze(valkey_url, moving).streams == 1
    assert valkey.hexists(keys.result(task_id), "blob") == to_files
    assert not valkey.exists(keys.stream(task_id))
    assert answers() == before
    if to_files:
        shutil.rmtree(tmp_path / "files")
        answer = http.get(f"/v1/tasks/{task_id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "file_unavailable")
