"""A compacted stream gives what the stream gave, to whoever comes whenever; and takes far less memory."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any

import pytest
from redis import Redis

from producers import AsyncClient, Event
from producers.client.reader import FIRST, Cursor, read_block, read_entries
from producers.connection.script import run
from producers.contract import keys
from producers.contract.stream import BLOCK, Choice, encode_token, pack, unpack
from producers.store import protocol
from producers.sweeper.compact import Compacted, Offload, compact
from tests.exhaustive import few
from tests.processes import valkey as own_valkey
from tests.producers.faces import Face
from tests.producers.fake_worker import FakeWorker


def made(client: Any, worker: FakeWorker, count: int, **task: Any) -> str:
    """A settled task with `count` tokens a choice, some with odd texts and log probabilities; and a prompt's."""
    task_id = f"t{random.randrange(1 << 60)}"
    n = task.get("n", 1)
    now = int(worker.redis.time()[0]) * 1000
    fields = {"task": json.dumps({"model": "tiny", "prompt": [1, 2, 3]}), "model": "tiny", "n": n, "tokens": 9}
    run(worker.redis, protocol.admit(task_id, "n", now, fields))
    assert worker.claim(task_id).answer == "go"
    if task.get("scored"):
        worker.prompt(task_id, [1, 2, 3], [None, (-1.5, ((2, -1.5), (9, -2.25))), (-0.5, ())])
    texts = ["a", "", '"\\', "é🙂", " \n", "\u2028", "\x00"]
    for choice in range(n):
        for start in range(0, count, 200):
            some = range(start, min(count, start + 200))
            scores = [(-1.0 - i, ((i, -0.5),)) if i % 3 == 0 else None for i in some]
            worker.append(task_id, start, [texts[i % 7] for i in some], choice=choice, logprobs=scores)
    worker.finish(task_id, [count] * n)
    worker.settle(task_id)
    return task_id


async def events(client: AsyncClient, task_id: str, start: int = 0) -> list[Event]:
    return [event async for event in client.get(task_id).stream(start)]


def squeeze(url: str, moving: Offload | None = None) -> Compacted:
    async def once() -> Compacted:
        async with AsyncClient(url) as client:
            return await compact(client, 0, moving)

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("count", "n"),
    few(
        [(0, 1), (5, 2), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 7, 1), (2 * BLOCK + 7, 1)], (0, 1), (5, 2), (BLOCK + 7, 1)
    ),
)
def test_every_event_is_given_again_from_every_position(
    client: Face, worker: FakeWorker, valkey: Redis, valkey_url: str, count: int, n: int
) -> None:
    task_id = made(client, worker, count, n=n, scored=count == 5)
    handle = client.get(task_id)
    whole, result = list(handle.stream()), handle.result()
    assert squeeze(valkey_url).entries == len(whole)
    assert not valkey.exists(keys.stream(task_id))
    assert not valkey.zcard(keys.SETTLED)
    assert handle.result() == result
    at = sorted(
        {0, 1, 4, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, count, len(whole) - 1, len(whole), len(whole) + BLOCK}
    )
    for start in at:
        assert list(handle.stream(start)) == whole[start:]
    assert isinstance(result.choices[0], Choice)


async def test_a_reader_goes_on_when_the_stream_is_compacted_under_it(aclient: AsyncClient, worker: FakeWorker) -> None:
    task_id = made(aclient, worker, 3 * BLOCK)
    whole = await events(aclient, task_id)
    reader = aclient.reader(task_id)
    found = await reader.next()
    assert len(found) == FIRST
    assert (await compact(aclient, age_ms=0)).streams == 1
    while more := await reader.next():
        found += more
    assert found == whole


@pytest.mark.parametrize("before", range(4))
async def test_a_query_finds_all_wherever_in_it_the_stream_is_compacted(
    aclient: AsyncClient, worker: FakeWorker, before: int
) -> None:
    """Its three commands are not one transaction. `before`: how many of them come before the compaction."""
    task_id = made(aclient, worker, 9)
    cursor = Cursor(task_id, 2)
    answers: list[Any] = []
    for at, command in enumerate([*cursor.query().commands, ("PING",)]):
        if at == before:
            assert (await compact(aclient, age_ms=0)).streams == 1
        answers.append(await aclient.store.execute_command(*command))
    record, found, (block, _), _ = answers
    entries = read_entries(found) if found else read_block(cursor.block, block)
    given = cursor.replay(record, entries, False if found else None)
    assert [event.position for event in given] == list(range(2, 10))
    assert cursor.ended


