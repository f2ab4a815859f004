from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from producers import PenstockError
from producers.client import hub
from producers.client.hub import Hub
from producers.connection.connect import connect_async
from producers.contract import keys
from tests import processes
from tests.waiting import PATIENCE_S, auntil


@pytest.fixture
async def a_hub(valkey_url: str) -> AsyncIterator[Hub]:
    store = connect_async(valkey_url)
    a_hub = Hub(store)
    yield a_hub
    await a_hub.aclose()
    await store.aclose()


def subscribers(valkey: Redis) -> set[str]:
    """Connections that listen."""
    return {c["id"] for c in valkey.client_list() if int(c["sub"])}


async def test_messages_flow_once_the_subscription_is_confirmed(a_hub: Hub, valkey: Redis) -> None:
    subscription = a_hub.follow("t")
    assert await subscription.take(60) is None  # confirmed: read the stream now
    valkey.publish(keys.channel("t"), "one")
    valkey.publish(keys.channel("t"), "two")
    payloads: list[bytes] = []
    while len(payloads) < 2:
        payloads += await subscription.take(60) or []
    assert payloads == [b"one", b"two"]
    assert await subscription.take(0.01) is None  # silence


async def test_only_the_last_confirmation_of_a_channel_counts(a_hub: Hub) -> None:
    """Left and joined again before the first SUBSCRIBE was confirmed: an UNSUBSCRIBE is still to take effect."""
    first = a_hub.follow("t")
    name = keys.channel("t").encode()
    a_hub._unconfirmed[name] = 2  # SUBSCRIBE, UNSUBSCRIBE, SUBSCRIBE are on their way
    a_hub._heed([b"subscribe", name, 1])
    assert not first.stale
    a_hub._heed([b"unsubscribe", name, 0])
    assert not first.stale
    a_hub._heed([b"subscribe", name, 1])
    assert first.stale


async def test_coming_and_going_in_one_breath_ends_as_ordered(a_hub: Hub, valkey: Redis) -> None:
    for _ in range(20):
        a_hub.leave(a_hub.follow("t"))
    last = a_hub.follow("t")
    assert await last.take(60) is None
    assert valkey.publish(keys.channel("t"), "x") == 1
    assert await last.take(60) == [b"x"]
    a_hub.leave(last)
    a_hub.leave(last)  # twice is once
    other = a_hub.follow("other")
    assert await other.take(60) is None
    tasks = [name for name in valkey.pubsub_channels() if not name.startswith(keys.process_channel("").encode())]
    assert tasks == [keys.channel("other").encode()]


async def test_a_reader_that_joins_a_live_channel_is_told_to_read_at_once(a_hub: Hub) -> None:
    first = a_hub.follow("t")
    assert await first.take(60) is None
    assert a_hub.follow("t").stale


async def test_too_many_messages_are_dropped_and_the_reader_told(a_hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "BACKLOG", 3)
    subscription = a_hub.follow("t")
    subscription.stale = False
    for k in range(3):
        subscription.put(b"%d" % k)
    assert await subscription.take(1) == [b"0", b"1", b"2"]
    for k in range(4):
        subscription.put(b"%d" % k)
    assert await subscription.take(1) is None


