"""The outbox is trimmed, and rows that nobody takes are told of. That nothing stays: `tests/producers`."""

from __future__ import annotations

import asyncio
import logging

import pytest
from redis import Redis

from producers import AsyncClient
from producers.connection import log_throttle
from producers.connection.script import run
from producers.contract import keys
from producers.store import outbox as store_outbox
from producers.sweeper import retention
from producers.sweeper.retention import Trimmed, count_outbox, trim_outbox


def rows(valkey: Redis, index: str, count: int, at_ms: int) -> None:
    names = [f"{index}{n}" for n in range(count)]
    valkey.zadd(index, dict.fromkeys(names, at_ms))
    for name in names:
        valkey.hset(keys.webhook_row(name), "state", "x")


async def test_what_is_old_goes_and_what_is_due_never(
    valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "OUTBOX_PAGE", 2)
    for index in (keys.WEBHOOKS_DUE, keys.WEBHOOKS_DELIVERED, keys.WEBHOOKS_DEAD):
        rows(valkey, index, 5, 1000)
    async with AsyncClient(valkey_url) as client:
        assert await trim_outbox(client.store, 60.0, 1e11) == Trimmed(delivered=5)
        monkeypatch.setattr(retention, "DEAD_LIMIT", 3)
        assert await trim_outbox(client.store, 60.0, 1e11) == Trimmed(dead=2)
        assert await trim_outbox(client.store) == Trimmed(dead=3)
    left = {name.decode().removeprefix("penstock:webhooks:row:") for name in valkey.keys("penstock:webhooks:row:*")}
    assert left == {name.decode() for name in valkey.zrange(keys.WEBHOOKS_DUE, 0, -1)}
    assert len(left) == 5


async def test_what_was_delivered_or_given_up_is_counted_once(valkey: Redis, valkey_url: str) -> None:
    """However many sweepers count; what had ended before the first one counted is nobody's."""

    def end(index: str, name: str) -> None:
        seconds, micros = valkey.time()
        valkey.zadd(index, {name: seconds * 1000 + micros // 1000})

    def counts() -> dict[str, int]:
        return {name.decode(): int(count) for name, count in valkey.hgetall(keys.SWEPT).items()}

    async with AsyncClient(valkey_url) as client:

        async def count() -> dict[str, int]:
            await asyncio.sleep(0.003)  # it ended before this millisecond
            await asyncio.gather(*(count_outbox(client.store) for _ in range(4)))
            return counts()

        end(keys.WEBHOOKS_DEAD, "before")
        assert await count() == {}
        for number in range(3):
            end(keys.WEBHOOKS_DELIVERED, f"row-{number}")
        end(keys.WEBHOOKS_DEAD, "lost")
        assert await count() == {"webhooks_delivered": 3, "webhooks_dead": 1}
        end(keys.WEBHOOKS_DELIVERED, "lost")
        valkey.zrem(keys.WEBHOOKS_DEAD, "lost")
        assert await count() == {"webhooks_delivered": 4, "webhooks_dead": 1}
        assert await count() == {"webhooks_delivered": 4, "webhooks_dead": 1}


async def test_rows_that_nobody_takes_are_told_of_now_and_then(
    valkey: Redis, valkey_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_throttle, "EVERY_S", 1e6)
    async with AsyncClient(valkey_url) as client:
        rows(valkey, keys.WEBHOOKS_DUE, 3, 9_000_000_000_000)
        with caplog.at_level(logging.WARNING):
            await trim_outbox(client.store)
            assert not caplog.records
            rows(valkey, keys.WEBHOOKS_DUE, 1, 1000)
            run(valkey, store_outbox.put("r", {"source": "jobs"}))
            valkey.zadd(keys.replies("jobs"), {"r": int(valkey.time()[0]) * 1000 - 120_000})  # type: ignore[index]
            await trim_outbox(client.store)
            await trim_outbox(client.store)
    said, replies = caplog.messages
    assert "1 of jobs" in replies
    assert "3 webhooks are to be delivered" in said
    assert "penstock webhooks" in said
