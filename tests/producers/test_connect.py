"""Connections fail in one way, whatever event loop they are on."""

from __future__ import annotations

import asyncio

import pytest
import redis
import uvloop

from producers.connect import connect_async


def test_a_connection_that_ended_unseen_is_a_lost_one(valkey_url: str) -> None:
    async def use() -> None:
        client = connect_async(valkey_url)
        connection = await client.connection_pool.get_connection()
        await connection.send_command("PING")
        assert await connection.read_response() == b"PONG"
        connection._writer.transport.abort()
        await asyncio.sleep(0)  # the loop closes it; nobody has read that yet
        with pytest.raises(redis.ConnectionError):
            await connection.send_command("PING")
        await client.connection_pool.release(connection)
        assert await client.ping(), "the pool's next connection works"
        await client.aclose()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(use())
