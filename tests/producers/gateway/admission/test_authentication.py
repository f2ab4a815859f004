"""Keys while the store is away, and wrong keys one after the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as Lost

from producers.client.steps import FAILURES
from producers.connection.connect import connect_async
from producers.gateway import GatewaySettings
from producers.gateway.admission import authentication as module
from producers.gateway.admission.authentication import FREE, LOOKED_FOR, LOOKS, PAUSED, SLOWEST_S, Callers
from producers.gateway.http.authorization import caller_of
from producers.gateway.http.errors import Problem
from producers.store.access import api_keys
from producers.store.access.audit import Change
from tests.processes import valkey
from tests.producers.gateway.conftest import Door
from tests.waiting import PATIENCE_S, auntil

T = TypeVar("T")


async def made(url: str, *scopes: str) -> str:
    key, token = api_keys.new_key("acme", "a key", scopes or ("read",))
    store = connect_async(url)
    await api_keys.create(store, key, Change("test", "key.create", key.id))
    await store.aclose()
    return token


async def test_keys_that_were_seen_go_on_while_the_store_is_away_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FRESH_S", 0.0)  # each call looks
    with valkey() as (url, _):
        seen, unseen = await made(url), await made(url)
        callers, began = Callers(connect_async(url)), time.monotonic()
        assert (await callers.principal(seen, "here")).tenant == "acme"
    assert (await callers.principal(seen, "here")).tenant == "acme"
    with pytest.raises(FAILURES):
        await callers.principal(unseen, "here")
    with pytest.raises(Problem) as wrong:  # a secret that the key never had, though its id was seen
        await callers.principal(seen[:21] + unseen[21:], "here")
    assert wrong.value.status == 401
    monkeypatch.setattr(module, "REMEMBERED_S", time.monotonic() - began + 0.3)

    async def used_on_and_on() -> None:
        while True:
            await callers.principal(seen, "here")

    with pytest.raises(FAILURES):  # use does not prolong it: meanwhile no revocation comes through
        await used_on_and_on()


async def test_whose_request_it_is_is_known_by_a_key_that_was_seen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who asks now and then would wait with those who flood from the same address."""
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    with valkey() as (url, _):
        seen, unseen = await made(url), await made(url)
        callers = Callers(connect_async(url))
        await callers.principal(seen, "here")
    assert callers.again(seen) is None
    app = SimpleNamespace(state=SimpleNamespace(gateway=SimpleNamespace(callers=callers)))
    for token, address, whose in (
        (seen, "192.0.2.1", ("tenant", "acme")),
        (unseen, "192.0.2.1", "192.0.2.1"),
        (None, "2001:db8::1:2:3:4", "2001:db8::/64"),
    ):
        headers = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
        assert caller_of({"app": app, "headers": headers, "client": (address, 1)}) == whose


