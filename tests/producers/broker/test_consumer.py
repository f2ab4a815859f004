"""A worker's side of the broker: what each operation promises, and what it answers when it is said twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from redis import Redis

from producers.broker.base import Consumer, Sender
from producers.broker.connect import connect_consumer, connect_sender
from producers.broker.redis import keys as broker_keys
from producers.broker.values import Ack, Back, Credit, Fetched, PutDown
from producers.contract import keys
from producers.contract.message import Message
from tests.producers.broker.conftest import INC, RULES, url_of
from tests.waiting import PATIENCE_S

POOL = keys.Pool("m", "1", "x")
OWN, QUEUE, OTHER = POOL.queues


@pytest.fixture(params=["redis", "memory"])
def url(request: pytest.FixtureRequest) -> str:
    """Brokers where what is sent can be fetched at once; for SQS see `tests/producers/broker/sqs`."""
    return url_of(request)


@pytest.fixture
def consumer(url: str) -> Iterator[Consumer]:
    found = connect_consumer(url, POOL.queues, url, home=QUEUE)
    found.take_lease(INC, "{}", 60.0)
    yield found
    found.close()


@pytest.fixture
def sender(url: str) -> Iterator[Sender]:
    found = connect_sender(url, url)
    yield found
    found.close()


def send(sender: Sender, name: str, queue: str = QUEUE, tier: str = "default") -> None:
    sender.send(Message(name, queue, tier, 1, 100))


def take(consumer: Consumer, *uuids: str, room: int = 64) -> list[Fetched]:
    fetched = consumer.fetch(INC, uuids, Credit((room,) * 4, (10**6,) * 4), RULES)
    assert fetched is not None
    return fetched


def ids(fetched: list[Fetched]) -> list[str]:
    return [json.loads(one.raw)["headers"]["id"] for one in fetched]


def test_a_delivery_says_its_queue_and_tier_and_is_repeated_by_its_name(consumer: Consumer, sender: Sender) -> None:
    send(sender, "b", OTHER, "batch")
    send(sender, "a", QUEUE, "priority")
    fetched = take(consumer, "u1", "u2")
    assert [(one.uuid, one.queue, one.rank) for one in fetched] == [("u1", QUEUE, 0), ("u2", OTHER, 3)]
    assert take(consumer, "u1", "u2", "u3") == fetched
    assert consumer.strays(INC, ["u1"]) == {"u2": "b"}


def test_celerys_own_messages_are_put_into_any_queue(consumer: Consumer, sender: Sender) -> None:
    """A retry keeps its tier; plain ones come from the model's queue."""
    sender.put(QUEUE, "priority", Message("retry", QUEUE, "priority", 1, 100).envelope())
    sender.put(OTHER, "default", Message("plain", OTHER, "default", 1, 100).envelope())
    fetched = take(consumer, "u1", "u2")
    assert [(*ids([one]), one.queue, one.rank) for one in fetched] == [("retry", QUEUE, 0), ("plain", OTHER, 1)]


def test_who_has_no_lease_gets_nothing_and_cannot_renew(consumer: Consumer) -> None:
    assert consumer.renew(INC, "{}", 60.0)
    consumer.end_lease(INC)
    assert not consumer.renew(INC, "{}", 60.0)
    assert consumer.fetch(INC, ["u"], Credit((1,) * 4, (1,) * 4), RULES) is None


def test_put_down_is_in_order_and_each_counts_once(consumer: Consumer, sender: Sender) -> None:
    for name in "abcd":
        send(sender, name)
    take(consumer, "1", "2", "3", "4")
    said: list[Ack | Back] = [Back(INC, "2"), Back(INC, "1"), Ack(INC, "3"), Ack(INC, "4", "no good"), Ack("w.2", "1")]
    assert consumer.put_down(said) == [PutDown.DONE] * 4 + [PutDown.GONE]
    assert consumer.put_down(said) == [PutDown.GONE] * 5
    assert ids(take(consumer, "5", "6", "7")) == ["a", "b"]


@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_a_task_that_the_record_does_not_call_settled_is_not_acknowledged(
    consumer: Consumer, sender: Sender, valkey: Redis
) -> None:
    """One server is both broker and store."""
    send(sender, "a")
    take(consumer, "1")
    valkey.hset(keys.task("a"), "status", "in_progress")
    assert consumer.put_down([Ack(INC, "1", settled="a")]) == [PutDown.UNSETTLED]
    valkey.hset(keys.task("a"), "settled", 1)
    assert consumer.put_down([Ack(INC, "1", settled="a")]) == [PutDown.DONE]


