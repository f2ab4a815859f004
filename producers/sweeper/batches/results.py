"""A batch's results: its lines' outcomes, written a part at a time in the order of the lines, then joined to files.

    the next lines' records, all final ─▶ answers ─▶ a blob for each file ─▶ BATCH_WRITTEN: the part counts, and the
                                                                             lines' records are removed, in one script
    all lines written: parts ─▶ one blob for each file ─▶ FILE_MADE ─▶ BATCH_END ─▶ parts removed ─▶ BATCH_CLOSE

Parts are written while later lines still run, so that the store keeps only what is not written yet. A part's blobs have
names of their own, noted before they are written (BATCH_PART). Whoever is killed, or is not the only one, leaves blobs
that no part names: they are removed at the batch's end. So each line is in the files once. The files' ids are functions
of the batch's, so whoever goes on after a kill makes the same files. Lines have OpenAI's form.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import zlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from typing import Any, Final, Self

from redis.asyncio import Redis

from producers.client.aio import AsyncClient
from producers.client.reader import read_block, read_entries
from producers.connection.script import aexecute_many, arun, text
from producers.contract import keys
from producers.contract.record import BROKEN, Record, read_error
from producers.contract.stream import End, Event
from producers.store import batches, files, protocol
from producers.store.batches import Batch, Part, Written, task_id
from producers.store.blobs import Ahead, BlobNotFound, Blobs, BlobWriter
from producers.store.references import Reference
from producers.sweeper.batches.endpoint import Answer, Endpoints, Finished
from producers.sweeper.batches.input import Requests, read_requests

log = logging.getLogger(__name__)

OUTPUT: Final = "output"
ERROR: Final = "error"
#: Code of a line that did not end in time -> its message.
REASONS: Final = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "batch_cancelled": "This request was not executed, or not to its end, because the batch was cancelled.",
    "line_lost": "What this request's task made is gone from the store, as it was removed or its time to live has "
    "ended, or cannot be read.",
}
LAPSED: Final = "batch_expired"
#: Lines in a part, and their bytes in the input; the last part of a batch may have fewer lines.
PART: Final = 500
PART_BYTES: Final = 4 << 20
#: Records read in one round trip; and tokens whose events are in memory at a time, or one line's.
PAGE: Final = 100
PAGE_TOKENS: Final = 20_000
#: Tokens in a stream's entry for the prompt.
PROMPT_PIECE: Final = 512
#: Bytes of vectors, labels and scores that are as much as a token's event: six numbers, as objects and as JSON.
RESULT_PIECE: Final = 32
#: Tasks cancelled or forgotten in one round trip.
CANCEL_PAGE: Final = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """A line's outcome: an answer, or the code of REASONS."""

    answer: Answer | None = None
    code: str = ""

    @property
    def kind(self) -> str:
        """The file that the line goes to."""
        return OUTPUT if self.answer is not None and self.answer.status == 200 else ERROR

    def to_line(self, batch: Batch, line: int, custom_id: str) -> bytes:
        """The line of the file, with its end."""
        name = task_id(batch.id, line)
        head = f'{{"id": "batch_req_{name.replace("-", "")}", "custom_id": {json.dumps(custom_id)}, '
        if self.answer is None:
            error = json.dumps({"code": self.code, "message": REASONS[self.code]})
            return f'{head}"response": null, "error": {error}}}\n'.encode()
        warning = f'"warning": {json.dumps(self.answer.warning)}, ' if self.answer.warning else ""
        answer = f'"response": {{"status_code": {self.answer.status}, "request_id": "{name}", {warning}"body": '
        return b"".join((head.encode(), answer.encode(), self.answer.body, b'}, "error": null}\n'))


def unfinished(batch: Batch, record: Record) -> str:
    """The code of a final record that was late, or cancelled, with its batch; empty if it ended by itself."""
    error = record.json("error") or {}
    if record.status in ("incomplete", "failed") and error.get("code") == "expired":
        return LAPSED if (record.time("finished") or 0) >= batch.deadline else ""
    return "batch_cancelled" if record.status == "cancelled" and batch.status == "cancelling" else ""


