"""The asyncio client. It writes messages itself, so that submitting never blocks the event loop."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self, Unpack

from redis.asyncio import Redis

from engine.errors import TextError
from engine.labels import Entity
from producers.broker.connect import connect_broker
from producers.client import operations
from producers.client.directory import Directory, ResolvedModel
from producers.client.hub import CLOSED, Hub
from producers.client.listing import Query, QueryFields, list_tasks, page_of
from producers.client.operations import not_found, submit_once
from producers.client.reader import Reader, Shortcut
from producers.client.steps import Fetch, Pause, Send, Step, Steps, T, adrive
from producers.client.submission import TASK, submit, submit_rest
from producers.connection.connect import SILENT_S, SMALL_EACH, SMALL_POOL, connect_pools
from producers.connection.local import servers
from producers.connection.script import Call, aexecute_many, arun
from producers.connection.turns import Turns
from producers.contract.message import Message
from producers.contract.record import Record, trace_fields
from producers.contract.stream import Chunk, End, Event, Result, Row, TaskPage, collect, rows_of
from producers.contract.task import Task
from producers.errors import PenstockError
from producers.store.fleet.routing import Selection
from producers.store.references import Places
from producers.store.usage.limits import Charge
from producers.store.waiting import Room


class AsyncClient:
    """Submits tasks and reads them, on one event loop.

    `broker`, `store`: redis://, rediss:// or unix:// URLs; the store is the broker unless given. The broker may also be
    SQS (sqs://REGION?prefix=pen-), which needs a store and boto3. Without a broker,
    `producers.connection.local` finds both. `patience`: time (s) for which a failing connection is retried.
    `files_dir`: the sweeper's folder or bucket of files, for results that were moved there; unset: FILES_DIR, else the
    location in each result. It connects at the first call. Raises ValueError for another kind of broker; the blocking
    `Client` supports those of kombu.
    """

    def __init__(
        self,
        broker: str | None = None,
        store: str | None = None,
        *,
        patience: float = operations.PATIENCE_S,
        files_dir: str | None = None,
    ) -> None:
        self.patience = operations.checked_patience(patience)
        #: Locations of results that were moved to files.
        self.places = Places(files_dir or os.environ.get("FILES_DIR"))
        broker, store = servers(broker, store)
        self._pools = connect_pools(store)
        #: The store and the broker, for what the client has no method for; and the store by connections that callers'
        #: requests never take.
        self.store: Redis = self._pools.general
        self.reserved: Redis = self._pools.reserved
        self.broker = connect_broker(broker, store, self.store)
        #: Whether the store is the broker, too.
        self.one_server = store == broker
        self.directory = Directory(ordered=self.broker.capabilities.order_per_key)
        self._fetches = Turns(SMALL_POOL, SMALL_EACH)
        self._hub = Hub(self.store)
        self._closed = False

    async def submit(
        self,
        task: Task | None = None,
        /,
        *,
        task_id: str | None = None,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        **fields: Any,
    ) -> AsyncHandle:
        """Queue a task, given as a Task or as its fields.

        `idempotency_key`: for 24 hours, a submit with the same key and task gives the first one, and queues nothing.
        `traceparent`: the caller's W3C trace, which the worker's log names; a bad one is ignored, as everywhere.
        Raises InvalidTask or UnknownModel (nothing was written), TaskExists (another task has this id),
        IdempotencyKeyReused (another task has this key), SubmitFailed (no answer in time: if a record was made, the
        sweeper sends the task).
        """
        task, more = operations.task_of(task, fields), {**TASK, **trace_fields(traceparent)}
        steps = submit_once(self.directory, task, idempotency_key, task_id, self.patience, more)
        return self.get(await self.run(steps))

    async def submit_rest(self, task: Task, task_id: str) -> None:
        """Queue what a dead, equal call left unwritten of a task that was admitted, if it is a task of many texts.
        Raises SubmitFailed."""
        await self.run(submit_rest(self.directory, task, task_id, self.patience))

    async def embed(self, model: str, texts: str | Sequence[Any], **fields: Any) -> list[array[float] | TextError]:
        """As `Client.embed`."""
        handle = await self.submit(kind="embed", model=model, input=texts, **fields)
        return operations.vectors_of_result(await handle.result())

    async def rerank(self, model: str, query: str, documents: Sequence[str], **fields: Any) -> list[float | TextError]:
        """As `Client.rerank`."""
        handle = await self.submit(kind="rerank", model=model, query=query, input=documents, **fields)
        return operations.scored(await handle.result())

    async def classify(
        self, model: str, texts: str | Sequence[Any], *, threshold: float | None = None, **fields: Any
    ) -> list[dict[str, float] | TextError]:
        """As `Client.classify`."""
        handle = await self.submit(kind="classify", model=model, input=texts, **fields)
        rows = operations.rows_of_result(await handle.result())
        return operations.labelled((await self.version_of(await handle.status())).card, rows, threshold)

    async def classify_tokens(
        self, model: str, texts: str | Sequence[str], **fields: Any
    ) -> list[list[Entity] | TextError]:
        """As `Client.classify_tokens`."""
        handle = await self.submit(kind="token_classify", model=model, input=texts, **fields)
        return operations.entities_of_result(await handle.result())

    async def admit(
        self,
        task: Task,
        task_id: str | None = None,
        more: Mapping[str, str | int] = TASK,
        charge: Charge | None = None,
        room: Room | None = None,
        resolved: ResolvedModel | None = None,
        moved: Callable[[ResolvedModel], None] | None = None,
    ) -> AsyncHandle:
        """Submit a task. `more`: fields of the record beside the task's own (`producers.contract.record`).
        `charge`: the accounts that it is charged to; raises LimitReached, too. `room`: the bounds on waiting tasks;
        raises QueueFull, too. `resolved`: the version for which its prompt was made; `moved`: called with the one that
        gets it, if that is another."""
        steps = submit(self.directory, task, task_id, self.patience, more, charge, room, resolved, moved=moved)
        return self.get(await self.run(steps))

    @property
    def tasks(self) -> AsyncTasks:
        """Lists tasks, and retries them."""
        return AsyncTasks(self)

    def get(self, task_id: str) -> AsyncHandle:
        """A handle on a task that anyone has submitted. It looks nothing up yet."""
        return AsyncHandle(self, task_id)

    async def models(self) -> list[dict[str, Any]]:
        """The cards of all models that take tasks (`engine.text.card`), by name."""
        return await self.run(operations.models(self.patience))

    async def aliases(self, models: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
        """For each of these models, its aliases beside the default, each with its version's card."""
        return await self.run(operations.aliases(self.directory, models, self.patience))

    async def card(self, model: str) -> dict[str, Any]:
        """Returns a model's card, as of at most a second ago. Raises UnknownModel, which names the existing models."""
        return (await self.resolve(model)).card

    async def resolve(
        self, model: str, selection: Selection | None = None, *, withdrawn: bool = False
    ) -> ResolvedModel:
        """Returns the version of a model that a task goes to, as of at most a second ago: its card, and the queue of
        its tasks. `model`: its name, perhaps with `@` and an alias or version; `selection`: what the task says, None
        for the model's default. Raises UnknownModel, also for one that nobody serves unless `withdrawn`."""
        return await self.run(self.directory.find(model, self.patience, selection, withdrawn=withdrawn))

    async def version_of(self, record: Record) -> ResolvedModel:
        """Returns the version of a model that ran a task; where that is not known any more, the one that its model's
        name leads to. Raises UnknownModel."""
        return await self.run(operations.version_of(self.directory, record, self.patience))

    async def ping(self) -> None:
        """Raise redis.exceptions.RedisError or OSError unless store and broker each answer the first request."""
        async with asyncio.timeout(SILENT_S):
            await self.store.execute_command("PING")
            if not self.one_server:
                await self.broker.ping()

    def reader(self, task_id: str, start: int = 0, shortcut: Shortcut | None = None) -> Reader:
        """A reader of a task's stream, for uses that `AsyncHandle.stream` does not fit. Close it."""
        return Reader(self.run, self._hub, task_id, start, shortcut)

    async def rows(self, chunk: Chunk) -> list[Row]:
        """The rows of a chunk's texts. Raises TaskNotFound, ResultUnavailable, redis.exceptions.RedisError or
        OSError."""
        async with aclosing(self.get(chunk.task_id).stream()) as events:
            async for event in events:
                if isinstance(event, End) and event.result is not None:
                    return rows_of(event.result)
        raise not_found(chunk.task_id)

    async def collected(self, record: Record, events: Sequence[Event]) -> Result:
        """The result of a final record and all events of its stream. Raises as `rows`."""
        result = collect(record, events)
        rows: list[Row] = []
        if record.status != "completed" or not record.chunks:
            return result
        for event in events:
            rows += await self.rows(event) if isinstance(event, Chunk) else ()
        return replace(result, rows=tuple(rows))

    async def run(self, steps: Steps[T]) -> T:
        """Perform steps (`producers.client.steps`) on this client's connections. Raises PenstockError once it is
        closed."""
        if self._closed:
            raise PenstockError(CLOSED)
        return await adrive(steps, self._perform)

    async def send(self, message: Message) -> None:
        """Put a task's message into its queue. Raises redis.exceptions.RedisError or OSError."""
        await self.broker.send(message)

    async def aclose(self) -> None:
        """Close all connections. Streams that are being read end with an error."""
        self._closed = True
        await self._hub.aclose()
        await self._pools.aclose()
        await self.broker.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.aclose()

    async def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        async with asyncio.timeout(SILENT_S):
            if isinstance(step, Call):
                return await arun(self.store, step)
            if isinstance(step, Send):
                return await self.send(step.message)
            if isinstance(step, Fetch):
                async with self._fetches.turn(SILENT_S):
                    return await asyncio.to_thread(self.places.block, step.reference, step.number)
            return await aexecute_many(self._pools.bulk if step.bulk else self.store, step.commands)


class AsyncHandle:
    """One task."""

    def __init__(self, client: AsyncClient, task_id: str) -> None:
        self._client = client
        self.id = task_id

    def __repr__(self) -> str:
        return f"<AsyncHandle {self.id}>"

    async def status(self) -> Record:
        """A snapshot of the record: `.status`, `.final`, `.tier`, `.model`, `.time(name)`, `.json("usage")`.

        Raises TaskNotFound.
        """
        return await self._client.run(operations.status(self.id, self._client.patience))

    async def stream(self, start: int = 0) -> AsyncGenerator[Event]:
        """Token events from position `start` on, in order, each once, as they are made; then the End.

        Prompt events come before the first token, if the prompt's log probabilities were requested. A stream that ended
        before `start` gives nothing. To leave early, use `contextlib.aclosing`, so that the subscription ends at once.
        Raises ValueError, TaskNotFound, and redis.exceptions.RedisError if the store stays away.
        """
        async with aclosing(self.batches(start)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    async def batches(
        self, start: int = 0, shortcut: Shortcut | None = None, reader: Reader | None = None
    ) -> AsyncGenerator[list[Event]]:
        """Yields the same events in batches, each with all events that are there: one system call for a server.

        `shortcut`: is given tokens that come while the next batch is waited for; they are in no batch then. `reader`:
        one that expected the task before it was submitted; it is closed at the end.
        """
        if reader is None:
            reader = self._client.reader(self.id, start, shortcut)
        else:
            reader.pass_to(shortcut)
        try:
            while (kept := [await reader.next()])[0]:
                yield kept.pop()  # so that the caller alone has them, until it asks for the next ones
        finally:
            reader.close()

    async def result(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - as the sync client's; here it says what timed out
        *,
        raise_for_status: bool = True,
    ) -> Result:
        """Wait for the final state.

        Raises TimeoutError after `timeout` seconds (the task goes on), TaskNotFound, and TaskFailed for a task that
        ended `failed` or `cancelled`, unless told not to.
        """
        waiting = asyncio.timeout(timeout)
        try:
            async with waiting:
                events = await self._events()
        except TimeoutError:
            if not waiting.expired():
                raise
            if not (await self.status()).final:
                raise TimeoutError(operations.unfinished(self.id, timeout)) from None
            events = await self._events()  # the task is final, so this needs no wait, also with a timeout of 0
        result = await self._client.collected(await self.status(), events)
        if raise_for_status:
            result.raise_for_status()
        return result

    async def _events(self) -> list[Event]:
        events: list[Event] = []
        async with aclosing(self.batches()) as batches:
            async for batch in batches:
                events += batch
        return events

    async def cancel(self) -> bool:
        """Cancel the task. True if it ends or has ended `cancelled`; False if it ended otherwise before.

        `result(raise_for_status=False)` then returns the output so far. Raises TaskNotFound.
        """
        return await self._client.run(operations.cancel(self.id, self._client.patience))

    async def delete(self) -> None:
        """Delete the task and all that is stored of it; one that has not ended is cancelled first. Webhooks that were
        not sent yet are not sent any more (docs/use/tasks.md says what stays where, and for how long).

        Raises TaskNotFound, and TaskInBatch for a line of a batch.
        """
        await self._client.run(operations.delete(self.id, self._client.patience))


class AsyncTasks:
    """Lists and retries tasks as `Tasks` does, for asyncio."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(self, **query: Unpack[QueryFields]) -> TaskPage:
        """Lists tasks as `Tasks.list` does."""
        return page_of(await self._client.run(list_tasks(Query(**query), self._client.patience)))

    async def retry(self, task_id: str, *, idempotency_key: str | None = None) -> AsyncHandle:
        """Retries a task as `Tasks.retry` does."""
        return self._client.get(
            await self._client.run(
                operations.retry(self._client.directory, task_id, idempotency_key, self._client.patience)
            )
        )
