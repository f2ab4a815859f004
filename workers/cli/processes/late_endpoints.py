"""The gateway's endpoints, as a sweeper asks them: imported with the first line of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from producers.client.aio import AsyncClient
from producers.store.access.principal import LOCAL, Principal
from producers.store.usage.prices import Prices
from producers.sweeper.batches.endpoint import Answer, Finished, Planned

if TYPE_CHECKING:
    from producers.gateway.batches.endpoints import LineEndpoints


@dataclass(slots=True)
class LateEndpoints:
    """As `LineEndpoints`, whose import takes a second and 30 MB. `close` it."""

    _client: AsyncClient
    _made: LineEndpoints | None = None

    @property
    def spent(self) -> Answer:
        return self._endpoints().spent

    async def tasks(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        principal: Principal = LOCAL,
        tenant: str | None = None,
        prices: Prices | None = None,
    ) -> list[Planned | Answer]:
        endpoints = await asyncio.to_thread(self._endpoints)
        return await endpoints.tasks(path, bodies, principal, tenant, prices)

    async def answers(self, path: str, finished: Sequence[Finished]) -> list[Answer]:
        endpoints = await asyncio.to_thread(self._endpoints)
        return await endpoints.answers(path, finished)

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _endpoints(self) -> LineEndpoints:
        from producers.gateway.batches.endpoints import LineEndpoints

        if self._made is None:
            self._made = LineEndpoints(self._client)
        return self._made
