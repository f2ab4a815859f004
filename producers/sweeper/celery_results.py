"""Stores the Celery results of final plain tasks whose messages no worker holds.

Only Celery's tracer sends links and completes chords, and it needs the message. The result is in record and stream, and
is stored as a worker would store it, unless one has. A worker that gets the message later stores the same again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.connection.connect import connect
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.stream import failure, summary

log = logging.getLogger(__name__)

#: Most remembered ids of stored results; forgotten ones are only checked again.
MAX_REMEMBERED: Final = 100_000


class CeleryResults:
    """`wait` queues a task's result, and `store_waiting` stores the queued ones."""

    def __init__(self, client: AsyncClient, store: str) -> None:
        self._client = client
        self._store = store
        self._stored: set[str] = set()
        self._waiting: list[str] = []

    def wait(self, task_id: str) -> None:
        """Queue a final task whose message no worker holds."""
        if task_id not in self._stored:
            self._waiting.append(task_id)

    async def store_waiting(self) -> int:
        """Store the queued results. Returns their number. Raises the store's errors; later sweeps store the rest."""
        waiting, self._waiting = self._waiting, []
        if len(self._stored) > MAX_REMEMBERED:
            self._stored.clear()
        stored = 0
        for task_id in waiting:
            record = Record.parse(task_id, await self._client.store.hgetall(keys.task(task_id)))
            if record.plain and record.final:
                result = await self._client.get(task_id).result(raise_for_status=False)
                stored += await asyncio.to_thread(self._store_one, record, summary(result))
                if not await self._client.store.exists(record.key):  # deleted since: nobody else looks for its result
                    await self._client.store.unlink(keys.celery_result(task_id))
            self._stored.add(task_id)
        return stored

    async def fail(self, task_ids: Iterable[str], error: Mapping[str, Any]) -> None:
        """Store this error, as a record has it, for messages that have no record; an existing result stays."""
        await asyncio.to_thread(self._fail, task_ids, error)

    def _fail(self, task_ids: Iterable[str], error: Mapping[str, Any]) -> None:
        from celery import states

        for task_id in task_ids:
            if self._backend.get_state(task_id) not in states.READY_STATES:
                self._backend.store_result(task_id, failure(error), states.FAILURE)

    def _store_one(self, record: Record, result: dict[str, Any]) -> bool:
        return store_result(self._backend, record, result)

    @cached_property
    def _backend(self) -> Any:
        """A backend with Celery's own format and keys on our connection, which supports every kind of store."""
        from celery import Celery
        from celery.backends.base import KeyValueStoreBackend

        store = connect(self._store)

        class Backend(KeyValueStoreBackend):
            """Like `celery.backends.redis`, it publishes results on the channel of the key's name."""

            def get(self, key: bytes) -> Any:
                return store.get(key)

            def _set_with_state(self, key: bytes, value: bytes, state: str) -> None:
                with store.pipeline(transaction=True) as pipe:
                    pipe.set(key, value, ex=int(self.expires))
                    pipe.publish(key, value)
                    pipe.execute()

        app = Celery("penstock", set_as_current=False)
        return Backend(app)


def store_result(backend: Any, record: Record, result: dict[str, Any]) -> bool:
    """Store a final plain task's result, as a worker would. False if Celery has one, which stays. Raises the backend's
    errors."""
    from celery import states

    if backend.get_state(record.id) in states.READY_STATES:
        return False
    if record.status == "cancelled":
        backend.mark_as_revoked(record.id, "cancelled")
    elif record.status == "failed":
        backend.store_result(record.id, failure(record.json("error")), states.FAILURE)
    else:
        backend.store_result(record.id, result, states.SUCCESS)
    return True
