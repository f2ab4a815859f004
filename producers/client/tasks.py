"""`client.tasks`: what the clients do with tasks by their ids and their states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from producers.client.listing import Listed, Query, Wanted, list_tasks
from producers.client.operations import retry
from producers.contract.stream.result import TaskInfo, TaskPage

if TYPE_CHECKING:
    from producers.client.aio import AsyncClient, AsyncHandle
    from producers.client.blocking import Client, Handle


class Tasks:
    """The tasks that clients submitted, also over HTTP; not those of OpenAI's endpoints, batches or plain Celery."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def list(self, **wanted: Unpack[Wanted]) -> TaskPage:
        """Tasks in order of time, the latest first. `producers.client.listing.Query` says what may be asked for.

        Raises InvalidQuery; TaskNotFound if the task of `after` is gone.
        """
        return _page(self._client.run(list_tasks(Query(**wanted), self._client.patience)))

    def retry(self, task_id: str, *, idempotency_key: str | None = None) -> Handle:
        """Submit a final task again, as a new one, with the same seed. Raises TaskNotFound, TaskNotFinal, and as
        `Client.submit`."""
        return self._client.get(
            self._client.run(retry(self._client.directory, task_id, idempotency_key, self._client.patience))
        )


class AsyncTasks:
    """As `Tasks`, for asyncio."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def list(self, **wanted: Unpack[Wanted]) -> TaskPage:
        """As `Tasks.list`."""
        return _page(await self._client.run(list_tasks(Query(**wanted), self._client.patience)))

    async def retry(self, task_id: str, *, idempotency_key: str | None = None) -> AsyncHandle:
        """As `Tasks.retry`."""
        return self._client.get(
            await self._client.run(retry(self._client.directory, task_id, idempotency_key, self._client.patience))
        )


def _page(listed: Listed) -> TaskPage:
    return TaskPage(tuple(map(TaskInfo.of, listed.records)), listed.next)