class PartFiles:
    """The blobs of one part, written as its lines come. `names`: kind -> blob. Leaving the context without `commit`
    discards them."""

    def __init__(self, blobs: Blobs, names: Mapping[str, str]) -> None:
        self.counts = dict.fromkeys(names, 0)
        self.lapsed = 0
        self._blobs = blobs
        self._names = names
        self._writers: dict[str, BlobWriter] = {}

    def take(self, batch: Batch, page: Requests, outcomes: Mapping[int, Outcome]) -> None:
        """Write these lines. Blocks. Raises OSError."""
        pieces: dict[str, list[bytes]] = {kind: [] for kind in self._names}
        for line, outcome in outcomes.items():
            pieces[outcome.kind].append(outcome.to_line(batch, line, page.requests[line - page.first].custom_id))
            self.lapsed += outcome.code == LAPSED
        for kind, encoded in pieces.items():
            if encoded:
                self.counts[kind] += len(encoded)
                if kind not in self._writers:
                    self._writers[kind] = self._blobs.writer(self._names[kind])
                self._writers[kind].write(b"".join(encoded))

    def commit(self) -> list[Part]:
        """Make the blobs durable, those that have lines. Blocks. Raises OSError."""
        for writer in self._writers.values():
            writer.commit()
        return [Part(kind, self._names[kind], writer.size) for kind, writer in self._writers.items()]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *how: Any) -> None:
        for writer in self._writers.values():
            await asyncio.to_thread(writer.__exit__, *how)


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
        limit = min(self._part, (batch.total or 0) - first)
        # Where lines are large, fewer than a page are expanded until these are written.
        there = limit if closing(batch) else min(limit, batch.count("line") - first)
        if there <= 0 or not await self._ended(batch, first, min(there, PAGE)):
            return 0
        page = await asyncio.to_thread(read_requests, self._blobs, batch, first, offset, limit, PART_BYTES, self._ahead)
        if not await self._ended(batch, first, len(page.requests)):
            return 0
        mark = f"part-{batch.id}-{first}-{secrets.token_hex(4)}"
        names = {kind: f"{mark}.{kind}" for kind in (OUTPUT, ERROR)}
        if not await arun(self._store, batches.begin_parts(batch.id, list(names.values()))):
            return 0
        done = await self._write(batch, page, names)
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

    async def _write(self, batch: Batch, page: Requests, names: Mapping[str, str]) -> Written | None:
        """Write the blobs of a part. None if another process has done it meanwhile."""
        async with PartFiles(self._blobs, names) as files:
            try:
                async with aclosing(self._outcomes(batch, page)) as outcomes:
                    async for decided in outcomes:
                        await asyncio.to_thread(files.take, batch, page, decided)
            except Stale:
                return None
            parts = await asyncio.to_thread(files.commit)
        first, lines = page.first, len(page.requests)
        return Written(first, lines, page.ends[-1], files.counts[OUTPUT], files.counts[ERROR], files.lapsed, parts)

    async def _outcomes(self, batch: Batch, page: Requests) -> AsyncGenerator[dict[int, Outcome]]:
        """The outcome of each line, in order, some lines at a time."""
        expanded = batch.count("line")
        never = Outcome(code="batch_cancelled" if batch.status == "cancelling" else "batch_expired")
        for lines in _pages(range(page.first, page.first + len(page.requests))):
            decided = {line: never for line in lines if line >= expanded}
            records: dict[int, Record] = {}
            for line, raw, refusal in await self._records(batch, [line for line in lines if line < expanded]):
                if refusal is not None:
                    decided[line] = Outcome(Answer.of_json(text(refusal)))
                elif not raw:
                    decided[line] = await self._lost(batch)
                else:
                    try:
                        record = Record.parse(batches.task_id(batch.id, line), raw)
                        code = unfinished(batch, record)
                        _weight(record)
                    except BROKEN as error:  # it must not hold up the others for ever
                        log.error("a line of batch %s is lost: %s", batch.id, error)
                        code = "line_lost"
                    else:
                        records[line] = record
                    if code:
                        decided[line] = Outcome(code=code)
            for chunk in chunks(lines, {line: record for line, record in records.items() if line not in decided}):
                yield await self._answers(batch, page, chunk, decided, records)

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
        page: Requests,
        lines: Sequence[int],
        decided: Mapping[int, Outcome],
        records: Mapping[int, Record],
    ) -> dict[int, Outcome]:
        """The outcomes of these lines: known, or the answer that their records and streams give."""
        open_ = [line for line in lines if line not in decided]
        events = await self._events([records[line] for line in open_])
        if None in events:
            await self._lost(batch)
        finished = [
            Finished(page.requests[line - page.first].body, records[line], its)
            for line, its in zip(open_, events, strict=True)
            if its is not None
        ]
        answers = iter(await self._endpoints.answers(batch.endpoint, finished) if finished else ())
        answered = {
            line: Outcome(code="line_lost") if its is None else Outcome(next(answers))
            for line, its in zip(open_, events, strict=True)
        }
        return {line: decided.get(line) or answered[line] for line in lines}

    async def _events(self, records: Sequence[Record]) -> list[Sequence[Event] | None]:
        """All events of each task, from its stream or its blocks; None if it has neither."""
        # In this order: blocks replace a stream in one step.
        streams = await aexecute_many(self._store, [("XRANGE", keys.stream(record.id), "-", "+") for record in records])
        results = await aexecute_many(self._store, [("HGETALL", keys.result(record.id)) for record in records])
        return await asyncio.to_thread(
            lambda: [self._read(*one) for one in zip(records, streams, results, strict=True)]
        )

    def _read(self, record: Record, stream: Sequence[Any], result: Mapping[bytes, bytes]) -> Sequence[Event] | None:
        """The events of a task's stream, or of its compacted stream, which may be in a blob. Blocks."""
        blocks: Iterable[tuple[int, bytes]] = ()
        if not stream and b"blob" in result:
            moved = Reference.parse(result[b"blob"])
            try:
                blocks = enumerate([self._blobs.read(moved.name, *span) for span in moved.blocks])
            except BlobNotFound:
                return None
        elif not stream:
            blocks = sorted((int(number), block) for number, block in result.items())
        try:
            return _events(stream, blocks)
        except (*BROKEN, LookupError, zlib.error):  # it must not hold up the others for ever
            log.exception("the output of task %s of a batch cannot be read", record.id)
        return (
            None if record.status == "completed" else [End(0, record.status, (), {}, read_error(record.json("error")))]
        )


