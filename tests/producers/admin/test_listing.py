"""Models that nobody serves, scales or published are withdrawn: after a minute, or by `penstock up` at once."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient, UnknownModel
from producers.admin import listing
from producers.admin.listing import UnservedModels, has_died, publisher_of, withdraw
from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from producers.gateway.batch_endpoints import LineEndpoints
from producers.sources.messages.source import MessagesSettings
from producers.sources.schedule import Schedule, ScheduleSettings
from producers.sources.source import Context
from producers.store.fleet import cards
from producers.sweeper.batches.endpoint import PlannedTask
from tests.producers.conftest import CARD, POOL
from tests.waiting import auntil

UP = "up:elsewhere.7.ab"


@pytest.fixture
async def aclient(valkey_url: str, valkey: Redis) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(valkey_url, patience=0.2) as client:
        yield client


class Clock:
    """The sweeper's clock, and its look at a time."""

    def __init__(self, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.models = 0.0, UnservedModels(client)
        monkeypatch.setattr(listing, "time", SimpleNamespace(monotonic=lambda: self.now))

    async def sweep(self, at: float) -> tuple[int, int]:
        self.now = at
        done = await self.models.sweep()
        return done["models_withdrawn"], done["models_listed"]


@pytest.fixture
def clock(aclient: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(aclient, monkeypatch)


def published(store: Redis, publisher: str | None) -> None:
    cards.publish(store, CARD, {}, publisher=publisher)


def serve(store: Redis, incarnation: str = "elsewhere.7.ab.worker.1", pool: keys.Pool = POOL) -> None:
    store.hset(keys.POOLS, pool.queue, json.dumps(asdict(pool)))
    store.hset(broker_keys.INCARNATIONS, incarnation, pool.queue)
    store.set(keys.lease(incarnation), "{}", ex=60)


def leave(store: Redis, incarnation: str = "elsewhere.7.ab.worker.1") -> None:
    store.delete(keys.lease(incarnation))


def scale(store: Redis, pool: str, age_s: int = 0, by: str = "elsewhere.7.ab") -> None:
    seconds, _ = store.time()
    store.hset(keys.SCALE_POOLS, pool, json.dumps({"at": seconds - age_s, "wanted": 0, "by": by}))


async def listed(client: AsyncClient) -> list[str]:
    return [card["name"] for card in await client.models()]


@pytest.mark.parametrize("publisher", [UP, "rollout:me@here", "nobody: a worker announced it"])
async def test_what_nobody_serves_for_a_minute_is_withdrawn_and_refused(
    aclient: AsyncClient, valkey: Redis, clock: Clock, publisher: str
) -> None:
    if publisher.startswith("nobody"):
        cards.announce(valkey, CARD, POOL, {})
    else:
        published(valkey, publisher)
    assert [await clock.sweep(at) for at in (0, 59, 60, 70)] == [(0, 0), (0, 0), (1, 0), (0, 0)]
    assert await listed(aclient) == []
    with pytest.raises(UnknownModel, match=r'Nobody serves the model "tiny".*penstock up.*penstock models publish'):
        await aclient.submit(model="tiny", prompt=[1])
    assert not valkey.exists(keys.TASKS), "nothing was written"


@pytest.mark.parametrize("old", [True, False])
async def test_what_an_operator_published_waits_for_ever(
    aclient: AsyncClient, valkey: Redis, clock: Clock, old: bool
) -> None:
    published(valkey, None)
    if old:  # by a release that wrote no publisher
        card = cards.read(valkey, "tiny") or {}
        valkey.hset(keys.MODELS, "tiny", json.dumps({name: card[name] for name in card if name != "publisher"}))
    assert [await clock.sweep(at) for at in (0, 100, 1000)] == [(0, 0)] * 3
    await aclient.submit(model="tiny", prompt=[1])


async def test_a_worker_that_is_started_again_within_a_minute_is_no_404(
    aclient: AsyncClient, valkey: Redis, clock: Clock
) -> None:
    published(valkey, UP)
    serve(valkey)
    assert await clock.sweep(0) == (0, 0)
    leave(valkey)
    assert [await clock.sweep(at) for at in (100, 155)] == [(0, 0), (0, 0)]
    serve(valkey)
    assert await clock.sweep(165) == (0, 0)
    leave(valkey)
    assert [await clock.sweep(at) for at in (170, 225, 231)] == [(0, 0), (0, 0), (1, 0)]


async def test_a_worker_of_another_version_serves_nothing_of_this_one(valkey: Redis, clock: Clock) -> None:
    published(valkey, UP)
    serve(valkey, pool=keys.Pool("tiny", "0ld", "f"))
    assert [await clock.sweep(at) for at in (0, 60)] == [(0, 0), (1, 0)]


@pytest.mark.parametrize("pool", ["tiny", f"tiny@{POOL.version}"])
async def test_a_model_is_listed_while_an_autoscaler_that_leads_has_it(
    aclient: AsyncClient, valkey: Redis, clock: Clock, pool: str
) -> None:
    published(valkey, UP)
    scale(valkey, pool)
    assert [await clock.sweep(at) for at in (0, 100)] == [(0, 0), (0, 0)]
    scale(valkey, pool, age_s=100)
    assert [await clock.sweep(at) for at in (200, 260)] == [(0, 0), (1, 0)]
    scale(valkey, pool)
    assert await clock.sweep(270) == (0, 1)
    assert await listed(aclient) == ["tiny"]


async def test_a_worker_that_announces_the_model_meanwhile_wins(
    aclient: AsyncClient, valkey: Redis, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card changes after the sweeper's look; and a time begins anew with each card, as leases come later."""
    published(valkey, UP)
    assert await clock.sweep(0) == (0, 0)
    look = listing.look

    async def late(client: AsyncClient) -> Any:
        models = await look(client)
        cards.announce(valkey, CARD | {"created": 2}, POOL, {})
        return models

    monkeypatch.setattr(listing, "look", late)
    assert await clock.sweep(60) == (0, 0)
    monkeypatch.setattr(listing, "look", look)
    assert [await clock.sweep(at) for at in (61, 120, 121)] == [(0, 0), (0, 0), (1, 0)]
    card = cards.announce(valkey, CARD, POOL, {})
    assert (card["publisher"], "withdrawn" in card) == (UP, False)


async def test_a_publisher_that_a_worker_of_an_earlier_release_left_out_is_named_again(
    valkey: Redis, clock: Clock
) -> None:
    def announced_by_the_earlier_release() -> None:
        card = cards.read(valkey, "tiny") or {}
        valkey.hset(keys.MODELS, "tiny", json.dumps({name: card[name] for name in card if name != "publisher"}))

    published(valkey, UP)
    assert await clock.sweep(0) == (0, 0)
    for at in (10, 20):
        announced_by_the_earlier_release()
        assert await clock.sweep(at) == (0, 0)
        assert (cards.read(valkey, "tiny") or {})["publisher"] == UP
    assert [await clock.sweep(at) for at in (30, 90)] == [(0, 0), (1, 0)]
    valkey.hset(keys.MODELS, "tiny", json.dumps(CARD | {"published": 5}))
    assert [await clock.sweep(at) for at in (100, 160)] == [(0, 0), (0, 0)], "published anew: an operator's"


class TestWhoPublishedIt:
    def test_an_operators_card_stays_an_operators_when_up_publishes_the_same(self, valkey: Redis) -> None:
        published(valkey, None)
        published(valkey, UP)
        assert (cards.read(valkey, "tiny") or {})["publisher"].startswith("cli:")
        cards.publish(valkey, CARD | {"version": "other"}, {}, publisher=UP)
        assert (cards.read(valkey, "tiny") or {})["publisher"] == UP
        published(valkey, None)
        assert cards.waits_alone(cards.read(valkey, "tiny") or {})

    def test_a_rollout_keeps_the_publisher_and_makes_none_that_waits(self, valkey: Redis) -> None:
        cards.announce(valkey, CARD, POOL, {})
        pinned = cards.pin(valkey, "tiny", POOL.version)
        assert not cards.waits_alone(pinned)
        assert cards.rollout_publisher(pinned) == pinned["publisher"]
        published(valkey, None)
        assert cards.rollout_publisher(cards.read(valkey, "tiny")) is None

    def test_an_up_takes_over_the_card_of_another(self, valkey: Redis) -> None:
        published(valkey, UP)
        raw, card = valkey.hget(keys.MODELS, "tiny"), cards.read(valkey, "tiny")
        valkey.hset(keys.MODELS, "tiny", json.dumps((card or {}) | {"withdrawn": 1}))
        cards.take_over(valkey, "tiny", "up:here.1.cd")
        assert cards.read(valkey, "tiny") == (card or {}) | {"publisher": "up:here.1.cd"}, raw
        cards.take_over(valkey, "nobody", "up:here.1.cd")


class TestAnUpThatEnded:
    async def test_its_models_are_withdrawn_with_what_its_own_processes_left(
        self, aclient: AsyncClient, valkey: Redis
    ) -> None:
        """A killed worker's lease stands for some seconds, and the last decision of its autoscaler for longer."""
        published(valkey, UP)
        serve(valkey)
        scale(valkey, f"tiny@{POOL.version}")
        assert await withdraw(aclient, lambda publisher: publisher == "up:other.1.cd") == []
        assert await withdraw(aclient, lambda publisher: publisher == UP) == ["tiny"]
        assert not valkey.exists(keys.SCALE_POOLS)
        assert await withdraw(aclient, lambda publisher: publisher == UP) == [], "done before"

    @pytest.mark.parametrize("other", ["worker", "autoscaler", "operator"])
    @pytest.mark.parametrize("name", ["elsewhere.70.ab", "elsewhere.7.cd"], ids=["a process", "another container"])
    async def test_others_keep_the_model_listed(
        self, aclient: AsyncClient, valkey: Redis, other: str, name: str
    ) -> None:
        """Containers may share their host name and process ids: the same image, and the same `hostname` in Compose."""
        published(valkey, publisher_of(UP.removeprefix("up:")))
        if other == "worker":
            serve(valkey, f"{name}.worker.1")
        elif other == "autoscaler":
            scale(valkey, "tiny", by=name)
        else:
            published(valkey, None)
        assert await withdraw(aclient, lambda publisher: True) == []
        assert await listed(aclient) == ["tiny"]

    def test_it_has_died_where_its_process_is_gone_or_this_one(self) -> None:
        host = socket.gethostname()
        mine = f"up:{host}.{os.getpid()}.ab"
        gone = 2**22 + 1  # above any process id
        assert has_died(f"up:{host}.{gone}.cd", mine)
        assert has_died(f"up:{host}.{os.getpid()}.cd", mine), "a container's first process has the same id each time"
        alive = (mine, f"up:{host}.1.cd", f"up:other.{gone}.cd", "up:", "up:x", f"up:{host}.{10**30}.ab")
        assert not any(has_died(publisher, mine) for publisher in alive)

    def test_it_lives_for_all_that_is_known_where_its_process_id_is_of_another_namespace(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two containers with one host name on one store, or one after a restart of the machine."""
        host, gone = socket.gethostname(), 2**22 + 1
        mine, *others = (publisher_of(f"{host}.{pid}.{run}") for pid in (os.getpid(), gone) for run in ("ab", "cd"))
        assert [has_died(other, mine) for other in others] == [True] * 3
        monkeypatch.setattr(listing, "place", lambda: "of another container")
        assert not any(has_died(other, publisher_of(f"{host}.{os.getpid()}.ef")) for other in others)
        assert has_died(f"up:{host}.{gone}.cd", mine), "as before it named its place"


async def test_tasks_that_were_accepted_elsewhere_find_a_withdrawn_model(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, clock: Clock
) -> None:
    """Lines of batches that were begun, schedules and messages of sources; and no others."""
    published(valkey, UP)
    assert [await clock.sweep(at) for at in (0, 60)] == [(0, 0), (1, 0)]
    task = {"model": "tiny", "prompt": "def main():", "max_tokens": 3}
    context = Context(aclient, valkey_url, "here", "")
    hourly = ScheduleSettings.model_validate({"type": "schedule", "cron": "0 * * * *", "task": task})
    schedule = hourly.source("hourly", context)
    assert isinstance(schedule, Schedule)
    await schedule.step(3600, 0)
    assert valkey.exists(keys.task("hourly-19700101T010000Z"))
    messages = MessagesSettings.model_validate({"type": "messages", "queue": "list:orders"}).source("orders", context)
    valkey.rpush("orders", json.dumps(task))
    running = asyncio.create_task(messages.run())
    await auntil(lambda: valkey.zcard(keys.TASKS) == 2)
    running.cancel()
    (line,) = await LineEndpoints(aclient).tasks("/v1/completions", [task])
    assert isinstance(line, PlannedTask)
    with pytest.raises(UnknownModel):
        await aclient.submit(**task)
