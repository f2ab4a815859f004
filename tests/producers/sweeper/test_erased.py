"""What is left of deleted tasks outside the reach of DELETE goes, and nothing of others."""

from __future__ import annotations

import json

from redis import Redis

from producers import AsyncClient
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run, text
from producers.contract import keys
from producers.store import protocol
from producers.sweeper.celery_results import CeleryResults
from producers.sweeper.queues import RetiredPools
from producers.sweeper.retention import ERASE_LATE_S, Erased, erase
from tests.producers.conftest import POOL
from tests.producers.fake_worker import FakeWorker
from tests.producers.leftovers import kept, leftovers

QUEUE = keys.model_queue("tiny")


def message(task_id: str) -> str:
    """As a plain Celery sender writes it, the prompt within."""
    headers = {"id": task_id, "task": keys.TASK_NAME, "root_id": task_id}
    return json.dumps({"body": "xyzzy", "headers": headers, "properties": {"delivery_tag": task_id}})


def ended(worker: FakeWorker, task_id: str) -> None:
    """A plain task that has ended and is not settled."""
    fields = {"model": "tiny", "queue": QUEUE, "n": 1, "task": "{}"}
    assert claim(worker.redis, task_id, worker.incarnation, fields) == "go"
    worker.claims[task_id] = "c"
    worker.append(task_id, 0, ["xyzzy"])
    worker.finish(task_id, [1])


def claim(redis: Redis, task_id: str, incarnation: str, fields: dict[str, str | int]) -> str:
    call = protocol.claim(task_id, "c", incarnation, POOL, plain=fields)
    return protocol.read_claim(task_id, run(redis, call)).answer


async def test_dead_letters_and_results_go_until_no_more_can_come(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    def left(task_id: str) -> None:
        entry = {"reason": "r", "list": QUEUE, "at": 1, "message": message(task_id)}
        valkey.rpush(broker_keys.DEAD, json.dumps(entry))
        valkey.set(keys.celery_result(task_id), "xyzzy")

    for task_id in ("gone", "kept"):
        ended(worker, task_id)
        left(task_id)
    run(valkey, protocol.delete("gone", "x"))
    assert not valkey.exists(keys.celery_result("gone"))
    assert await erase(aclient) == Erased(letters=1)
    left("gone")  # a worker was about to, when the task was deleted
    assert await erase(aclient) == Erased(letters=1, results=1)
    assert set(leftovers(valkey, "gone")) == kept("gone")
    assert valkey.llen(broker_keys.DEAD) == 1
    assert valkey.exists(keys.celery_result("kept"))
    valkey.zadd(keys.ERASING, {"gone": int(valkey.time()[0]) * 1000 - ERASE_LATE_S * 1000 - 1000})
    assert await erase(aclient) == Erased()
    assert not valkey.exists(keys.ERASING)


async def test_a_user_who_may_not_touch_celerys_keys_leaves_the_result_to_the_sweeper(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, worker: FakeWorker
) -> None:
    """As a gateway's may be (docs/run/servers.md)."""
    ended(worker, "t")
    valkey.set(keys.celery_result("t"), "xyzzy")
    rights = ("~penstock:*", "&penstock:*", "+@all", "-@admin", "-@dangerous", "+info")
    valkey.execute_command("ACL", "SETUSER", "gate", "on", ">pw", *rights)
    try:
        with Redis.from_url(valkey_url.replace("://", "://gate:pw@")) as gate:
            assert run(gate, protocol.delete("t", "x")) == [b"completed"]
    finally:
        valkey.execute_command("ACL", "DELUSER", "gate")
    assert not valkey.exists(keys.task("t"))
    assert valkey.exists(keys.celery_result("t"))
    assert await erase(aclient) == Erased(results=1)


async def test_a_message_of_a_deleted_plain_task_makes_it_no_more(valkey: Redis, worker: FakeWorker) -> None:
    ended(worker, "t")
    run(valkey, protocol.delete("t", "x"))
    assert claim(valkey, "t", worker.incarnation, {"model": "tiny", "task": "{}"}) == "erased"
    assert not valkey.exists(keys.task("t"))
    assert valkey.ttl(keys.erased("t")) > 14 * 24 * 3600, "longer than SQS keeps a message"


async def test_without_workers_such_a_message_is_removed(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker, model: str
) -> None:
    for task_id in ("gone", "waits"):
        ended(worker, task_id)
        valkey.lpush(QUEUE, message(task_id))
    run(valkey, protocol.delete("gone", "x"))
    pruned = await RetiredPools(aclient).sweep()
    assert pruned.messages == 1
    assert [json.loads(raw)["headers"]["id"] for raw in valkey.lrange(QUEUE, 0, -1)] == ["waits"]


async def test_a_result_that_is_stored_while_its_task_is_deleted_goes_again(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, worker: FakeWorker
) -> None:
    results = CeleryResults(aclient, valkey_url)
    for task_id in ("gone", "kept"):
        ended(worker, task_id)
        results.wait(task_id)
    store = results._store_one

    def stores(record: protocol.Record, result: dict[str, object]) -> bool:
        if record.id == "gone":
            run(valkey, protocol.delete("gone", "x"))
        return store(record, result)

    results._store_one = stores  # type: ignore[method-assign]
    assert await results.store_waiting() == 2
    assert not valkey.exists(keys.celery_result("gone"))
    assert valkey.exists(keys.celery_result("kept"))


async def test_a_call_that_is_repeated_says_that_it_was_its_own(valkey: Redis, worker: FakeWorker) -> None:
    ended(worker, "t")
    answers = [[text(part) for part in run(valkey, protocol.delete("t", nonce))] for nonce in ("x", "x", "y")]
    assert answers == [["completed"], ["mine"], ["gone"]]
