"""Sends the spans of tasks that have ended to an OpenTelemetry collector, where traces are turned on.

    rows of the ledger since the mark ─▶ traceparent of each ─ sampled ─▶ its record ─▶ task_spans ─▶ OTLP ─▶ the mark

The ledger is the queue: a row is there for every end, whichever processes died, and stays for hours. So while the
collector is away nothing waits and nothing is held in memory. Rows that are too old by the time it is back are passed
over, and counted (`traces_dropped` in `penstock:swept`).

| dies after | state | who repairs it |
| --- | --- | --- |
| the spans were sent | the mark is before them | the next leader sends them again, with the same ids |
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.connection.script import aexecute, aexecute_many, text
from producers.contract import keys
from producers.contract.record import Record
from producers.errors import BrokenRecord
from producers.store.measurements import KEPT_S
from producers.tracing.export import Tracer
from producers.tracing.spans import FIELDS, TRACE_FIELDS, Span, TaskTrace, task_spans

#: The name of the mark (`keys.metrics_mark`): the id of the last row whose task was sent, or passed over.
SOURCE: Final = "traces"
#: Time (ms) after its end at which a task's spans are made: most have been settled by then.
AFTER_MS: Final = 2_000
#: Age (ms) of rows that are passed over.
TOO_OLD_MS: Final = 15 * 60_000
#: Age (ms) up to which the first sweep of all takes rows: a sweeper may begin to lead well after tasks came.
FIRST_MS: Final = 60_000
#: Rows that are taken at a time, and tasks whose records are read at a time.
PAGE: Final = 500
RECORDS: Final = 50
#: Lines of a batch whose tasks are sent, its first ones: they are all in the trace of the request that made the batch.
BATCH_LINES: Final = 100
#: Time (s) after which a sweep sends no more, and for which it waits for an answer: together less than it may take.
SWEEP_S: Final = 15.0
ANSWER_S: Final = 15.0
#: The fields of a record that decide whether its task is sent.
DECIDING: Final = (*TRACE_FIELDS, "line", "parent")


class TaskTraces:
    """`sweep` it now and then. One for a process; `close` it."""

    def __init__(self, client: AsyncClient, tracer: Tracer, after_ms: int = AFTER_MS) -> None:
        self._store = client.store
        self._tracer = tracer
        self._after_ms = after_ms
        self._sender = ThreadPoolExecutor(1, "penstock-spans")
        self._sending: asyncio.Future[bool] | None = None

    def close(self) -> None:
        """Wait for no call that is under way."""
        self._sender.shutdown(wait=False, cancel_futures=True)
        self._tracer.close(0.0)

    async def sweep(self) -> dict[str, int]:
        """Send what has come since the last call of whomever. Answers how many tasks were sent and how many were
        passed over. Raises redis.exceptions.RedisError or OSError."""
        counts = {"traces_sent": 0, "traces_dropped": 0}
        if self._sending is not None and not self._sending.done():
            return counts  # the collector still has not answered the last call
        mark_key, until = keys.metrics_mark(SOURCE), time.monotonic() + SWEEP_S
        while True:
            raw = await aexecute(self._store, "GET", mark_key)
            seconds, micros = await aexecute(self._store, "TIME")
            now = int(seconds) * 1000 + int(micros) // 1000
            mark = text(raw) if raw else f"{now - max(FIRST_MS, self._after_ms)}-0"
            rows: Any = await aexecute(
                self._store, "XRANGE", keys.LEDGER, f"({mark}", str(now - self._after_ms), "COUNT", PAGE
            )
            if not rows:
                if not raw:
                    await aexecute(self._store, "SET", mark_key, mark, "EX", KEPT_S)
                return counts
            behind_mark = dict(counts)  # other rows come again, and are counted then
            ended = []
            for entry, fields in rows:
                if int(text(entry).partition("-")[0]) < now - TOO_OLD_MS:
                    counts["traces_dropped"] += 1
                else:
                    task_id = text(dict(zip(fields[::2], fields[1::2], strict=True))[b"id"])
                    ended.append((text(entry), task_id))
            sampled = await self._sampled(ended)
            for start in range(0, len(sampled), RECORDS):
                part = sampled[start : start + RECORDS]
                spans, tasks = await self._spans([task_id for _, task_id in part])
                if spans and not await self._send(spans):
                    return behind_mark
                counts["traces_sent"] += tasks
                await aexecute(self._store, "SET", mark_key, part[-1][0], "EX", KEPT_S)
                behind_mark = dict(counts)
                if time.monotonic() > until:
                    return counts
            await aexecute(self._store, "SET", mark_key, text(rows[-1][0]), "EX", KEPT_S)
            if len(rows) < PAGE:
                return counts

    async def _sampled(self, ended: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of the tasks (row, id) whose traces are sent. What was deleted since has none, and of a batch's lines
        the first ones alone have."""
        answers = await aexecute_many(self._store, [("HMGET", keys.task(name), *DECIDING) for _, name in ended])
        sampled: list[tuple[str, str]] = []
        parents: dict[str, str] = {}
        for (row, task_id), values in zip(ended, answers, strict=True):
            fields = _fields(DECIDING, values)
            trace = TaskTrace.of(task_id, fields)
            line = fields.get("line", "0")
            if not fields or (line.isdecimal() and int(line[:16]) >= BATCH_LINES):
                continue
            if self._tracer.sampled(trace.trace_id, trace.parent):
                sampled.append((row, task_id))
                parents.pop(fields.get("parent", ""), None)
                parents |= {fields["parent"]: row} if "parent" in fields else {}
        return await self._with_parents(sampled, parents)

    async def _with_parents(self, sampled: list[tuple[str, str]], parents: dict[str, str]) -> list[tuple[str, str]]:
        """The tasks, and parents of chunks among them that have ended, which have no rows. `parents`: id -> the row of
        its last chunk here. One ends with its last chunk, in the same script; if it failed before, it may come again
        with the chunks that end later, with the same ids."""
        if not parents:
            return sampled
        names = [*parents]
        ended = await aexecute_many(self._store, [("HGET", keys.task(name), "finished") for name in names])
        after = {parents[name]: name for name, finished in zip(names, ended, strict=True) if finished}
        return [pair for row, task_id in sampled for pair in ((row, task_id), (row, after.get(row, ""))) if pair[1]]

    async def _spans(self, ids: list[str]) -> tuple[list[Span], int]:
        """Their spans, and how many of them have some."""
        answers = await aexecute_many(self._store, [("HMGET", keys.task(name), *FIELDS) for name in ids])
        spans: list[Span] = []
        tasks = 0
        for task_id, values in zip(ids, answers, strict=True):
            fields = _fields(FIELDS, values)
            try:
                record = Record.parse(task_id, fields)
            except BrokenRecord:
                continue
            parts = task_spans(record, TaskTrace.of(task_id, fields))
            tasks += bool(parts)
            spans += parts
        return spans, tasks

    async def _send(self, spans: list[Span]) -> bool:
        """Returns False if the collector does not take them, or does not answer soon: then its answer is not waited
        for, as little as if the sweep is cancelled."""
        self._sending = asyncio.get_running_loop().run_in_executor(self._sender, self._tracer.export, spans)
        await asyncio.wait((self._sending,), timeout=ANSWER_S)
        return self._sending.done() and self._sending.result()


def _fields(names: tuple[str, ...], values: Any) -> dict[str, str]:
    """A record's fields, without those that it lacks or that are no text."""
    fields = {}
    for name, value in zip(names, values or (), strict=True):
        if value is not None:
            fields[name] = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return fields
