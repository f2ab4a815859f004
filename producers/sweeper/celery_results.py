"""The results of plain Celery tasks, told by a sweeper while nobody has their messages.

Only the tracer sends links and takes part in chords, and it needs the message. The result stands in record and stream:
it is stored as a worker would have, unless one has; a worker that gets the message later stores the same again.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from typing import Any, Final

from producers.client.aio import AsyncClient
from producers.connection.connect import connect
from producers.contract import keys
from producers.contract.record import Record
from producers.contract.result import failure, summary

log = logging.getLogger(__name__)

#: Ids remembered as told: more are only looked at again.
MANY: Final = 100_000


class CeleryResults:
    """`wait` for those that are to be told; `tell` tells them."""

    def __init__(self, client: AsyncClient, store: str) -> None:
        self._client = client
        self._store = store
        self._told: set[str] = set()
        self._waiting: list[str] = []

    def wait(self, task_id: str) -> None:
        """This task is final and its message has not come."""
        if task_id not in self._told:
            self._waiting.append(task_id)

    async def tell(self) -> int:
        """How many were told. Raises what the store does; then the rest is told when they are met again."""
        waiting, self._waiting = self._waiting, []
        if len(self._told) > MANY:
            self._told.clear()
        told = 0
        for task_id in waiting:
            record = Record.parse(task_id, await self._client.store.hgetall(keys.task(task_id)))
            if record.plain and record.final:
                result = await self._client.get(task_id).result(raise_for_status=False)
                told += await asyncio.to_thread(self._tell, record, summary(result))
            self._told.add(task_id)
        return told

    def _tell(self, record: Record, result: dict[str, Any]) -> bool:
        from celery import states

        backend = self._backend
        if backend.get_state(record.id) in states.READY_STATES:
            return False
        if record.status == "cancelled":
            backend.mark_as_revoked(record.id, "cancelled")
        elif record.status == "failed":
            backend.store_result(record.id, failure(record.json("error")), states.FAILURE)
        else:
            backend.store_result(record.id, result, states.SUCCESS)
        return True

    @cached_property
    def _backend(self) -> Any:
        """Celery's own words under Celery's own keys, through a connection of ours: which knows every kind of store."""
        from celery import Celery
        from celery.backends.base import KeyValueStoreBackend

        store = connect(self._store)

        class Backend(KeyValueStoreBackend):
            """As `celery.backends.redis`: who waits is told on the channel of the key's name."""

            def get(self, key: bytes) -> Any:
                return store.get(key)

            def _set_with_state(self, key: bytes, value: bytes, state: str) -> None:
                with store.pipeline(transaction=True) as pipe:
                    pipe.set(key, value, ex=int(self.expires))
                    pipe.publish(key, value)
                    pipe.execute()

        app = Celery("penstock", set_as_current=False)
        return Backend(app)
