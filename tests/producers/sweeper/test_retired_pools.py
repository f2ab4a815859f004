"""Pools that nobody serves: what waits there is told of, what is over is removed, an empty one is forgotten."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from redis import Redis

from producers import AsyncClient
from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message
from producers.store import protocol
from producers.sweeper import queues as retired
from producers.sweeper.queues import Pruned, RetiredPools
from tests.producers.conftest import CARD, POOL, QUEUE
from tests.producers.fake_worker import FakeWorker

OLD_POOL = keys.Pool("tiny", "0ld", "cafe")
OLD = OLD_POOL.version_queue


@pytest.fixture
async def aclient(valkey_url: str, model: str, valkey: Redis) -> AsyncIterator[AsyncClient]:
    """`tiny` is served by a worker; an older version of it is not."""
    for pool in (POOL, OLD_POOL):
        valkey.hset(keys.POOLS, pool.queue, json.dumps(asdict(pool)))
    valkey.hset(broker_keys.INCARNATIONS, "w1", POOL.queue)
    async with AsyncClient(valkey_url, patience=0.2) as client:
        yield client


def publish(client: AsyncClient, valkey: Redis, version: str) -> None:
    valkey.hset(keys.MODELS, "tiny", json.dumps(CARD | {"version": version}))
    client.directory.forget("tiny")


async def task(client: AsyncClient, valkey: Redis, end: str = "") -> str:
    """A task in the old version's queue, which has come to this end."""
    publish(client, valkey, "0ld")
    handle = await client.submit(model="tiny", prompt=[1])
    publish(client, valkey, POOL.version)
    if end in ("settled", "expired"):
        await handle.cancel()
        run(valkey, protocol.settle(handle.id))
    if end == "expired":
        valkey.delete(keys.task(handle.id))
    return handle.id


async def test_only_what_is_over_is_removed_and_the_rest_told_of(
    aclient: AsyncClient, valkey: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(retired, "PAGE", 2)
    ends = ["", "settled", "", "expired", "settled", "settled", "expired", ""]
    ids = [await task(aclient, valkey, end) for end in ends]
    plain = Message("plain", OLD, "default", 1, 9).envelope().replace('"penstock": {', '"other": {')
    impossible = Message("half", OLD, "default", 1, 9).envelope().replace('"half"', '"\\ud800"')  # in no key
    valkey.lpush(OLD, plain, "junk", impossible)
    valkey.hset(broker_keys.REAPED, ids[1], 1)
    pools = RetiredPools(aclient, patience_s=0)
    assert await pools.sweep() == Pruned(messages=5)
    left = valkey.lrange(OLD, 0, -1)
    assert left[:3] == [impossible.encode(), b"junk", plain.encode()]
    assert [json.loads(raw)["headers"]["id"] for raw in left[3:]] == [ids[7], ids[2], ids[0]]
    assert not valkey.exists(broker_keys.REAPED)
    assert f"6 tasks wait in {OLD}" in caplog.text
    caplog.clear()
    await pools.sweep()
    assert "wait in" not in caplog.text, "once for each number"


async def test_a_worker_that_is_loading_its_model_is_waited_for(
    aclient: AsyncClient, valkey: Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweeper is there before it; and each time that the pool's last worker has gone it may come back."""
    now = 0.0
    monkeypatch.setattr(retired, "time", SimpleNamespace(monotonic=lambda: now))
    await task(aclient, valkey)
    pools = RetiredPools(aclient)

    async def told(at: float) -> bool:
        nonlocal now
        now = at
        caplog.clear()
        await pools.sweep()
        return f"1 tasks wait in {OLD}, which no worker serves" in caplog.text

    assert [await told(at) for at in (0, 59)] == [False, False]
    valkey.hset(broker_keys.INCARNATIONS, "w2", OLD_POOL.queue)
    assert not await told(61)
    valkey.hdel(broker_keys.INCARNATIONS, "w2")
    assert [await told(at) for at in (70, 129, 130, 140)] == [False, False, True, False]


async def test_a_served_queue_is_left_to_its_workers(aclient: AsyncClient, valkey: Redis) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1])
    await handle.cancel()
    run(valkey, protocol.settle(handle.id))
    assert await RetiredPools(aclient).sweep() == Pruned()
    assert valkey.llen(QUEUE) == 1
    valkey.delete(broker_keys.INCARNATIONS)
    assert await RetiredPools(aclient).sweep() == Pruned(messages=1)


