"""The results of plain Celery tasks, told by a sweeper while nobody has their messages.

Only the tracer sends links and takes part in chords, and it needs the message. The result stands in record and stream:
it is stored as a worker would have, unless one has; a worker that gets the message later stores the same again.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from producers import keys
from producers.aio import AsyncClient
from producers.connect import kombu_url
from producers.record import Record
from producers.result import failure, summary

if TYPE_CHECKING:
    from celery import Celery

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

        backend = self._app.backend
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
    def _app(self) -> Celery:
        from celery import Celery

        return Celery("penstock", backend=kombu_url(self._store), set_as_current=False)
