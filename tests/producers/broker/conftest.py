"""Each broker that there is, empty."""

from __future__ import annotations

import uuid

import pytest

from producers.broker.sqs.address import is_sqs, read
from producers.broker.sqs.names import lists
from producers.broker.sqs.queues.setup import make_missing

#: Queues that there are on SQS: of a model version, and one that looks like a pool's.
QUEUES = ("penstock:queue:m@1", "penstock:queue:m@1.x")


@pytest.fixture(params=["redis", "memory", "sqs"])
def url(request: pytest.FixtureRequest) -> str:
    return url_of(request)


def url_of(request: pytest.FixtureRequest) -> str:
    """Of the kind that the fixture's parameter names."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4()}"
    request.getfixturevalue("valkey")
    if request.param == "sqs":
        found: str = request.getfixturevalue("aws").broker()
        make_missing(read(found), [name for queue in QUEUES for name, _ in lists(queue)])
        return found
    found = request.getfixturevalue("valkey_url")
    return found


@pytest.fixture
def store_url(url: str, request: pytest.FixtureRequest) -> str:
    """Where a broker on SQS keeps its books; others need none."""
    found: str = request.getfixturevalue("valkey_url") if is_sqs(url) else url
    return found