async def test_what_was_sorted_or_held_back_is_found_too(aclient: AsyncClient, valkey: Redis) -> None:
    """By a worker of the pool, before it went."""
    for _ in range(4):
        await task(aclient, valkey, "settled")
    valkey.set(keys.lease("w2"), "{}")
    free = broker.Credit((2, 2, 2, 2), (10_000,) * 4)
    call = broker.fetch(
        "w2", [OLD], ["u1", "u2"], free, capacity=(9, 10_000), plain_tokens=9, ageing_ms=1000, max_redeliveries=3
    )
    assert len(broker.read_fetch(run(valkey, call), broker.places([OLD])) or ()) == 2
    run(valkey, broker.back("w2", OLD, "u1", 60_000))
    run(valkey, broker.back("w2", OLD, "u2", 0))
    assert await RetiredPools(aclient).sweep() == Pruned(messages=3)
    (delayed,) = valkey.zrange(broker_keys.delayed(OLD), 0, -1)
    valkey.zadd(broker_keys.delayed(OLD), {delayed: 1})  # it is due now
    assert await RetiredPools(aclient).sweep() == Pruned(messages=1)
    assert not valkey.exists(broker_keys.delayed(OLD))
    assert not [name for name in valkey.keys("penstock:*") if OLD.encode() in name]


async def test_an_empty_one_is_forgotten_with_its_version_unless_a_card_names_that(
    aclient: AsyncClient, valkey: Redis
) -> None:
    waits = await task(aclient, valkey)
    pools = RetiredPools(aclient, retire_after_s=0.0)
    assert (await pools.sweep()).pools == 0, "somebody's task waits there"
    worker = FakeWorker(valkey)
    assert worker.take(OLD) == waits
    for queue in (OLD, OLD_POOL.queue, QUEUE):
        valkey.sadd(f"_kombu.binding.{queue}", "x")
        valkey.sadd(f"_kombu.binding_permanent.{queue}", "x")
    assert (await pools.sweep()).pools == 1
    assert valkey.hkeys(keys.POOLS) == [POOL.queue.encode()]
    valkey.delete(broker_keys.INCARNATIONS)
    assert (await pools.sweep()).pools == 1, "a card is enough to send tasks"
    assert {name.decode().removeprefix("_kombu.") for name in valkey.keys("_kombu*")} == {
        f"binding.{QUEUE}",
        f"binding_permanent.{QUEUE}",
    }


async def test_one_that_is_announced_anew_meanwhile_is_kept(aclient: AsyncClient, valkey: Redis) -> None:
    before = valkey.hget(keys.POOLS, OLD_POOL.queue)
    assert before is not None
    valkey.hset(keys.POOLS, OLD_POOL.queue, json.dumps({**asdict(OLD_POOL), "announced": 7}))
    assert run(valkey, retired.retire(OLD_POOL.queue, before.decode())) == 0
    assert valkey.hexists(keys.POOLS, OLD_POOL.queue)


async def test_time_without_a_worker_counts_from_when_it_was_empty(aclient: AsyncClient, valkey: Redis) -> None:
    pools = RetiredPools(aclient, retire_after_s=3600.0)
    for _ in range(3):
        assert await pools.sweep() == Pruned()
    assert valkey.hexists(keys.POOLS, OLD_POOL.queue)


async def test_what_workers_measured_goes_with_the_last_that_names_the_version(
    aclient: AsyncClient, valkey: Redis
) -> None:
    versions = {f"tiny@{POOL.version}", "tiny@0ld"}
    valkey.hset(keys.PROFILES, mapping=dict.fromkeys([*versions, "tiny@older", "other@1", "junk"], "{}"))
    pools = RetiredPools(aclient, retire_after_s=0)
    await pools.sweep()
    assert {name.decode() for name in valkey.hkeys(keys.PROFILES)} == versions
    await pools.sweep()  # the pool of the old version was retired by the first
    assert [name.decode() for name in valkey.hkeys(keys.PROFILES)] == [f"tiny@{POOL.version}"]
    valkey.delete(keys.POOLS)
    await pools.sweep()
    assert valkey.hlen(keys.PROFILES) == 1, "the card names it"


@pytest.mark.parametrize(("pool", "wanted", "told"), [("tiny@0ld", 0, False), ("tiny", 0, False), ("tiny", 1, True)])
async def test_tasks_for_which_an_autoscaler_wants_no_worker_yet_are_no_news(
    aclient: AsyncClient, valkey: Redis, caplog: pytest.LogCaptureFixture, pool: str, wanted: int, told: bool
) -> None:
    await task(aclient, valkey)
    publish(aclient, valkey, "0ld")
    seconds, _ = valkey.time()
    valkey.hset(keys.SCALE_POOLS, pool, json.dumps({"at": seconds, "wanted": wanted}))
    pools = RetiredPools(aclient, patience_s=0)
    await pools.sweep()
    assert (f"1 tasks wait in {OLD}" in caplog.text) == told
    valkey.hset(keys.SCALE_POOLS, pool, json.dumps({"at": seconds - 60, "wanted": 0}))
    await pools.sweep()
    assert f"1 tasks wait in {OLD}" in caplog.text, "that autoscaler is gone"
