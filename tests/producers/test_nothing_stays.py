"""After a mixed load and all its times to live, the store holds what models there are, and nothing else."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from redis import Redis

from producers import AsyncClient
from producers.broker.redis import calls as broker
from producers.broker.redis import keys as broker_keys
from producers.broker.sqs import keys as sqs_keys
from producers.client.leases import hold
from producers.connection.script import run
from producers.contract import keys
from producers.contract.message import Message
from producers.gateway.batch_endpoints import LineEndpoints
from producers.store import batches, files, inbox, outbox, protocol
from producers.sweeper.retention import Ages
from producers.sweeper.sweeper import SweeperSettings, lead
from tests.producers.conftest import POOL, QUEUE
from tests.producers.fake_worker import FakeWorker

OLD = keys.Pool("tiny", "0ld", "cafe")
#: Models, what sweepers counted, and the ledger, which is empty then.
STAYS = {keys.MODELS, keys.SWEPT, keys.LEDGER, keys.USAGE_FOLDED}
#: The longest time to live of anything (s).
LONGEST_S = 62 * 24 * 3600
FREE = broker.Credit((9, 9, 9, 9), (9999,) * 4)


async def _load(client: AsyncClient, valkey: Redis, worker: FakeWorker) -> None:
    """One of everything that may become of a task; and what its processes leave when they die."""

    async def submit(**fields: Any) -> str:
        return (await client.submit(model="tiny", prompt=[1], **fields)).id

    for ttl in (None, 300):
        task_id = await submit(ttl=ttl, tenant="a")
        worker.serve(task_id, ["x"] * 1500)
    keyed = await submit(idempotency_key="k")
    assert keyed == await submit(idempotency_key="k")
    worker.serve(keyed)
    await client.get(await submit(ttl=300)).cancel()
    await client.get(await submit(idempotency_key="deleted", tenant="b")).delete()
    late = await submit(timeout=600, tier="batch")
    valkey.hset(keys.task(late), "deadline", 5)
    valkey.zadd(keys.DEADLINES, {late: 5})
    unread = await submit()
    run(valkey, hold([unread, "never admitted"], 1))
    died = await submit()
    worker.claim(died)
    worker.finish(died, [0])
    plain = protocol.claim(
        "plain", "c", worker.incarnation, POOL, plain={"model": "tiny", "queue": QUEUE, "n": 1, "task": "{}"}
    )
    run(valkey, plain)
    worker.claims["plain"] = "c"
    worker.finish("plain", [0])
    fields = {"task": "{}", "model": "tiny", "queue": OLD.queue, "tier": "default", "n": 1, "tokens": 9, "deadline": 5}
    run(valkey, protocol.admit("unsent", "n", int(valkey.time()[0]) * 1000, fields))
    valkey.zadd(keys.SUBMITTING, {"unsent": 1})
    # A worker that fetched some of it and died, after it had given one back.
    valkey.hset(broker_keys.INCARNATIONS, "gone", POOL.queue)
    valkey.set(keys.lease("gone"), "{}")
    call = broker.fetch(
        "gone", [QUEUE], ["u1", "u2", "u3"], FREE, capacity=(9, 9999), plain_tokens=9, ageing_ms=9, max_redeliveries=9
    )
    assert len(broker.read_fetch(run(valkey, call), broker.places([QUEUE])) or ()) == 3
    run(valkey, broker.back("gone", QUEUE, "u1", 600_000))
    valkey.delete(keys.lease("gone"))
    for queue in (OLD.queue, OLD.version_queue, POOL.queue):
        valkey.lpush(queue, Message("long expired", queue, "default", 1, 9).envelope())
    valkey.rpush(broker_keys.DEAD, json.dumps({"reason": "r", "list": "q", "at": 1000, "message": "m"}))
    await _called_back(client, valkey)
    valkey.set(keys.blob("00ff"), b"a tokenizer that no card names any more")
    valkey.hset(keys.SCHEDULES, "gone", 1)
    for file_id in ("file-over", "file-unmade"):
        valkey.zadd(keys.FILE_NOTES, {file_id: 1})
    run(valkey, files.file_made(files.File("file-over", 0, "x", "batch", 1, expires_at=2)))
    batch = batches.new_id(1)  # made so long ago that no list has it any more
    fields = {"endpoint": "/v1/completions", "input_file": "file-1", "completion_window": "1h"}
    for call in (batches.create(batch, 3600, fields), batches.begin_parts(batch, ["part-1"]), batches.cancel(batch)):
        run(valkey, call)
    object_ = inbox.new_entry("s3://bucket/inbox/", inbox.InboxObject("a.jsonl", " etag", 1), 1)
    for call in (
        inbox.take("s3://bucket/inbox/", object_),
        inbox.hold(object_, "p", 120_000),
        inbox.done("s3://bucket/inbox/", object_, forget=False),
    ):
        run(valkey, call)
    worker.die()
    # Everything waits for long enough already, but for what is yet to become so.
    _age(valkey)


async def _called_back(client: AsyncClient, valkey: Redis) -> None:
    """A webhook that was delivered, and one that was given up; a reply of a source that nobody runs."""
    run(valkey, outbox.put("evt_1.reply", {"webhook_id": "evt_1", "source": "gone"}))
    for end in (outbox.delivered, outbox.dead):
        handle = await client.submit(model="tiny", prompt=[1], ttl=300, webhook={"url": "https://example.com/"})
        await handle.cancel()
        (row,) = outbox.read_take(run(valkey, outbox.take("d", 9, 60_000))).rows
        run(valkey, end(row, "d", outbox.Attempt(1, 1, 200)))


def _age(valkey: Redis) -> None:
    now = int(valkey.time()[0]) * 1000
    if settled := valkey.zrange(keys.SETTLED, 0, -1):
        valkey.zadd(keys.SETTLED, dict.fromkeys(settled, now - 120_000), xx=True)
    unsettled = dict.fromkeys(valkey.zrange(keys.UNSETTLED, 0, -1), now - 120_000)
    if b"plain" in unsettled:
        unsettled[b"plain"] = 1  # its message is lost, and a week has passed
    if unsettled:
        valkey.zadd(keys.UNSETTLED, unsettled, xx=True)


def _time_passes(valkey: Redis) -> None:
    """Whatever is to live for a time has lived. What has no end is left."""
    for name in valkey.keys("*"):
        if 60_000 < valkey.pttl(name) <= LONGEST_S * 1000:
            valkey.delete(name)
    valkey.delete(keys.WAITING_MEMORY)  # the last look at it, which counts for a minute
    for name in valkey.keys("penstock:delayed:*"):
        valkey.zadd(name, dict.fromkeys(valkey.zrange(name, 0, -1), 1), xx=True)
    if erasing := valkey.zrange(keys.ERASING, 0, -1):
        valkey.zadd(keys.ERASING, dict.fromkeys(erasing, 1), xx=True)
    if noted := valkey.zrange(keys.FILE_NOTES, 0, -1):
        valkey.zadd(keys.FILE_NOTES, dict.fromkeys(noted, 1), xx=True)


async def test_nothing_grows_for_ever(
    valkey: Redis, valkey_url: str, model: str, worker: FakeWorker, tmp_path: Path
) -> None:
    for pool in (POOL, OLD):
        valkey.hset(keys.POOLS, pool.queue, json.dumps(asdict(pool)))
    settings = SweeperSettings(
        valkey_url,
        valkey_url,
        "s",
        lease=60.0,
        every=0.02,
        seldom=0.05,
        reader_lease=0.01,
        letters_kept=60.0,
        delivered_kept=0.1,
        dead_kept=0.1,
        untaken=0.1,
        usage=Ages(fold=0.0, roll=0.0, kept=0.0),
        unneeded=0.2,
        retire_after=0.1,
        files_dir=str(tmp_path),
        results_to_files=3000,
    )
    async with AsyncClient(valkey_url) as client:
        await _load(client, valkey, worker)
        found = {name.decode().split(":")[1] for name in valkey.keys("penstock:*")}
        assert found >= {"task", "stream", "submitting", "deadlines", "readers", "unsettled", "settled", "incarnations"}
        assert found >= {"inflight", "delayed", "dead", "blob", "queue", "unserved", "webhooks"}
        assert found >= {"replies", "schedules", "tasks", "idempotency", "batch", "batches", "inbox", "ledger"}
        endpoints = LineEndpoints(client)
        sweeping = asyncio.create_task(lead(client, settings, endpoints))
        try:
            for _ in range(800):
                if not _left(valkey):
                    break
                await asyncio.sleep(0.1)
                _age(valkey)
                if not valkey.zcard(keys.UNSETTLED) and not valkey.zcard(keys.SETTLED):
                    _time_passes(valkey)
            assert _left(valkey) == set()
            assert valkey.hget(keys.SWEPT, "results_moved") == b"2"
            assert not [name for _, _, names in os.walk(tmp_path) for name in names]
        finally:
            sweeping.cancel()
            await asyncio.wait((sweeping,))
            endpoints.close()
    assert {name.decode() for name in valkey.keys("*")} <= STAYS | COUNTERS
    assert valkey.xlen(keys.LEDGER) == 0


def test_the_table_of_keys_has_each_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how" / "sweeper.md").read_text()
    table = page.partition("## When keys are removed")[2]
    told: list[str] = []
    for name in re.findall("`([^`]+)`", "".join(re.findall(r"^\|[^|]+", table, re.MULTILINE))):
        told.append(told[-1].rpartition(":")[0] + name if name.startswith(":") else name)
    known = [re.compile(re.sub("<.+?>", ".+", name) + (".+" if name.endswith(":") else "")) for name in told]
    for key in {key for module in (keys, broker_keys, sqs_keys) for key in _keys_of(module)}:
        assert any(name.fullmatch(key) for name in known), f"{key}: docs/how/sweeper.md does not say when it is removed"


def _keys_of(module: ModuleType) -> Iterator[str]:
    """The keys that it names, without prefix, with x for whatever a name depends on; no channels, and no queues."""
    for what in vars(module).values():
        if inspect.isfunction(what) and re.match("Hash|Set|Sorted set|Stream|String|Zset", what.__doc__ or ""):
            what = what(*["x"] * len(inspect.signature(what).parameters))
        if isinstance(what, str) and what.startswith("penstock:") and what != keys.WEBHOOKS_WAKE:
            yield what.removeprefix("penstock:")


#: Of the broker's scripts: a number each, however much there is of what they count.
COUNTERS = {"penstock:deliveries", "penstock:deliveries:tokens", "penstock:arrivals", keys.JOINS}


def _left(valkey: Redis) -> set[str]:
    return {name.decode() for name in valkey.keys("*")} - STAYS - COUNTERS - {keys.SWEEPER}
