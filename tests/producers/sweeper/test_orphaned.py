"""What killed workers left goes back to the lists: all of it, in its order, and never under a living worker's hands."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import chain

import pytest
from redis import Redis

from producers import AsyncClient
from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.levels import split
from producers.contract.message import Message
from producers.sweeper import queues
from producers.sweeper.queues import OrphanedQueues
from tests.producers.conftest import POOL, QUEUE

MODEL = keys.model_queue("tiny")
INC = "w.1"
OTHER = keys.Pool("tiny", "other", "cafe")
SISTER = keys.Pool(POOL.model, POOL.version, "cafe")


@pytest.fixture
async def aclient(valkey_url: str, model: str, valkey: Redis) -> AsyncIterator[AsyncClient]:
    for pool in (POOL, OTHER, SISTER):
        valkey.hset(keys.POOLS, pool.queue, json.dumps(asdict(pool)))
    async with AsyncClient(valkey_url, patience=0.2) as client:
        yield client


def begin(valkey: Redis, inc: str = INC, pool: keys.Pool = POOL) -> None:
    run(valkey, broker.lease(inc, "{}", 60_000, take=True, queue=pool.queue))


def fetch(valkey: Redis, uuids: list[str], inc: str = INC) -> list[str]:
    """The tasks of what comes; all that waits is sorted."""
    free = broker.Credit((99,) * 4, (10**6,) * 4)
    call = broker.fetch(
        inc, POOL.queues, uuids, free, capacity=(99, 10**6), plain_tokens=9, ageing_ms=10**9, max_redeliveries=5
    )
    fetched = broker.read_fetch(run(valkey, call), broker.places(POOL.queues))
    return [json.loads(one.raw)["headers"]["id"] for one in fetched or ()]


def leave(valkey: Redis) -> dict[str, list[str]]:
    """A worker is killed that holds four, gave one of them back, and has sorted the rest. What is left, by list."""
    kept = {name.encode() for name in (keys.POOLS, keys.MODELS)}
    valkey.delete("none", *(name for name in valkey.keys("*") if name not in kept))
    begin(valkey)
    sent: dict[str, list[str]] = {}
    for k in range(24):
        queue, tier = (QUEUE, MODEL)[k % 8 == 7], ("default", "default", "batch", "flex")[k % 4]
        message = Message(f"t{k}", queue, tier, 1, 9, ("a", "b", "")[k % 3])
        valkey.lpush(broker_keys.list_of(message), message.envelope())
        sent.setdefault(broker_keys.list_of(message), []).append(f"t{k}")
    held = fetch(valkey, ["u0", "u1", "u2", "u3"])
    assert len(held) == 4
    run(valkey, broker.back(INC, QUEUE, "u1"))
    assert not fetch(valkey, [])
    assert sum(valkey.llen(name) for name in sent) == 0
    valkey.delete(keys.lease(INC))
    return sent


def left(valkey: Redis, names: dict[str, list[str]]) -> dict[str, list[str]]:
    """Of each list, the front first."""
    return {name: [json.loads(raw)["headers"]["id"] for raw in valkey.lrange(name, 0, -1)[::-1]] for name in names}


def sweeping(client: AsyncClient) -> OrphanedQueues:
    return OrphanedQueues(client, patience_s=0.0)


async def test_all_of_it_is_in_the_lists_in_the_order_of_arrival(aclient: AsyncClient, valkey: Redis) -> None:
    sent = leave(valkey)
    orphaned = sweeping(aclient)
    assert await orphaned.sweep() == (0, 0), "it may be about to say that it lives"
    assert await orphaned.sweep() == (3, 21)
    assert left(valkey, sent) == sent
    assert not valkey.keys("penstock:sorted:*") + valkey.keys("penstock:turn*") + valkey.keys("penstock:inflight:*")
    assert not valkey.exists(broker_keys.INCARNATIONS)
    assert await orphaned.sweep() == (0, 0)
    begin(valkey, "w.2")
    assert sorted(fetch(valkey, [f"v{k}" for k in range(30)], "w.2")) == sorted(chain(*sent.values()))
    assert not valkey.exists(broker_keys.RETURNED)


async def test_it_waits_for_as_long_as_it_was_told(aclient: AsyncClient, valkey: Redis) -> None:
    leave(valkey)
    orphaned = OrphanedQueues(aclient, patience_s=3600.0)
    for _ in range(3):
        assert await orphaned.sweep() == (0, 0)


async def test_who_was_seen_alive_meanwhile_has_all_of_the_time_again(aclient: AsyncClient, valkey: Redis) -> None:
    leave(valkey)
    orphaned = sweeping(aclient)
    await orphaned.sweep()
    begin(valkey)
    await orphaned.sweep()
    valkey.delete(keys.lease(INC))
    assert await orphaned.sweep() == (0, 0)
    assert await orphaned.sweep() == (3, 21)


async def test_a_worker_of_another_pool_keeps_what_all_of_its_model_take_from(
    aclient: AsyncClient, valkey: Redis
) -> None:
    sent = leave(valkey)
    begin(valkey, "other.1", OTHER)
    orphaned = sweeping(aclient)
    await orphaned.sweep()
    await orphaned.sweep()
    found = left(valkey, sent)
    assert all(found[name] == ids for name, ids in sent.items() if name.startswith(QUEUE))
    assert not any(found[name] for name in sent if name.startswith(MODEL) and not name.startswith(QUEUE))


async def test_what_waits_for_a_pool_goes_to_its_version_once_nobody_of_the_pool_lives(
    aclient: AsyncClient, valkey: Redis
) -> None:
    """In its order, before what waits there; with what was sorted of it, given back, or held back for later."""
    begin(valkey)
    for k, tier in enumerate(("default", "default", "flex", "default")):
        message = Message(f"t{k}", POOL.queue, tier, 1, 9, ("a", "b")[k % 2])
        valkey.lpush(broker_keys.list_of(message), message.envelope())
    assert fetch(valkey, ["u0", "u1"]) == ["t0", "t1"]
    run(valkey, broker.back(INC, POOL.queue, "u0"))
    run(valkey, broker.back(INC, POOL.queue, "u1", 3_600_000))
    valkey.lpush(QUEUE, Message("waits", QUEUE, "default", 1, 9).envelope())
    begin(valkey, "sister.1", SISTER)
    orphaned = sweeping(aclient)
    for _ in range(2):
        assert await orphaned.sweep() == (0, 0)
    valkey.delete(keys.lease(INC))
    await orphaned.sweep()
    assert await orphaned.sweep() == (0, 4)
    lists = {broker_keys.tier_list(QUEUE, tier): [] for tier in ("default", "flex")}
    assert list(left(valkey, lists).values()) == [["t0", "t3", "waits"], ["t2"]]
    (due,) = valkey.zrange(broker_keys.delayed(QUEUE), 0, -1)
    valkey.zadd(broker_keys.delayed(QUEUE), {due: 1})
    call = broker.fetch(
        "sister.1",
        SISTER.queues,
        ["v0", "v1", "v2", "v3", "v4"],
        broker.Credit((9,) * 4, (99,) * 4),
        capacity=(9, 99),
        plain_tokens=9,
        ageing_ms=10**9,
        max_redeliveries=5,
        home=QUEUE,
    )
    fetched = broker.read_fetch(run(valkey, call), broker.places(SISTER.queues)) or ()
    found = {json.loads(one.raw)["headers"]["id"]: one.queue for one in fetched}
    assert found["t1"] == QUEUE, "it is not sent back to the dead"
    assert not valkey.keys(f"*{POOL.queue}*")


async def test_a_worker_that_starts_at_this_very_moment_keeps_what_it_sorted(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any page: before the first, or in the midst."""
    monkeypatch.setattr(queues, "PAGE", 2)
    real = aclient.broker.recall
    for starts in range(12):
        sent = leave(valkey)
        calls = 0

        async def recall(queue: str, pools: list[str], count: int, starts: int = starts) -> int:
            nonlocal calls
            if split(queue)[1]:  # each sweep looks at these
                return await real(queue, pools, count)
            if calls == starts:
                begin(valkey, "w.2")
                fetch(valkey, [], "w.2")
            calls += 1
            return await real(queue, pools, count)

        monkeypatch.setattr(aclient.broker, "recall", recall)
        orphaned = sweeping(aclient)
        await orphaned.sweep()
        await orphaned.sweep()
        assert calls > starts
        assert not any(left(valkey, sent).values()), "it was sorted, and is not taken away"
        taken: list[str] = []
        while batch := fetch(valkey, [f"v{len(taken) + k}" for k in range(5)], "w.2"):
            taken += batch
        assert sorted(taken) == sorted(chain(*sent.values()))
        for ids in sent.values():
            for tenant in range(3):
                mine = [task_id for task_id in ids if int(task_id[1:]) % 3 == tenant]
                assert [task_id for task_id in taken if task_id in mine] == mine, "a tenant's tasks keep their order"


async def test_a_sweeper_that_dies_between_any_two_calls_loses_nothing(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "PAGE", 2)
    died = True
    dies = 0
    while died:
        sent = leave(valkey)
        calls, died = 0, False

        def mortal(call: Callable[..., Awaitable[int]], dies: int = dies) -> Callable[..., Awaitable[int]]:
            async def made(*args: object) -> int:
                nonlocal calls, died
                died = died or calls == dies
                calls += 1
                if died:
                    raise ConnectionError("killed")
                return await call(*args)

            return made

        orphaned = sweeping(aclient)
        await orphaned.sweep()
        with suppress(ConnectionError), monkeypatch.context() as killed:
            for name in ("reap", "recall"):
                killed.setattr(aclient.broker, name, mortal(getattr(aclient.broker, name)))
            await orphaned.sweep()
        another = sweeping(aclient)
        await another.sweep()
        await another.sweep()
        assert left(valkey, sent) == sent
        dies += 1
    assert dies > 10
