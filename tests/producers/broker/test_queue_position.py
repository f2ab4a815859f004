"""Where a waiting message stands, compared with the order in which messages are then taken."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest

from producers.broker.base import Broker, Consumer
from producers.broker.values import Back, Credit, QueuePosition, Rules, TenantCounts
from producers.contract.message import Message
from tests.exhaustive import few
from tests.producers.broker.conftest import INC, QUEUE

RULES = Rules(capacity=(10**6, 10**9), plain_tokens=512, ageing=10**6, max_redeliveries=5)
ALL = Credit((10**6,) * 4, (10**9,) * 4)

EITHER = pytest.mark.parametrize("url", ["redis", "memory"], indirect=True)
#: In memory the same turns are played, only slower.
REDIS_FIRST = pytest.mark.parametrize("url", few(["redis", "memory"], "redis"), indirect=True)


def take(consumer: Consumer, count: int) -> list[str]:
    """The ids of the next messages; of each list so many are sorted by tenant that none is taken out of turn."""
    uuids = [f"{random.random()}" for _ in range(count)]
    fetched = consumer.fetch(INC, uuids, ALL, RULES, sort_limit=1000)
    return [json.loads(one.raw)["headers"]["id"] for one in fetched or ()]


def one(number: int, tenant: str = "", tokens: int = 100) -> Message:
    """Of the same time are several, as of a request with many prompts."""
    return Message(f"task-{number}", QUEUE, "default", 1, tokens, tenant, 1_000_000 + number // 3)


@EITHER
async def test_with_one_tenant_it_is_exact_wherever_the_message_is(broker: Broker, consumer: Consumer) -> None:
    sent = [one(number) for number in range(1500)]
    await broker.send_many(sent)
    assert take(consumer, 10) == [message.id for message in sent[:10]]
    for number in (10, 11, 500, 1499):
        position = QueuePosition(number - 10, exact=True, tokens=100 * (number - 10))
        assert await broker.queue_position(sent[number]) == position
    assert await broker.queue_position(sent[3]) is None  # in flight
    assert await broker.queue_position(one(4000)) is None


@EITHER
async def test_what_was_given_back_stands_at_the_front_or_is_due(broker: Broker, consumer: Consumer) -> None:
    sent = [one(number) for number in range(50)]
    await broker.send_many(sent)
    fetched = consumer.fetch(INC, ["a", "b", "c"], ALL, RULES)
    assert fetched is not None
    consumer.put_down([Back(INC, "b"), Back(INC, "c", delay=3600.0)])
    assert await broker.queue_position(sent[1]) == QueuePosition(0, exact=True, tokens=0)
    late = await broker.queue_position(sent[2])
    assert late is not None
    assert late.due_s is not None
    assert 3000 < late.due_s <= 3600


@REDIS_FIRST
@pytest.mark.parametrize("sorted_already", [True, False])
async def test_among_tenants_it_is_right_to_a_twentieth_of_the_queue(
    broker: Broker, consumer: Consumer, sorted_already: bool
) -> None:
    """On average: what is not sorted yet is known by a sample."""
    draw = random.Random(5)
    weights = {"heavy": 1.0, "light": 1.0, "paid": 4.0, "": 1.0}
    for tenant, weight in weights.items():
        await broker.weigh(tenant, weight)
    shares = draw.choices([*weights], [70, 5, 20, 5], k=900)
    sent = [one(number, tenant, draw.randint(50, 150)) for number, tenant in enumerate(shares)]
    await broker.send_many(sent)
    gone = {*take(consumer, 40)} if sorted_already else set[str]()
    waiting = [message for message in sent if message.id not in gone]
    told = {message.id: await broker.queue_position(message) for message in draw.sample(waiting, 30)}
    order = take(consumer, len(waiting))
    assert len(order) == len(waiting)
    found = {name: standing for name, standing in told.items() if standing is not None and not standing.exact}
    assert found.keys() == told.keys()
    off = [abs(standing.ahead - order.index(name)) / len(waiting) for name, standing in found.items()]
    assert sum(off) / len(off) <= 0.05
    assert max(off) <= 0.15
    sizes = [{message.id: message.tokens for message in waiting}[task_id] for task_id in order]
    before = {name: sum(sizes[: order.index(name)]) for name in found}
    wrong = [abs((standing.tokens or 0) - before[name]) / sum(sizes) for name, standing in found.items()]
    assert sum(wrong) / len(wrong) <= 0.05


@REDIS_FIRST
async def test_so_it_is_among_more_tenants_than_are_looked_at(broker: Broker, consumer: Consumer) -> None:
    sent = [one(number, f"tenant-{number % 300:03}") for number in range(900)]
    await broker.send_many(sent)
    gone = {*take(consumer, 150)}
    waiting = [message for message in sent if message.id not in gone]
    told = {message.id: await broker.queue_position(message) for message in waiting[::50]}
    order = take(consumer, len(waiting))
    off = [abs(found.ahead - order.index(name)) for name, found in told.items() if found is not None]
    assert len(off) == len(told)
    assert max(off) <= 0.05 * len(waiting)


@REDIS_FIRST
async def test_of_many_tenants_what_was_counted_tells_where_samples_cannot(broker: Broker, consumer: Consumer) -> None:
    draw = random.Random(2)
    waiting = [one(number, f"t{draw.randrange(100)}", draw.choice([20, 500])) for number in range(3000)]
    await broker.send_many(waiting)
    tenants = dict(Counter(message.tenant for message in waiting))
    told = {}
    for message in waiting[::300]:
        its = [other for other in waiting if other.tenant == message.tenant]
        before = its[: its.index(message)]
        size = sum(other.tokens for other in before) / len(before) if before else None
        counted = TenantCounts(tenants, len(before) / len(its), size)
        told[message.id] = await broker.queue_position(message, counted)
    order = {task_id: place for place, task_id in enumerate(_all(consumer, 3000))}
    off = [abs(standing.ahead - order[task_id]) for task_id, standing in told.items() if standing is not None]
    assert len(off) == len(told)
    assert sorted(off)[-2] < 0.05 * len(waiting)


def _all(consumer: Consumer, count: int) -> list[str]:
    found: list[str] = []
    for _ in range(count // 1000 + 1):  # first all are sorted, as others do who take nothing
        consumer.fetch(INC, ["none"], Credit((0,) * 4, (0,) * 4), RULES, sort_limit=1000)
    while len(found) < count:
        found += take(consumer, 500)
    return found
