from __future__ import annotations

import asyncio
from dataclasses import replace
from string import ascii_lowercase

import pytest
from redis import Redis as Sync
from redis.asyncio import Redis

from producers.contract import keys
from producers.store import endpoints
from producers.store.access.audit import Change
from producers.store.endpoints import OVERLAP_S, Endpoint, Secrets, TooManyEndpoints

CHANGE = Change("test", "endpoint.change", "whe_1")


def endpoint(number: int = 1) -> Endpoint:
    return Endpoint(
        f"whe_{number}", "https://example.com/", "", ("batch.failed",), Secrets.new(), created_at=1, updated_at=1
    )


def test_changes_at_the_same_time_are_all_kept(valkey_url: str) -> None:
    async def run() -> None:
        async with Redis.from_url(valkey_url) as store:
            one = await endpoints.create(store, endpoint(), CHANGE)
            again = await endpoints.create(
                store, endpoint(), CHANGE
            )  # of a request that comes again: the first one counts
            assert again == one

            async def append(letter: str) -> None:
                await endpoints.change(store, one.id, lambda one: replace(one, name=one.name + letter), CHANGE)

            await asyncio.gather(*map(append, ascii_lowercase))
            found = await endpoints.get(store, one.id)
            assert found is not None
            assert sorted(found.name) == sorted(ascii_lowercase)
            assert await endpoints.remove(store, one.id, CHANGE)
            assert not await endpoints.remove(store, one.id, CHANGE)
            assert await endpoints.change(store, one.id, lambda one: one, CHANGE) is None

    asyncio.run(run())


def test_a_tenant_gets_one_secret_and_an_old_one_ends_after_a_day(valkey_url: str) -> None:
    async def run() -> None:
        async with Redis.from_url(valkey_url) as store:
            made = await asyncio.gather(*(endpoints.own_secrets(store, "acme") for _ in range(10)))
            (first,) = set(made)
            assert await endpoints.own_secrets(store, None) != first
            kept = await endpoints.rotate_own(store, "acme", CHANGE)
            assert kept.signing(kept.old_until - OVERLAP_S) == [kept.secret, first.secret]
            assert kept.signing(kept.old_until) == [kept.secret]
            dropped = await endpoints.rotate_own(store, "acme", CHANGE, keep_old=False)
            assert dropped.signing(0) == [dropped.secret]
            assert kept.secret not in repr(kept)

    asyncio.run(run())


def test_a_tenant_has_as_many_as_it_may_whoever_made_them(valkey_url: str, valkey: Sync) -> None:
    async def run() -> None:
        async with Redis.from_url(valkey_url) as store:
            early = replace(endpoint(1), tenant="acme")
            valkey.hset(keys.WEBHOOK_ENDPOINTS, early.id, early.to_json())  # by a release that knows no sets
            assert await endpoints.of_tenant(store, "acme") == [early]
            made = await endpoints.create(store, replace(endpoint(2), tenant="acme"), CHANGE, 2)
            with pytest.raises(TooManyEndpoints):
                await endpoints.create(store, replace(endpoint(3), tenant="acme"), CHANGE, 2)
            other = await endpoints.create(store, endpoint(4), CHANGE, 1)
            assert await endpoints.of_tenant(store, "acme") == [made, early]
            assert await endpoints.of_tenant(store, None) == [other]
            valkey.hdel(keys.WEBHOOK_ENDPOINTS, early.id)
            assert await endpoints.remove(store, made.id, CHANGE)
            assert await endpoints.of_tenant(store, "acme") == []
            assert valkey.get(keys.ENDPOINTS_INDEXED) == b"1"

    asyncio.run(run())
