from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from producers import AsyncClient, SubmitFailed
from producers.broker.redis import keys as broker_keys
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message
from producers.store import protocol
from producers.sweeper import tasks
from producers.sweeper.tasks import Swept, send_unsent
from tests.producers.conftest import QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.producers.proxy import Proxy
from tests.waiting import PATIENCE_S


def admit(valkey: Redis, task_id: str, **fields: Any) -> None:
    """A record whose submitter died right after ADMIT."""
    now = int(valkey.time()[0]) * 1000
    record = {"task": "{}", "model": "tiny", "queue": QUEUE, "tier": "flex", "n": 1, "tokens": 9} | fields
    assert run(valkey, protocol.admit(task_id, task_id, now, record)) == b"new"


async def test_an_abandoned_submit_is_sent(aclient: AsyncClient, valkey: Redis, worker: FakeWorker) -> None:
    admit(valkey, "t")
    assert await send_unsent(aclient, age_ms=0) == Swept(sent=1)
    assert valkey.hget(keys.task("t"), "status") == b"queued"
    assert valkey.zcard(keys.SUBMITTING) == 0
    (raw,) = valkey.lrange(broker_keys.tier_list(QUEUE, "flex"), 0, -1)
    created = int(valkey.hget(keys.task("t"), "created") or 0)
    expected = json.loads(Message("t", QUEUE, "flex", 1, 9, at=created).envelope())
    assert json.loads(raw)["headers"] == expected["headers"]
    worker.serve(worker.take(QUEUE) or "")
    assert (await aclient.get("t").result(PATIENCE_S)).text == "Hello, world"
    assert await send_unsent(aclient, age_ms=0) == Swept()


async def test_a_young_submit_is_left_to_its_client(aclient: AsyncClient, valkey: Redis) -> None:
    admit(valkey, "t")
    assert await send_unsent(aclient) == Swept()
    assert valkey.zcard(keys.SUBMITTING) == 1
    valkey.zadd(keys.SUBMITTING, {"t": int(valkey.time()[0]) * 1000 - protocol.SWEEP_AGE_MS - 1000})
    assert await send_unsent(aclient) == Swept(sent=1)


@pytest.mark.parametrize("state", ["gone", "queued", "running", "final"])
async def test_what_needs_no_message_gets_none(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker, state: str
) -> None:
    admit(valkey, "t")
    match state:
        case "gone":
            valkey.delete(keys.task("t"))
        case "queued":
            run(valkey, protocol.queued("t"))
        case "running":
            worker.claim("t")
        case "final":
            worker.serve("t")
    valkey.zadd(keys.SUBMITTING, {"t": 1})
    before = valkey.hgetall(keys.task("t"))
    assert await send_unsent(aclient, age_ms=0) == Swept(dropped=1)
    assert valkey.zcard(keys.SUBMITTING) == 0
    assert valkey.hgetall(keys.task("t")) == before
    assert valkey.llen(broker_keys.tier_list(QUEUE, "flex")) == 0


async def test_a_cancelled_submit_is_sent_all_the_same_so_that_a_worker_settles_it(
    aclient: AsyncClient, valkey: Redis, worker: FakeWorker
) -> None:
    admit(valkey, "t")
    assert await aclient.get("t").cancel()
    assert await send_unsent(aclient, age_ms=0) == Swept(sent=1)
    assert worker.claim(worker.take(QUEUE) or "").answer == "settle"
    assert (await aclient.get("t").result(5, raise_for_status=False)).status == "cancelled"


async def test_an_id_admitted_anew_while_it_was_looked_at_is_kept(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    valkey.zadd(keys.SUBMITTING, {"t": 1})  # its record is gone
    hget = aclient.store.hget

    async def admitted_meanwhile(*args: Any) -> Any:
        status = await hget(*args)
        admit(valkey, "t")
        return status

    monkeypatch.setattr(aclient.store, "hget", admitted_meanwhile)
    assert await send_unsent(aclient, age_ms=0) == Swept(failed=1)
    assert valkey.zscore(keys.SUBMITTING, "t") > 1
    monkeypatch.undo()
    assert await send_unsent(aclient, age_ms=0) == Swept(sent=1)


async def test_a_bad_record_does_not_stop_the_rest(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "UNSENT_PAGE", 3)
    for k in range(20):
        admit(valkey, f"t{k}")
        valkey.zadd(keys.SUBMITTING, {f"t{k}": k})
    for k in (0, 1, 2, 3, 9, 19):
        valkey.hdel(keys.task(f"t{k}"), "queue")
    valkey.delete(keys.task("t5"))
    valkey.set(keys.task("t5"), "not a hash")
    valkey.hset(keys.task("t6"), "task", "null")
    assert await send_unsent(aclient, age_ms=0) == Swept(sent=12, failed=8)
    assert valkey.llen(broker_keys.tier_list(QUEUE, "flex")) == 12
    assert valkey.zcard(keys.SUBMITTING) == 8


async def test_sweepers_at_the_same_time_lose_nothing(valkey_url: str, valkey: Redis, worker: FakeWorker) -> None:
    for k in range(30):
        admit(valkey, f"t{k}")
    async with AsyncClient(valkey_url) as one, AsyncClient(valkey_url) as other:
        await asyncio.gather(send_unsent(one, age_ms=0), send_unsent(other, age_ms=0))
    seen = set()
    while (task_id := worker.take(QUEUE)) is not None:
        if task_id in seen:
            assert worker.claim(task_id).answer == "done"
        else:
            seen.add(task_id)
            worker.serve(task_id)
    assert seen == {f"t{k}" for k in range(30)}
    assert valkey.zcard(keys.SUBMITTING) == 0


async def test_a_submit_that_failed_is_finished_when_the_broker_is_back(
    proxy: Proxy, valkey: Redis, valkey_url: str, model: str, worker: FakeWorker
) -> None:
    async with AsyncClient(proxy.url, valkey_url, patience=0.1) as client:
        proxy.fail(b"LPUSH", "before", 1000)
        with pytest.raises(SubmitFailed):
            await client.submit(model=model, prompt="x", task_id="t")
        with pytest.raises((RedisError, OSError)):  # a broker that is away ends the sweep, nothing is forgotten
            await send_unsent(client, age_ms=0)
        proxy.heal()
        assert await send_unsent(client, age_ms=0) == Swept(sent=1)
        worker.serve(worker.take(QUEUE) or "")
        assert (await client.get("t").result(PATIENCE_S)).status == "completed"
