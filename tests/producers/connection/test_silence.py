"""A server that takes connections and answers nothing is waited for once, not by each call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from producers.client.steps import FAILURES
from producers.connection import connect
from producers.connection.connect import PAUSE_S, SILENT_S, Silence, Silent, connect_async
from tests.chaos.links import Links

#: Calls that come at once.
CALLS = 5
#: The address of a server that is not there.
WHERE = "server:6379"


@pytest.fixture
def links(valkey_url: str) -> Iterator[Links]:
    links = Links()
    links.add("client", urlsplit(valkey_url).port or 0)
    yield links
    links.close()


@pytest.fixture
async def client(links: Links, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Redis]:
    """A client of a server that has fallen silent, as a call of it has found; the next one may try it."""
    monkeypatch.setattr(connect, "PAUSE_S", 0.0)
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
    """A proxy on the way may have forgotten them all, while the server is well."""
    links.make("client", "forget")
    await client.ping()
    assert await asyncio.gather(*(client.echo("all") for _ in range(CALLS))) == [b"all"] * CALLS


async def test_a_slow_call_does_not_make_a_server_silent_that_answers_others(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect_async(valkey_url) as client:
        monkeypatch.setattr(connect, "SILENT_S", 2.0)  # a busy machine's server may answer late
        slow = asyncio.ensure_future(client.blpop(["nobody-pushes"], 0))
        while not slow.done():
            await client.ping()
            await asyncio.wait([slow], timeout=0.01)
        assert isinstance(slow.exception(), TimeoutError)
        assert await asyncio.gather(*(client.echo("all") for _ in range(CALLS))) == [b"all"] * CALLS


async def test_a_watch_does_not_outlive_its_connection(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take what changed meanwhile for unchanged."""
    async with connect_async(valkey_url) as client, client.pipeline() as pipe:
        await pipe.watch("watched")
        with monkeypatch.context() as patched:
            patched.setattr(connect, "SILENT_S", 0.1)
            patched.setattr(connect, "PAUSE_S", 0.0)
            with pytest.raises(TimeoutError):
                await client.blpop(["nobody-pushes"], 0)
        pipe.multi()
        pipe.set("watched", "mine")
        with pytest.raises(FAILURES):
            await pipe.execute()
        assert not await client.exists("watched")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time (s) that Silence sees."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(connect, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def silent(clock: SimpleNamespace) -> Silence:
    """A silence that was just found, so that one may try now."""
    known = Silence()
    known.unanswered(WHERE, SILENT_S)
    clock.now += PAUSE_S
    return known


def test_only_the_end_of_the_one_try_lets_another_one_begin(clock: SimpleNamespace) -> None:
    """Calls of before end meanwhile, too."""
    known = silent(clock)
    entered = known.enter(WHERE)
    known.unanswered(WHERE, SILENT_S)
    clock.now += 2 * PAUSE_S
    with pytest.raises(Silent):
        known.enter(WHERE)
    known.tried(entered)
    clock.now += PAUSE_S
    known.enter(WHERE)


def test_a_silence_of_long_ago_is_forgotten(clock: SimpleNamespace) -> None:
    """The server may be well since, and all calls that come at once would fail but one."""
    known = silent(clock)
    clock.now += 2 * SILENT_S
    known.enter(WHERE)
    known.enter(WHERE)


async def test_what_came_while_the_process_was_held_up_is_read(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by SIGSTOP, after which timers run before sockets are read: here the timer is late by its clock."""
    async with connect_async(valkey_url) as client:
        await client.ping()
        loop = asyncio.get_running_loop()
        call = asyncio.ensure_future(client.blpop(["nobody-pushes"], 0.1))
        await asyncio.sleep(0)
        monkeypatch.setattr(loop, "time", lambda told=loop.time: told() + SILENT_S + 2 * connect.HELD_UP_S)
        assert await call is None


def test_another_address_may_fall_silent_after_the_first(clock: SimpleNamespace) -> None:
    """A primary that was replaced keeps what is known of it for itself."""
    known = silent(clock)
    known.enter("replica:6379")
    known.unanswered("replica:6379", SILENT_S)
    with pytest.raises(Silent):
        known.enter("replica:6379")
