"""Keys that are made and changed by several operators at a time."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from producers.admin import keys
from producers.store.access import api_keys, audit, tenants
from producers.store.access.api_keys import TooManyKeys
from producers.store.access.audit import Actor

ME = Actor("test")


async def test_changes_at_the_same_time_are_all_kept_and_logged_once(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as store:
        key, _ = await keys.create(store, {"tenant": "acme"}, ME)
        rotations = (keys.rotate(store, key.id, 60, ME) for _ in range(8))
        disables = (keys.turn(store, key.id, "disable", ME) for _ in range(8))
        made = [one for one in await asyncio.gather(*rotations) if one]
        await asyncio.gather(*disables)
        stands = await api_keys.get(store, key.id)
        assert stands is not None
        assert stands.disabled_at is not None
        assert stands.digest in {one.digest for one, _ in made}
        assert len({token for _, token in made}) == 8
        told = [one["did"] for one in await audit.latest(store, 100)]
        assert sorted(told) == ["key.create", "key.disable", *["key.rotate"] * 8]


async def test_where_there_are_the_most_keys_one_that_has_ended_makes_room(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_keys, "MAX_KEYS", 2)
    async with Redis.from_url(valkey_url) as store:
        first, second = [(await keys.create(store, {"tenant": "acme"}, ME))[0] for _ in range(2)]
        with pytest.raises(TooManyKeys):
            await keys.create(store, {"tenant": "acme"}, ME)
        await keys.turn(store, first.id, "revoke", ME)
        third, _ = await keys.create(store, {"tenant": "acme"}, ME)
        assert {one.id for one in await api_keys.every(store)} == {second.id, third.id}
        said = [(one["did"], one["what"]) for one in await audit.latest(store, 2)]
        assert said == [("key.create", third.id), ("key.drop", first.id)]


async def test_a_key_that_cannot_be_read_hides_no_other(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as store:
        key, _ = await keys.create(store, {"tenant": "acme"}, ME)
        for field, raw in (("a", "["), ("b", "{}"), ("c", '{"scopes": 5}')):
            await store.execute_command("HSET", "penstock:keys", field, raw)
        assert [one.id for one in await keys.matching(store)] == [key.id]
        assert await keys.turn(store, "a", "revoke", ME) is None


async def test_limits_of_a_later_release_keep_no_other_from_holding(valkey_url: str) -> None:
    async with Redis.from_url(valkey_url) as store:
        await store.execute_command("HSET", "penstock:tenants:limits", "acme", '{"rpm": 5, "later": 1}')
        assert (await tenants.get(store, "acme")).rpm == 5
