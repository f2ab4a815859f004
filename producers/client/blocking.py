"""The blocking client. For a broker that is not Redis, Celery sends its messages, so it takes any broker of kombu.

A `Portal` runs the asyncio reader's event loop on a thread of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self, Unpack

from engine.errors import TextError
from engine.labels import Entity
from producers.broker.base import Sender
from producers.broker.connect import connect_sender, is_known
from producers.client import operations
from producers.client.aio import AsyncClient
from producers.client.directory import Directory
from producers.client.hub import CLOSED
from producers.client.listing import Query, QueryFields, list_tasks, page_of
from producers.client.operations import submit_once
from producers.client.steps import Fetch, Pause, Send, Step, Steps, T, drive
from producers.client.submission import TASK
from producers.connection.connect import connect
from producers.connection.local import servers
from producers.connection.script import Call, run
from producers.contract import keys
from producers.contract.message import Message
from producers.contract.record import Record, trace_fields
from producers.contract.stream import Event, Result, TaskPage, collect
from producers.contract.task import Task
from producers.errors import PenstockError

if TYPE_CHECKING:
    from celery import Celery

FORKED = "this stream was opened before a fork: open it again"


class Client:
    """Submits tasks and reads them. One client serves all threads of a process; it may be made before a fork.

    `broker`, `store`: URLs as in `producers.connection.connect`; the broker may also be SQS (sqs://REGION?prefix=pen-,
    with its own store), or any that kombu supports. The store is the broker unless given. Without a broker,
    `producers.connection.local` finds both. `patience`: time (s) for which a failing connection is retried.
    `files_dir`: as in AsyncClient. It connects at the first call. Raises ValueError for a bad URL.
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
        self._files_dir = files_dir
        broker, self._store_url = servers(broker, store)
        self._broker_url = broker
        self._store = connect(self._store_url)
        #: None where kombu speaks to the broker.
        self._broker: Sender | None = None
        if is_known(broker):
            self._broker = connect_sender(broker, self._store_url, self._store)
        ordered = self._broker is not None and self._broker.capabilities.order_per_key
        self.directory = Directory(ordered=ordered)
        self._lock = threading.Lock()
        self._closed = False
        #: The last pair is in use. A pair from before a fork is kept untouched: it shares the parent's epoll.
        self._reading: list[tuple[Portal, AsyncClient]] = []

    def submit(
        self,
        task: Task | None = None,
        /,
        *,
        task_id: str | None = None,
        idempotency_key: str | None = None,
        traceparent: str | None = None,
        **fields: Any,
    ) -> Handle:
        """Queue a task, given as a Task or as its fields.

        `idempotency_key`: for 24 hours, a submit with the same key and task gives the first one, and queues nothing.
        `traceparent`: the caller's W3C trace, which the worker's log names; a bad one is ignored, as everywhere.
        Raises InvalidTask or UnknownModel (nothing was written), TaskExists (another task has this id),
        IdempotencyKeyReused (another task has this key), SubmitFailed (no answer in time: if a record was made, the
        sweeper sends the task).
        """
        task = operations.task_of(task, fields)
        more = {**TASK, **trace_fields(traceparent)}
        return self.get(self.run(submit_once(self.directory, task, idempotency_key, task_id, self.patience, more)))

    def embed(self, model: str, texts: str | Sequence[Any], **fields: Any) -> list[array[float] | TextError]:
        """The vectors of texts, each an array of fp32 numbers. `texts`: a text, or a list of at most 10,000, each text
        or a list of token ids. `fields`: other fields of the task, such as `dimensions` or `tier`. With
        `on_error="item"` a bad text has its TextError in place of a vector, and the others have theirs.

        Waits for the result. Raises as `submit`, and TaskFailed.
        """
        result = self.submit(kind="embed", model=model, input=texts, **fields).result()
        return operations.vectors_of_result(result)

    def rerank(self, model: str, query: str, documents: Sequence[str], **fields: Any) -> list[float | TextError]:
        """The score of each document, at most 10,000, by its relevance to a query. Raises as `embed`."""
        task = self.submit(kind="rerank", model=model, query=query, input=documents, **fields)
        return operations.scored(task.result())

    def classify(
        self, model: str, texts: str | Sequence[Any], *, threshold: float | None = None, **fields: Any
    ) -> list[dict[str, float] | TextError]:
        """For each text, at most 10,000, the probability of each label. `threshold`: without labels below it. Raises as
        `embed`."""
        handle = self.submit(kind="classify", model=model, input=texts, **fields)
        rows = operations.rows_of_result(handle.result())
        card = self.run(operations.version_of(self.directory, handle.status(), self.patience)).card
        return operations.labelled(card, rows, threshold)

    def classify_tokens(self, model: str, texts: str | Sequence[str], **fields: Any) -> list[list[Entity] | TextError]:
        """For each text, at most 10,000, its labelled parts in order, such as names. `fields`: such as
        `aggregation_strategy` and `threshold`. Raises as `embed`."""
        result = self.submit(kind="token_classify", model=model, input=texts, **fields).result()
        return operations.entities_of_result(result)

    @property
    def tasks(self) -> Tasks:
        """Lists tasks, and retries them."""
        return Tasks(self)

    def get(self, task_id: str) -> Handle:
        """A handle on a task that anyone has submitted. It looks nothing up yet."""
        return Handle(self, task_id)

    def models(self) -> list[dict[str, Any]]:
        """The cards of all models that take tasks (`engine.text.card`), by name."""
        return self.run(operations.models(self.patience))

    def run(self, steps: Steps[T]) -> T:
        """Perform steps (`producers.client.steps`) on this client's connections. Raises PenstockError once closed."""
        self._check_open()
        return drive(steps, self._perform)

    def reading(self) -> tuple[Portal, AsyncClient]:
        """The thread that reads streams, and its client. They are made at the first call, and again after a fork."""
        with self._lock:
            self._check_open()
            if not self._reading or not self._reading[-1][0].usable:
                client = AsyncClient(self._store_url, patience=self.patience, files_dir=self._files_dir)
                self._reading.append((Portal(), client))
            return self._reading[-1]

    def close(self) -> None:
        """Close all connections. Streams that are being read end with an error."""
        with self._lock:
            self._closed = True
            for portal, client in self._reading:
                if portal.usable:
                    portal.call(client.aclose())
                    portal.close()
        self._store.close()
        if self._broker is not None:
            self._broker.close()
        if "_app" in self.__dict__:
            self._app.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise PenstockError(CLOSED)

    def _perform(self, step: Step) -> Any:
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        if isinstance(step, Call):
            return run(self._store, step)
        if isinstance(step, Send):
            return self._send(step.message)
        assert not isinstance(step, Fetch), "the asyncio client reads results"
        with self._store.pipeline(transaction=False) as pipe:
            for command in step.commands:
                pipe.execute_command(*command)
            return pipe.execute()

    def _send(self, message: Message) -> None:
        if self._broker is not None:
            self._broker.send(message)
            return
        from kombu.exceptions import OperationalError

        try:
            self._app.send_task(
                keys.TASK_NAME,
                args=[],
                kwargs={},
                add_to_parent=False,
                # Celery retries once with a fresh connection; `steps` decides how long to go on.
                retry=True,
                retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0},
                **message.options(),
            )
        except OperationalError as error:
            raise ConnectionError(f"the broker did not take it: {error}") from error

    @cached_property
    def _app(self) -> Celery:
        # Imported here: clients that only read, or send to Redis, do not need Celery.
        from celery import Celery

        app = Celery("penstock", broker=self._broker_url, set_as_current=False)
        app.conf.update(task_serializer="json", task_protocol=2, task_send_sent_event=False)
        return app


