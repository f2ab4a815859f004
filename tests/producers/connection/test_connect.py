"""Connections fail in one way, whatever event loop they are on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
import redis
import uvloop

from producers.connection import connect
from producers.connection.connect import connect_async, kombu_url, shown
from producers.connection.script import aexecute


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


@pytest.mark.parametrize(
    "ask",
    [
        lambda client, *command: client.execute_command(*command),
        lambda client, *command: client.pipeline(transaction=False).execute_command(*command).execute(),
        aexecute,
    ],
    ids=["command", "pipeline", "plain"],
)
async def test_a_server_that_does_not_answer_is_given_up(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Awaitable[object]]
) -> None:
    async with connect_async(valkey_url) as client:
        await client.ping()
        monkeypatch.setattr(connect, "SILENT_S", 0.1)
        monkeypatch.setattr(connect, "PAUSE_S", 0.0)
        with pytest.raises(TimeoutError):
            await ask(client, "BLPOP", "nobody-pushes", 0)
        monkeypatch.undo()
        assert await client.echo("next") == b"next", "what was not read is nobody's answer"


def test_kombu_is_told_the_options_that_it_knows() -> None:
    assert kombu_url("redis://h:1/2?socket_timeout=1") == "redis://h:1/2"
    tls = "rediss://h:1/2?ssl_ca_certs=/ca.pem&socket_timeout=1"
    assert kombu_url(tls) == "rediss://h:1/2?ssl_ca_certs=/ca.pem&ssl_cert_reqs=required"


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("redis://me:secret@10.0.0.5:6379/0?password=secret", "redis://10.0.0.5:6379/0"),
        ("sqs://us-east-1?prefix=as-&celery=1", "sqs://us-east-1?prefix=as-&celery=1"),
        ("sqs://us-east-1?endpoint_url=http://me:secret@10.0.0.5", "10.0.0.5"),
    ],
)
def test_a_url_is_shown_without_secrets_and_can_still_be_used(url: str, text: str) -> None:
    assert shown(url).endswith(text)
    assert "secret" not in shown(url)


@pytest.mark.parametrize("client", [connect.connect, connect_async])
def test_a_new_connection_reads_no_version_from_installed_files(
    client: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read() -> str:
        raise AssertionError("it takes longer than to connect")

    monkeypatch.setattr("redis.utils.get_lib_version", read)
    client("redis://127.0.0.1:1/0").connection_pool.make_connection()


async def test_a_listening_connection_gives_all_replies_of_a_read_at_once(valkey_url: str) -> None:
    client = connect_async(valkey_url)
    connection = client.connection_pool.make_connection()
    await connection.connect()
    async with aclosing(connection.replies()) as batches:
        await connection.send_packed_command([b"PING\r\n" * 3])
        replies: list[Any] = []
        while len(replies) < 3:
            replies += await anext(batches)
        assert replies == [b"PONG"] * 3
        await connection.send_packed_command([b"NONSENSE\r\n"])
        with pytest.raises(redis.ResponseError, match="unknown command"):
            await anext(batches)
    await connection.disconnect(nowait=True)
    await client.aclose()


async def test_a_server_that_closes_ends_them(valkey: redis.Redis, valkey_url: str) -> None:
    client = connect_async(valkey_url)
    connection = client.connection_pool.make_connection()
    await connection.connect()
    await connection.send_command("CLIENT", "ID")
    batches = connection.replies()
    (number,) = await anext(batches)
    valkey.client_kill_filter(_id=number)
    with pytest.raises(redis.ConnectionError, match="closed"):
        await anext(batches)
    await connection.disconnect(nowait=True)
    await client.aclose()
