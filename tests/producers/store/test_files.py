"""What is known of files: made once, listed by time, gone when removed or expired."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest
from redis import Redis

from producers import AsyncClient
from producers.connection.script import run
from producers.store import files
from producers.store.files import File


@pytest.fixture
async def aclient(valkey_url: str, model: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, patience=0.2) as client:
        yield client


def _made(valkey: Redis, ms: int, purpose: str = "batch", expires_at: int | None = None) -> File:
    file = File(files.new_id(ms), 5, "in.jsonl", purpose, ms // 1000, expires_at, tenant="a")
    assert run(valkey, files.made(file)) == 1
    return file


async def test_files_are_listed_by_time_from_a_cursor_that_may_be_gone(aclient: AsyncClient, valkey: Redis) -> None:
    made = [_made(valkey, ms, "batch" if ms % 2 else "batch_output") for ms in range(1, 8)]
    store = aclient.store
    assert await files.listed(store, limit=99) == made[::-1]
    assert await files.listed(store, limit=2, newest_first=False) == made[:2]
    assert await files.remove(store, made[1].id)
    assert not await files.remove(store, made[1].id)
    assert await files.listed(store, after=made[1].id, limit=2, newest_first=False) == made[2:4]
    assert await files.listed(store, after=made[3].id, limit=9, purpose="batch") == [made[2], made[0]]
    assert await files.get(store, made[1].id) is None
    assert await files.get(store, made[0].id) == made[0]


async def test_a_file_is_made_once(aclient: AsyncClient, valkey: Redis) -> None:
    first = File(files.new_id(1, "batch_1:output"), 5, "out.jsonl", "batch_output", 1)
    assert run(valkey, files.made(first)) == 1
    again = File(files.new_id(1, "batch_1:output"), 6, "other.jsonl", "batch_output", 1)
    assert again.id == first.id
    assert run(valkey, files.made(again)) == 0
    assert await files.get(aclient.store, first.id) == first


async def test_an_expired_file_is_not_there_and_is_named_for_its_removal(aclient: AsyncClient, valkey: Redis) -> None:
    now = int(time.time())
    stays, over = _made(valkey, 1, expires_at=now + 600), _made(valkey, 2, expires_at=now)
    assert await files.get(aclient.store, over.id) is None
    assert await files.listed(aclient.store, limit=9) == [stays]
    assert await files.expired(aclient.store, 9) == [over.id]
    assert await files.remove(aclient.store, over.id)
    assert await files.expired(aclient.store, 9) == []
