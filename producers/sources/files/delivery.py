"""Writes what became of a batch to the outbox, once it has ended.

    errors ─▶ <name>.errors.jsonl, output ─▶ <name>.jsonl ─▶ input moved or left ─▶ input's copy removed ─▶ INBOX_DONE

Both are always written, and either may be empty: what an earlier content of the same name left is not there any more.
The output comes last, so who sees it sees all. Each is whole or not there. Whoever goes on after a kill writes the
same bytes again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from redis.asyncio import Redis

from producers.connection.script import arun
from producers.sources.files.intake import input_file
from producers.sources.files.place import ERRORS, SUFFIX, Place, pieces
from producers.store import files, inbox
from producers.store.batches import Batch
from producers.store.blobs import Blobs
from producers.store.inbox import Entry


class Delivery:
    """Delivers the results of one place's batches."""

    def __init__(self, store: Redis, blobs: Blobs, place: Place) -> None:
        self._store = store
        self._blobs = blobs
        self._place = place

    async def deliver(self, entry: Entry, batch: Batch, stopped: Callable[[], bool]) -> None:
        """Deliver one batch that has ended. Raises Stopped, BlobNotFound, redis.exceptions.RedisError, OSError."""
        name = entry.object.name.removesuffix(SUFFIX)
        there = await asyncio.to_thread(self._place.find, entry.object.name)
        if not await inbox.is_newest(self._store, self._place.name, entry, there):
            name += f".{entry.id}"
        output, errors = batch.fields.get("output_file"), batch.fields.get("error_file")
        gone = [file for file in (output, errors) if file and await files.get(self._store, file) is None]
        reasons = [*(batch.json("reasons") or ()), *map(_gone, gone)]
        for kind, file, said in ((ERRORS, errors, reasons), (SUFFIX, output, [])):
            blob = None if file in gone else file
            await asyncio.to_thread(self._write, name + kind, [_line(batch, one) for one in said], blob, stopped)
        if self._place.moves:
            await asyncio.to_thread(self._place.leave, entry.object)
        await files.remove(self._store, self._blobs, input_file(entry))
        await arun(self._store, inbox.done(self._place.name, entry, forget=self._place.moves))

    def _write(self, name: str, said: Sequence[bytes], blob: str | None, stopped: Callable[[], bool]) -> None:
        """Write an object of the outbox: lines about the input as a whole, and one of the batch's files."""
        if blob is not None and not said:
            self._place.write_blob(name, self._blobs, blob, stopped)
        else:
            self._place.write(name, chain(said, pieces(self._blobs, blob, stopped) if blob else ()))


def _line(batch: Batch, reason: Mapping[str, Any]) -> bytes:
    """A line in the form of all others."""
    return json.dumps({"id": batch.id, "custom_id": None, "response": None, "error": reason}).encode() + b"\n"


def _gone(file: str) -> dict[str, Any]:
    message = f"The batch's file {file} was deleted, or has expired, before it was written here."
    return {"code": "file_gone", "message": message, "line": None, "param": None}
