"""Encrypts the secrets that the store already holds with the first key of the key file (`producers.contract.sealing`).

    endpoints, tenants' own -> records of tasks -> rows of the outbox, which get theirs from records

Each is written only over what was read, so it may run beside everything, and again. A process without the key file
still writes plain ones: restart all with it first.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace

from redis.asyncio import Redis

from producers.connection.script import arun, text
from producers.contract import keys
from producers.contract.sealing import Keyring
from producers.errors import SecretUnreadable
from producers.store import endpoints
from producers.store.endpoints import Endpoint, Secrets
from producers.store.protocol import swap

#: Keys that one SCAN looks at.
PAGE = 1000


@dataclass(slots=True)
class Sealed:
    """Numbers of secrets: encrypted with the first key, by kind; and `unreadable`, whose key is not in the file."""

    endpoints: int = 0
    tenants: int = 0
    tasks: int = 0
    deliveries: int = 0
    unreadable: int = 0


async def seal_all(store: Redis, keyring: Keyring) -> Sealed:
    """Encrypt all secrets with the first key. Raises redis.exceptions.RedisError or OSError; call it again then."""
    done = Sealed()
    for endpoint in await endpoints.every(store):
        try:
            changed = _resealed(endpoint.secrets, keyring) != endpoint.secrets
        except SecretUnreadable:
            done.unreadable += 1
            continue
        if changed:
            await endpoints.change(store, endpoint.id, lambda endpoint: _endpoint(endpoint, keyring), None)
            done.endpoints += 1
    done.tenants = await _tenants(store, keyring, done)
    done.tasks = await _fields(store, keys.task("*"), "webhook_secret", keyring, done)
    done.deliveries = await _fields(store, keys.webhook_row("*"), "secret", keyring, done)
    return done


def _resealed(secrets: Secrets, keyring: Keyring) -> Secrets:
    return replace(
        secrets, secret=keyring.seal(secrets.secret), old=None if secrets.old is None else keyring.seal(secrets.old)
    )


def _endpoint(endpoint: Endpoint, keyring: Keyring) -> Endpoint:
    return replace(endpoint, secrets=_resealed(endpoint.secrets, keyring))


async def _tenants(store: Redis, keyring: Keyring, done: Sealed) -> int:
    count = 0
    for tenant in await store.execute_command("HKEYS", keys.WEBHOOK_SECRETS):
        while (raw := await store.execute_command("HGET", keys.WEBHOOK_SECRETS, tenant)) is not None:
            old = Secrets.parse(json.loads(raw))
            try:
                new = _resealed(old, keyring)
            except SecretUnreadable:
                done.unreadable += 1
                break
            if new == old:
                break
            if await arun(store, swap(keys.WEBHOOK_SECRETS, text(tenant), text(raw), json.dumps(asdict(new)))):
                count += 1
                break
    return count


async def _fields(store: Redis, pattern: str, field: str, keyring: Keyring, done: Sealed) -> int:
    """Encrypt one field of all hashes with such names. Nothing but its end changes it, so one look is enough."""
    count = 0
    async for page in _pages(store, pattern):
        async with store.pipeline(transaction=False) as pipe:
            for name in page:
                pipe.hget(name, field)
            values = await pipe.execute()
        for name, stored in zip(page, values, strict=True):
            if stored is None or keyring.is_current(text(stored)):
                continue
            try:
                new = keyring.seal(text(stored))
            except SecretUnreadable:
                done.unreadable += 1
                continue
            count += await arun(store, swap(name, field, text(stored), new))
    return count


async def _pages(store: Redis, pattern: str) -> AsyncIterator[list[str]]:
    cursor = 0
    while True:
        cursor, page = await store.scan(cursor, match=pattern, count=PAGE)
        if page:
            yield [text(name) for name in page]
        if not cursor:
            return
