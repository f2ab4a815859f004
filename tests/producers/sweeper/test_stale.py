"""What has no TTL of its own goes when nobody needs it, and not before."""

from __future__ import annotations

import json

import pytest
from redis import Redis

from producers import AsyncClient
from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol, task_index
from producers.store.fleet.cards import unused_file
from producers.sweeper.retention import RemovedData, Stale


async def test_a_worker_that_is_gone_is_taken_off_the_books_and_its_deliveries_returned(
    aclient: AsyncClient, valkey: Redis
) -> None:
    valkey.hset(broker_keys.INCARNATIONS, mapping={"gone": "q", "lives": "q"})
    valkey.set(keys.lease("lives"), "{}")
    valkey.lpush("q", json.dumps(MESSAGE))
    valkey.set(keys.lease("gone"), "{}")
    free = broker.Credit((9, 9, 9, 9), (9999,) * 4)
    run(
        valkey,
        broker.fetch("gone", ["q"], ["u"], free, capacity=(9, 999), plain_tokens=9, ageing_ms=9, max_redeliveries=3),
    )
    assert valkey.hlen(broker_keys.inflight("gone")) == 1
    stale = Stale(aclient, unneeded_s=0.0)
    assert await stale.sweep() == RemovedData()
    valkey.delete(keys.lease("gone"))
    patient = Stale(aclient)
    assert await patient.sweep() == await patient.sweep() == RemovedData(), "it may be about to say that it lives"
    assert await stale.sweep() == RemovedData(incarnations=1, deliveries=1)
    assert valkey.hkeys(broker_keys.INCARNATIONS) == [b"lives"]
    assert valkey.llen("q") == 1


MESSAGE = {
    "body": "W10=",
    "headers": {"id": "t", "task": keys.TASK_NAME},
    "properties": {"delivery_info": {"routing_key": "q"}},
}


async def test_tokenizer_files_that_no_card_names_go(aclient: AsyncClient, valkey: Redis) -> None:
    valkey.hset(keys.MODELS, "tiny", json.dumps({"files": {"tokenizer.json": "aa11"}}))
    valkey.mset({keys.blob("aa11"): b"new", keys.blob("bb22"): b"old"})
    patient = Stale(aclient)
    assert (await patient.sweep()).files == (await patient.sweep()).files == 0
    assert (await Stale(aclient, unneeded_s=0.0).sweep()).files == 1
    assert valkey.exists(keys.blob("aa11"))
    assert run(valkey, unused_file("aa11")) == 0, "a worker has announced a card with it meanwhile"


async def test_dead_letters_are_kept_for_their_time(aclient: AsyncClient, valkey: Redis) -> None:
    now = int(valkey.time()[0]) * 1000
    for at in (now - 900_000, now - 800_000, now - 1000):
        valkey.rpush(broker_keys.DEAD, json.dumps({"reason": "r", "list": "q", "at": at, "message": f"m{at}"}))
    assert (await Stale(aclient).sweep()).letters == 0
    assert (await Stale(aclient, letters_kept_s=500.0).sweep()).letters == 2
    assert [json.loads(raw)["at"] for raw in valkey.lrange(broker_keys.DEAD, 0, -1)] == [now - 1000]


async def test_schedules_that_nobody_has_run_for_more_than_a_year_are_forgotten(
    aclient: AsyncClient, valkey: Redis
) -> None:
    now = int(valkey.time()[0])
    valkey.hset(keys.SCHEDULES, mapping={"gone": 1, "led": 1, "yearly": now - 366 * 24 * 3600})
    valkey.set(keys.source_leader("led"), "p")
    patient = Stale(aclient)
    assert (await patient.sweep()).schedules == (await patient.sweep()).schedules == 0, "it may be about to lead"
    assert (await Stale(aclient, unneeded_s=0.0).sweep()).schedules == 1
    assert sorted(valkey.hkeys(keys.SCHEDULES)) == [b"led", b"yearly"]


async def test_lists_that_are_no_more_are_not_waited_for(aclient: AsyncClient, valkey: Redis) -> None:
    valkey.lpush("there", "m")
    valkey.hset(broker_keys.UNSERVED, mapping={"there": 1, "gone": 1})
    await Stale(aclient).sweep()
    assert valkey.hkeys(broker_keys.UNSERVED) == [b"there"]


async def test_the_index_of_tasks_loses_what_has_no_record(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives = {f"lives {number}": number for number in range(2000)}
    with valkey.pipeline() as pipe:
        for task_id in lives:
            pipe.hset(keys.task(task_id), "status", "queued")
        pipe.zadd(keys.TASKS, lives | {f"gone {number}": number for number in range(2000)})
        pipe.execute()
    assert (await Stale(aclient).sweep()).listed == 2000
    monkeypatch.setattr(task_index, "CALLS", 1)  # a part of the index in each sweep
    stale = Stale(aclient)
    valkey.zadd(keys.TASKS, {"gone": 1})
    assert sum([(await stale.sweep()).listed for _ in range(8)]) == 1
    assert {name.decode() for name in valkey.zrange(keys.TASKS, 0, -1)} == lives.keys()


async def test_tenants_indexes_lose_what_is_gone_or_another_tenants(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(valkey.time()[0]) * 1000
    for task_id, tenant in (("lives", "acme"), ("gone", "acme"), ("last", "zoo")):
        run(valkey, protocol.admit(task_id, "n", now, {"origin": "task", "tenant": tenant}))
    valkey.delete(keys.task("gone"), keys.task("last"))
    valkey.zadd(keys.tasks("acme"), {"another's": 1})
    valkey.hset(keys.task("another's"), mapping={"status": "queued", "tenant": "zoo"})
    stale = Stale(aclient)
    assert (await stale.sweep()).listed == 5
    assert valkey.zrange(keys.tasks("acme"), 0, -1) == [b"lives"]
    assert valkey.smembers(keys.TENANTS) == {b"acme"}
    monkeypatch.setattr(task_index, "CALLS", 1)  # one index in each sweep, where little goes
    for number in range(4):
        for origin in ("task", "response"):
            fields = {"origin": origin, "tenant": "acme"}
            run(valkey, protocol.admit(f"{origin}{number}", "n", now, fields))
    for index in (keys.tasks("acme"), keys.requests("acme")):
        valkey.zadd(index, {"gone": 1})
    assert [(await stale.sweep()).listed for _ in range(6)] == [0, 0, 1, 1, 0, 0]
