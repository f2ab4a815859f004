"""A worker's side of SQS: how messages leave it, by its own hand or by whoever reaps it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from producers.broker.redis import keys as shared
from producers.broker.sqs import keys
from producers.broker.sqs.address import sqs_name
from producers.broker.sqs.receiver import flight, send
from producers.broker.values import Ack, Back, PutDown
from producers.connection.script import run
from producers.contract import keys as contract_keys
from producers.contract.message import Message
from tests.processes import guarded
from tests.producers.broker.sqs.place import INC, QUEUE, RULES, Place, ids, until


def test_put_down_is_said_once(place: Place) -> None:
    place.send(*"abcd")
    a, b, c, d = place.take(4, room=4)
    said: list[Ack | Back] = [
        Ack(INC, a.uuid, used=3),
        Ack(INC, b.uuid, "no good"),
        Back(INC, c.uuid),
        Ack("w.2", d.uuid),
    ]
    assert place.consumer.put_down(said) == [PutDown.DONE] * 3 + [PutDown.GONE]
    assert place.consumer.put_down(said) == [PutDown.GONE] * 4
    until(lambda: place.counts() == (1, 1) and [*place.flying()] == [d.uuid])
    (letter,) = place.redis.lrange(shared.DEAD, 0, -1)
    assert json.loads(letter)["reason"] == "no good"
    assert json.loads(letter)["list"] == f"{QUEUE}#default"
    assert json.loads(letter)["message"].encode() == b.raw
    assert (place.waiting(), place.consumer.waiting(QUEUE)) == (1, 1)
    assert ids(place.take(1)) == ids([c])


def test_a_task_that_the_record_does_not_call_settled_keeps_its_message(place: Place) -> None:
    """A failover has lost that. It is nobody's until it is given back."""
    place.send("a")
    (one,) = place.take(1, room=1)
    place.redis.hset(contract_keys.task("a"), "status", "in_progress")
    place.consumer.put_down([Ack(INC, one.uuid, settled="a")])
    until(lambda: place.consumer.strays(INC, []) == {one.uuid: "a"})
    assert place.counts() == (0, 1)
    assert place.consumer.put_down([Back(INC, one.uuid)]) == [PutDown.DONE]
    assert place.counts() == (1, 0)
    (again,) = place.take(1, room=1)
    place.redis.hset(contract_keys.task("a"), "settled", 1)
    place.consumer.put_down([Ack(INC, again.uuid, settled="a")])
    until(lambda: place.counts() == (0, 0) and not place.flying())


def test_a_delay_that_sqs_takes_hides_the_message(place: Place) -> None:
    place.send("a")
    (one,) = place.take(1, room=1)
    before = place.redis.time()[0] * 1000
    assert place.consumer.put_down([Back(INC, one.uuid, 800.0)]) == [PutDown.DONE]
    assert (place.counts(), place.flying()) == ((0, 1), {})
    ((member, due),) = place.redis.zrange(keys.waiting(f"{QUEUE}#default"), 0, -1, withscores=True)
    assert member.startswith(b"a 1 100")
    assert 799_000 < due - before < 900_000
    assert [json.loads(raw)["headers"]["id"] for raw in place.consumer.scheduled(9)] == ["a"]
    assert place.consumer.waiting(QUEUE) == 1


def test_a_longer_delay_is_kept_in_the_store_and_sent_anew_when_due(place: Place) -> None:
    place.send("a")
    (one,) = place.take(1, room=1)
    assert place.consumer.put_down([Back(INC, one.uuid, 4000.0)]) == [PutDown.DONE]
    assert (place.counts(), place.flying(), place.waiting()) == ((0, 0), {}, 0)
    assert place.consumer.waiting(QUEUE) == 1
    (raw,) = place.consumer.scheduled(9)
    assert raw == one.raw
    (entry,) = place.redis.zrange(keys.delayed(QUEUE), 0, -1)
    place.redis.zadd(keys.delayed(QUEUE), {entry: 1})
    (again,) = place.take(1, room=1)
    assert again.raw == one.raw
    until(lambda: not place.redis.exists(keys.delayed(QUEUE)))


