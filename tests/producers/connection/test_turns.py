"""Turns at connections and permits: none for those who wait longest, but one owner after the other."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from redis import Redis

from producers.connection.connect import EACH, POOL, connect_async
from producers.connection.script import aexecute
from producers.connection.turns import OWNER, PROCESS, Busy, Turns
from tests.waiting import auntil


async def waits(turns: Turns, owner: str, order: list[str], patience_s: float = 60.0) -> None:
    """Take a place, note whose it is, and keep it."""
    if not turns.take(owner):
        await turns.wait(owner, patience_s)
    order.append(owner)


async def test_owners_take_turns_however_many_of_one_wait() -> None:
    turns, order = Turns(2, 2), list[str]()
    tasks = [asyncio.create_task(waits(turns, owner, order)) for owner in "aaaaaabbc"]
    await auntil(lambda: turns.waiting == 7)
    for k in range(7):
        turns.give(order[k])
        await auntil(lambda k=k: len(order) == 3 + k)
    assert "".join(order) == "aaabcabaa"
    await asyncio.gather(*tasks)


async def test_no_owner_takes_all_places_but_the_process_itself() -> None:
    turns = Turns(4, 3)
    assert [turns.take("a") for _ in range(4)] == [True, True, True, False]
    assert turns.take("b")
    for owner in "aaab":
        turns.give(owner)
    assert [turns.take(PROCESS) for _ in range(5)] == [True, True, True, True, False]


async def test_an_owner_that_has_its_most_keeps_no_other_one_waiting() -> None:
    turns, order = Turns(4, 2), list[str]()
    tasks = [asyncio.create_task(waits(turns, owner, order)) for owner in "aaaaab"]
    await auntil(lambda: turns.waiting == 3)
    assert "".join(order) == "aab"
    for task in tasks:
        task.cancel()


async def test_who_waits_for_too_long_or_leaves_takes_nothing_along() -> None:
    turns = Turns(1, 1)
    assert turns.take("a")
    with pytest.raises(Busy, match=r"within 0\.01 s"):
        await turns.wait("b", 0.01)
    left = asyncio.create_task(turns.wait("c", 60))
    given = asyncio.create_task(turns.wait("d", 60))
    await auntil(lambda: turns.waiting == 2)
    left.cancel()
    with suppress(asyncio.CancelledError):
        await left
    turns.give("a")
    given.cancel()  # it has its place already, and never hears of it
    with suppress(asyncio.CancelledError):
        await given
    assert (turns.free, turns.waiting) == (1, 0)
    assert turns.take("e")


async def test_a_caller_with_many_calls_leaves_connections_to_others(valkey_url: str, valkey: Redis) -> None:
    """Its calls are slow: the server waits in each."""

    async def call(owner: str, done: list[str], key: str) -> None:
        OWNER.set(owner)
        await aexecute(client, "BRPOP", key, 60)
        done.append(owner)

    done: list[str] = []
    async with connect_async(valkey_url) as client:
        many = [asyncio.create_task(call("many", done, "never")) for _ in range(3 * POOL)]
        await auntil(lambda: valkey.info("clients")["blocked_clients"] == EACH)
        valkey.lpush("soon", *range(8))
        await asyncio.gather(*(call("other", done, "soon") for _ in range(8)))
        assert done == ["other"] * 8
        assert valkey.info("clients")["blocked_clients"] == EACH
        for task in many:
            task.cancel()
        await asyncio.wait(many)
        assert await aexecute(client, "PING") == b"PONG"


async def test_who_gets_no_connection_in_time_is_told(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("producers.connection.connect.WAIT_S", 0.01)
    async with connect_async(valkey_url) as client:
        waiting = [asyncio.create_task(aexecute(client, "BRPOP", "never", 60)) for _ in range(POOL)]
        await auntil(lambda: client.connection_pool._turns.free == 0)
        with pytest.raises(Busy):
            await aexecute(client, "PING")
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