def test_what_is_held_back_is_scheduled_and_counted(consumer: Consumer, sender: Sender) -> None:
    for name in "ab":
        send(sender, name)
    take(consumer, "1", "2")
    consumer.put_down([Back(INC, "1", 500.0), Back(INC, "2", 60.0)])
    assert take(consumer, "3") == []
    assert [json.loads(raw)["headers"]["id"] for raw in consumer.scheduled(9)] == ["b", "a"]
    assert len(consumer.scheduled(1)) == 1
    assert consumer.waiting(QUEUE) == 2


def test_messages_at_their_last_chance_come_one_at_a_time_until_their_tasks_got_on(
    consumer: Consumer, sender: Sender
) -> None:
    for name in "ab":
        send(sender, name)
    for uuid in "1234":
        assert [one.returned for one in take(consumer, f"{uuid}a", f"{uuid}b")] == [uuid != "1"] * 2
        consumer.end_lease(INC)
        consumer.reap(INC)
        consumer.take_lease(INC, "{}", 60.0)
    assert ids(take(consumer, "5", "6")) == ["a"]
    consumer.survived(["a"])
    consumer.survived(["a"])
    (first, other) = take(consumer, "5", "6")
    assert (ids([first, other]), first.returned, other.returned) == (["a", "b"], False, True)


def test_workers_are_listed_until_they_are_reaped(consumer: Consumer, sender: Sender) -> None:
    send(sender, "a")
    take(consumer, "1")
    (one,) = consumer.workers()
    assert (one.incarnation, one.queue) == (INC, OWN)
    assert one.remaining_s is not None
    assert 0 < one.remaining_s <= 60
    assert consumer.reap(INC) == -1
    consumer.end_lease(INC)
    assert [one.remaining_s for one in consumer.workers()] == [None]
    assert (consumer.reap(INC), consumer.reap(INC)) == (1, 0)
    assert (consumer.workers(), consumer.waiting(QUEUE)) == ([], 1)


def test_the_last_to_leave_puts_everything_where_its_length_is_seen(consumer: Consumer, sender: Sender) -> None:
    send(sender, "a", OWN)
    for name in "bc":
        send(sender, name)
    take(consumer, "1")
    consumer.leave(INC, {queue: [OWN] for queue in POOL.queues})
    assert (consumer.workers(), consumer.waiting(QUEUE)) == ([], 3)
    consumer.take_lease(INC, "{}", 60.0)
    assert ids(take(consumer, "2", "3", "4")) == ["a", "b", "c"]


def test_an_abandoned_queue_is_adopted_before_what_came_later(consumer: Consumer, sender: Sender) -> None:
    send(sender, "new")
    send(sender, "old", f"{QUEUE}.y")
    assert (consumer.adopt(f"{QUEUE}.y", QUEUE), consumer.adopt(f"{QUEUE}.y", QUEUE)) == (1, 0)
    assert ids(take(consumer, "1", "2")) == ["old", "new"]
    assert consumer.adopt(OWN, QUEUE) == -1, "one lives"


def test_what_belongs_elsewhere_goes_to_the_front_of_its_tier_there(consumer: Consumer, sender: Sender) -> None:
    send(sender, "flex", tier="flex")
    send(sender, "new", OWN, "flex")
    consumer.fetch(INC, [], Credit((0,) * 4, (0,) * 4), RULES)
    take(consumer, "1", "2")
    assert consumer.put_down([Back(INC, "2", to=OWN), Back(INC, "1")]) == [PutDown.DONE] * 2
    assert [(one.queue, one.rank) for one in take(consumer, "3", "4")] == [(OWN, 2), (OWN, 2)]


@pytest.mark.parametrize("url", ["redis"], indirect=True)
def test_weights_that_are_none_do_not_count(consumer: Consumer, valkey: Redis) -> None:
    valkey.hset(broker_keys.WEIGHTS, mapping={"a": "4", "b": "much", "c": "0", "d": "nan"})
    assert consumer.weights() == {"a": 4.0}


def test_the_waker_hears_of_what_comes(consumer: Consumer, sender: Sender) -> None:
    heard = threading.Semaphore(0)
    consumer.waker(heard.release).stop()  # as a worker that ends before it began
    waker = consumer.waker(heard.release)
    waker.start()
    try:
        assert heard.acquire(timeout=PATIENCE_S), "once it listens, for what came before"
        send(sender, "a", OTHER)
        assert heard.acquire(timeout=PATIENCE_S)
    finally:
        waker.stop()
