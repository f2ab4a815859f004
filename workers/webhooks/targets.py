"""Where taken rows go now: an endpoint's present URL and secrets, or what a task's own webhook says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from producers.contract.webhook import Destination
from producers.store import endpoints
from producers.store.endpoints import Endpoint
from producers.store.outbox import Row


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, and the secrets to sign with."""

    url: str
    secrets: Sequence[str]
    whose: str
    """The endpoint or the tenant: on a host that many share, each has limits of its own."""

    @property
    def receiver(self) -> str:
        """What limits are counted by: scheme, host, port, and whose it is."""
        try:
            origin = Destination.parse(self.url).origin
        except ValueError:  # a producer of another version wrote it: the try says what is wrong
            origin = self.url
        return f"{origin} {self.whose}"


async def targets(store: Redis, rows: Sequence[Row]) -> list[Target | str]:
    """For each row a target, or why it has none. Raises redis.exceptions.RedisError or OSError."""
    named = await endpoints.get_many(store, list({row.endpoint for row in rows if row.endpoint is not None}))
    own = {row.tenant for row in rows if row.endpoint is None and row.secret is None}
    secrets = {tenant: await _of_tenant(store, tenant) for tenant in own}
    found: list[Target | str] = []
    for row in rows:
        if row.endpoint is not None:
            found.append(_of_endpoint(named.get(row.endpoint)))
        else:
            found.append(_of_task(row, secrets))
    return found


def _of_endpoint(one: Endpoint | None) -> Target | str:
    if one is None:
        return "the endpoint was deleted, or cannot be read"
    if not one.enabled:
        return f"the endpoint is disabled: {one.disabled_because}"
    return Target(one.url, one.secrets.signing(time.time()), one.id)


async def _of_tenant(store: Redis, tenant: str | None) -> Sequence[str]:
    """The secrets that sign now; none if what is stored cannot be read."""
    try:
        return (await endpoints.own_secrets(store, tenant)).signing(time.time())
    except (ValueError, TypeError, KeyError):
        return ()


def _of_task(row: Row, secrets: Mapping[str | None, Sequence[str]]) -> Target | str:
    signing = [row.secret] if row.secret is not None else secrets[row.tenant]
    return Target(row.url, signing, f"of {row.tenant or ''}") if signing else "the tenant's secret cannot be read"
