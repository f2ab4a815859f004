"""Turns among tenants, as the real scripts give them: who floods a queue makes nobody wait, and nobody saves up."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

import pytest
from redis import Redis

from producers.broker import redis as broker
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message

QUEUE = keys.pool_queue("m", "1", "test")
INC = "w.1"


@dataclass(slots=True)
class Taken:
    uuid: str
    tenant: str
    tokens: int


@dataclass(slots=True)
class Shop:
    """A queue, and one worker that takes from it."""

    redis: Redis
    numbers: int = 0
    served: dict[str, int] = field(default_factory=dict)

    def send(self, tenant: str, tokens: int = 100, *, count: int = 1, tier: str = "default") -> None:
        with self.redis.pipeline(transaction=False) as pipe:
            for _ in range(count):
                self.numbers += 1
                message = Message(f"t{self.numbers}", QUEUE, tier, 1, tokens, tenant)
                pipe.lpush(broker_keys.list_of(message), message.envelope())
            pipe.execute()

    def take(self, count: int = 1, room: int = 10**6) -> list[Taken]:
        uuids = [f"u{self.numbers + k}" for k in range(1, count + 1)]
        self.numbers += count
        call = broker.fetch(
            INC,
            [QUEUE],
            uuids,
            broker.Credit((room,) * 4, (10**9,) * 4),
            capacity=(10**6, 10**9),
            plain_tokens=100,
            ageing_ms=10**9,
            max_redeliveries=5,
        )
        fetched = broker.read_fetch(run(self.redis, call))
        assert fetched is not None
        sizes = [json.loads(one.raw)["headers"]["penstock"] for one in fetched]
        found = [
            Taken(one.uuid, said.get("tenant", ""), said["tokens"]) for one, said in zip(fetched, sizes, strict=True)
        ]
        for one in found:
            self.served[one.tenant] = self.served.get(one.tenant, 0) + one.tokens
        return found

    def sort(self) -> None:
        """As a worker without room does, which looks again after each change of the lists."""
        while any(self.redis.llen(name) for name, _ in broker.lists([QUEUE])):
            assert not self.take(room=0)

    def end(self, one: Taken, used: int) -> None:
        assert run(self.redis, broker.ack(INC, one.uuid, "", used)) == 1


@pytest.fixture
def shop(valkey: Redis) -> Shop:
    valkey.set(keys.lease(INC), "{}")
    return Shop(valkey)


def test_a_flood_of_one_tenant_does_not_make_the_first_task_of_another_wait(shop: Shop) -> None:
    shop.send("flood", count=10_000)
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
        ids += [json.loads(_message(shop, one))["headers"]["id"] for one in taken]
    numbers = [int(task_id[1:]) for task_id in ids]
    assert [n for n in numbers if n <= 100] == list(range(1, 101))
    assert [n for n in numbers if n > 100] == list(range(101, 201))


def _message(shop: Shop, one: Taken) -> bytes:
    packed = shop.redis.hget(broker_keys.inflight(INC), one.uuid)
    found: bytes = shop.redis.eval("return cmsgpack.unpack(ARGV[1])[4]", 0, packed)
    return found


@pytest.mark.parametrize("weights", [{}, {"a": 4, "c": 0.5}])
def test_what_waiting_tenants_are_given_differs_by_the_largest_task_at_most(
    shop: Shop, weights: dict[str, float]
) -> None:
    """Virtual counters of those who wait differ by at most what one task adds: see `_fair.lua`."""
    rng = random.Random(7)
    largest = 4000
    for tenant, weight in weights.items():
        shop.redis.hset(broker_keys.WEIGHTS, tenant, str(weight))
    for _ in range(1000):
        tenant = rng.choice("aaaabbc")
        shop.send(tenant, rng.randint(1, 400 if tenant == "b" else largest))
    shop.sort()
    while all(shop.redis.exists(broker_keys.turn(QUEUE, tenant)) for tenant in "abc"):
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


def test_nothing_is_kept_of_tenants_who_are_gone(shop: Shop) -> None:
    for number in range(50):
        shop.send(f"tenant-{number}", 10 + number)
    shop.sort()
    taken = shop.take(50)
    assert len(taken) == 50
    for one in taken:
        shop.end(one, 5)
    left = {name.decode() for name in shop.redis.keys("*")}
    assert left == {keys.lease(INC), broker_keys.ARRIVALS, "penstock:deliveries"}


def test_the_last_worker_leaves_everything_in_the_lists(shop: Shop) -> None:
    shop.send("a", count=70)
    shop.send("b", count=40)
    shop.sort()
    shop.send("c")
    shop.take(3)
    while run(shop.redis, broker.recall(QUEUE, [], 30)) == 30:
        pass
    assert shop.redis.llen(QUEUE) == 111 - 3
    assert not shop.redis.keys("penstock:turn*") + shop.redis.keys("penstock:sorted*")
    ids = [json.loads(raw)["headers"]["id"] for raw in shop.redis.lrange(QUEUE, 0, -1)]
    assert ids == [task_id for task_id in (f"t{n}" for n in range(111, 0, -1)) if task_id in ids]
