"""The side of senders, gateways and operators: what it says of what a worker's side did."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence

import pytest

from producers.broker.base import Broker, Consumer, NoSuchList
from producers.broker.connect import connect_consumer, connect_sender
from producers.broker.values import Ack, Back, Credit, Depth, Fetched
from producers.contract.message import Message
from tests.producers.broker.conftest import INC, QUEUE, RULES


async def send(broker: Broker, *names: str, tier: str = "default", tenant: str = "") -> None:
    await broker.send_many([Message(name, QUEUE, tier, 1, 100, tenant) for name in names])


def take(consumer: Consumer, *uuids: str) -> list[str]:
    """Fetch one for each UUID, and nothing more. Where another thread receives them, they take a moment to come."""
    deadline, found, room = time.monotonic() + 60, list[Fetched](), (len(uuids),) * 4
    while len(found) < len(uuids):
        assert time.monotonic() < deadline, f"these alone came: {found}"
        fetched = consumer.fetch(INC, uuids, Credit(room, (10**6,) * 4), RULES)
        assert fetched is not None
        found = fetched
    return [json.loads(one.raw)["headers"]["id"] for one in found]


#: On SQS see tests/producers/broker/sqs: what is received is in flight, and has no front to go back to.
@pytest.mark.parametrize("url", ["redis", "memory"], indirect=True)
async def test_a_message_is_counted_wherever_it_is(broker: Broker, consumer: Consumer) -> None:
    await send(broker, "a", "b", "c", "d", tenant="t")
    await send(broker, "e", tier="batch")
    assert take(consumer, "1", "2") == ["a", "b"]
    consumer.put_down([Back(INC, "2", 60.0)])
    await send(broker, "f")
    depths = await broker.depths([QUEUE, "none"])
    tiers = {"priority": 0, "flex": 0}
    held = Depth({**tiers, "default": 3, "batch": 1}, {**tiers, "default": 1, "batch": 1}, delayed=1, in_flight=1)
    assert depths.queues[QUEUE] == held
    assert depths.queues["none"] == Depth()
    assert (depths.workers, depths.dead_letters) == ({INC: QUEUE}, 0)
    waiting = await broker.waiting(QUEUE)
    assert (waiting.tiers, waiting.delivered_tokens, waiting.served) == ({**tiers, "default": 3, "batch": 1}, 200, True)
    waits, unsorted = await broker.tenants([QUEUE])
    assert (waits["t"]["default"], waits[""]["batch"], unsorted) == (2, 1, 1)


@pytest.mark.parametrize("url", ["redis", "memory"], indirect=True)
async def test_the_age_of_the_oldest_is_told_where_messages_say_it(broker: Broker, consumer: Consumer) -> None:
    """Whether it is sorted or not; and the older of the two."""
    now = await broker.now_ms()
    for name, age, tier in (("a", 9000, "default"), ("b", 5000, "default"), ("c", 7000, "flex"), ("d", 0, "batch")):
        await broker.send(Message(name, QUEUE, tier, 1, 100, "", now - age * 1000 if age else 0))

    async def oldest() -> dict[str, int]:
        return {tier: int(age // 1000) for tier, age in (await broker.depths([QUEUE])).queues[QUEUE].oldest.items()}

    assert await oldest() == {"default": 9, "flex": 7}
    assert take(consumer, "1") == ["a"]
    assert await oldest() == {"default": 5, "flex": 7}
    await broker.send(Message("e", QUEUE, "default", 1, 100, "", now - 6000))
    consumer.put_down([Back(INC, "1")])
    assert await oldest() == {"default": 9, "flex": 7}


async def test_a_queue_that_is_passed_over_keeps_its_messages(broker: Broker, url: str, store_url: str) -> None:
    other = "penstock:queue:m@1"
    consumer = connect_consumer(url, [QUEUE, other], store_url)
    consumer.take_lease(INC, "{}", 60.0)
    consumer.passed = frozenset([other])
    await broker.send(Message("a", other, "priority", 1, 100))
    await send(broker, "b")
    assert take(consumer, "1") == ["b"]
    consumer.passed = frozenset()
    assert sorted(take(consumer, "1", "2")) == ["a", "b"]
    consumer.close()


async def test_what_a_blocking_client_sends_is_the_same(broker: Broker, url: str, store_url: str) -> None:
    sender = connect_sender(url, store_url)
    sender.send(Message("a", QUEUE, "flex", 1, 1))
    sender.close()
    assert (await broker.waiting(QUEUE)).tiers["flex"] == 1


@pytest.mark.parametrize("url", ["redis", "memory"], indirect=True)
async def test_what_a_dead_worker_left_comes_back(broker: Broker, consumer: Consumer) -> None:
    await send(broker, "a", "b", "c", "d")
    assert take(consumer, "1", "2") == ["a", "b"]
    consumer.put_down([Back(INC, "1", 0.2)])
    assert await broker.reap(INC) == await broker.recall(QUEUE, [QUEUE], 9) == -1
    consumer.end_lease(INC)
    assert [(one.incarnation, one.remaining_s) for one in await broker.workers()] == [(INC, None)]
    assert (await broker.reap(INC), await broker.recall(QUEUE, [QUEUE], 9)) == (1, 2)
    await asyncio.sleep(0.3)
    assert (await broker.due(QUEUE), await broker.due(QUEUE)) == (1, 0)
    consumer.take_lease(INC, "{}", 60.0)
    assert sorted(take(consumer, "5", "6", "7", "8")) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("url", ["redis", "memory"], indirect=True)
async def test_only_what_is_over_is_pruned_and_the_rest_keeps_its_order(broker: Broker, consumer: Consumer) -> None:
    await send(broker, "later")
    assert take(consumer, "0") == ["later"]
    consumer.put_down([Back(INC, "0", 3600.0)])
    await send(broker, *"abcdefg")

    async def over(page: Sequence[bytes]) -> Mapping[bytes, str]:
        found = {raw: json.loads(raw)["headers"]["id"] for raw in page}
        return {raw: name for raw, name in found.items() if name in "bcg"}

    assert await broker.due(QUEUE) == 0
    assert await broker.prune(QUEUE, over, 2) == (3, 5)
    assert take(consumer, *"1234") == list("adef")


@pytest.mark.parametrize("url", ["redis", "memory"], indirect=True)
async def test_what_is_pruned_for_a_reason_becomes_a_dead_letter(broker: Broker) -> None:
    await send(broker, *"abcab")

    async def over(page: Sequence[bytes]) -> Mapping[bytes, str]:
        found = {raw: json.loads(raw)["headers"]["id"] for raw in page}
        return {raw: name for raw, name in found.items() if name == "b"}

    assert await broker.prune(QUEUE, over, 2, "no good") == (2, 3)
    letters = [json.loads(letter) for letter in await broker.letters(0, 9)]
    assert [json.loads(letter["message"])["headers"]["id"] for letter in letters] == ["b", "b"]
    assert {letter["reason"] for letter in letters} == {"no good"}
    assert await broker.prune(QUEUE, over, 2, "no good") == (0, 3)


@pytest.mark.parametrize("url", ["redis", "memory"], indirect=True)
async def test_what_is_pruned_to_another_queue_is_in_front_there(broker: Broker, consumer: Consumer) -> None:
    elsewhere = f"{QUEUE}+1"
    await broker.send_many([Message(name, elsewhere, "flex", 1, 1) for name in "abc"])
    await broker.send_many([Message("d", QUEUE, "flex", 1, 1)])

    async def over(page: Sequence[bytes]) -> Mapping[bytes, str]:
        found = {raw: json.loads(raw)["headers"]["id"] for raw in page}
        return {raw: name for raw, name in found.items() if name == "b"}

    assert await broker.prune(elsewhere, over, 2, to=QUEUE) == (1, 2)
    assert (await broker.waiting(QUEUE)).tiers["flex"] == 2
    assert take(consumer, "1", "2") == ["b", "d"]


async def test_a_dead_letter_is_replayed_once(broker: Broker, consumer: Consumer) -> None:
    await send(broker, "a", "b")
    take(consumer, "1", "2")
    consumer.put_down([Ack(INC, "1", "no good"), Ack(INC, "2", "no good")])
    for _ in range(6000):
        if len(letters := await broker.letters(0, 9)) == 2:
            break
        await asyncio.sleep(0.01)
    first, second = letters
    assert await broker.letters(1, 1) == [second]
    said = json.loads(first)
    assert said["reason"] == "no good"
    assert abs(said["at"] - await broker.now_ms()) < 600_000
    message = said["message"].encode()
    with pytest.raises(NoSuchList):
        await broker.replay(first, "penstock:arrivals", message, "a")
    assert await broker.replay(first, said["list"], message, "a")
    assert not await broker.replay(first, said["list"], message, "a")
    assert take(consumer, "3") == ["a"]
    assert (await broker.waiting(QUEUE)).tiers["default"] == 0
    assert await broker.remove_letter(second)
    assert not await broker.remove_letter(second)


async def test_a_weight_is_set_and_reset(broker: Broker, consumer: Consumer) -> None:
    await broker.weigh("a", 4)
    await broker.weigh("b", 2)
    await broker.weigh("b", 1)
    assert await broker.weights() == consumer.weights() == {"a": 4.0}
    with pytest.raises(ValueError, match=r"1001; it must be from 0\.001 to 1000"):
        await broker.weigh("a", 1001)
