"""The asyncio client: it writes the envelope itself, so that submitting never blocks the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from redis.asyncio import Redis

from producers.events import Event
from producers.record import Record
from producers.result import Result
from producers.task import Task


class AsyncClient:
    """Submits tasks and reads them, on one event loop.

    `broker`, `store`: redis://, rediss:// or unix:// URLs; the store is the broker unless given. Nothing connects before
    the first call. Raises ValueError for another kind of broker (the sync `Client` speaks to those through kombu).
    """

    #: The store and the broker, for what the client has no method for.
    store: Redis
    broker: Redis

    def __init__(self, broker: str, store: str | None = None) -> None:
        raise NotImplementedError

    async def submit(self, task: Task | None = None, /, *, task_id: str | None = None, **fields: Any) -> AsyncHandle:
        """Queue a task, given as a Task or as its fields.

        Raises InvalidTask or UnknownModel (nothing was written), TaskExists (another task has this id), SubmitFailed (no
        answer in time: where a record was made, the sweeper finishes it).
        """
        raise NotImplementedError

    def get(self, task_id: str) -> AsyncHandle:
        """A handle on a task submitted before, by anyone. Nothing is looked up yet."""
        raise NotImplementedError

    async def models(self) -> list[dict[str, Any]]:
        """The cards of all models (`engine.text.card`), by name."""
        raise NotImplementedError

    async def card(self, model: str) -> dict[str, Any]:
        """A model's card, at most 2 s old. Raises UnknownModel, which names the models that there are."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Raise redis.exceptions.RedisError unless store and broker answer."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close all connections; streams being read end with an error."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class AsyncHandle:
    """One task."""

    id: str

    async def status(self) -> Record:
        """A snapshot of the record: `.status`, `.final`, `.tier`, `.model`, `.time(name)`, `.json("usage")`.

        Raises TaskNotFound.
        """
        raise NotImplementedError

    def stream(self, start: int = 0) -> AsyncIterator[Event]:
        """Token events from position `start` on, in order, each once, as they are made; then the End.

        A stream that ended before `start` gives nothing. Raises TaskNotFound.
        """
        raise NotImplementedError

    def batches(self, start: int = 0) -> AsyncIterator[list[Event]]:
        """The same events, as many at a time as there are: what a server writes with one system call."""
        raise NotImplementedError

    async def result(self, timeout: float | None = None, *, raise_for_status: bool = True) -> Result:
        """Wait for the final state.

        Raises TimeoutError after `timeout` seconds (the task goes on), TaskNotFound, and TaskFailed for a task that ended
        `failed` or `cancelled`, unless told not to.
        """
        raise NotImplementedError

    async def cancel(self) -> bool:
        """Ask for the task's end: True if that was accepted (it will end `cancelled`), False if it was final before.

        Raises TaskNotFound.
        """
        raise NotImplementedError
