"""One sweeper leads; another follows when it is gone, stopped or cut off."""

from __future__ import annotations

import asyncio
import logging

import pytest
from redis import Redis

from producers import AsyncClient
from producers.client import leases
from producers.client.leases import Leadership
from producers.contract import keys
from tests.producers.proxy import Proxy
from tests.waiting import PATIENCE_S, until

#: Far longer than any process is held up by a busy machine.
LEASE = 60.0


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is renewed, and asked for, every 0.6 s all the same."""
    monkeypatch.setattr(leases, "RENEWALS", 100)


async def test_of_several_one_leads_until_it_resigns(aclient: AsyncClient, valkey: Redis) -> None:
    one, other = (Leadership(aclient, name, LEASE) for name in "ab")
    await one.acquire()
    waiting = asyncio.create_task(other.acquire())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert valkey.get(keys.SWEEPER) == b"a"
    await other.resign()
    assert valkey.get(keys.SWEEPER) == b"a", "only the leader can"
    waiting.cancel()
    await one.resign()
    await other.acquire()
    assert valkey.get(keys.SWEEPER) == b"b"


@pytest.mark.usefixtures("often")
async def test_who_is_not_heard_of_is_followed_and_notices(aclient: AsyncClient, valkey: Redis) -> None:
    """As one that is stopped: it neither renews nor resigns."""
    one, other = (Leadership(aclient, name, LEASE) for name in "ab")
    await one.acquire()
    valkey.pexpire(keys.SWEEPER, 200)
    async with asyncio.timeout(PATIENCE_S):
        await other.acquire()
        assert valkey.get(keys.SWEEPER) == b"b"
        kept = asyncio.create_task(other.keep())
        await one.keep()  # it goes on
    assert valkey.get(keys.SWEEPER) == b"b"
    assert not kept.done()
    kept.cancel()


@pytest.mark.usefixtures("often")
async def test_who_renews_keeps_it(aclient: AsyncClient, valkey: Redis) -> None:
    one, other = (Leadership(aclient, name, LEASE) for name in "ab")
    await one.acquire()
    kept, waiting = asyncio.create_task(one.keep()), asyncio.create_task(other.acquire())
    for _ in range(3):
        valkey.pexpire(keys.SWEEPER, int(LEASE * 500))
        await asyncio.to_thread(until, lambda: valkey.pttl(keys.SWEEPER) > LEASE * 600)
    assert valkey.get(keys.SWEEPER) == b"a"
    assert not kept.done()
    assert not waiting.done()
    for task in (kept, waiting):
        task.cancel()


async def test_who_cannot_reach_the_store_stops_leading_before_another_begins(
    proxy: Proxy, valkey_url: str, valkey: Redis
) -> None:
    async with AsyncClient(proxy.url) as cut_off, AsyncClient(valkey_url) as fine:
        one, other = Leadership(cut_off, "a", 1.0), Leadership(fine, "b", LEASE)
        await one.acquire()
        proxy.fail(b"penstock:sweeper", "before", 10_000)
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(one.keep(), other.acquire())
        assert valkey.get(keys.SWEEPER) == b"b"
        proxy.heal()
        waiting = asyncio.create_task(one.acquire())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        waiting.cancel()


@pytest.mark.usefixtures("often")
async def test_who_is_refused_does_not_say_that_the_store_was_away(
    valkey_url: str, valkey: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    valkey.acl_setuser("limited", enabled=True, nopass=True, keys=["*"], commands=["+@all", "-evalsha"])
    async with AsyncClient(valkey_url.replace("//", "//limited:x@")) as client, asyncio.timeout(PATIENCE_S):
        one = Leadership(client, "a", LEASE)
        while "a leads no more: no renewal for 60.0 s, the store cannot be used: " not in caplog.text:
            await one.keep()
    valkey.acl_deluser("limited")
