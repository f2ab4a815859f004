"""OpenAI's own client, on a gateway with a worker that answers as it is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.producers.gateway.conftest import Door


@pytest.fixture
def client(door: Door) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{door.url}/v1", api_key="none", timeout=60, max_retries=0) as made:
        yield made
