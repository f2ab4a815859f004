"""A Celery message whose body travels by claim check runs like any other; without its body it is a dead letter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery.result import AsyncResult
from redis import Redis

from producers.contract import keys
from producers.contract.message import check_in
from producers.store.files import MessageBlobs
from tests.stub_engine import text_of
from tests.waiting import PATIENCE_S
from tests.workers.rig import MODEL, Rig, rig


@pytest.fixture
def large(tmp_path: Path) -> Iterator[Rig]:
    """A worker that finds bodies in the test's folder."""
    with rig() as made:
        made.worker(files_dir=str(tmp_path))
        yield made


def parked(served: Rig) -> tuple[AsyncResult, str]:
    """A task, and its message, which no worker has yet."""
    kwargs = {"prompt": [1, 2, 3], "seed": 5, "max_tokens": 4, "metadata": {"note": "x" * 500}}
    result: AsyncResult = served.sender().send_task(keys.TASK_NAME, kwargs=kwargs, queue="parked")
    (envelope,) = served.redis.lrange("parked", 0, -1)
    served.redis.delete("parked")
    return result, envelope.decode() if isinstance(envelope, bytes) else envelope


def put(served: Rig, envelope: str, folder: Path) -> Path:
    """Its body into the folder, the rest to the workers. Returns the body's file."""
    with Redis.from_url(served.url) as redis:
        sent = check_in(envelope, len(envelope) - 1, MessageBlobs(redis, str(folder)))
    assert json.loads(sent)["body"] == ""
    served.redis.lpush("parked", sent)
    (body,) = (path for path in folder.iterdir() if path.is_file())
    return body


def test_it_runs(large: Rig, tmp_path: Path) -> None:
    result, envelope = parked(large)
    put(large, envelope, tmp_path)
    large.redis.rename("parked", MODEL)
    assert result.get(timeout=PATIENCE_S)["text"] == text_of(5, 0, 4)
    large.until_settled([result.id])


def test_without_its_body_it_fails_and_is_kept(large: Rig, tmp_path: Path) -> None:
    result, envelope = parked(large)
    put(large, envelope, tmp_path).unlink()
    large.redis.rename("parked", MODEL)
    with pytest.raises(Exception, match="body is gone"):
        result.get(timeout=PATIENCE_S)
    large.until(lambda: large.redis.llen("penstock:dead"))
