"""SQS for a stage: moto's server behind a proxy of faults, with the queues of the stub engine's version."""

from __future__ import annotations

import contextlib
import time
from typing import Any, Final

from redis import Redis

from producers.broker.sqs.address import lists, read, sqs_name
from tests.aws import Aws, running_aws
from tests.aws_faults import Fault, Faults, faulty
from tests.stub_engine import load
from workers.runtime.worker import announce

#: What AWS does to requests, all the time.
AWS_FAULTS: Final = (
    Fault("error", chance=0.02),
    Fault("throttle", chance=0.02),
    Fault("reset", chance=0.02),
    Fault("lost", chance=0.02),
    Fault("partial", chance=0.05),
    Fault("hidden", chance=0.05),
    Fault("twice", chance=0.05),
    Fault("kept", chance=0.05),
    Fault("stale", chance=0.5),
)
#: Seconds after which a message shows up again that was received by a process that was killed.
VISIBILITY_S: Final = 10
#: What may still be deleted then, and copies that were made visible late.
PATIENCE_S: Final = 40.0


class Sqs:
    """`store`: where the broker keeps its books."""

    def __init__(self, store: str, seed: int) -> None:
        self._store, self._seed = store, seed
        self._servers = contextlib.ExitStack()
        self._urls: list[str] = []
        self._aws: Aws
        self._faults: Faults

    @property
    def url(self) -> str:
        """The broker's."""
        return self._aws.broker(visibility=str(VISIBILITY_S))

    def up(self) -> None:
        """The queues are there, and faults begin."""
        moto = self._servers.enter_context(running_aws())
        self._aws, self._faults = self._servers.enter_context(faulty(moto, self._seed))
        engine, files = load("stub", {})
        with Redis.from_url(self._store, decode_responses=True) as store:
            _, pool = announce(store, engine, files)
        engine.close()
        sqs, address = moto.client("sqs"), read(self.url)
        settings = {"VisibilityTimeout": str(VISIBILITY_S), "MessageRetentionPeriod": "345600"}
        for name, _ in lists(pool.version_queue):
            made = sqs.create_queue(QueueName=sqs_name(address, name), Attributes=settings)
            self._urls.append(made["QueueUrl"])
        self._sqs = sqs
        self._faults.put(*AWS_FAULTS)

    def calm(self) -> dict[str, int]:
        """No faults any more. Returns how many there were, by kind."""
        self._faults.calm()
        return dict(self._faults.done)

    def left(self) -> list[str]:
        """Messages that do not go away while workers run."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._waiting()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _waiting(self) -> list[str]:
        asked = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        found = []
        for url in self._urls:
            said: dict[str, Any] = self._sqs.get_queue_attributes(QueueUrl=url, AttributeNames=asked)["Attributes"]
            if any(int(count) for count in said.values()):
                found.append(f"{url}: {said}")
        return found

    def down(self) -> None:
        self._servers.close()
