"""A server that takes connections and answers nothing is waited for once, not by each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from producers.connection import connect, silence
from producers.connection.connect import connect_async
from producers.connection.silence import Silent
from tests.chaos.links import Links

#: Calls that come at once.
CALLS = 5


@pytest.fixture
def links(valkey_url: str) -> Iterator[Links]:
    links = Links()
    links.add("client", urlsplit(valkey_url).port or 0)
    yield links
    links.close()


@pytest.fixture
async def client(links: Links, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Redis]:
    """A client of a server that has fallen silent, as a call of it has found; the next one may try it."""
    monkeypatch.setattr(silence, "PAUSE_S", 0.0)
    async with connect_async(f"redis://127.0.0.1:{links.by_name['client'].port}/0") as client:
        await asyncio.gather(*(client.ping() for _ in range(CALLS)))
        links.make("client", "silence")
        with monkeypatch.context() as patched:
            patched.setattr(connect, "SILENT_S", 0.1)
            with pytest.raises(TimeoutError, match="no answer"):
                await client.ping()
        yield client


async def test_one_call_tries_it_and_the_others_fail_at_once(client: Redis, links: Links) -> None:
    calls = [asyncio.ensure_future(client.echo(str(number))) for number in range(CALLS)]
    done: set[asyncio.Future[bytes]] = set()
    while len(done) < CALLS - 1:
        done, trying = await asyncio.wait(calls, return_when="FIRST_COMPLETED", timeout=0.01)
    assert all(isinstance(call.exception(), Silent) for call in done)
    links.make("client", "ok")
    (last,) = trying
    assert await last == str(calls.index(last)).encode()
    assert await asyncio.gather(*(client.echo("all") for _ in range(CALLS))) == [b"all"] * CALLS


async def test_another_may_try_where_the_one_gave_up(client: Redis, links: Links) -> None:
    trying = asyncio.ensure_future(client.ping())
    await asyncio.wait([trying], timeout=0.1)
    with pytest.raises(Silent):
        await client.ping()
    trying.cancel()
    await asyncio.wait([trying])
    links.make("client", "ok")
    assert await client.ping()


async def test_connections_of_before_are_not_trusted(client: Redis, links: Links) -> None:
    """What lies on the way may have forgotten them all, while the server is well."""
    links.make("client", "forget")
    await client.ping()
    assert await asyncio.gather(*(client.echo("all") for _ in range(CALLS))) == [b"all"] * CALLS
