"""The side of gateways, sweepers and operators on SQS: what is special about it (see also ../test_broker.py)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from redis import Redis

from producers.broker.base import NoSuchList
from producers.broker.connect import connect_broker
from producers.broker.redis import keys as shared
from producers.broker.sqs import keys, operator
from producers.broker.sqs.address import read, sqs_name
from producers.broker.sqs.operator import SqsBroker
from producers.broker.sqs.sending import Outgoing, send_one
from producers.broker.values import Back, Depth
from producers.connection.aws import AwsError
from producers.contract import keys as contract_keys
from tests.aws import Aws
from tests.aws_faults import Fault, Faults
from tests.producers.broker.sqs.place import INC, OWN, QUEUE, Place, ids
from tests.producers.broker.sqs.test_sending import DEFAULT, message, received, url_of
from tests.producers.broker.sqs.test_sending import ids as ids_of

DAY_MS = 24 * 3600 * 1000


@pytest.fixture
async def beside(place: Place) -> Any:
    """A broker beside the consumer of `place`."""
    found = connect_broker(place.url, place.store_url)
    yield found
    await found.aclose()


def record(valkey: Redis, task_id: str, created: int, **more: str) -> None:
    fields = {"status": "queued", "queue": QUEUE, "tier": "default", "tokens": "100", "task": "{}", "created": created}
    valkey.hset(contract_keys.task(task_id), mapping={**fields, **more})


async def test_what_there_is_is_known_without_a_request(place: Place, beside: SqsBroker) -> None:
    """In flight is what a worker has received; delayed is what SQS or the store keeps for later."""
    place.send("a", "b", "c", tenant="t")
    first, second = place.take(2, room=2)
    place.consumer.put_down([Back(INC, first.uuid, 600.0), Back(INC, second.uuid, 3600.0)])
    place.send("d", tier="batch")
    depths = await beside.depths([QUEUE, "penstock:queue:none@1"])
    tiers = {"priority": 0, "flex": 0}
    found = depths.queues[QUEUE]
    assert found.waiting == {**tiers, "default": 1, "batch": 1}
    assert (found.tenants["default"], found.delayed, found.in_flight) == (1, 2, 0)
    assert found.oldest.keys() == {"default", "batch"}
    assert depths.queues["penstock:queue:none@1"] == Depth()
    assert (depths.workers, depths.dead_letters) == ({INC: OWN}, 0)
    waiting = await beside.waiting(QUEUE)
    assert (waiting.tiers["default"], waiting.delivered_tokens, waiting.served) == (1, 200, True)
    waits, unsorted = await beside.tenants([QUEUE])
    assert (waits["t"]["default"], waits[""]["batch"], unsorted) == (2, 1, 0)


async def test_a_message_that_was_handed_back_keeps_its_age(place: Place, beside: SqsBroker) -> None:
    now = await beside.now_ms()
    for name, age in (("a", 9000), ("b", 5000)):
        await beside.send(message(name, at=now - age * 1000))

    async def oldest() -> int:
        return int((await beside.depths([QUEUE])).queues[QUEUE].oldest["default"] // 1000)

    assert await oldest() == 9
    (taken,) = place.take(1, room=1)
    assert ids([taken]) == ["a"]
    assert await oldest() == 5
    place.consumer.put_down([Back(INC, taken.uuid)])
    assert await oldest() == 9


async def test_no_call_that_only_looks_asks_sqs(broker: SqsBroker, faults: Faults) -> None:
    await broker.send(message("a"))
    before = faults.asked.total()
    await broker.depths([QUEUE])
    await broker.waiting(QUEUE)
    await broker.tenants([QUEUE])
    assert faults.asked.total() == before


async def test_plain_celery_messages_are_counted_by_sqs_once_in_a_while(
    aws: Aws, seen: tuple[Aws, Faults], valkey_url: str
) -> None:
    model = contract_keys.model_queue("m")
    broker = connect_broker(seen[0].broker(celery="1"), valkey_url)
    url = aws.client("sqs").create_queue(QueueName=sqs_name(read(aws.broker()), f"{model}#default"))["QueueUrl"]
    aws.client("sqs").send_message(QueueUrl=url, MessageBody="x")
    for _ in range(3):
        assert (await broker.waiting(model)).tiers["default"] == 1
    assert seen[1].asked["GetQueueAttributes"] == 1
    await broker.aclose()


async def test_what_a_dead_worker_left_comes_back_at_once(place: Place, beside: SqsBroker) -> None:
    place.send("a", "b")
    place.take(2, room=2)
    assert await beside.reap(INC) == -1
    place.consumer.end_lease(INC)
    assert (await beside.reap(INC), await beside.reap(INC)) == (2, 0)
    assert place.redis.hgetall(shared.REAPED) == {b"a": b"1", b"b": b"1"}
    assert (place.waiting(), await beside.workers()) == (2, [])
    assert place.counts() == (2, 0), "and not once their visibility is over"


async def test_a_reap_that_sqs_interrupts_is_finished_by_the_next(
    place: Place, seen: tuple[Aws, Faults], valkey_url: str
) -> None:
    place.send("a")
    place.take(1, room=1)
    place.consumer.end_lease(INC)
    broker = connect_broker(seen[0].broker(), valkey_url)
    seen[1].put(Fault("partial", "ChangeMessageVisibility", times=1))
    with pytest.raises(AwsError, match="change visibilities"):
        await broker.reap(INC)
    assert (place.waiting(), place.counts()) == (1, (0, 1))
    assert await broker.reap(INC) == 0
    assert (place.counts(), place.flying()) == ((1, 0), {})
    assert place.redis.hget(shared.REAPED, "a") == b"1", "counted once"
    await broker.aclose()


async def test_a_long_delay_that_is_over_is_sent_without_a_worker(
    broker: SqsBroker, seen: tuple[Aws, Faults], valkey: Redis
) -> None:
    now = await broker.now_ms()
    for name, due in (("a", now - 1000), ("later", now + 10**6)):
        kept = json.dumps({"list": DEFAULT, "body": message(name).envelope(), "group": ""})
        valkey.zadd(keys.delayed(QUEUE), {kept: due})
    seen[1].put(Fault("partial", "SendMessage", times=1))
    with pytest.raises(AwsError):
        await broker.due(QUEUE)
    assert valkey.zcard(keys.delayed(QUEUE)) == 2, "kept until it was sent"
    for kept, _ in valkey.zrange(keys.delayed(QUEUE), 0, 0, withscores=True):
        valkey.zadd(keys.delayed(QUEUE), {kept: now})
    assert (await broker.due(QUEUE), await broker.due(QUEUE)) == (1, 0)
    assert ids_of(received(seen[0])) == ["a"]
    assert (await broker.depths([QUEUE])).queues[QUEUE].delayed == 1


async def test_large_messages_that_are_due_do_not_share_a_request(
    broker: SqsBroker, seen: tuple[Aws, Faults], valkey: Redis
) -> None:
    for number in range(6):
        kept = json.dumps({"list": DEFAULT, "body": str(number) + "x" * 200_000, "group": ""})
        valkey.zadd(keys.delayed(QUEUE), {kept: 1})
    assert (await broker.due(QUEUE), valkey.zcard(keys.delayed(QUEUE))) == (6, 0)
    assert seen[1].asked["SendMessageBatch"] == 6


async def test_a_letter_whose_message_is_empty_is_refused_and_stays(
    broker: SqsBroker, faults: Faults, valkey: Redis
) -> None:
    """Whoever else sends one hears what SQS says of it."""
    valkey.rpush(shared.DEAD, "letter")
    with pytest.raises(NoSuchList, match="empty"):
        await broker.replay(b"letter", DEFAULT, b"", "")
    assert await broker.letters(0, 9) == [b"letter"]
    send_one(broker._to, DEFAULT, Outgoing.again(DEFAULT, ""))
    assert faults.asked["SendMessageBatch"] == 1


async def test_what_is_over_is_pruned_from_the_index_alone(broker: SqsBroker, seen: tuple[Aws, Faults]) -> None:
    await broker.send_many([message(name) for name in "abcdefg"])

    async def over(page: Sequence[bytes]) -> Mapping[bytes, str]:
        found = {raw: json.loads(raw)["headers"]["id"] for raw in page}
        return {raw: name for raw, name in found.items() if name in "bcg"}

    assert await broker.prune(QUEUE, over, 2) == (3, 4)
    assert (await broker.waiting(QUEUE)).tiers["default"] == 4
    assert len(received(seen[0])) == 7, "SQS removes a message for its receiver alone"


# ---- repair ---------------------------------------------------------------------------------------------------------


async def test_entries_of_tasks_that_need_no_message_leave_the_index(broker: SqsBroker, valkey: Redis) -> None:
    now = await broker.now_ms()
    await broker.send_many([message(name, at=now, tenant="t") for name in ("waits", "final", "settled", "gone")])
    record(valkey, "waits", now)
    record(valkey, "final", now, status="completed")
    record(valkey, "settled", now, status="completed", settled=str(now))
    await broker.tidy()
    assert valkey.zrange(keys.waiting(DEFAULT), 0, -1) == [b"final 1 100 t", b"waits 1 100 t"]
    for name in ("waits", "final"):
        valkey.delete(contract_keys.task(name))
    await broker.tidy()
    assert not valkey.exists(keys.LISTS, keys.waiting(DEFAULT), keys.tenants(DEFAULT))


async def test_what_its_queue_would_soon_drop_is_sent_anew_once(
    broker: SqsBroker, seen: tuple[Aws, Faults], valkey: Redis
) -> None:
    seen[0].client("sqs").set_queue_attributes(
        QueueUrl=url_of(seen[0]), Attributes={"MessageRetentionPeriod": str(4 * 24 * 3600)}
    )
    now = await broker.now_ms()
    ages = {"young": DAY_MS // 2, "middle": 2 * DAY_MS, "old": 3 * DAY_MS + 1000}
    for name, age in ages.items():
        record(valkey, name, now - age)
        await broker.send(message(name, at=now - age))
    seen[1].put(Fault("throttle", "SendMessage", times=2))
    with pytest.raises(AwsError):
        await broker.tidy()
    for _ in range(2):
        await broker.tidy()
    assert sorted(ids_of(received(seen[0]))) == ["middle", "old", "old", "young"]
    assert (await broker.waiting(QUEUE)).tiers["default"] == 3


# ---- health ---------------------------------------------------------------------------------------------------------


def announce(valkey: Redis, *models: str) -> None:
    for model in models:
        pool = contract_keys.Pool(model, "1", "x")
        valkey.hset(contract_keys.POOLS, pool.queue, json.dumps({"model": model, "version": "1", "fingerprint": "x"}))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ping looks."""
    monkeypatch.setattr(operator, "WELL_S", 0.0)
    monkeypatch.setattr(operator, "UNWELL_S", 0.0)


