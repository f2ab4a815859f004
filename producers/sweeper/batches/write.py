"""Writes what became of a batch's lines, a part at a time, in the order of the lines.

    the next lines' records, all final ─▶ answers ─▶ a blob for each file ─▶ BATCH_WRITTEN: the part counts, and the
                                                                             lines' records are removed, in one script

Parts are written while later lines still run, so that the store keeps only what is not written yet. A part's blobs have
names of their own, noted before they are written (BATCH_PART). Whoever is killed, or is not the only one, leaves blobs
that no part names: they are removed at the batch's end. So each line is in the files once.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import chain, starmap
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.client.reader import read_block, read_entries
from producers.connection.script import aexecute_many, arun, text
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.stream.events import Event
from producers.store import batches
from producers.store.batches import Batch, Written
from producers.store.blobs import Ahead, BlobNotFound, Blobs
from producers.store.references import Reference
from producers.sweeper.batches.endpoint import Answer, Endpoints, Finished
from producers.sweeper.batches.output import ERROR, OUTPUT, Files, Outcome, unfinished
from producers.sweeper.batches.reading import Requests, read_requests

#: Lines in a part, and their bytes in the input; the last part of a batch may have fewer lines.
PART: Final = 500
PART_BYTES: Final = 4 << 20
#: Records read in one round trip; and tokens whose events are in memory at a time, or one line's.
PAGE: Final = 100
PAGE_TOKENS: Final = 20_000
#: Tokens in a stream's entry for the prompt.
PROMPT_PIECE: Final = 512


class Stale(Exception):
    """Another process has written these lines meanwhile."""


class Writer:
    """Writes parts of batches. `part`: lines in a part."""

    def __init__(self, client: AsyncClient, blobs: Blobs, endpoints: Endpoints, *, part: int = PART) -> None:
        self._store = client.store
        self._blobs = blobs
        self._ahead = Ahead()
        self._endpoints = endpoints
        self._part = part

    async def write(self, batch: Batch) -> int:
        """Write the next part if all of its lines have ended. Returns the number of its lines, else 0.

        Raises redis.exceptions.RedisError, OSError, BlobNotFound and BadLine.
        """
        first, offset = batch.count("written"), batch.count("written_offset")
        most = min(self._part, (batch.total or 0) - first)
        # Of large lines fewer than a page are expanded, until these are written.
        there = most if closing(batch) else min(most, batch.count("line") - first)
        if there <= 0 or not await self._ended(batch, first, min(there, PAGE)):
            return 0
        found = await asyncio.to_thread(read_requests, self._blobs, batch, first, offset, most, PART_BYTES, self._ahead)
        if not await self._ended(batch, first, len(found.requests)):
            return 0
        mark = f"part-{batch.id}-{first}-{secrets.token_hex(4)}"
        names = {kind: f"{mark}.{kind}" for kind in (OUTPUT, ERROR)}
        if not await arun(self._store, batches.begin_parts(batch.id, list(names.values()))):
            return 0
        done = await self._write(batch, found, names)
        if done is not None and await arun(self._store, batches.written(batch.id, done)):
            return done.lines
        for name in names.values():
            await asyncio.to_thread(self._blobs.delete, name)
        return 0

    async def _ended(self, batch: Batch, first: int, count: int) -> bool:
        """Whether all of these lines have ended. A line that is not expanded ends with its batch."""
        expanded = batch.count("line")
        if first + count > expanded and not closing(batch):
            return False
        for lines in _pages(range(first, min(first + count, expanded))):
            commands = [("HMGET", keys.task(batches.task_id(batch.id, line)), "status", "end") for line in lines]
            if any(status is not None and end is None for status, end in await aexecute_many(self._store, commands)):
                return False
        return True

    async def _write(self, batch: Batch, found: Requests, names: Mapping[str, str]) -> Written | None:
        """Write the blobs of a part. None if another process has done it meanwhile."""
        async with Files(self._blobs, names) as files:
            try:
                async with aclosing(self._outcomes(batch, found)) as outcomes:
                    async for some in outcomes:
                        await asyncio.to_thread(files.take, batch, found, some)
            except Stale:
                return None
            parts = await asyncio.to_thread(files.commit)
        first, lines = found.first, len(found.requests)
        return Written(first, lines, found.ends[-1], files.counts[OUTPUT], files.counts[ERROR], files.lapsed, parts)

    async def _outcomes(self, batch: Batch, found: Requests) -> AsyncGenerator[dict[int, Outcome]]:
        """The outcome of each line, in order, some lines at a time."""
        expanded = batch.count("line")
        never = Outcome(code="batch_cancelled" if batch.status == "cancelling" else "batch_expired")
        for lines in _pages(range(found.first, found.first + len(found.requests))):
            known = {line: never for line in lines if line >= expanded}
            records: dict[int, Record] = {}
            for line, raw, refusal in await self._records(batch, [line for line in lines if line < expanded]):
                if refusal is not None:
                    known[line] = Outcome(Answer.of_json(text(refusal)))
                elif not raw:
                    known[line] = await self._lost(batch)
                else:
                    record = records[line] = Record.parse(batches.task_id(batch.id, line), raw)
                    if code := unfinished(batch, record):
                        known[line] = Outcome(code=code)
            for some in _chunks(lines, {line: record for line, record in records.items() if line not in known}):
                yield await self._answers(batch, found, some, known, records)

    async def _records(self, batch: Batch, lines: Sequence[int]) -> list[tuple[int, Any, Any]]:
        """Each line's record, and its refusal if it has one."""
        if not lines:
            return []
        commands: list[tuple[str | int, ...]] = [("HMGET", keys.batch_refused(batch.id), *lines)]
        commands += [("HGETALL", keys.task(batches.task_id(batch.id, line))) for line in lines]
        refusals, *records = await aexecute_many(self._store, commands)
        return list(zip(lines, records, refusals, strict=True))

    async def _lost(self, batch: Batch) -> Outcome:
        """The outcome of a line without a record. Raises Stale if that is because the line is written."""
        now = await batches.read(self._store, batch.id)
        if now is None or now.count("written") != batch.count("written"):
            raise Stale
        return Outcome(code="line_lost")

    async def _answers(
        self,
        batch: Batch,
        found: Requests,
        lines: Sequence[int],
        known: Mapping[int, Outcome],
        records: Mapping[int, Record],
    ) -> dict[int, Outcome]:
        """The outcomes of these lines: known, or the answer that their records and streams give."""
        open_ = [line for line in lines if line not in known]
        events = await self._events([records[line] for line in open_])
        if None in events:
            await self._lost(batch)
        finished = [
            Finished(found.requests[line - found.first].body, records[line], its)
            for line, its in zip(open_, events, strict=True)
            if its is not None
        ]
        answers = iter(await self._endpoints.answers(batch.endpoint, finished) if finished else ())
        made = {
            line: Outcome(code="line_lost") if its is None else Outcome(next(answers))
            for line, its in zip(open_, events, strict=True)
        }
        return {line: known.get(line) or made[line] for line in lines}

    async def _events(self, records: Sequence[Record]) -> list[Sequence[Event] | None]:
        """All events of each task, from its stream or its blocks; None if it has neither."""
        # In this order: blocks replace a stream in one step.
        streams = await aexecute_many(self._store, [("XRANGE", keys.stream(record.id), "-", "+") for record in records])
        results = await aexecute_many(self._store, [("HGETALL", keys.result(record.id)) for record in records])
        return await asyncio.to_thread(lambda: [self._read(s, r) for s, r in zip(streams, results, strict=True)])

    def _read(self, stream: Sequence[Any], result: Mapping[bytes, bytes]) -> list[Event] | None:
        """The events of a task's stream, or of its compacted stream, which may be in a blob. Blocks."""
        if not stream and b"blob" in result:
            moved = Reference.parse(result[b"blob"])
            try:
                blocks = [self._blobs.read(moved.name, *place) for place in moved.blocks]
            except BlobNotFound:
                return None
            return _events(stream, enumerate(blocks))
        return _events(stream, sorted((int(number), block) for number, block in result.items()))


def closing(batch: Batch) -> bool:
    """Whether no more lines are expanded: those that were not are written as they are."""
    return batch.status in ("finalizing", "cancelling")


def _pages(lines: range) -> Iterator[range]:
    for start in range(lines.start, lines.stop, PAGE):
        yield lines[start - lines.start : start - lines.start + PAGE]


def _chunks(lines: Sequence[int], records: Mapping[int, Record]) -> Iterator[list[int]]:
    """The lines, in order, in pieces whose streams have up to PAGE_TOKENS tokens, or one line's."""
    some: list[int] = []
    tokens = 0
    for line in lines:
        weight = _weight(records[line]) if line in records else 0
        if some and tokens + weight > PAGE_TOKENS:
            yield some
            some, tokens = [], 0
        some.append(line)
        tokens += weight
    yield some


def _weight(record: Record) -> int:
    used = record.json("usage") or {}
    return int(used.get("output_tokens", 0)) + PROMPT_PIECE * int(record.fields.get("prompt", 0))


def _events(stream: Sequence[Any], blocks: Iterable[tuple[int, bytes]]) -> list[Event] | None:
    entries = read_entries(stream) if stream else chain.from_iterable(starmap(read_block, blocks))
    return [event for _, event in entries if event is not None] or None
