"""The source type `folder`: a watched folder.

    [batches]
    type = "folder"
    folder = "/srv/batches"

A file is taken when it has not changed for some seconds: one that is renamed into the inbox is whole at once, one that
is written there has a writer who pauses no longer. The inbox is looked through again and again; nothing has to tell of
a file, and none is missed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from producers.sources.files.folder import Folder
from producers.sources.files.settings import InboxSettings
from producers.sources.files.source import InboxSource
from producers.sources.files.work import EVERY_S, Work
from producers.sources.source import Context, Source
from producers.store.blobs import open_blobs
from producers.store.inbox import InboxObject

#: Time (s) after which a file that is still in the inbox is named to the store again. If files are moved, it may have
#: gone and come back meanwhile. One that is left is known to the store for weeks.
AGAIN_S: Final = {True: 10.0, False: 3600.0}
#: Time (s) after which a half-written result counts as left by a dead process; and between two looks for such.
HALVES_S: Final = 3600.0


class FolderSettings(InboxSettings):
    """A watched folder."""

    type: Literal["folder"]
    folder: str = Field(min_length=1, description="the path of a folder, which gets inbox/, outbox/ and done/")
    settled_seconds: float = Field(
        5.0, ge=0, description="seconds, 0 or more, for which a file has to be unchanged before it is taken"
    )

    def source(self, name: str, context: Context) -> Source:
        return FolderSource(name, context, self)


SETTINGS = FolderSettings


class FolderSource(InboxSource):
    """Batches of a folder's files."""

    def __init__(self, name: str, context: Context, settings: FolderSettings) -> None:
        self._folder = Folder(Path(settings.folder), moves=settings.after == "move")
        super().__init__(name, self._folder, Work(name, context, self._folder, open_blobs(context.files_dir), settings))
        self._settled_s = settings.settled_seconds

    def _duties(self) -> list[Coroutine[Any, Any, None]]:
        return [self._watch(), self._clean()]

    async def _watch(self) -> None:
        every_s, looks = min(EVERY_S, max(self._settled_s, 0.05)), Looks(self._settled_s, AGAIN_S[self._folder.moves])
        while True:
            there = await asyncio.to_thread(lambda: list(self._folder.files()))
            for found in looks.settled(there, time.monotonic()):
                await self._work.open(found)
            await asyncio.sleep(every_s)

    async def _clean(self) -> None:
        while True:
            await asyncio.to_thread(self._folder.clean, HALVES_S)
            await asyncio.sleep(HALVES_S)


class Looks:
    """The findings of successive looks at a folder."""

    def __init__(self, settled_s: float, again_s: float) -> None:
        self._settled_s = settled_s
        self._again_s = again_s
        self._seen: dict[str, tuple[str, float]] = {}
        """Name -> stamp, and when (s) it is to be taken."""

    def settled(self, there: Sequence[InboxObject], now: float) -> list[InboxObject]:
        """The files to take: unchanged for long enough by `now` (s), or taken `again_s` ago and still there."""
        before, self._seen, due = self._seen, {}, []
        for found in there:
            stamp, at = before.get(found.name, ("", 0.0))
            if stamp != found.stamp:
                at = now + self._settled_s
            if now >= at:
                due.append(found)
                at = now + self._again_s
            self._seen[found.name] = found.stamp, at
        return due
