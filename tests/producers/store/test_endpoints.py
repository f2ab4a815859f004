from __future__ import annotations

import asyncio
from dataclasses import replace
from string import ascii_lowercase

from redis.asyncio import Redis

from producers.store import endpoints
from producers.store.access.audit import Change
from producers.store.endpoints import OVERLAP_S, Endpoint, Secrets

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
