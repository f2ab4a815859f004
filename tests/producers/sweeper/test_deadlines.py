from __future__ import annotations

import asyncio

import pytest
from redis import Redis

from producers import AsyncClient, TaskFailed
from producers.contract import keys
from producers.contract.stream import End
from producers.sweeper import sweeper, tasks
from producers.sweeper.tasks import expire_late
from tests.producers.conftest import QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S


async def late(client: AsyncClient, valkey: Redis) -> str:
    """A queued task whose deadline has passed."""
    task_id = (await client.submit(model="tiny", prompt=[1, 2], timeout=600)).id
    valkey.hset(keys.task(task_id), "deadline", 5)
    assert valkey.zadd(keys.DEADLINES, {task_id: 5}, xx=True, ch=True) == 1, "it stands there since its submit"
    return task_id


async def test_who_waits_for_a_queued_task_is_told_when_its_time_is_over(aclient: AsyncClient, valkey: Redis) -> None:
    """No worker is up."""
    task_id = await late(aclient, valkey)
    sweeping = asyncio.create_task(sweeper.run(aclient))
    with pytest.raises(TaskFailed, match="deadline passed") as told:
        await aclient.get(task_id).result(PATIENCE_S)
    assert told.value.code == "expired"
    sweeping.cancel()
    assert [event async for event in aclient.get(task_id).stream()][-1].status == "failed"
    assert not valkey.exists(keys.DEADLINES)
    worker = FakeWorker(valkey)
    assert worker.take(QUEUE) == task_id
    assert worker.claim(task_id).answer == "settle", "it is never run"


async def test_whoever_has_time_left_goes_on(aclient: AsyncClient, valkey: Redis) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1], timeout=600)
    await aclient.submit(model="tiny", prompt=[1])
    assert await aclient.run(expire_late()) == 0
    assert valkey.zcard(keys.DEADLINES) == 1
    FakeWorker(valkey).serve(handle.id)
    assert valkey.zcard(keys.DEADLINES) == 0, "what has ended waits for nothing"


async def test_a_living_worker_ends_its_task_itself_a_dead_one_s_is_ended(aclient: AsyncClient, valkey: Redis) -> None:
    task_id = await late(aclient, valkey)
    valkey.hset(keys.task(task_id), "deadline", 9_000_000_000_000)
    worker = FakeWorker(valkey)
    assert worker.claim(task_id).answer == "go"
    worker.append(task_id, 0, ["a", "b"])
    valkey.hset(keys.task(task_id), "deadline", 5)
    assert await aclient.run(expire_late()) == 0
    assert valkey.hget(keys.task(task_id), "status") == b"in_progress"
    worker.die()
    assert await aclient.run(expire_late()) == 1
    *tokens, end = [event async for event in aclient.get(task_id).stream()]
    assert len(tokens) == 2
    assert isinstance(end, End)
    assert (end.usage or {})["output_tokens"] == 2


async def test_a_task_cancelled_under_a_worker_that_dies_is_ended_with_no_worker_up(
    aclient: AsyncClient, valkey: Redis
) -> None:
    handle = await aclient.submit(model="tiny", prompt=[1])
    worker = FakeWorker(valkey)
    assert worker.claim(handle.id).answer == "go"
    await handle.cancel()
    assert await aclient.run(expire_late()) == 0, "a living worker ends it itself"
    worker.die()
    assert await aclient.run(expire_late()) == 1
    assert (await handle.status()).status == "cancelled"
    assert not valkey.exists(keys.DEADLINES)


async def test_a_task_cancelled_before_it_was_sent_is_ended_with_no_worker_up(
    aclient: AsyncClient, valkey: Redis
) -> None:
    """Its gateway was killed between ADMIT and send; a sweeper sends it, for it to be settled."""
    handle = await aclient.submit(model="tiny", prompt=[1], timeout=600)
    valkey.hset(keys.task(handle.id), "status", "submitting")
    valkey.zadd(keys.SUBMITTING, {handle.id: 1})
    await handle.cancel()
    assert await aclient.run(expire_late()) == 0
    assert (await tasks.send_unsent(aclient, 0)).sent == 1
    assert await aclient.run(expire_late()) == 1
    assert (await handle.status()).status == "cancelled"
    assert not valkey.exists(keys.DEADLINES)


async def test_those_left_to_others_do_not_hide_the_rest(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept: one that is being submitted, and one that cannot be read, for later. Over several pages."""
    monkeypatch.setattr(tasks, "PAGE", 3)
    ids = [await late(aclient, valkey) for _ in range(8)]
    valkey.hset(keys.task(ids[0]), "status", "submitting")
    valkey.hset(keys.task(ids[1]), "deadline", "soon")
    valkey.delete(keys.task(ids[2]))
    valkey.zadd(keys.DEADLINES, {name: k for k, name in enumerate(ids)})
    assert await aclient.run(expire_late()) == 5
    assert [name.decode() for name in valkey.zrange(keys.DEADLINES, 0, -1)] == ids[:2]
    next_try = valkey.zscore(keys.DEADLINES, ids[1]) or 0
    assert 3500 < next_try / 1000 - valkey.time()[0] <= 3601, "not every second for ever, and not never"
    assert await aclient.run(expire_late()) == 0
    assert valkey.zscore(keys.DEADLINES, ids[1]) == next_try
