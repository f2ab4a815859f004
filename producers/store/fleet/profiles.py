"""Profiles of model versions: what their workers measured, kept so that it is known with no worker up.

The hash `penstock:profiles` has one profile (`producers.contract.profile`) under each `model@version`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
from redis.asyncio import Redis

from producers.connection.script import text
from producers.contract import keys
from producers.contract.profile import Profile


def field(model: str, version: str) -> str:
    """The name of a version's profile in the hash."""
    return f"{model}@{version}"


async def profiles(store: Redis) -> dict[str, Profile]:
    """All profiles, by `model@version`. Raises redis.RedisError or OSError."""
    return read_profiles(await store.execute_command("HGETALL", keys.PROFILES))


def read_profiles(raw: Mapping[Any, Any]) -> dict[str, Profile]:
    """The same of HGETALL's answer. What makes no sense is left out of its profile."""
    return {text(name): Profile.from_json(said) for name, said in raw.items()}


def keep(store: redis.Redis, name: str, seen: Profile, *, fresh: bool, started: bool) -> bool:
    """Merge what a worker has `seen` into the version's profile (`Profile.merged`). A value that makes no sense is
    replaced. False if another process wrote at the same time: say it again later. Raises redis.RedisError or OSError.
    """
    with store.pipeline() as pipe:
        pipe.watch(keys.PROFILES)
        raw: Any = pipe.hget(keys.PROFILES, name)
        kept = Profile.from_json(raw)
        merged = kept.merged(seen, fresh=fresh, started=started)
        if merged == kept:
            return True
        pipe.multi()
        pipe.hset(keys.PROFILES, name, merged.to_json())
        try:
            pipe.execute()
        except redis.WatchError:
            return False
    return True
