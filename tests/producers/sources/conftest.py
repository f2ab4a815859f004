"""What sends messages to a sources process, and a worker for the tasks that it makes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from producers.client.aio import AsyncClient
from producers.contract import keys
from producers.sweeper import tasks
from tests.chaos.sweeping import Sweeper
from tests.producers.conftest import QUEUE
from tests.producers.fake_worker import FakeWorker


class Sqs:
    """A queue and its messages. `dead`: where its redrive policy moves those that are received ten times."""

    def __init__(self, client: Any, name: str, *, redrive: bool = True) -> None:
        self._sqs = client
        attributes = {}
        if redrive:
            self.dead = Sqs(client, f"{name}-dead", redrive=False)
            attributes["RedrivePolicy"] = json.dumps({"deadLetterTargetArn": self.dead.arn, "maxReceiveCount": 10})
        self.url: str = client.create_queue(QueueName=name, Attributes=attributes)["QueueUrl"]

    @property
    def arn(self) -> str:
        said: dict[str, str] = self._sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=["All"])["Attributes"]
        return said["QueueArn"]

    def send(self, body: Any, **attributes: str) -> None:
        more = {
            name.replace("_", "-"): {"DataType": "String", "StringValue": text} for name, text in attributes.items()
        }
        text = body if isinstance(body, str) else json.dumps(body)
        self._sqs.send_message(QueueUrl=self.url, MessageBody=text, MessageAttributes=more)

    def receive(self) -> list[dict[str, Any]]:
        """Messages that nobody hides. They are hidden then for a moment, and stay."""
        asked = {"MessageAttributeNames": ["All"], "VisibilityTimeout": 1, "MaxNumberOfMessages": 10}
        found: list[dict[str, Any]] = self._sqs.receive_message(QueueUrl=self.url, **asked).get("Messages", [])
        return found

    def __len__(self) -> int:
        """Messages, hidden ones too."""
        said = self._sqs.get_queue_attributes(QueueUrl=self.url, AttributeNames=["All"])["Attributes"]
        return int(said["ApproximateNumberOfMessages"]) + int(said["ApproximateNumberOfMessagesNotVisible"])


class Serving:
    """A worker that serves each task as it comes, in a thread. `served`: ids, in order, each before its end."""

    def __init__(self, url: str) -> None:
        self.served: list[str] = []
        self.pieces = ["Hello", ",", " world"]
        self._redis = Redis.from_url(url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        worker = FakeWorker(self._redis)
        while not self._stop.is_set():
            task_id = worker.take(QUEUE, 0.1)
            if task_id is None or task_id in self.served:  # a second message of a task ends as done
                continue
            self.served.append(task_id)
            worker.serve(task_id, self.pieces)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._redis.close()


def send_unsent(url: str) -> None:
    """What a sweeper does about tasks whose sender was killed, at once."""

    async def work() -> None:
        async with AsyncClient(url) as client:
            await tasks.send_unsent(client, 0)

    asyncio.run(work())


@pytest.fixture
def sweeper(valkey_url: str, model: str, tmp_path: Path) -> Iterator[Sweeper]:
    with Sweeper(valkey_url, "sweeper", files_dir=str(tmp_path / "files"), unsent_after=0.2) as running:
        yield running


@pytest.fixture
def serving(valkey_url: str) -> Iterator[Serving]:
    serving = Serving(valkey_url)
    yield serving
    serving.close()


@pytest.fixture
def records(valkey: Redis) -> Any:
    """All tasks' records by id, as text."""

    def read() -> dict[str, dict[str, str]]:
        found = {}
        for name in valkey.scan_iter("penstock:task:*"):
            fields = valkey.hgetall(name)
            found[name.decode().removeprefix(keys.task(""))] = {k.decode(): v.decode() for k, v in fields.items()}
        return found

    return read