class Handle:
    """One task."""

    def __init__(self, client: Client, task_id: str) -> None:
        self._client = client
        self.id = task_id

    def __repr__(self) -> str:
        return f"<Handle {self.id}>"

    def status(self) -> Record:
        """A snapshot of the record: `.status`, `.final`, `.tier`, `.model`, `.time(name)`, `.json("usage")`.

        Raises TaskNotFound.
        """
        return self._client.run(operations.status(self.id, self._client.patience))

    def stream(self, start: int = 0) -> Generator[Event]:
        """Token events from position `start` on, in order, each once, as they are made; then the End.

        Prompt events come before the first token, if the prompt's log probabilities were requested. A stream that ended
        before `start` gives nothing. Raises ValueError, TaskNotFound, and redis.exceptions.RedisError if the store
        stays away.
        """
        for events in self._batches(start, None):
            yield from events

    def result(self, timeout: float | None = None, *, raise_for_status: bool = True) -> Result:
        """Wait for the final state.

        Raises TimeoutError after `timeout` seconds (the task goes on), TaskNotFound, and TaskFailed for a task that
        ended `failed` or `cancelled`, unless told not to.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            events = [event for batch in self._batches(0, until) for event in batch]
        except Expired:
            if not self.status().final:
                raise TimeoutError(operations.unfinished(self.id, timeout)) from None
            events = list(self.stream())  # the task is final, so this needs no wait, also with a timeout of 0
        record = self.status()
        if record.chunks:
            portal, client = self._client.reading()
            result = portal.call(client.collected(record, events))
        else:
            result = collect(record, events)
        if raise_for_status:
            result.raise_for_status()
        return result

    def cancel(self) -> bool:
        """Cancel the task. True if it ends or has ended `cancelled`; False if it ended otherwise before.

        `result(raise_for_status=False)` then returns the output so far. Raises TaskNotFound.
        """
        return self._client.run(operations.cancel(self.id, self._client.patience))

    def delete(self) -> None:
        """Delete the task and all that is stored of it; one that has not ended is cancelled first. Webhooks that were
        not sent yet are not sent any more (docs/use/tasks.md says what stays where, and for how long).

        Raises TaskNotFound, and TaskInBatch for a line of a batch.
        """
        self._client.run(operations.delete(self.id, self._client.patience))

    def _batches(self, start: int, until: float | None) -> Generator[list[Event]]:
        portal, client = self._client.reading()
        reader = client.reader(self.id, start)
        try:
            while events := portal.call(reader.next(), None if until is None else max(0, until - time.monotonic())):
                yield events
        finally:
            portal.soon(reader.close)


class Tasks:
    """The tasks that clients submitted, also over HTTP; not those of OpenAI's endpoints, batches or plain Celery."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self, **query: Unpack[QueryFields]) -> TaskPage:
        """Lists tasks in order of time, the latest first. `producers.client.listing.Query` has the fields of a query.

        Raises InvalidQuery; TaskNotFound if the task of `after` is gone.
        """
        return page_of(self._client.run(list_tasks(Query(**query), self._client.patience)))

    def retry(self, task_id: str, *, idempotency_key: str | None = None) -> Handle:
        """Submit a final task again, as a new one, with the same seed. Raises TaskNotFound, TaskNotFinal,
        TokenizerChanged, and as `Client.submit`."""
        return self._client.get(
            self._client.run(operations.retry(self._client.directory, task_id, idempotency_key, self._client.patience))
        )