def test_a_key_of_the_metrics_alone_reads_that_the_store_is_away_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the series that tells it would end before its alert fires."""
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    with valkey() as (url, _):
        tokens = [asyncio.run(made(url, *scopes)) for scopes in (("metrics",), ("metrics", "read"))]
        door = Door(GatewaySettings(url, url, auth="keys", sweep=False))

        def scraped(token: str) -> httpx.Response:
            return httpx.get(f"{door.url}/metrics", headers={"authorization": f"Bearer {token}"}, timeout=PATIENCE_S)

        assert ["penstock_up 1.0" in scraped(token).text for token in tokens] == [True, True]
    monkeypatch.setattr(module, "REMEMBERED_S", 0.0)
    try:
        assert "penstock_up 0.0" in scraped(tokens[0]).text
        assert scraped(tokens[1]).status_code == 503
    finally:
        door.close()


def test_a_gateway_without_its_store_lets_in_whom_it_knows_alone() -> None:
    """Who is let in is told that the body is wrong, for which no store is asked."""
    with valkey() as (url, _):
        seen, unseen = asyncio.run(made(url)), asyncio.run(made(url))
        door = Door(GatewaySettings(url, url, auth="keys", sweep=False))

        def told(token: str | None) -> int:
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            return httpx.get(f"{door.url}/v1/tasks?limit=none", headers=headers, timeout=PATIENCE_S).status_code

        assert told(seen) == 400
    try:
        assert [told(one) for one in (seen, unseen, seen[:21] + unseen[21:], None)] == [400, 503, 401, 401]
    finally:
        door.close()


class Late(Redis):
    """A store that holds an answer back until its event is set, and loses all while it is `away`."""

    held: tuple[asyncio.Event, asyncio.Event] | None = None
    away = False

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        held, self.held = self.held, None
        answer = await super().execute_command(*args, **options)
        if held is not None:
            held[0].set()
            await held[1].wait()
        if self.away:
            raise Lost
        return answer

    async def hold(self, asking: Coroutine[Any, Any, T]) -> tuple[asyncio.Event, asyncio.Task[T]]:
        """Hold back the answer to what asks now, until the event is set."""
        there, comes = self.held = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(asking)
        await there.wait()
        return comes, task


async def test_a_wrong_secret_that_is_answered_late_takes_nothing_from_who_came_in_meanwhile(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    async with Late.from_url(valkey_url) as store:
        good, callers = await made(valkey_url), Callers(store)
        comes, guess = await store.hold(callers.principal(good[:21] + "b" * 43, "there"))
        await callers.principal(good, "here")
        comes.set()
        with pytest.raises(Problem):
            await guess
        store.away = True
        assert (await callers.principal(good, "here")).tenant == "acme"


@pytest.mark.parametrize("lost", [True, False])
async def test_a_look_that_is_answered_late_or_never_brings_no_ended_key_back(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(module, "FRESH_S", 0.0)
    async with Late.from_url(valkey_url) as store:
        good, callers = await made(valkey_url), Callers(store)
        await callers.principal(good, "here")
        comes, early = await store.hold(callers.principal(good, "here"))
        await api_keys.change(store, good[4:20], lambda key: replace(key, revoked_at=1), Change("test", "x", "x"))
        with pytest.raises(Problem):  # another look, which finds that the key has ended
            await callers.principal(good[:21] + "b" * 43, "there")
        store.away = lost
        comes.set()
        with pytest.raises(Problem):
            await early


async def test_wrong_keys_of_an_address_are_answered_ever_more_slowly(valkey_url: str) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    callers, good = Callers(connect_async(valkey_url), sleep), await made(valkey_url)

    async def tries(address: str, count: int, token: str | None = "psk_" + "a" * 16 + "_" + "b" * 43) -> list[float]:
        pauses.clear()
        for _ in range(count):
            with pytest.raises(Problem):
                await callers.principal(token, address)
        return [*pauses]

    slowed = await tries("guesser", FREE + 10)
    assert slowed[:FREE] == [0.0] * FREE
    assert all(one < two for one, two in zip(slowed[FREE - 1 : FREE + 3], slowed[FREE : FREE + 4], strict=True))
    assert slowed[-1] == SLOWEST_S
    assert await tries("another", 1) == [0.0]
    assert await tries("guesser", 1, None) == [], "no key is no guess"
    pauses.clear()
    await callers.principal(good, "guesser")
    assert pauses == [], "who has a good key does not wait for those who have none"


async def test_only_so_many_wrong_keys_of_an_address_wait_and_of_all(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Further ones are refused at once. Who has a good key is let in all the same."""
    monkeypatch.setattr(module, "PAUSED_IN_ALL", 2 * PAUSED)
    over = asyncio.Event()

    async def sleep(_: float) -> None:
        await over.wait()

    callers, good = Callers(connect_async(valkey_url), sleep), await made(valkey_url)

    def flood(address: str, count: int) -> list[asyncio.Task[int]]:
        return [asyncio.create_task(told(callers, wrong(number), address)) for number in range(count)]

    first = flood("2001:db8::1", 3 * PAUSED)
    await auntil(lambda: sum(task.done() for task in first) == 2 * PAUSED)
    assert {task.result() for task in first if task.done()} == {429}
    assert await told(callers, wrong(), "2001:db8::ffff:2") == 429, "64 bits of IPv6 are one address"
    assert await told(callers, None, "2001:db8::1") == 401, "no key is no guess"
    second = flood("203.0.113.1", PAUSED)
    await auntil(lambda: callers._paused.total() == 2 * PAUSED)
    assert await told(callers, wrong(), "203.0.113.2") == 429
    assert (await callers.principal(good, "2001:db8::1")).tenant == "acme"
    over.set()
    assert {await task for task in (*first, *second)} == {401, 429}
    assert await told(callers, wrong(), "203.0.113.2") == 401


class Counted(Redis):
    """A store that counts the commands for keys; it answers them once `answers` is set."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.commands: list[int] = []
        self.answers = asyncio.Event()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        self.commands.append(len(args) - 2)
        await self.answers.wait()
        return await super().execute_command(*args, **options)


async def test_a_flood_of_wrong_keys_shares_commands_to_the_store(valkey_url: str) -> None:
    async with Counted.from_url(valkey_url) as store:
        callers, good = Callers(store), await made(valkey_url)
        flood = []
        for number in range(2 * LOOKED_FOR + LOOKS):
            flood.append(asyncio.create_task(told(callers, wrong(number), "203.0.113.1")))
            if number < LOOKS:
                await auntil(lambda: len(store.commands) == len(flood))
        right = asyncio.create_task(callers.principal(good, "203.0.113.1"))
        await auntil(lambda: len(callers._sought) == 2 * LOOKED_FOR + 1)
        assert store.commands == [1] * LOOKS
        store.answers.set()
        assert (await right).tenant == "acme"
        assert {await task for task in flood} == {401, 429}
        assert store.commands[LOOKS:] == [LOOKED_FOR, LOOKED_FOR, 1]


async def test_those_who_ask_for_a_key_together_are_told_together_that_the_store_is_away() -> None:
    callers = Callers(connect_async("redis://127.0.0.1:1"))
    tries = [callers.principal(wrong(number % 3), "203.0.113.1") for number in range(9)]
    assert {type(error) for error in await asyncio.gather(*tries, return_exceptions=True)} == {Lost}
    assert not callers._sought
    assert not callers._looking


def wrong(number: int = 0) -> str:
    """A key that nobody has."""
    return f"psk_{number:016}_" + "b" * 43


async def told(callers: Callers, token: str | None, address: str) -> int:
    """The status with which a caller is refused."""
    with pytest.raises(Problem) as refused:
        await callers.principal(token, address)
    return refused.value.status
