"""All bytes of a store, so that a test can say that nothing of a task is in them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from redis import Redis

from producers.contract import keys


def contents(redis: Redis) -> dict[str, bytes]:
    """Key -> its name and everything in it; compressed blocks as what they hold."""
    return {name.decode(): b"\n".join([name, *_values(redis, name)]) for name in redis.scan_iter("*", count=1000)}


def leftovers(redis: Redis, *words: str) -> dict[str, str]:
    """Key -> the first of the words that is in it."""
    found = ((name, word) for name, whole in contents(redis).items() for word in words if word.encode() in whole)
    return dict(reversed(list(found)))


def kept(task_id: str) -> set[str]:
    """Where the id of a deleted task is still: numbers in the ledger, and what keeps it from being made again."""
    return {keys.LEDGER, keys.ERASING, keys.erased(task_id)}


def _values(redis: Redis, name: bytes) -> Iterator[bytes]:
    kind = redis.type(name)
    if kind == b"string":
        yield redis.get(name) or b""
        return
    found: Any = {
        b"hash": redis.hgetall,
        b"list": lambda name: redis.lrange(name, 0, -1),
        b"set": redis.smembers,
        b"zset": lambda name: redis.zrange(name, 0, -1),
        b"stream": redis.xrange,
    }[kind](name)
    if kind == b"hash":
        found = [part for item in found.items() for part in item]
    if kind == b"stream":
        found = [part for _, fields in found for item in fields.items() for part in item]
    for value in found:
        yield _unpacked(value)


def _unpacked(value: bytes) -> bytes:
    try:
        return zlib.decompress(value)
    except zlib.error:
        return value
