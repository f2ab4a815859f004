"""The asyncio client behind the blocking client's face, so that one test says what holds for both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from producers import AsyncClient, AsyncHandle, Client, Event, Handle, Record, Result, TaskPage
from producers.client.blocking import Portal


class AsyncFace:
    """Calls an AsyncClient on the event loop of a thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.portal = Portal()
        self.client = AsyncClient(*args, **options)

    def submit(self, /, *args: Any, **fields: Any) -> AsyncHandleFace:
        return AsyncHandleFace(self.portal, self.portal.call(self.client.submit(*args, **fields)))

    def get(self, task_id: str) -> AsyncHandleFace:
        return AsyncHandleFace(self.portal, self.client.get(task_id))

    @property
    def tasks(self) -> AsyncTasksFace:
        return AsyncTasksFace(self.portal, self.client)

    def models(self) -> list[dict[str, Any]]:
        return self.portal.call(self.client.models())

    def close(self) -> None:
        if self.portal.usable:
            self.portal.call(self.client.aclose())
            self.portal.close()


class AsyncTasksFace:
    def __init__(self, portal: Portal, client: AsyncClient) -> None:
        self.portal = portal
        self.client = client

    def list(self, **wanted: Any) -> TaskPage:
        return self.portal.call(self.client.tasks.list(**wanted))

    def retry(self, task_id: str, *, idempotency_key: str | None = None) -> AsyncHandleFace:
        return AsyncHandleFace(
            self.portal, self.portal.call(self.client.tasks.retry(task_id, idempotency_key=idempotency_key))
        )


class AsyncHandleFace:
    def __init__(self, portal: Portal, handle: AsyncHandle) -> None:
        self.portal = portal
        self.handle = handle
        self.id = handle.id

    def status(self) -> Record:
        return self.portal.call(self.handle.status())

    def cancel(self) -> bool:
        return self.portal.call(self.handle.cancel())

    def delete(self) -> None:
        self.portal.call(self.handle.delete())

    def result(self, timeout: float | None = None, *, raise_for_status: bool = True) -> Result:
        return self.portal.call(self.handle.result(timeout, raise_for_status=raise_for_status))

    def stream(self, start: int = 0) -> Iterator[Event]:
        events = self.handle.stream(start)

        async def following() -> Event | None:
            return await anext(events, None)

        try:
            while (event := self.portal.call(following())) is not None:
                yield event
        except GeneratorExit:  # left early; where it ended otherwise, there is nothing to close, and maybe no loop
            self.portal.call(events.aclose())
            raise


Face = Client | AsyncFace
HandleFace = Handle | AsyncHandleFace
