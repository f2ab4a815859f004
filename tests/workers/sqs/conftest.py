"""Real workers on SQS (moto's server), with a Valkey as the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from redis import Redis

from tests.aws import REGION, Aws
from tests.aws_faults import Faults, faulty
from tests.processes import observer
from tests.workers.rig import MODEL, Rig

#: Seconds for which a received message is hidden, longer than any test waits: what the dead had comes back by REAP.
HIDDEN_S = "3600"


class SqsRig(Rig):
    """`redis` and `store` are the store's client: the books of the broker are there."""

    def __init__(self, aws: Aws, store_url: str, **options: str) -> None:
        store = observer(store_url)
        super().__init__(aws.broker(celery="1", visibility=HIDDEN_S, **options), store, store_url, store)
        self.aws = aws

    def sender(self, **conf: Any) -> Celery:
        """A plain Celery application, which sends by kombu's own SQS transport."""
        place = self.aws.url.removeprefix("http://")
        app = Celery("sender", broker=f"sqs://test:test@{place}", backend=self.store_url, set_as_current=False)
        options = {"region": REGION, "queue_name_prefix": "pen-", "is_secure": False}
        app.conf.update(task_default_queue=MODEL, broker_transport_options=options, **conf)
        return app

    def monitor(self) -> Celery:
        """A plain Celery application for remote control, which goes by the store."""
        return Celery("monitor", broker=self.store_url, backend=self.store_url, set_as_current=False)

    def check_nothing_left(self) -> None:
        """No message anywhere: neither in the books nor in any queue, also hidden ones. ACKs may be on their way."""
        kinds = ("waiting", "inflight", "delayed")
        self.until(lambda: not [key for kind in kinds for key in self.store.keys(f"penstock:sqs:{kind}:*")])
        self.until(self._empty)

    def _empty(self) -> bool:
        if not any(self.messages().values()):
            return True
        time.sleep(0.1)  # each look asks SQS for a dozen things
        return False

    def messages(self) -> dict[str, int]:
        """SQS queue -> its messages, waiting, hidden or delayed."""
        return self.aws.messages()


@pytest.fixture
def sqs(aws: Aws, valkey_url: str, valkey: Redis) -> Iterator[SqsRig]:
    """Empty; the workers started on it are killed at the end."""
    rig = SqsRig(aws, valkey_url)
    try:
        yield rig
    finally:
        rig.close()


@pytest.fixture
def faults(aws: Aws, valkey_url: str, valkey: Redis) -> Iterator[tuple[SqsRig, Faults]]:
    """A rig whose workers reach SQS through the proxy, and the proxy's faults."""
    with faulty(aws) as (proxied, coming):
        rig = SqsRig(proxied, valkey_url)
        try:
            yield rig, coming
        finally:
            rig.close()
