"""What a stream is to send next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from producers.gateway.fair_share import SHARE, FairShare
from producers.gateway.http.sse import HEARTBEAT, Feed


async def test_heartbeats_come_before_a_late_chunk_and_lose_none() -> None:
    may = asyncio.Event()

    async def late() -> AsyncGenerator[bytes]:
        await may.wait()
        for chunk in (b"a", b"b", b"c"):
            yield chunk

    feed = Feed(late(), asyncio.get_running_loop().create_future(), heartbeat=0.005)
    try:
        assert [await feed.next() for _ in range(2)] == [HEARTBEAT] * 2
        may.set()
        sent = []
        while (chunk := await feed.next()) is not None:
            sent.append(chunk)
    finally:
        await feed.close()
    assert [chunk for chunk in sent if chunk != HEARTBEAT] == [b"a", b"b", b"c"]


def test_what_the_chunks_raise_comes_after_the_chunks() -> None:
    async def broken() -> AsyncGenerator[bytes]:
        yield b"a"
        raise OSError("the store is away")

    async def first() -> None:
        feed = Feed(broken(), asyncio.get_running_loop().create_future(), heartbeat=60)
        assert await feed.next() == b"a"
        try:
            with pytest.raises(OSError, match="away"):
                await feed.next()
        finally:
            await feed.close()

    asyncio.run(first())


async def test_a_chunk_waits_for_its_callers_turn_with_heartbeats() -> None:
    fair = FairShare()
    share, fair.cap = fair.of("caller"), 0.001
    share.used = 1e9
    SHARE.set(share)

    async def chunks() -> AsyncGenerator[bytes]:
        yield b"one"

    feed = Feed(chunks(), asyncio.get_running_loop().create_future(), heartbeat=0.005)
    assert [await feed.next() for _ in range(2)] == [HEARTBEAT] * 2
    fair.cap = None
    while (chunk := await feed.next()) == HEARTBEAT:
        pass
    assert chunk == b"one"
    await feed.close()


async def test_heartbeats_go_on_where_nobody_can_tell_what_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    told = asyncio.Event()

    async def waits() -> str:
        raise ZeroDivisionError("of a share")

    async def chunks() -> AsyncGenerator[bytes]:
        await told.wait()
        yield b"a"

    feed = Feed(chunks(), asyncio.get_running_loop().create_future(), heartbeat=0.005, waits=waits)
    assert [await feed.next() for _ in range(2)] == [HEARTBEAT] * 2
    told.set()
    while (chunk := await feed.next()) == HEARTBEAT:
        pass
    await feed.close()
    assert chunk == b"a"
    assert "cannot tell what a stream waits for: of a share" in caplog.text


async def test_no_heartbeat_stands_behind_the_last_chunk_of_a_reader_who_took_it_slowly() -> None:
    async def chunks() -> AsyncGenerator[bytes]:
        yield b"a"

    feed = Feed(chunks(), asyncio.get_running_loop().create_future(), heartbeat=3600)
    assert await feed.next() == b"a"
    feed._last_read_at = float("-inf")
    feed._beat()
    assert await feed.next() is None
    await feed.close()
