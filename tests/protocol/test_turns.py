"""Turns among tenants, as each broker gives them: who floods a queue makes nobody wait, and nobody saves up."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from redis import Redis

from producers.broker.base import Consumer, Sender
from producers.broker.connect import connect_broker, connect_consumer, connect_sender
from producers.broker.redis import calls
from producers.broker.redis import keys as broker_keys
from producers.broker.values import Ack, Credit, PutDown, Rules
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message

QUEUE = keys.pool_queue("m", "1", "test")
INC = "w.1"


ROOM = 10**6
RULES = Rules(capacity=(ROOM, 10**9), plain_tokens=100, ageing=10**6, max_redeliveries=5)


@dataclass(slots=True)
class Taken:
    uuid: str
    id: str
    tenant: str
    tokens: int


@dataclass(slots=True)
class Shop:
    """A queue, and one worker that takes from it."""

    url: str
    sender: Sender
    worker: Consumer
    numbers: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    served: dict[str, int] = field(default_factory=dict)

    def send(self, tenant: str, tokens: int = 100, *, count: int = 1, tier: str = "default") -> None:
        for _ in range(count):
            self.numbers += 1
            self.sender.send(Message(f"t{self.numbers}", QUEUE, tier, 1, tokens, tenant))
        self.sent[tenant] += count

    def take(self, count: int = 1, room: int = ROOM, sort_limit: int | None = None) -> list[Taken]:
        uuids = [f"u{self.numbers + k}" for k in range(1, count + 1)]
        self.numbers += count
        fetched = self.worker.fetch(INC, uuids, Credit((room,) * 4, (10**9,) * 4), RULES, sort_limit)
        assert fetched is not None
        found = []
        for one in fetched:
            headers = json.loads(one.raw)["headers"]
            said = headers["penstock"]
            found.append(Taken(one.uuid, headers["id"], said.get("tenant", ""), said["tokens"]))
        for one in found:
            self.served[one.tenant] = self.served.get(one.tenant, 0) + one.tokens
            self.taken[one.tenant] += 1
        return found

    def sort(self) -> None:
        """As workers without room do, in the end."""
        for _ in range(0, self.sent.total(), 1000):
            assert not self.take(room=0, sort_limit=1000)

    def end(self, one: Taken, used: int) -> None:
        assert self.worker.put_down([Ack(INC, one.uuid, used=used)]) == [PutDown.DONE]

    def weigh(self, tenant: str, weight: float) -> None:
        async def said() -> None:
            broker = connect_broker(self.url, self.url)
            await broker.weigh(tenant, weight)
            await broker.aclose()

        asyncio.run(said())


@pytest.fixture(params=["redis", "memory"])
def shop(request: pytest.FixtureRequest, valkey_url: str, valkey: Redis) -> Iterator[Shop]:
    url = valkey_url if request.param == "redis" else f"memory://{uuid.uuid4()}"
    shop = Shop(url, connect_sender(url, url), connect_consumer(url, [QUEUE], url))
    shop.worker.take_lease(INC, "{}", 600.0)
    yield shop
    shop.sender.close()
    shop.worker.close()


def test_a_flood_of_one_tenant_does_not_make_the_first_task_of_another_wait(shop: Shop) -> None:
    shop.send("flood", count=2_500)
    running = shop.take(8, room=8)
    assert {one.tenant for one in running} == {"flood"}
    shop.send("other")
    shop.send("", count=2)
    shop.sort()
    assert {one.tenant for one in shop.take(3)} == {"", "flood", "other"}


def test_a_tenants_own_tasks_keep_their_order(shop: Shop) -> None:
    shop.send("a", count=100)
    shop.send("b", count=100)
    ids = []
    while taken := shop.take(7):
        ids += [one.id for one in taken]
    numbers = [int(task_id[1:]) for task_id in ids]
    assert [n for n in numbers if n <= 100] == list(range(1, 101))
    assert [n for n in numbers if n > 100] == list(range(101, 201))


@pytest.mark.parametrize("weights", [{}, {"a": 4, "c": 0.5}])
def test_what_waiting_tenants_are_given_differs_by_the_largest_task_at_most(
    shop: Shop, weights: dict[str, float]
) -> None:
    """Virtual counters of those who wait differ by at most what one task adds: see `_fair.lua`."""
    rng = random.Random(7)
    largest = 4000
    for tenant, weight in weights.items():
        shop.weigh(tenant, weight)
    for _ in range(1000):
        tenant = rng.choice("aaaabbc")
        shop.send(tenant, rng.randint(1, 400 if tenant == "b" else largest))
    shop.sort()
    while all(shop.sent[tenant] > shop.taken[tenant] for tenant in "abc"):
        shop.take(rng.randint(1, 5))
        shares = [shop.served.get(tenant, 0) / weights.get(tenant, 1) for tenant in "abc"]
        assert max(shares) - min(shares) <= largest / min([1, *weights.values()])
    assert min(shop.served.values()) > 5 * largest


def test_a_rest_saves_nothing_up(shop: Shop) -> None:
    shop.send("busy", count=300)
    shop.send("idle")
    shop.sort()
    shop.take(200)
    shop.send("idle", count=50)
    shop.sort()
    taken = [one.tenant for one in shop.take(20)]
    assert abs(taken.count("idle") - taken.count("busy")) <= 2


def test_who_asks_one_at_a_time_gets_no_more_than_its_share(shop: Shop) -> None:
    shop.send("many", 100, count=300)
    shop.sort()
    shop.send("single", 1000)
    for _ in range(200):
        if shop.take(1)[0].tenant == "single":
            shop.send("single", 1000)
    assert abs(shop.served["single"] - shop.served["many"]) <= 1100


def test_what_was_not_used_is_not_paid_for(shop: Shop) -> None:
    """Who leaves max_tokens high and stops early is charged what was made."""
    shop.send("careless", 4000, count=200)
    shop.send("careful", 100, count=400)
    shop.sort()
    used: dict[str, int] = {}
    for _ in range(300):
        (one,) = shop.take(1)
        shop.end(one, 100)
        used[one.tenant] = used.get(one.tenant, 0) + 100
    assert abs(used["careless"] - used["careful"]) <= 200


def test_tiers_come_before_turns(shop: Shop) -> None:
    shop.send("a", count=3, tier="batch")
    shop.send("b", tier="flex", count=2)
    shop.send("a", tier="priority", count=3)
    shop.take(2)
    assert [one.tenant for one in shop.take(6)] == ["a", "b", "b", "a", "a", "a"]


@pytest.mark.parametrize("shop", ["redis"], indirect=True)
def test_nothing_is_kept_of_tenants_who_are_gone(shop: Shop, valkey: Redis) -> None:
    for number in range(50):
        shop.send(f"tenant-{number}", 10 + number)
    shop.sort()
    taken = shop.take(50)
    assert len(taken) == 50
    for one in taken:
        shop.end(one, 5)
    counted = (broker_keys.ARRIVALS, broker_keys.DELIVERIES, broker_keys.DELIVERED_TOKENS)
    left = {name.decode() for name in valkey.keys("*")}
    assert left == {keys.lease(INC), broker_keys.INCARNATIONS, *counted}


@pytest.mark.parametrize("shop", ["redis"], indirect=True)
def test_the_last_worker_leaves_everything_in_the_lists(shop: Shop, valkey: Redis) -> None:
    shop.send("a", count=70)
    shop.send("b", count=40)
    shop.sort()
    shop.send("c")
    shop.take(3)
    while run(valkey, calls.recall(QUEUE, [], 30)) == 30:
        pass
    assert valkey.llen(QUEUE) == 111 - 3
    assert not valkey.keys("penstock:turn*") + valkey.keys("penstock:sorted*")
    ids = [json.loads(raw)["headers"]["id"] for raw in valkey.lrange(QUEUE, 0, -1)]
    assert ids == [task_id for task_id in (f"t{n}" for n in range(111, 0, -1)) if task_id in ids]
