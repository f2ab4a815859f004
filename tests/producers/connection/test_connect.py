"""Connections fail in one way, whatever event loop they are on."""

from __future__ import annotations

import asyncio

import pytest
import redis
import uvloop

from producers.connection.connect import connect_async, kombu_url


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


def test_kombu_is_told_the_options_that_it_knows() -> None:
    assert kombu_url("redis://h:1/2?socket_timeout=1") == "redis://h:1/2"
    tls = "rediss://h:1/2?ssl_ca_certs=/ca.pem&socket_timeout=1"
    assert kombu_url(tls) == "rediss://h:1/2?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required"
