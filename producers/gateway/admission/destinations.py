"""Refuses webhooks that may not be called, while their caller is there to hear why.

Their names may resolve to other addresses later, so each delivery checks again.
"""

from __future__ import annotations

from collections.abc import Sequence

from producers.connection.addresses import Network, Resolver, Unresolved, refusal
from producers.contract.webhook import Destination
from producers.errors import InvalidTask, shown


class Destinations:
    """The gateway's check of webhooks. `allowed`: networks whose addresses may be called though they are not public."""

    def __init__(self, allowed: Sequence[Network]) -> None:
        self._allowed = allowed
        self._resolver = Resolver()

    async def check(self, url: str, param: str) -> None:
        """Raises InvalidTask for a URL that does not resolve or may not be called. Its form was checked before."""
        destination = Destination.parse(url)
        try:
            addresses = await self._resolver.resolve(destination.host)
        except Unresolved as error:
            raise InvalidTask(f"{param} is {shown(url)}: {error}", param=param, code="webhook_refused") from None
        why = refusal(destination.scheme, destination.port, addresses, self._allowed)
        if why is not None:
            raise InvalidTask(f"{param} is {shown(url)}: {why}", param=param, code="webhook_refused")

    async def aclose(self) -> None:
        await self._resolver.aclose()
