"""Makes a batch of an open object.

    object ─▶ note, blob, FILE_MADE ─▶ url of its first line ─▶ BATCH_CREATE

The ids of file and batch are in the entry, so whoever goes on after a kill makes the same ones. The sweeper checks the
input's lines, as it checks all inputs: an object with bad lines is a batch that fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.script import arun
from producers.errors import shown
from producers.sources.files.place import Place
from producers.sources.files.settings import InboxSettings
from producers.store import batches, files
from producers.store.batches import ENDPOINTS, TEXT, window_s
from producers.store.blobs import Blobs, lines
from producers.store.inbox import Entry
from producers.sweeper.batches.input import is_blank

#: Lines, blank ones not counted, among which the first one with a known `url` is looked for.
LOOKED_AT: Final = 100


class Intake:
    """Makes batches of one place's objects."""

    def __init__(self, store: Redis, blobs: Blobs, place: Place, settings: InboxSettings) -> None:
        self._store = store
        self._blobs = blobs
        self._place = place
        self._settings = settings

    async def take_in(self, entry: Entry, stopped: Callable[[], bool]) -> None:
        """Make the batch. Raises Replaced, Stopped, redis.exceptions.RedisError and OSError."""
        if entry.object.size > self._settings.max_file:
            await self._refuse(entry)
            return
        file_id = input_file(entry)
        if await files.get(self._store, file_id) is None:
            await self._make_file(entry, file_id, stopped)
        endpoint = self._settings.endpoint
        if endpoint is None:
            endpoint = await asyncio.to_thread(endpoint_of, self._blobs, file_id)
        await arun(self._store, self._create(entry, endpoint))

    async def _make_file(self, entry: Entry, file_id: str, stopped: Callable[[], bool]) -> None:
        kept_s = self._window_s + batches.MARGIN_S + batches.KEPT_S
        end = (entry.at // 1000) + kept_s
        name = entry.object.name.rpartition("/")[2]
        about = files.File(file_id, 0, name, files.BATCH, entry.at // 1000, end, self._settings.tenant or "")
        await files.make(self._store, about, partial(self._place.copy, entry.object, self._blobs, file_id, stopped))

    async def _refuse(self, entry: Entry) -> None:
        """Make a batch that has failed, in one transaction: no sweeper sees it before it has."""
        found, most = entry.object, self._settings.max_file
        message = f"{shown(found.name)} has {found.size} bytes; at most {most} are taken (max_file)"
        reason = {"code": "file_too_large", "message": message, "line": None, "param": None}
        async with self._store.pipeline(transaction=True) as pipe:
            for call in (
                self._create(entry, self._settings.endpoint or ENDPOINTS[0]),
                batches.fail(entry.id, [reason]),
            ):
                pipe.execute_command(*call.whole)
            await pipe.execute()

    @property
    def _window_s(self) -> int:
        seconds = window_s(self._settings.completion_window)
        assert seconds is not None
        return seconds

    def _create(self, entry: Entry, endpoint: str) -> Any:
        fields: dict[str, str | int] = {
            "endpoint": endpoint,
            "input_file": input_file(entry),
            "completion_window": self._settings.completion_window,
            "metadata": json.dumps({**self._settings.metadata, "source": self._place.url(entry.object.name)[:TEXT]}),
        }
        if self._settings.tenant:
            fields["tenant"] = self._settings.tenant
        return batches.create(entry.id, self._window_s, fields)


def input_file(entry: Entry) -> str:
    """The id of the file that the object becomes."""
    return files.new_id(entry.at, f"{entry.id}:input")


def endpoint_of(blobs: Blobs, blob: str) -> str:
    """The endpoint that the first lines are for; the first of all where they name none, which the check then says.

    Blocks. Raises BlobNotFound and OSError.
    """
    requests = (line for line in lines(blobs, blob) if not is_blank(line))
    for line in islice(requests, LOOKED_AT):
        url = _url(line.data.removeprefix(b"\xef\xbb\xbf")) if line.data else None
        if url in ENDPOINTS:
            return str(url)
    return ENDPOINTS[0]


def _url(data: bytes) -> Any:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found.get("url") if isinstance(found, Mapping) else None