@pytest.mark.parametrize("delay", [0.0, 60.0, 4000.0])
def test_a_sender_that_dies_before_sqs_is_told_leaves_it_to_reap(place: Place, delay: float) -> None:
    """The books change first; who finds the message in flight finishes what was begun, once."""
    place.send("a")
    place.take(1, room=1)
    message = place.messages[0]
    step = send.back(message, delay, fifo=False, worn=False).send(None)
    assert run(place.redis, step) == 1
    place.consumer.end_lease(INC)
    assert place.consumer.reap(INC) == 0, "it was on its way already"
    assert not place.redis.hexists(shared.REAPED, "a")
    assert (place.waiting(), place.redis.zcard(keys.delayed(QUEUE))) == ((1, 0) if delay < 900 else (0, 1))
    assert place.counts() == ((1, 0) if delay < 900 else (0, 0))
    assert (place.flying(), place.consumer.workers()) == ({}, [])


def test_a_renewal_does_not_follow_a_hand_back(place: Place) -> None:
    place.send("a")
    (one,) = place.take(1, room=1)
    receiver = place.consumer._receiver
    with receiver.changed:  # both are on their way together
        receiver.sender.add(send.Request(send.renew(place.messages[0], 600)))
        receiver.put_down([Ack(INC, "none")], 1.0)
        back = receiver._put_down(Back(INC, one.uuid))
    until(lambda: back.answer)
    assert place.counts() == (1, 0)


def test_the_last_to_leave_shows_all_that_it_had(place: Place) -> None:
    place.send(*"abcd")
    place.take(1, room=1)
    place.consumer.leave(INC, {})
    until(lambda: place.counts() == (4, 0))
    assert (place.consumer.workers(), place.consumer.waiting(QUEUE), place.flying()) == ([], 4, {})


def test_what_was_acknowledged_is_deleted_before_a_worker_ends(place: Place) -> None:
    place.send("a")
    (one,) = place.take(1, room=1)
    place.consumer.put_down([Ack(INC, one.uuid)])
    place.consumer.leave(INC, {})
    assert (place.counts(), place.flying(), place.redis.hgetall(shared.REAPED)) == ((0, 0), {}, {})


#: A worker that has two deliveries, and more in its buffer.
_WORKER = """
import signal, sys
from producers.broker.connect import connect_consumer
from tests.producers.broker.sqs.place import POOL, QUEUE, RULES, Credit
consumer = connect_consumer(sys.argv[1], POOL.queues, sys.argv[2], home=QUEUE)
consumer.take_lease("dead", "{}", 600.0)
while len(consumer.fetch("dead", ["1", "2"], Credit((64,) * 4, (10**6,) * 4), RULES)) < 2:
    pass
signal.pause()
"""


@pytest.mark.exhaustive
def test_what_a_killed_worker_had_is_shown_at_once(place: Place) -> None:
    place.send(*"abcde")
    process = subprocess.Popen(guarded(sys.executable, "-c", _WORKER, place.url, place.store_url))
    flying = keys.inflight("dead")
    until(lambda: place.redis.hlen(flying) == 5 and place.redis.hexists(flying, "2"))
    assert place.consumer.reap("dead") == -1
    process.kill()
    process.wait()
    place.consumer.end_lease("dead")
    assert [one.remaining_s for one in place.consumer.workers() if one.incarnation == "dead"] == [None]
    run(place.redis, flight.reap("dead"))  # by a reaper that dies before it told SQS
    assert place.consumer.reap("dead") == 0
    until(lambda: place.redis.hlen(flying) == 0)
    assert place.consumer.reap("dead") == 0
    assert (place.counts(), place.waiting()) == ((5, 0), 5)
    assert set(place.redis.hgetall(shared.REAPED).values()) == {b"1"}
    assert place.redis.hlen(shared.REAPED) == 2, "of what it had only received, nothing is counted"
    assert [one.incarnation for one in place.consumer.workers()] == [INC]
    assert sorted(ids(place.take(5))) == list("abcde")


def test_what_is_over_is_deleted_for_a_dead_worker_and_its_redeliveries_forgotten(place: Place) -> None:
    """The worker dies after it marked a task that others had died of, before DOWN."""
    place.redis.hset(contract_keys.task("a"), mapping={"status": "completed", "settled": "1"})
    place.redis.hset(shared.REAPED, "a", 1)
    place.send("a")
    place.take(1)
    (message,) = place.messages
    assert run(place.redis, flight.out(message, "done", settled=True)) == 1
    place.consumer.end_lease(INC)
    place.consumer.reap(INC)
    until(lambda: place.flying() == {})
    assert (place.counts(), place.redis.hlen(shared.REAPED)) == ((0, 0), 0)


