"""A client process's three ways to Penstock: HTTP, the client library and Celery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

from celery import Celery

from producers.client.aio import AsyncClient
from producers.client.steps import FAILURES
from producers.connection.connect import kombu_url
from producers.contract import keys
from workers.gateway_http import Event
from workers.trials.bench.connection import Answer, Broken, Connections
from workers.trials.chaos.load import LINKS

#: Silence (s) after which a connection is given up. Gateways send a comment at least every 15 s.
SILENT_S: Final = 20.0
#: Longest wait for an answer (s). A gateway retries an unreachable server for some seconds.
ANSWER_S: Final = 25.0


#: Exceptions of an unreachable server or a dead gateway.
AWAY: Final = (Broken, TimeoutError, *FAILURES)
#: Codes of answers to a key whose limit is reached.
_LIMITED: Final = (
    "rate_limit_exceeded",
    "token_limit_exceeded",
    "too_many_in_flight",
    "insufficient_quota",
    "budget_reserved",
)


@dataclass(frozen=True, slots=True)
class Holder:
    """An API key and the tenant that it belongs to."""

    tenant: str
    token: str

    @property
    def id(self) -> str:
        return self.token.split("_")[1]


class Declined(Exception):
    """The gateway refused the request. `error`: the beginning of its answer."""

    def __init__(self, status: int, error: str) -> None:
        super().__init__(f"{status}: {error}")
        self.status, self.error = status, error

    @property
    def for_now(self) -> bool:
        """Whether the request may be taken soon: the system is full or away, and no limit of the key is reached."""
        return self.status in (429, 503) and not any(code in self.error for code in _LIMITED)


class Senders:
    """The ways to one system. `holders`: the API keys for its gateway; without them, the environment's. Close it."""

    def __init__(self, url: str, broker: str, store: str, holders: Sequence[Holder] = ()) -> None:
        self.holders = {holder.id: holder for holder in holders}
        self._connections: dict[str | None, Connections] = {None: Connections(url)}
        for holder in holders:
            self._connections[holder.id] = Connections(url, {"authorization": f"Bearer {holder.token}"})
        self.library = AsyncClient(broker, store)
        self._celery = Celery("penstock-chaos", broker=kombu_url(broker), set_as_current=False)
        self._celery.conf.broker_transport_options = {"socket_timeout": 5, "socket_connect_timeout": 5}
        self._celery.conf.broker_connection_retry = False

    def tenant(self, key: str | None) -> str | None:
        """The tenant of a key's id."""
        return None if key is None else self.holders[key].tenant

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None
    ) -> Any:
        """Send a request with the key of this id, and return the JSON answer. Raises Declined and AWAY."""
        async with self._answer(method, path, body, key) as (answer, _):
            return await answer.json()

    async def events(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, key: str | None = None
    ) -> AsyncGenerator[list[Event]]:
        """Server-sent events, in batches as they came; none at status 204. Raises as `request`."""
        async with self._answer(method, path, body, key) as (answer, patience):
            async for events in answer.events():
                patience.reschedule(asyncio.get_running_loop().time() + SILENT_S)
                yield events

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, key: str | None
    ) -> AsyncIterator[tuple[Answer, asyncio.Timeout]]:
        """An answer that is no refusal, and the time limit for reading it."""
        async with asyncio.timeout(ANSWER_S) as patience, self._connections[key].request(method, path, body) as answer:
            if answer.status >= 300:
                raise Declined(answer.status, (await answer.whole())[:300].decode(errors="replace"))
            yield answer, patience

    async def send_plain(self, task_id: str, task: Mapping[str, Any], tier: str) -> None:
        """Send a plain Celery message with a link. Raises what Celery raises."""
        kwargs = {name: value for name, value in task.items() if name != "model"}
        link = self._celery.signature("penstock.chaos.note", args=[task_id], queue=LINKS, immutable=True)

        def send() -> None:
            self._celery.send_task(
                keys.TASK_NAME,
                kwargs=kwargs,
                task_id=task_id,
                queue=keys.model_queue(task["model"]),
                priority=keys.TIERS[tier][1],
                link=link,
                retry=False,
            )

        await asyncio.to_thread(send)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connections in self._connections.values():
            connections.close()
        await self.library.aclose()
        self._celery.close()
