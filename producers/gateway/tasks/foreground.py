"""Runs tasks whose caller waits on the connection, and cancels them when the connection ends.

ids -> reader leases -> submit all -> events of all, as they come -> cancel those that have not ended
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final, TypeVar

from starlette.requests import Request

from producers.client.directory import ResolvedModel
from producers.client.reader import Reader, Shortcut
from producers.client.steps import FAILURES
from producers.connection.log_throttle import warn_throttled
from producers.contract import model_fit
from producers.contract.stream import End, Event
from producers.contract.task import Task
from producers.errors import PenstockError, TaskExists, TaskNotFound
from producers.gateway.context import Gateway
from producers.gateway.fair_share import measured, next_of
from producers.gateway.http import idempotency
from producers.gateway.http.authorization import charge_of, marks, principal_of
from producers.gateway.http.errors import CLIENT_LEFT, ONCE, Problem, unavailable
from producers.gateway.http.request_state import resolve, settle, work_of
from producers.gateway.http.sse import watch, why_stopped
from producers.store.idempotency import KEPT_S, Entry, ids

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Error code of a task that failed through no fault of its request -> HTTP status. Other codes are a worker's refusals.
FAULTS: Final = {
    "engine_error": 500,
    "dead_lettered": 500,
    "failed": 500,
    "adapter_broken": 500,
    "chunk_lost": 500,
    "adapter_not_found": 404,
    "release_missing": 503,
    "submit_failed": 503,
    "expired": 504,
}
#: Codes for which a retry is useless: it would wait as long, or kill as many workers.
FINAL: Final = ("dead_lettered", "adapter_broken", "release_missing", "expired")


class Foreground:
    """The tasks of one request. Always call `close`.

    `more`: fields of their records beside the tasks' own and the caller's. `ids`: the tasks' ids, if they were chosen
    before. `entry`: what the request's Idempotency-Key stands for, see `keyed`. `expects`: all events are read here.
    """

    def __init__(
        self,
        request: Request,
        gateway: Gateway,
        tasks: Sequence[Task],
        more: Mapping[str, str | int] | None = None,
        ids: Sequence[str] | None = None,
        entry: Entry | None = None,
        expects: bool = False,
    ) -> None:
        self._gateway = gateway
        self._request = request
        self._charge = charge_of(request)
        self._tasks = tasks
        self._more = {**(more or {}), **marks(request)}
        self.ids: Final = ids or [str(uuid.uuid4()) for _ in tasks]
        self._open = set(self.ids)
        self._leased: list[str] = []
        self._entry = entry
        self._expects = expects and entry is None
        self._readers: dict[str, Reader] = {}
        #: Whether an earlier request submitted some of them.
        self.replayed = False
        #: The field of the answer that says so, where overload shortened its outputs.
        self.shortened: dict[str, Any] = {}
        #: The version that its tasks went to, once they are submitted.
        self.resolved: ResolvedModel | None = None

    async def waits(self) -> str:
        """The reason why the first of its tasks that has not ended waits (`WaitReasons.text`)."""
        name = next((name for name in self.ids if name in self._open), None)
        whole = principal_of(self._request).may("read")
        return "" if name is None else await self._gateway.waits.text(name, whole=whole)

    @property
    def created(self) -> float:
        """When the tasks were first requested (unix seconds)."""
        return time.time() if self._entry is None else self._entry.at / 1000

    async def submit(self) -> None:
        """Submit all tasks. Raises Problem if too many wait, and as `AsyncClient.submit`; none stays queued then."""
        admission, metrics = self._gateway.admission, self._gateway.metrics
        if self._entry is None or self._entry.state != "made":
            entered = await admission.enter(self._request, self._tasks)
            self._tasks, self._more = entered.tasks, {**self._more, **entered.more}
            self.shortened = {} if entered.to is None else {"shortened_to": entered.to}
        if self._expects:
            self._expect()
        try:
            await self._gateway.readers.enter(self.ids)
        except BaseException:
            self._close_readers()
            raise
        self._leased = list(self.ids)
        for reader in self._readers.values():
            reader.submits()
        try:
            answers = await self._admitted()
            existing = {name for name, answer in zip(self.ids, answers, strict=True) if isinstance(answer, TaskExists)}
            self.replayed = bool(existing)
            failed = [answer for answer in answers if isinstance(answer, BaseException) and not self._shared(answer)]
            if failed:
                raise failed[0]
            for task, name in zip(self._tasks, self.ids, strict=True):
                if name in existing:
                    await self._gateway.client.submit_rest(task, name)
        except BaseException:
            await self.close()
            raise
        self.resolved = await resolve(self._request, self._gateway.client, self._tasks[0])
        for task, name in zip(self._tasks, self.ids, strict=True):
            if name not in existing:
                metrics.submitted(self.resolved.card["name"], task.tier)

    def _expect(self) -> None:
        """Listen for the tasks before they are submitted, so that their streams need not be read first."""
        readers = {name: self._gateway.client.reader(name) for name in self.ids}
        followers = [reader.expect() for reader in readers.values()]
        if followers[0] is not None:
            self._readers, self._more = readers, {**self._more, "followers": followers[0]}

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            reader.close(ended=True)

    async def _admitted(self) -> list[str | BaseException]:
        """The answers to the submits. The first one decides which version all go to, and where they are taken together
        or not at all, whether a month's budget has enough left: what ends meanwhile has used some of that."""
        each, charge = [*zip(self._tasks, self.ids, strict=True)], self._charge
        first: list[str | BaseException] = []
        together = charge is not None and charge.all is not None
        if together or len(each) > 1:
            first += await asyncio.gather(self._admit(*each.pop(0)), return_exceptions=True)
            if isinstance(first[0], BaseException) and not self._shared(first[0]):
                raise first[0]
            settle(self._request, self._tasks[0].model)
        if charge is not None:
            charge.all = None
        submits = [self._admit(task, name) for task, name in each]
        return first + await asyncio.gather(*submits, return_exceptions=True)

    async def _admit(self, task: Task, name: str) -> str:
        return await self._gateway.admission.admit(self._request, task, name, self._more, self._charge)

    def _shared(self, answer: BaseException) -> bool:
        """Whether a submit found the task of an earlier request with the same key."""
        return self._entry is not None and isinstance(answer, TaskExists)

    async def events(self, shortcut: Shortcut | None = None) -> AsyncGenerator[list[tuple[int, Event]]]:
        """All events of all tasks, as (task's number, event), in batches as they come. `shortcut`: as of
        `AsyncHandle.batches`, for a request of one task; with several it has none.

        Raises Problem for a task that failed or was cancelled, TaskNotFound, and redis.exceptions.RedisError or OSError
        if the store stays away.
        """
        direct = shortcut if len(self.ids) == 1 else None
        readers = [
            self._gateway.client.get(name).batches(shortcut=direct, reader=self._readers.get(name)) for name in self.ids
        ]
        async with aclosing(merged(readers)) as batches:
            async for batch in batches:
                problem = None
                for number, event in batch:
                    if isinstance(event, End):
                        self._open.discard(self.ids[number])
                        problem = problem or problem_of_end(event)
                yield batch
                if problem is not None:
                    raise problem

    async def only(self, shortcut: Shortcut | None = None) -> AsyncGenerator[list[Event]]:
        """The events of a request's only task. Raises as `events` does."""
        async with aclosing(self.events(shortcut)) as batches:
            async for batch in batches:
                yield [event for _, event in batch]

    def again(self, number: int, start: int) -> AsyncGenerator[list[Event]]:
        """The events of one ended task from a position on, read again. Raises as `events` does."""
        return self._gateway.client.get(self.ids[number]).batches(start)

    async def close(self) -> None:
        """Cancel the tasks that have not ended. If the store is away, they end when their reader leases lapse.

        So do those of a request with a key, so that its next try finds them.
        """
        await asyncio.shield(asyncio.create_task(self._close()))

    async def _close(self) -> None:
        client = self._gateway.client
        self._close_readers()
        missed = set(self._open) if self._entry is not None else set()
        for name in self._open - missed:
            try:
                await client.get(name).cancel()
            except TaskNotFound:
                pass  # it never had a record
            except (PenstockError, *FAILURES) as error:
                warn_throttled(logger, "task %s of a caller who left is not cancelled yet: %s", name, error)
                missed.add(name)
        self._open.clear()
        leased, self._leased = self._leased, []
        await self._gateway.readers.leave(leased, lapse=missed)