async def test_so_are_messages_of_too_many_bytes(a_hub: Hub) -> None:
    """A few large ones of a reader that takes nothing would have as much as thousands of small ones."""
    subscription = a_hub.follow("t")
    subscription.stale = False
    half = bytes(hub.BACKLOG_BYTES // 2)
    for _ in range(2):
        subscription.put(half)
    assert await subscription.take(1) == [half, half]
    for _ in range(3):
        subscription.put(half)
    assert sum(map(len, subscription._inbox)) <= hub.BACKLOG_BYTES
    assert await subscription.take(1) is None
    subscription.put(half)
    assert await subscription.take(1) == [half]


async def test_messages_pass_a_waiting_reader_by_its_shortcut() -> None:
    offered: list[bytes] = []

    def shortcut(message: bytes) -> bool:
        offered.append(message)
        return message != b"not for it"

    subscription = hub.Subscription(b"t", shortcut)
    subscription.put(b"nobody waits")
    assert await subscription.take(60) == [b"nobody waits"]
    waiting = asyncio.create_task(subscription.take(60))
    await asyncio.sleep(0)
    for message in (b"1", b"2", b"not for it", b"behind that"):
        subscription.put(message)
    assert await waiting == [b"not for it", b"behind that"]
    assert offered == [b"1", b"2", b"not for it"]


async def test_what_passed_a_reader_is_no_silence() -> None:
    subscription = hub.Subscription(b"t", lambda message: True)
    waiting = asyncio.create_task(subscription.take(3600))
    await asyncio.sleep(0)
    subscription.put(b"1")
    subscription._end_wait()  # as if the hour were over
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    subscription._end_wait()
    assert await waiting is None


async def test_a_server_that_says_nothing_is_left_for_a_new_connection(
    a_hub: Hub, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "PING_S", 0.05)
    deaf: list[Any] = []
    heed = Hub._heed

    def hear(self: Hub, reply: Any) -> None:
        if len(deaf) < 3 and b"pong" in reply:
            deaf.append(reply)  # as if the answer to PING had not come
        else:
            heed(self, reply)

    monkeypatch.setattr(Hub, "_heed", hear)
    subscription = a_hub.follow("t")
    assert await subscription.take(60) is None
    before = subscribers(valkey)
    async with asyncio.timeout(PATIENCE_S):
        while not (deaf and subscribers(valkey) - before):
            await subscription.take(0.05)
        # A message may fall between two connections: on a busy machine there may be more than these.
        while not await subscription.take(0.05):
            valkey.publish(keys.channel("t"), "x")


async def test_an_idle_connection_is_kept_by_its_pongs(
    a_hub: Hub, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that ticks with them alone: a server that is slow to answer is none that is silent."""
    monkeypatch.setattr(hub, "PING_S", 0.05)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(hub, "time", clock)
    pongs: list[Any] = []
    heed = Hub._heed

    def hear(self: Hub, reply: Any) -> None:
        clock.now += hub.PING_S
        pongs.append(reply)
        heed(self, reply)

    monkeypatch.setattr(Hub, "_heed", hear)

    async def answered() -> None:
        pongs.clear()
        async with asyncio.timeout(PATIENCE_S):
            while sum(b"pong" in reply for reply in pongs) < 5:
                await subscription.take(0.01)

    subscription = a_hub.follow("t")
    assert await subscription.take(60) is None
    before = subscribers(valkey)
    await answered()
    a_hub.leave(subscription)
    await answered()
    again = a_hub.follow("t")
    assert await again.take(60) is None
    assert subscribers(valkey) == before


async def test_a_hub_that_listens_to_another_server_than_the_store_moves_to_it(
    a_hub: Hub, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does whose connection a demoted server has kept."""
    with processes.valkey() as (url, _):
        other, pool = connect_async(url), a_hub._store.connection_pool
        first, make = [other.connection_pool.make_connection], pool.make_connection
        monkeypatch.setattr(pool, "make_connection", lambda: (first.pop() if first else make)())
        subscription = a_hub.follow("t")
        assert await subscription.take(60) is None
        assert not valkey.pubsub_channels()
        a_hub.doubt(subscription)
        async with asyncio.timeout(PATIENCE_S):
            while not valkey.pubsub_numsub(keys.channel("t"))[0][1]:
                await subscription.take(0.05)
        await other.aclose()


async def test_a_message_that_is_none_ends_no_hub(a_hub: Hub, valkey: Redis) -> None:
    subscription = a_hub.follow("t")
    assert await subscription.take(60) is None
    await auntil(lambda: a_hub.follower)
    channel = keys.process_channel(str(a_hub.follower))
    for message in ("", "t", "t\n[0]\nt"):
        valkey.publish(channel, message)
    assert await subscription.take(60) == [b"[0]"]
    valkey.publish(channel, "t\n[1]")
    assert await subscription.take(60) == [b"[1]"]


async def test_a_reader_that_comes_as_another_leaves_keeps_the_tasks_channel_until_it_is_entered(
    a_hub: Hub, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's leave has yet to take effect: then nothing comes on the process's channel for a moment."""
    gate, left, run = asyncio.Event(), asyncio.Event(), hub.arun

    async def slow(store: Any, call: Any) -> Any:
        if call.args[1] == 0:
            left.set()
            await gate.wait()
        return await run(store, call)

    valkey.hset(keys.task("t"), "status", "in_progress")
    first = a_hub.follow("t")
    assert await first.take(60) is None
    await auntil(lambda: a_hub._channels[b"t"].entered)
    monkeypatch.setattr(hub, "arun", slow)
    a_hub.leave(first)
    await left.wait()
    second = a_hub.follow("t")
    assert await second.take(60) is None
    process = keys.process_channel(str(a_hub.follower))
    valkey.publish(process, "t\n[0]")
    assert await second.take(60) == [b"[0]"]
    assert a_hub._channels[b"t"].own
    gate.set()
    await auntil(lambda: a_hub._channels[b"t"].entered)
    assert valkey.hget(keys.task("t"), "followers") == str(a_hub.follower).encode()
    valkey.publish(process, "t\n[1]")
    assert await second.take(60) == [b"[1]"]
    assert not a_hub._channels[b"t"].own


async def test_a_hub_without_readers_listens_again_after_a_cut(a_hub: Hub, valkey: Redis) -> None:
    """So that the next task's reader can expect it."""
    a_hub.leave(a_hub.follow("t"))
    await auntil(lambda: a_hub.follower)
    follower = a_hub.follower
    assert follower
    valkey.client_kill_filter(_type="pubsub")
    await auntil(lambda: valkey.pubsub_numsub(keys.process_channel(follower))[0][1])
    await auntil(lambda: a_hub.follower == follower)


async def test_a_closed_hub_ends_its_readers_and_takes_no_more(a_hub: Hub) -> None:
    subscription = a_hub.follow("t")
    waiting = asyncio.create_task(_drain(subscription))
    await asyncio.sleep(0.05)
    await a_hub.aclose()
    with pytest.raises(PenstockError, match="closed"):
        await waiting
    with pytest.raises(PenstockError, match="closed"):
        a_hub.follow("t")


async def _drain(subscription: hub.Subscription) -> None:
    while True:
        await subscription.take(60)


class Failing:
    """A connection that fails when told to."""

    def __init__(self) -> None:
        self.reads, self.fail = asyncio.Event(), asyncio.Event()

    async def connect(self) -> None: ...

    async def disconnect(self, nowait: bool = False) -> None: ...

    def pack_commands(self, commands: object) -> list[bytes]:
        return []

    async def send_packed_command(self, commands: object) -> None: ...

    async def replies(self) -> AsyncIterator[list[Any]]:
        self.reads.set()
        await self.fail.wait()
        yield []
        raise ConnectionError("told to")


async def test_a_hub_is_closed_in_the_moment_in_which_its_connection_fails() -> None:
    connection = Failing()
    a_hub = Hub(SimpleNamespace(connection_pool=SimpleNamespace(make_connection=lambda: connection)))  # type: ignore[arg-type]
    a_hub.follow("t")
    await connection.reads.wait()
    connection.fail.set()
    async with asyncio.timeout(PATIENCE_S):
        await a_hub.aclose()
