"""What is known of files: made once, listed by time, gone when removed or expired."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from redis import Redis

from producers import AsyncClient
from producers.connection.script import arun, run, text
from producers.contract import keys
from producers.store import files
from producers.store.blobs import BlobNotFound, Blobs, FolderBlobs
from producers.store.files import File, Room
from tests.producers.store.test_s3 import put


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return FolderBlobs(tmp_path)


async def _make(client: AsyncClient, blobs: Blobs, file: File) -> str:
    await files.note(client.store, file.id)
    put(blobs, file.id)
    return text(await arun(client.store, files.file_made(file)))


async def _made(
    client: AsyncClient, blobs: Blobs, ms: int, purpose: str = "batch", expires_at: int | None = None, tenant: str = ""
) -> File:
    file = File(files.new_id(ms), 5, "in.jsonl", purpose, ms // 1000, expires_at, tenant=tenant)
    assert await _make(client, blobs, file) == "made"
    return file


async def test_files_are_listed_by_time_from_a_cursor_that_may_be_gone(aclient: AsyncClient, blobs: Blobs) -> None:
    made = [await _made(aclient, blobs, ms, "batch" if ms % 2 else "batch_output") for ms in range(1, 8)]
    theirs = await _made(aclient, blobs, 5, tenant="acme")
    store = aclient.store
    assert await files.listed(store, limit=99) == made[::-1]
    assert await files.listed(store, limit=99, tenant="acme") == [theirs]
    assert await files.listed(store, limit=2, newest_first=False) == made[:2]
    assert await files.remove(store, blobs, made[1].id)
    assert not await files.remove(store, blobs, made[1].id)
    with pytest.raises(BlobNotFound):
        blobs.size(made[1].id)
    assert await files.listed(store, after=made[1].id, limit=2, newest_first=False) == made[2:4]
    assert await files.listed(store, after=made[3].id, limit=9, purpose="batch") == [made[2], made[0]]
    assert await files.get(store, made[1].id) is None
    assert await files.get(store, made[0].id) == made[0]


async def test_a_file_is_made_once(aclient: AsyncClient, blobs: Blobs) -> None:
    first, again = (File(files.new_id(1, "batch_1:output"), n, f"{n}.jsonl", "batch_output", 1) for n in (5, 6))
    assert again.id == first.id
    assert await _make(aclient, blobs, first) == "made"
    assert await _make(aclient, blobs, again) == "exists"
    assert await files.get(aclient.store, first.id) == first


async def test_an_expired_file_is_not_there_and_is_named_for_its_removal(aclient: AsyncClient, blobs: Blobs) -> None:
    now = int(time.time())
    stays, over = [await _made(aclient, blobs, n, expires_at=end) for n, end in ((1, now + 600), (2, now))]
    assert await files.get(aclient.store, over.id) is None
    assert await files.listed(aclient.store, limit=9) == [stays]
    assert await files.expired(aclient.store, 9) == [over.id]
    assert await files.remove(aclient.store, blobs, over.id)
    assert await files.expired(aclient.store, 9) == []


async def test_a_blob_whose_maker_died_is_removed_and_one_who_only_slept_begins_again(
    aclient: AsyncClient, blobs: Blobs, valkey: Redis
) -> None:
    file = File(files.new_id(1, "slept"), 0, "in.jsonl", "batch", 1)
    await files.note(aclient.store, file.id)
    put(blobs, file.id)
    assert await files.left_behind(aclient.store, 9) == []
    valkey.zadd(keys.FILE_NOTES, {file.id: int(time.time()) - files.NOTED_S})
    assert await files.left_behind(aclient.store, 9) == [file.id]
    run(valkey, files.removed(file.id, None, None))  # and the sweeper dies
    await files.note(aclient.store, file.id)
    assert run(valkey, files.file_made(file)) == b"late"
    assert await files.left_behind(aclient.store, 9) == [file.id]
    await files.remove(aclient.store, blobs, file.id)
    assert await _make(aclient, blobs, file) == "made"
    assert await files.left_behind(aclient.store, 9) == []


async def test_who_makes_a_file_writes_again_what_the_sweeper_took_meanwhile(
    aclient: AsyncClient, blobs: Blobs, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LATE_S", 0.0)
    about = File(files.new_id(1, "slow"), 0, "out.jsonl", "batch_output", 1, tenant="acme")
    sizes: list[int] = []

    def write() -> int:
        put(blobs, about.id, b"lines")
        sizes.append(blobs.size(about.id))
        if len(sizes) == 1:
            valkey.zadd(keys.FILE_NOTES, {about.id: int(time.time()) - files.NOTED_S})
            run(valkey, files.removed(about.id, "", "", int(time.time())))
            blobs.delete(about.id)
            valkey.zrem(keys.FILE_NOTES, about.id)
        return sizes[-1]

    before = int(time.time())
    await files.make(aclient.store, about, write, kept_s=600)
    file = await files.get(aclient.store, about.id)
    assert file is not None
    assert file.expires_at is not None
    assert before + 600 <= file.expires_at <= int(time.time()) + 600
    assert replace(file, size=0, expires_at=None) == about
    assert (file.size, blobs.size(about.id), len(sizes)) == (5, 5, 2)
    assert await files.left_behind(aclient.store, 9) == []


async def test_a_file_that_is_made_again_after_a_kill_outlives_the_note_of_it(
    aclient: AsyncClient, blobs: Blobs, valkey: Redis
) -> None:
    file = File(files.new_id(1, "batch_1:output"), 0, "out.jsonl", "batch_output", 1)
    assert await _make(aclient, blobs, file) == "made"  # and the maker dies before it tells anybody
    assert await _make(aclient, blobs, file) == "exists"
    await files.note(aclient.store, file.id)  # a third one dies here
    valkey.zadd(keys.FILE_NOTES, {file.id: int(time.time()) - files.NOTED_S})
    for name in await files.left_behind(aclient.store, 9):
        assert not await files.remove_left_behind(aclient.store, blobs, name)
    assert (await files.get(aclient.store, file.id), blobs.size(file.id)) == (file, 0)
    assert await files.left_behind(aclient.store, 9) == []


class TestRoom:
    """What a tenant's uploads reserve, and what its files have."""

    TENANT = "acme"

    def reserve(self, valkey: Redis, upload: str, size: int, most: int | None = 100, files_: int | None = 3) -> Room:
        return files.read_room(run(valkey, files.reserve(upload, self.TENANT, size, most, files_)))

    def make(self, valkey: Redis, size: int, upload: str = "", n: int = 1) -> str:
        file = File(files.new_id(n), size, "in.jsonl", "batch", 1, tenant=self.TENANT)
        valkey.zadd(keys.FILE_NOTES, {file.id: int(time.time())})
        assert run(valkey, files.file_made(file, upload)) == b"made"
        return file.id

    def test_bytes_are_reserved_up_to_the_limit_and_then_are_the_files(self, valkey: Redis) -> None:
        assert self.reserve(valkey, "a", 60) == Room(None, 0)
        assert self.reserve(valkey, "b", 41) == Room("bytes", 60)
        assert self.reserve(valkey, "a", 100) == Room(None, 0), "in the place of what it had"
        self.make(valkey, 30, "a")
        assert self.reserve(valkey, "b", 71) == Room("bytes", 30)
        assert self.reserve(valkey, "b", 70) == Room(None, 30)
        assert self.reserve(valkey, "c", 1, most=None) == Room(None, 100)
        assert files.read_room(run(valkey, files.reserve("d", "other", 100, 100, 1))) == Room(None, 0)

    def test_files_and_uploads_are_counted_together(self, valkey: Redis) -> None:
        self.make(valkey, 1)
        assert [self.reserve(valkey, name, 0).reached for name in "aabc"] == [None, None, None, "files"]
        uploads = [f"u{n}" for n in range(files.MAX_UPLOADS)]
        assert [self.reserve(valkey, name, 0, files_=None).reached for name in uploads][-3:] == [
            None,
            "uploads",
            "uploads",
        ]

    def test_the_reservation_of_a_gateway_that_died_ends(self, valkey: Redis) -> None:
        assert self.reserve(valkey, "a", 100) == Room(None, 0)
        valkey.hset(keys.uploads(self.TENANT), "a", f"100 {int(time.time())}")
        assert self.reserve(valkey, "b", 100) == Room(None, 0)
        assert valkey.hkeys(keys.uploads(self.TENANT)) == [b"b"]
        assert 0 < valkey.ttl(keys.uploads(self.TENANT)) <= files.LEASE_S

    def test_a_file_that_is_removed_gives_its_bytes_back_once(self, valkey: Redis) -> None:
        self.reserve(valkey, "a", 50)
        first, second = self.make(valkey, 50, "a"), self.make(valkey, 20, n=2)
        for _ in range(2):
            run(valkey, files.removed(first, self.TENANT, "batch"))
        assert self.reserve(valkey, "b", 81) == Room("bytes", 20)
        run(valkey, files.removed(second, self.TENANT, "batch"))
        assert self.reserve(valkey, "b", 100) == Room(None, 0)

    def test_what_was_never_counted_or_is_lost_is_added_up_from_the_list(self, valkey: Redis) -> None:
        """Files of an earlier release, or a counter that somebody removed."""
        made = [self.make(valkey, size, n=size) for size in (10, 20)]
        assert not valkey.exists(keys.file_bytes(self.TENANT))
        run(valkey, files.removed(made[0], self.TENANT, "batch"))
        assert self.reserve(valkey, "a", 81) == Room("bytes", 20)
        assert 0 < valkey.ttl(keys.file_bytes(self.TENANT)) <= 24 * 3600
        valkey.delete(keys.file_bytes(self.TENANT))
        assert self.reserve(valkey, "a", 81) == Room("bytes", 20)