async def keyed(request: Request, gateway: Gateway, tasks: Sequence[Task]) -> Foreground:
    """The tasks of a request; those of an earlier one with the same Idempotency-Key and body, if there was one.

    With a key they are kept as long as it is, and run on for a reader lease when their caller leaves. Raises
    InvalidTask, UnknownModel or Problem.
    """
    await gateway.forms.check(tasks[0], work_of(request, tasks[0].tenant))  # the others have the same form
    tasks = await gateway.accounts.sized(request, tasks)
    if idempotency.HEADER in request.headers:
        for task in tasks:  # a refused request takes no key
            model_fit.check(task, (await resolve(request, gateway.client, task)).card)
    entry = await idempotency.first(request, gateway.client, str(uuid.uuid4()), tenant=tasks[0].tenant)
    if entry is None:
        return Foreground(request, gateway, tasks, expects=True)
    kept = [task.model_copy(update={"ttl": KEPT_S}) for task in tasks]
    return Foreground(request, gateway, kept, {"idempotency": entry.name}, ids(entry.id, len(tasks)), entry)


async def answered(request: Request, gateway: Gateway, waiting: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `waiting` and return its result. Raises Problem if the client leaves, its key ends or the gateway stops
    first."""
    stop = await gateway.streams.enter(request.scope, "answer")
    leaving = asyncio.create_task(watch(request.receive, stop))
    work = asyncio.ensure_future(measured(waiting))
    try:
        await asyncio.wait((work, stop), return_when="FIRST_COMPLETED")
        if work.done():
            return work.result()
        if (ended := why_stopped(stop)) is not None:
            raise ended
        if leaving.done():
            raise Problem(CLIENT_LEFT, "The client left before the answer was there.", code="client_left")
        raise stopping()
    finally:
        leaving.cancel()
        if work.cancel():
            await asyncio.wait((work,))


def stopping() -> Problem:
    """The error for callers that still wait when the gateway stops."""
    return unavailable("This gateway is stopping, and the request with it; send it again.", code="stopping")


async def merged(streams: Sequence[AsyncGenerator[list[Event]]]) -> AsyncGenerator[list[tuple[int, Event]]]:
    """Merge streams into batches of (stream's number, event), in order within a stream, until all end."""
    if len(streams) == 1:  # its reader waits for it without a task for each batch
        async with aclosing(streams[0]) as only:
            async for fresh in only:
                if fresh:
                    yield [(0, event) for event in fresh]
        return
    coming: dict[asyncio.Future[list[Event] | None], int] = {}
    try:
        for number, stream in enumerate(streams):
            coming[asyncio.ensure_future(measured(next_of, stream))] = number
        while coming:
            done, _ = await asyncio.wait(coming, return_when="FIRST_COMPLETED")
            batch: list[tuple[int, Event]] = []
            for future in sorted(done, key=coming.__getitem__):
                number = coming.pop(future)
                events = future.result()
                if events is not None:
                    batch += [(number, event) for event in events]
                    coming[asyncio.ensure_future(measured(next_of, streams[number]))] = number
            if batch:
                yield batch
    finally:
        for future in coming:
            future.cancel()
        if coming:
            await asyncio.wait(coming)
        for stream in streams:
            await stream.aclose()


def problem_of_end(end: End) -> Problem | None:
    """The error for a task that failed, was cancelled, or timed out before its first token; else None."""
    if end.status == "cancelled":
        return Problem(409, "The task of this request was cancelled.", code="cancelled", headers=ONCE)
    # A task that timed out before its first token has no output to answer with.
    if end.status == "failed" or (end.status == "incomplete" and not end.usage["output_tokens"]):
        error: dict[str, Any] = end.error or {}
        code = error.get("code", "failed")
        return Problem(
            FAULTS.get(code, 400),
            error.get("message", "The task failed."),
            code=code,
            param=error.get("param"),
            headers=ONCE if code in FINAL else None,
        )
    return None