async def test_probes_share_looks_at_sqs(broker: SqsBroker, faults: Faults, valkey: Redis) -> None:
    announce(valkey, "m")
    await asyncio.gather(*(broker.ping() for _ in range(20)))
    assert faults.asked == {"GetQueueUrl": 4, "GetQueueAttributes": 4}, "each list once"
    await broker.ping()
    assert faults.asked.total() == 8


@pytest.mark.usefixtures("always")
async def test_a_look_is_one_request_once_each_queue_was_seen(broker: SqsBroker, faults: Faults, valkey: Redis) -> None:
    announce(valkey, "m")
    await broker.ping()
    faults.asked.clear()
    for _ in range(4):
        await broker.ping()
    assert faults.asked == {"GetQueueAttributes": 4}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("kind", "said", "announced"),
    [
        ("expired", "have expired", ()),
        ("expired", "have expired", ("m",)),
        ("skewed", "clock is wrong", ()),
        ("denied", r"it needs sqs:GetQueue", ("m",)),  # without a model, of a queue that it need not be allowed
    ],
)
async def test_sqs_that_does_not_take_the_credentials_is_not_well(
    kind: str, said: str, announced: Sequence[str], broker: SqsBroker, faults: Faults, valkey: Redis
) -> None:
    announce(valkey, *announced)
    faults.put(Fault(kind))
    with pytest.raises(AwsError, match=said):
        await broker.ping()
    faults.calm()
    await broker.ping()


@pytest.mark.usefixtures("always")
async def test_a_missing_queue_is_not_well_unless_another_model_can_be_used(
    broker: SqsBroker, seen: tuple[Aws, Faults], valkey: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    announce(valkey, "other")
    with pytest.raises(AwsError, match=r"queue pen-other_1_[0-9a-f]{8}-priority in us-east-1.*penstock aws setup"):
        await broker.ping()
    announce(valkey, "m")
    await broker.ping()
    assert "pen-other_1_" in caplog.text
    seen[0].client("sqs").delete_queue(QueueUrl=url_of(seen[0]))
    faults = [await asyncio.gather(broker.ping(), return_exceptions=True) for _ in range(8)]
    assert any(isinstance(error, AwsError) for (error,) in faults), "within a round"