async def test_only_what_is_settled_and_was_for_a_while(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis
) -> None:
    task_id = made(aclient, worker, 3)
    assert await compact(aclient) == Compacted()
    valkey.hdel(keys.task(task_id), "settled")
    assert await compact(aclient, age_ms=0) == Compacted()
    assert valkey.exists(keys.stream(task_id))


async def test_a_stream_with_a_hole_or_no_end_is_left(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    hole, endless, fine = (made(aclient, worker, 5) for _ in range(3))
    valkey.xdel(keys.stream(hole), "3-0")
    valkey.xdel(keys.stream(endless), "6-0")
    assert (await compact(aclient, age_ms=0)).streams == 1
    assert [valkey.exists(keys.stream(one)) for one in (hole, endless, fine)] == [1, 1, 0]
    assert not valkey.zcard(keys.SETTLED), "it is not looked at again and again"
    assert hole in caplog.text
    assert endless in caplog.text


async def test_blocks_of_an_earlier_life_of_an_id_are_refused(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis
) -> None:
    """Who compacts was stopped for a long time; the new life has as many entries."""
    task_id = made(aclient, worker, 3)
    settled = int(valkey.hget(keys.task(task_id), "settled") or 0)  # type: ignore[arg-type]
    old = pack([encode_token(0, k, 7, "old").encode() for k in range(3)] + [b'{"end":"completed"}'])
    call = protocol.compact(task_id, settled - 1, 4, [old])
    assert run(valkey, call) == b"changed"
    assert len(await events(aclient, task_id)) == 4


async def test_an_id_used_anew_finds_nothing_of_its_earlier_life(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis
) -> None:
    """A stream outlives its record for a moment."""
    for compacted in (False, True):
        task_id = made(aclient, worker, 3)
        if compacted:
            await compact(aclient, age_ms=0)
        valkey.delete(keys.task(task_id))
        run(valkey, protocol.admit(task_id, "n", int(valkey.time()[0]) * 1000, {"task": "{}", "n": 1}))
        assert not valkey.exists(keys.stream(task_id), keys.result(task_id))


async def test_the_result_expires_when_the_stream_would_have(
    aclient: AsyncClient, worker: FakeWorker, valkey: Redis
) -> None:
    task_id = made(aclient, worker, 3)
    before = valkey.pttl(keys.stream(task_id))
    await compact(aclient, age_ms=0)
    assert before - 60_000 < valkey.pttl(keys.result(task_id)) <= before
    assert valkey.ttl(keys.task(task_id)) < valkey.ttl(keys.result(task_id)), "else a reader found a record without it"


async def test_many_are_compacted_by_two_at_once(aclient: AsyncClient, worker: FakeWorker, valkey: Redis) -> None:
    ids = [made(aclient, worker, 20) for _ in range(150)]
    whole = [await events(aclient, task_id) for task_id in ids]
    await asyncio.gather(compact(aclient, age_ms=0), compact(aclient, age_ms=0))
    assert not valkey.zcard(keys.SETTLED)
    assert not valkey.keys(keys.stream("*"))
    assert [await events(aclient, task_id) for task_id in ids] == whole


async def test_where_the_server_has_no_memory_left_compacting_makes_some() -> None:
    with own_valkey() as (url, redis):
        raw = Redis.from_url(url)
        worker = FakeWorker(raw)
        async with AsyncClient(url) as client:
            task_id = made(client, worker, 5 * BLOCK)
            whole = await events(client, task_id)
            run(raw, protocol.compact("none", 0, 0, []))  # the script is known
            stream = redis.memory_usage(keys.stream(task_id), samples=0)
            used = redis.info("memory")["used_memory"]
            redis.config_set("maxmemory-policy", "noeviction")
            redis.config_set("maxmemory", used - 1000)
            assert (await compact(client, age_ms=0)).streams == 1
            assert redis.memory_usage(keys.result(task_id), samples=0) < stream / 2
            assert await events(client, task_id) == whole


def test_a_block_is_a_fraction_of_its_entries() -> None:
    chance = random.Random(1)
    words = [f" w{chance.randrange(5000)}" for _ in range(BLOCK)]
    entries = [encode_token(0, k, hash(w) % 49_152, w).encode() for k, w in enumerate(words)]
    block = pack(entries)
    assert len(block) < sum(map(len, entries)) / 2
    assert unpack(3, block) == [(3 * BLOCK + k, json.loads(entry)) for k, entry in enumerate(entries)]
