"""Limits of tenants, which all of a tenant's keys share: `penstock:tenants:limits`, tenant -> `Limits` (JSON).

SWAP changes an entry only from what was read, and appends the change to the audit log in the same script.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from redis.asyncio import Redis

from producers.connection.log_throttle import warn_throttled
from producers.connection.script import arun, text
from producers.contract import keys
from producers.store.access.api_keys import NO_LIMITS, TENANT, Account, Limits
from producers.store.access.audit import Change
from producers.store.protocol import swap

log = logging.getLogger(__name__)

#: Most tenants with limits.
MAX_LIMITED: Final = 10_000


class TooManyTenants(Exception):
    """MAX_LIMITED tenants have limits already."""


def parse(raw: Any) -> Limits:
    """The limits in an entry; no limits for None or an unreadable entry."""
    try:
        return NO_LIMITS if raw is None else Limits.parse(json.loads(raw))
    except (ValueError, TypeError) as error:
        warn_throttled(log, "limits in %s cannot be read: %s", keys.TENANT_LIMITS, error)
        return NO_LIMITS


def account(tenant: str, limits: Limits) -> Account | None:
    """A tenant's account, or None if no limit applies to tasks."""
    return Account.of(f"{TENANT}{tenant}", limits)


async def get(store: Redis, tenant: str) -> Limits:
    """Raises redis.exceptions.RedisError or OSError."""
    return parse(await store.execute_command("HGET", keys.TENANT_LIMITS, tenant))


async def change(store: Redis, tenant: str, how: Callable[[Limits], Limits], audit: Change) -> Limits:
    """Change a tenant's limits by a function, which may be called again if another process changes them meanwhile.

    Raises TooManyTenants, redis.exceptions.RedisError or OSError.
    """
    while True:
        raw = await store.execute_command("HGET", keys.TENANT_LIMITS, tenant)
        old = parse(raw)
        if (new := how(old)) == old:
            return new
        entry = "" if new == NO_LIMITS else json.dumps(asdict(new))
        before = "" if raw is None else text(raw)
        done = await arun(store, swap(keys.TENANT_LIMITS, tenant, before, entry, max_fields=MAX_LIMITED, audit=audit))
        if done < 0:
            raise TooManyTenants
        if done:
            audit.say()
            return new