def closing(batch: Batch) -> bool:
    """Whether no more lines are expanded: those that were not are written as they are."""
    return batch.status in ("finalizing", "cancelling")


def _pages(lines: range) -> Iterator[range]:
    for start in range(lines.start, lines.stop, PAGE):
        yield lines[start - lines.start : start - lines.start + PAGE]


def chunks(lines: Sequence[int], records: Mapping[int, Record]) -> Iterator[list[int]]:
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
    result = int(record.fields.get("result_bytes", 0)) // RESULT_PIECE
    return int(used.get("output_tokens", 0)) + PROMPT_PIECE * int(record.fields.get("prompt", 0)) + result


def _events(stream: Sequence[Any], blocks: Iterable[tuple[int, bytes]]) -> list[Event] | None:
    entries = read_entries(stream) if stream else chain.from_iterable(starmap(read_block, blocks))
    return [event for _, event in entries if event is not None] or None


class Finisher:
    """Ends batches."""

    def __init__(self, client: AsyncClient, blobs: Blobs) -> None:
        self._store = client.store
        self._blobs = blobs

    async def finish(self, batch: Batch) -> str:
        """End the batch if all lines are written. Returns its status then.

        Raises redis.exceptions.RedisError and OSError.
        """
        if batch.total is not None and batch.count("written") < batch.total:
            return batch.status
        try:
            file_ids = {kind: await self._file(batch, kind) for kind in (OUTPUT, ERROR)}
        except BlobNotFound:  # another process has ended the batch, and removed its parts
            return batch.status
        return text(await arun(self._store, batches.end(batch.id, file_ids[OUTPUT], file_ids[ERROR])))

    async def _file(self, batch: Batch, kind: str) -> str | None:
        """The id of the batch's file of this kind, which is there then; None if it has no lines."""
        parts = [part.name for part in await batches.parts(self._store, batch.id) if part.kind == kind]
        if not parts:
            return None
        at = batch.time("created") or 0
        file_id = files.new_id(at, f"{batch.id}:{kind}")
        name = f"{batch.id}_{kind}.jsonl"
        file = files.File(file_id, 0, name, files.BATCH_OUTPUT, at // 1000, tenant=batch.tenant)
        await files.make(self._store, file, partial(self._blobs.join, file_id, parts), batch.output_kept_s)
        return file_id

    async def tidy(self, batch: Batch) -> None:
        """Remove what a batch that has ended leaves: parts, and the tasks of lines that nobody wrote."""
        ids = unwritten(batch)
        for start in range(0, len(ids), CANCEL_PAGE):
            await cancel(self._store, ids[start : start + CANCEL_PAGE])
            await arun(self._store, batches.drop(batch.id, ids[start : start + CANCEL_PAGE]))
        for name in await self._store.smembers(keys.batch_begun(batch.id)):
            await asyncio.to_thread(self._blobs.delete, text(name))
        await arun(self._store, batches.close(batch.id))

    async def cancel_lines(self, batch: Batch) -> None:
        """Cancel the tasks of all lines that have not ended."""
        ids = unwritten(batch)
        for start in range(0, len(ids), CANCEL_PAGE):
            await cancel(self._store, ids[start : start + CANCEL_PAGE])


def unwritten(batch: Batch) -> list[str]:
    """Ids of the tasks of lines that are expanded and not written. Some were refused, and have no task."""
    return [batches.task_id(batch.id, line) for line in range(batch.count("written"), batch.count("line"))]


async def cancel(store: Redis, ids: Sequence[str]) -> None:
    """CANCEL each of these tasks; one that has ended, or is gone, stays so."""
    calls = [protocol.cancel(name) for name in ids]
    async with store.pipeline(transaction=False) as pipe:
        for call in calls:
            pipe.execute_command(*(call.whole if call is calls[0] else call.command))
        await pipe.execute()