class Expired(Exception):
    """The call did not end in time."""


class Portal:
    """Runs coroutines for other threads. It does not survive a fork: see `usable`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        #: Guards hand-overs to the loop: a coroutine handed over after its end would never run or fail. Reentrant: the
        #: garbage collector may close a forgotten stream at any point, which calls `soon`.
        self._lock = threading.RLock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock reader", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        """Whether it can be used: not closed, and not in a forked child, which lacks the thread."""
        return self._pid == os.getpid() and not self._closed

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and return its result.

        Raises Expired after `timeout` seconds; then, and when interrupted, the coroutine is cancelled. Raises
        PenstockError if the portal is closed, before or meanwhile, and in a forked child.
        """
        if self._pid != os.getpid():  # its lock may be held by a thread that does not exist here
            coroutine.close()
            raise PenstockError(FORKED)
        with self._lock:
            if self._closed:
                coroutine.close()
                raise PenstockError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(None if timeout is None else min(timeout, threading.TIMEOUT_MAX))
        except CancelledError:
            raise PenstockError(CLOSED) from None
        except TimeoutError:
            if future.done():
                raise
            raise Expired from None
        finally:
            future.cancel()

    def soon(self, function: Callable[[], object]) -> None:
        """Schedule a call on the loop; does nothing if the loop has ended."""
        if self.usable:  # in a forked child the lock may be held by a thread that does not exist
            with self._lock:
                if not self._closed:
                    self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel the running coroutines and end the thread."""
        if not self.usable:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ending = asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop)
        ending.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
