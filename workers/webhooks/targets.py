"""The targets of leased rows: an endpoint's present URL and secrets, or those of a task's own webhook."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from producers.contract.sealing import unseal
from producers.contract.webhook import Destination
from producers.errors import SecretUnreadable
from producers.store import endpoints
from producers.store.endpoints import Endpoint, Secrets
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
        """The name by which limits are counted: scheme, host, port, and its owner."""
        try:
            origin = Destination.parse(self.url).origin
        except ValueError:  # a producer of another version wrote it: the try fails with the reason
            origin = self.url
        return f"{origin} {self.whose}"


async def targets(store: Redis, rows: Sequence[Row]) -> list[Target | SecretUnreadable | str]:
    """A target for each row, or the reason why it has none: for good, or until this process has the secret's key.

    Raises redis.exceptions.RedisError or OSError.
    """
    named = await endpoints.get_many(store, list({row.endpoint for row in rows if row.endpoint is not None}))
    tenants = {row.tenant for row in rows if row.endpoint is None and row.secret is None}
    secrets = {tenant: await _of_tenant(store, tenant) for tenant in tenants}
    results: list[Target | SecretUnreadable | str] = []
    for row in rows:
        try:
            results.append(_of_task(row, secrets) if row.endpoint is None else _of_endpoint(named.get(row.endpoint)))
        except SecretUnreadable as error:
            results.append(error)
    return results


def _of_endpoint(endpoint: Endpoint | None) -> Target | str:
    if endpoint is None:
        return "the endpoint was deleted, or cannot be read"
    if not endpoint.enabled:
        return f"the endpoint is disabled: {endpoint.disabled_because}"
    return Target(endpoint.url, endpoint.secrets.signing(time.time()), endpoint.id)


async def _of_tenant(store: Redis, tenant: str | None) -> Secrets | SecretUnreadable | None:
    """A tenant's secrets; None if what is stored cannot be read."""
    try:
        return await endpoints.own_secrets(store, tenant)
    except SecretUnreadable as error:
        return error
    except (ValueError, TypeError, KeyError):
        return None


def _of_task(row: Row, secrets: Mapping[str | None, Secrets | SecretUnreadable | None]) -> Target | str:
    signing: Sequence[str] = ()
    if row.secret is not None:
        signing = [unseal(row.secret)]
    elif isinstance(tenant_secrets := secrets[row.tenant], SecretUnreadable):
        raise tenant_secrets
    elif tenant_secrets is not None:
        signing = tenant_secrets.signing(time.time())
    return Target(row.url, signing, f"of {row.tenant or ''}") if signing else "the tenant's secret cannot be read"
