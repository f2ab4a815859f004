"""A worker's side of SQS: what it takes, and how it keeps that."""

from __future__ import annotations

import base64
import time
from typing import Any

import pytest
from redis import Redis

from producers.broker.redis import keys as shared
from producers.broker.sqs import keys
from producers.broker.sqs.receiver import buffer, flight, send
from producers.broker.sqs.receiver.flight import LONGEST_S
from producers.broker.values import Ack, Back, Credit, PutDown, Rules
from producers.connection.script import run
from producers.contract.message import Message
from tests.aws import Aws
from tests.aws_faults import Fault, faulty
from tests.producers.broker.sqs.place import CELERY, INC, OWN, QUEUE, RULES, Place, ids, placed, until

TIERS = ("priority", "default", "flex", "batch")


def test_strict_tiers_with_a_backlog_in_all(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer, "QUIET_S", 600.0)
    for number in range(3):
        for tier in reversed(TIERS):
            place.send(f"{tier}{number}", tier=tier)
    taken = place.take(12)
    assert [one.rank for one in taken] == sorted(one.rank for one in taken)
    assert {one.queue for one in taken} == {QUEUE}
    assert place.redis.get(shared.DELIVERIES) == b"12"
    assert place.redis.get(shared.DELIVERED_TOKENS) == b"1200"


def test_a_list_that_was_unserved_for_long_counts_as_better(place: Place) -> None:
    for tier in TIERS:
        place.send(tier, tier=tier)
    place.redis.hset(shared.UNSERVED, f"{QUEUE}#batch", int(time.time() * 1000) - 4_500_000_000)
    rules = Rules((64, 10**6), 512, 1_000_000.0, 5)  # nothing else ages, however slow the machine
    assert ids(place.take(4, rules=rules)) == ["batch", "priority", "default", "flex"]


def test_a_delivery_is_repeated_by_its_name(place: Place) -> None:
    place.send("a", "b")
    until(lambda: len(place.fetch(["1", "2"])) == 2)
    first = place.fetch(["1", "2", "3"])
    assert place.fetch(["1", "2", "3"]) == first
    assert {place.flying()[one.uuid]["id"] for one in first} == {"a", "b"}
    assert place.redis.get(shared.DELIVERIES) == b"2"
    (a, b) = (one.uuid for one in first)
    assert place.consumer.strays(INC, [a, b]) == {}


