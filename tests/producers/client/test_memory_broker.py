"""Both clients send to the broker that their URL names, whatever the store is."""

from __future__ import annotations

import json
import uuid

import pytest
from redis import Redis

from producers import Client
from producers.broker.connect import connect_consumer
from producers.broker.values import Credit, Rules
from tests.producers.conftest import QUEUE
from tests.producers.faces import AsyncFace


@pytest.mark.parametrize("kind", [Client, AsyncFace])
def test_a_task_goes_to_the_broker_in_memory(
    kind: type[Client] | type[AsyncFace], valkey_url: str, valkey: Redis, model: str
) -> None:
    url = f"memory://{uuid.uuid4()}"
    client = kind(url, valkey_url)
    task_id = client.submit(model="tiny", prompt=[1, 2], max_tokens=3).id
    assert client.get(task_id).status().status == "queued"
    client.close()
    assert not valkey.keys(f"{QUEUE}*")
    consumer = connect_consumer(url, [QUEUE], url)
    consumer.take_lease("w.1", "{}", 60.0)
    fetched = consumer.fetch("w.1", ["u"], Credit((1,) * 4, (9,) * 4), Rules((1, 9), 9, 60.0, 3))
    assert [json.loads(one.raw)["headers"]["id"] for one in fetched or ()] == [task_id]