def test_messages_at_their_last_chance_come_one_at_a_time_until_their_tasks_got_on(place: Place) -> None:
    place.redis.hset(shared.REAPED, mapping={"a": RULES.max_redeliveries - 1, "b": RULES.max_redeliveries - 1})
    place.send("a", "b")
    (first,) = place.take(1)
    until(lambda: place.redis.hlen(keys.inflight(INC)) == 2)
    assert (first.returned, place.fetch(["other"], 64, 10**6, RULES)) == (True, [])
    place.consumer.survived([ids([first])[0]])
    assert place.redis.hlen(shared.REAPED) == 1
    assert len(place.take(1)) == 1


def test_what_sqs_does_not_have_any_more_is_sent_anew(place: Place) -> None:
    """A failover of the store restored an entry whose message is deleted."""
    place.send("a")
    (one,) = place.take(1, room=1)
    place.sqs.purge_queue(QueueUrl=place.queue_url(f"{QUEUE}#default"))
    assert place.consumer.put_down([Back(INC, one.uuid)]) == [PutDown.DONE]
    assert ids(place.take(1)) == ["a"]


def test_what_a_failover_brought_back_is_a_stray_that_goes_back(place: Place) -> None:
    """The store has lost that it was acknowledged; SQS has not."""
    place.send("a")
    (one,) = place.take(1, room=1)
    lost = place.redis.hget(keys.inflight(INC), one.uuid)
    place.consumer.put_down([Ack(INC, one.uuid)])
    until(lambda: place.counts() == (0, 0) and not place.flying())
    place.redis.hset(keys.inflight(INC), one.uuid, lost)
    assert place.consumer.strays(INC, [one.uuid]) == {}
    assert place.consumer.strays(INC, []) == {one.uuid: "a"}
    assert place.consumer.put_down([Back(INC, one.uuid)]) == [PutDown.DONE]
    assert place.flying() == {}
    assert ids(place.take(1)) == ["a"]


def test_what_belongs_to_another_version_goes_there(place: Place) -> None:
    other = contract_keys.version_queue("m", "2")
    place.sqs.create_queue(QueueName=sqs_name(place.address, f"{other}#flex"))
    place.send("a", tier="flex")
    (one,) = place.take(1, room=1)
    assert place.consumer.put_down([Back(INC, one.uuid, to=other)]) == [PutDown.DONE]
    assert (place.counts("flex"), place.counts("flex", other)) == ((0, 0), (1, 0))
    assert place.redis.zcard(keys.waiting(f"{other}#flex")) == 1


def test_what_another_queue_does_not_take_is_not_deleted(place: Place) -> None:
    other = contract_keys.version_queue("m", "2")
    small = {"MaximumMessageSize": "1024"}
    place.sqs.create_queue(QueueName=sqs_name(place.address, f"{other}#flex"), Attributes=small)
    place.sender.send(Message("a", QUEUE, "flex", 1, 100, order_key="k" * 2000))
    (one,) = place.take(1, room=1)
    assert place.consumer.put_down([Back(INC, one.uuid, to=other)]) == [PutDown.GONE]
    assert (place.counts("flex"), place.counts("flex", other)) == ((0, 1), (0, 0))


def test_what_is_sent_anew_for_a_dead_worker_stays_in_its_group(fifo: Place) -> None:
    """A failover of the store restored an entry whose message is deleted."""
    fifo.send("a1", group="a")
    fifo.take(1, room=1)
    url = fifo.queue_url(f"{QUEUE}#default")
    fifo.sqs.purge_queue(QueueUrl=url)
    fifo.consumer.end_lease(INC)
    assert fifo.consumer.reap(INC) == 1
    until(lambda: fifo.counts() == (1, 0))
    (found,) = fifo.sqs.receive_message(QueueUrl=url, AttributeNames=["MessageGroupId"])["Messages"]
    assert found["Attributes"]["MessageGroupId"] == "a"


def test_what_follows_a_task_that_is_given_back_goes_back_with_it(fifo: Place) -> None:
    fifo.send("a1", "a2", "a3", group="a")
    (a1,) = fifo.take(1, room=1)
    assert fifo.consumer.put_down([Back(INC, a1.uuid)]) == [PutDown.DONE]
    until(lambda: fifo.counts() == (3, 0))
    order = []
    for _ in range(3):
        (one,) = fifo.take(1, room=1)
        order += ids([one])
        fifo.consumer.put_down([Ack(INC, one.uuid)])
        until(lambda: fifo.counts()[1] == 0)
    assert order == ["a1", "a2", "a3"]