def test_what_does_not_fit_goes_back_and_is_not_asked_for_until_it_does(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what comes after it."""
    monkeypatch.setattr(buffer, "QUIET_S", 600.0)  # a busy machine's SQS is slow, not empty
    monkeypatch.setattr(send, "KEEP_S", 0.1)
    place.send("large", tokens=900)
    place.send("small", tier="batch")
    until(lambda: not place.fetch(["1"], tokens=500) and place.consumer._receiver.lines[f"{QUEUE}#default"].blocked)
    until(lambda: place.waiting() == 1 and place.counts() == (1, 0))
    for _ in range(20):
        assert place.fetch(["1"], tokens=500) == []
    assert (place.counts(), place.counts("batch")) == ((1, 0), (1, 0))
    until(lambda: ids(place.fetch(["1"], tokens=900)) == ["large"])


def test_a_list_whose_first_message_another_took_is_asked_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "KEEP_S", 0.1)
    place.send("large", tokens=900)
    until(lambda: not place.fetch(["1"], tokens=500) and place.consumer._receiver.lines[f"{QUEUE}#default"].blocked)
    until(lambda: place.counts() == (1, 0))
    place.sqs.purge_queue(QueueUrl=place.queue_url(f"{QUEUE}#default"))
    place.redis.delete(keys.waiting(f"{QUEUE}#default"))
    place.send("small")
    until(lambda: ids(place.fetch(["1"], tokens=500)) == ["small"])


def test_credit_is_handed_back_where_a_poll_brought_more_than_fits(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(send, "KEEP_S", 0.1)
    place.fetch([])
    place.send(*"abcdef")
    assert len(place.take(1, room=1)) == 1
    until(lambda: place.waiting() == 5 and place.counts() == (5, 1) and len(place.flying()) == 1)


def test_what_cannot_be_used_is_a_dead_letter_and_is_told_of_once(place: Place) -> None:
    place.sqs.send_message(QueueUrl=place.queue_url(f"{QUEUE}#flex"), MessageBody='{"headers": {}}')
    buried: list[Any] = []

    def found() -> bool:
        buried.extend(place.fetch(["1"]))
        return bool(buried)

    until(found)
    assert [(one.buried, one.queue, one.rank) for one in buried] == [("no properties", QUEUE, 2)]
    until(lambda: place.counts("flex") == (0, 0) and not place.flying())
    assert place.redis.llen(shared.DEAD) == 1
    assert place.fetch(["1"]) == []


def test_plain_celery_messages_of_kombu_are_read_where_that_is_asked_for(
    aws: Aws, valkey: Redis, valkey_url: str
) -> None:
    with placed(aws, valkey_url, valkey, celery="1") as place:
        body = Message("a", CELERY, "default", 1, 1).envelope()
        place.sqs.send_message(
            QueueUrl=place.queue_url(f"{CELERY}#default"), MessageBody=base64.b64encode(body.encode()).decode()
        )
        (one,) = place.take(1)
        assert (one.queue, one.rank, one.raw.decode()) == (CELERY, 1, body)


def test_a_plain_celery_message_that_the_store_keeps_is_scheduled_and_sent_when_due(
    aws: Aws, valkey: Redis, valkey_url: str
) -> None:
    with placed(aws, valkey_url, valkey, celery="1") as place:
        url, body = place.queue_url(f"{CELERY}#default"), Message("a", CELERY, "default", 0, 0).envelope()
        place.sqs.send_message(QueueUrl=url, MessageBody=body)
        (one,) = place.take(1)
        assert place.consumer.put_down([Back(INC, one.uuid, 60.0)]) == [PutDown.DONE]
        assert place.consumer.scheduled(9) == [one.raw]
        valkey.zadd(keys.delayed(CELERY), {valkey.zrange(keys.delayed(CELERY), 0, -1)[0]: 1})  # type: ignore[index]
        (again,) = place.take(1)
        assert (again.queue, again.raw) == (CELERY, one.raw)
        until(lambda: not valkey.exists(keys.delayed(CELERY)))


def test_what_it_holds_is_renewed(place: Place) -> None:
    place.send("a", "b")
    place.take(1, room=1)
    receiver = place.consumer._receiver
    with receiver.changed:
        before = time.monotonic()
        for one in receiver.messages:
            one.until = before + 1.0
        receiver.changed.notify_all()
    until(lambda: all(one.until > before + 30 for one in place.messages if one.delivered))


def test_a_message_that_nears_the_longest_that_sqs_hides_it_is_sent_anew(place: Place) -> None:
    place.send("a")
    (one,) = place.take(1, room=1)
    receiver = place.consumer._receiver
    with receiver.changed:
        place.messages[0].received -= LONGEST_S
        receiver.changed.notify_all()
    until(lambda: place.flying()[one.uuid]["receipt"] == "")
    assert place.counts()[1] == 0
    assert place.waiting() == 1, "the copy, delayed"
    place.consumer.put_down([Ack(INC, one.uuid)])
    until(lambda: not place.flying() and place.waiting() == 0)


def test_a_copy_of_what_it_has_is_not_given_twice_and_brings_the_newer_receipt(place: Place) -> None:
    place.send("a")
    (one,) = place.take(1, room=1)
    first = place.flying()[one.uuid]["receipt"]
    url = place.queue_url(f"{QUEUE}#default")
    place.sqs.change_message_visibility(QueueUrl=url, ReceiptHandle=first, VisibilityTimeout=0)

    def replaced() -> bool:
        assert place.fetch(["x"]) == []
        return bool(place.flying()[one.uuid]["receipt"] != first)

    until(replaced)
    assert len(place.flying()) == 1
    place.consumer.put_down([Ack(INC, one.uuid)])
    until(lambda: place.counts() == (0, 0) and not place.flying())


def test_without_its_lease_it_gets_nothing_and_hands_back_what_it_did_not_give(place: Place) -> None:
    place.send(*"abc")
    place.take(1, room=1)
    assert place.consumer.renew(INC, "{}", 60.0)
    place.consumer.end_lease(INC)
    assert not place.consumer.renew(INC, "{}", 60.0)
    assert place.consumer.fetch(INC, ["u"], Credit((1,) * 4, (1,) * 4), RULES) is None
    until(lambda: place.counts() == (2, 1))


def test_faults_of_sqs_are_waited_out_and_said(aws: Aws, valkey: Redis, valkey_url: str) -> None:
    with faulty(aws) as (proxied, faults), placed(proxied, valkey_url, valkey, aws) as place:
        faults.put(Fault("over", "ReceiveMessage"))
        place.send("a", "b")
        until(lambda: place.fetch([]) == [] and any("OverLimit" in said for said in place.consumer.faults()))
        faults.calm()
        a, b = place.take(2, room=2)
        until(lambda: place.fetch([], room=2) == [] and place.consumer.faults() == [])
        faults.put(Fault("throttle", "DeleteMessage", times=2), Fault("partial", "ChangeMessageVisibility", times=1))
        faults.put(Fault("reset", "ChangeMessageVisibility", times=1), Fault("lost", "DeleteMessage", times=1))
        assert place.consumer.put_down([Ack(INC, a.uuid), Back(INC, b.uuid, 30.0)]) == [PutDown.DONE] * 2
        until(lambda: place.counts() == (0, 1) and not place.flying())


def test_a_queue_that_is_not_there_is_named_and_served_once_it_is(place: Place) -> None:
    url = place.queue_url(f"{QUEUE}#flex")
    place.sqs.delete_queue(QueueUrl=url)
    until(lambda: place.fetch([]) == [] and place.consumer.faults())
    (said,) = place.consumer.faults()
    assert "-flex in us-east-1" in said
    assert "penstock aws setup" in said
    place.sqs.create_queue(QueueName=url.rpartition("/")[2])
    place.send("a", tier="flex")
    assert ids(place.take(1)) == ["a"]
    until(lambda: place.consumer.faults() == [])


def test_a_message_waits_for_a_store_that_is_away(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures, entering = run, iter(range(3)), flight.note(INC, "", []).script

    def away(redis: Any, call: Any) -> Any:
        if call.script == entering and next(failures, None) is not None:
            raise ConnectionError("away")
        return real(redis, call)

    monkeypatch.setattr("producers.broker.sqs.receiver.receive.run", away)
    place.send("a")
    assert ids(place.take(1)) == ["a"]
    assert next(failures, None) is None


def test_tasks_of_one_key_run_one_after_another(fifo: Place) -> None:
    fifo.send("a1", "a2", "a3", group="a")
    fifo.send("b1", group="b")
    first = fifo.take(2, room=2)
    assert sorted(ids(first)) == ["a1", "b1"]
    until(lambda: len(fifo.flying()) >= 2)
    for _ in range(10):
        assert fifo.fetch(["x"]) == []
    (a1,) = (one for one in first if ids([one]) == ["a1"])
    fifo.consumer.put_down([Ack(INC, a1.uuid)])
    assert ids(fifo.take(1, room=1)) == ["a2"]


def test_no_pool_has_a_queue_of_its_own(place: Place) -> None:
    assert {line.queue for line in place.consumer._receiver.lines.values()} == {QUEUE}
    assert place.consumer.adopt(OWN, QUEUE) == -1, "one lives"
    assert place.consumer.adopt(f"{QUEUE}.y", QUEUE) == 0
