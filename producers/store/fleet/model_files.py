"""Models' files, each by its SHA-256 (hex): written once, read by gateways, removed once no model's card names it.

    put (a worker that announces a model) ─▶ blob ─▶ get (gateways) ─▶ names, remove_unused (the sweeper that leads)

They lie in the store, as `penstock:blob:<sha256>`. Each may raise redis.exceptions.RedisError or OSError, and may be
called again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import redis
from redis.asyncio import Redis

from producers.connection.script import Call, arun, script, text
from producers.contract import keys
from producers.store.protocol import PACKAGE


def put(store: redis.Redis, sha256: str, data: bytes) -> None:
    """Write the blob unless it is there: it is megabytes, and named by what is in it."""
    if not store.exists(keys.blob(sha256)):
        store.set(keys.blob(sha256), data, nx=True)


async def get(store: Redis, sha256: str) -> bytes | None:
    """None where it is not there. Whether it is what its name says is the reader's to look at."""
    data: bytes | None = await store.execute_command("GET", keys.blob(sha256))
    return data


async def names(store: Redis) -> AsyncIterator[str]:
    """The SHA-256 of all that there are."""
    async for key in store.scan_iter(match=keys.blob("*"), count=1000):
        yield text(key).removeprefix(keys.blob(""))


async def remove_unused(store: Redis, sha256: str) -> bool:
    """Remove it unless a card names it, in one step. False where one does, or it is not there."""
    return bool(await arun(store, unused(sha256)))


def unused(sha256: str) -> Call:
    """Answers 1 where the blob was there, and no card named it."""
    return Call(script(PACKAGE, "unused"), (keys.MODELS, keys.blob(sha256)), (sha256,))
