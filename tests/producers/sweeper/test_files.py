"""Files whose end has come go with their content; so does content whose writer died."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
from redis import Redis

from producers import AsyncClient
from producers.connection.script import arun
from producers.contract import keys
from producers.store import files
from producers.store.blobs import Blobs, FolderBlobs
from producers.store.files import File
from producers.sweeper.retention import UPLOAD_S, RemovedFiles, remove_files
from producers.sweeper.sweeper import SweeperSettings, lead
from tests.producers.store.test_s3 import put
from tests.waiting import PATIENCE_S


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return FolderBlobs(tmp_path)


async def _file(client: AsyncClient, blobs: Blobs, end: int | None, made: bool = True) -> str:
    file = File(files.new_id(int(time.time() * 1000)), 1, "x", "batch", 1, end)
    await files.note(client.store, file.id)
    put(blobs, file.id, b"x")
    if made:
        await arun(client.store, files.file_made(file))
    return file.id


async def test_what_nobody_may_need_any_more_goes_and_nothing_else(
    aclient: AsyncClient, blobs: Blobs, valkey: Redis, tmp_path: Path
) -> None:
    now = int(time.time())
    stays = [await _file(aclient, blobs, end) for end in (None, now + 600)]
    stays.append(await _file(aclient, blobs, None, made=False))
    await _file(aclient, blobs, now)
    left = await _file(aclient, blobs, None, made=False)
    valkey.zadd(keys.FILE_NOTES, {left: now - files.NOTED_S})
    with blobs.writer("a"), blobs.writer("b"):
        half, fresh = (tmp_path / ".incoming").iterdir()
        os.utime(half, (now - UPLOAD_S - 1,) * 2)
        assert await remove_files(aclient.store, blobs) == RemovedFiles(1, 1, 1)
        assert fresh.exists()
    assert await remove_files(aclient.store, blobs) == RemovedFiles()
    assert sorted(os.listdir(tmp_path)) == sorted([".incoming", *stays])


async def test_the_leader_does_it(
    aclient: AsyncClient, blobs: Blobs, valkey: Redis, valkey_url: str, tmp_path: Path
) -> None:
    over = await _file(aclient, blobs, 1)
    settings = SweeperSettings(valkey_url, valkey_url, "s", seldom=0.05, files_dir=str(tmp_path))
    sweeping = asyncio.create_task(lead(aclient, settings))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not valkey.hget(keys.SWEPT, "files_expired"):  # noqa: ASYNC110 - another task's doing
                await asyncio.sleep(0.02)
        assert over not in os.listdir(tmp_path)
    finally:
        sweeping.cancel()
        await asyncio.wait((sweeping,))
