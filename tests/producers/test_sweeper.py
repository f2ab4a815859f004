from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient, protocol, submits, sweeper
from producers.submits import Swept


@pytest.fixture
async def aclient(valkey_url: str, model: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url) as client:
        yield client


async def test_the_loop_goes_on_after_a_failed_sweep(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SWEEP_AGE_MS", 0)
    answers: list[Any] = [ConnectionError("away"), Swept(), Swept(sent=1)]
    done = asyncio.Event()

    async def one_sweep(client: AsyncClient, age_ms: int) -> Swept:
        assert client is aclient
        answer = answers.pop(0)
        if not answers:
            done.set()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    monkeypatch.setattr(submits, "sweep", one_sweep)
    loop = asyncio.create_task(sweeper.run(aclient, every_s=0.001))
    async with asyncio.timeout(10):
        await done.wait()
    assert not loop.done()
    loop.cancel()
