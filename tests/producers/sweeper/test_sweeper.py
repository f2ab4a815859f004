from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import WatchError

from producers import AsyncClient
from producers.connection import log_throttle as complaints
from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol
from producers.sweeper import sweeper, tasks
from producers.sweeper.sweeper import SweeperSettings
from producers.sweeper.tasks import Swept
from tests.producers.conftest import QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.waiting import PATIENCE_S, auntil


async def test_the_loop_goes_on_after_a_failed_sweep(
    aclient: AsyncClient, valkey: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "SWEEP_AGE_MS", 0)
    answers: list[Any] = [ConnectionError("away"), Swept(), Swept(sent=1)]
    done = asyncio.Event()

    async def one_sweep(client: AsyncClient, age_ms: int) -> Swept:
        assert client is aclient
        answer = answers.pop(0)
        if not answers:
            done.set()
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    monkeypatch.setattr(tasks, "send_unsent", one_sweep)
    loop = asyncio.create_task(sweeper.run(aclient, every_s=0.001))
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    assert not loop.done()
    loop.cancel()


async def test_what_has_been_queued_for_hours_is_not_sent_again(
    aclient: AsyncClient, valkey: Redis, valkey_url: str
) -> None:
    """A slow backlog is no lost message, however often one looks."""
    ids = [(await aclient.submit(model="tiny", prompt=[1])).id for _ in range(20)]
    for task_id in ids:
        valkey.hset(keys.task(task_id), mapping={"created": 5, "queued": 6})
    settings = SweeperSettings(
        valkey_url, valkey_url, "s", lease=60.0, every=0.01, seldom=0.01, unneeded=0.0, retire_after=0.0
    )
    before = valkey.lrange(QUEUE, 0, -1), [valkey.hgetall(keys.task(task_id)) for task_id in ids]
    leading = asyncio.create_task(sweeper.lead(aclient, settings))
    await asyncio.sleep(0.3)
    assert not leading.done()
    leading.cancel()
    await asyncio.wait((leading,))
    assert before == (valkey.lrange(QUEUE, 0, -1), [valkey.hgetall(keys.task(task_id)) for task_id in ids])
    assert not valkey.exists(keys.SWEPT)
    assert not valkey.exists(keys.SWEEPER), "it resigned"


async def test_one_bad_record_does_not_end_the_sweeping_of_others(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(client: AsyncClient, age_ms: int) -> Any:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(tasks, "send_unsent", broken)
    handle = await aclient.submit(model="tiny", prompt=[1])
    await handle.cancel()
    valkey.zincrby(keys.UNSETTLED, -60_000, handle.id)
    settings = SweeperSettings(valkey_url, valkey_url, "s", every=0.01)
    leading = asyncio.create_task(sweeper.lead(aclient, settings))
    await auntil(lambda: valkey.hexists(keys.task(handle.id), "settled"))
    leading.cancel()
    await asyncio.wait((leading,))


async def test_a_full_store_is_compacted_at_once_and_keeps_no_sweeper_from_its_work(
    aclient: AsyncClient, valkey: Redis, valkey_url: str, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [(await aclient.submit(model="tiny", prompt=[1])).id for _ in range(3)]
    for task_id in ids:
        worker.claim(task_id)
        worker.append(task_id, 0, ["a", "b", "c"], finish_reason="stop")
        worker.finish(task_id, [3])
        run(valkey, protocol.settle(task_id))
    valkey.config_set("maxmemory", "1")
    settings = SweeperSettings(valkey_url, valkey_url, "s", lease=60.0, every=0.01, compact_after=3600.0)
    leading = asyncio.create_task(sweeper.lead(aclient, settings))
    try:
        await auntil(lambda: valkey.hget(keys.SWEPT, "compacted") == b"3")
    finally:
        leading.cancel()
        await asyncio.wait((leading,))
        valkey.config_set("maxmemory", "0")
    assert all(valkey.exists(keys.result(task_id)) and not valkey.exists(keys.stream(task_id)) for task_id in ids)
    assert "broken off" not in caplog.text
    for task_id in ids:
        assert (await aclient.get(task_id).result()).text == "abc"


async def test_a_store_that_is_away_is_complained_of_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(complaints, "EVERY_S", 1e6)
    tries, tried = 0, asyncio.Event()

    async def away() -> dict[str, int]:
        nonlocal tries
        tries += 1
        if tries == 20:
            tried.set()
        raise TimeoutError

    async with AsyncClient("redis://127.0.0.1:1/0") as client:
        sweeping = asyncio.create_task(sweeper._repeat(client, away, 0.0))
        await tried.wait()
        sweeping.cancel()
    assert caplog.messages == ["sweep broken off, trying again: TimeoutError"]


async def test_a_sweeper_that_leads_no_more_stops_though_a_sweep_makes_another_error_of_that(
    aclient: AsyncClient,
) -> None:
    """As redis-py does while it ends a WATCH: the sweeper would wait for that sweep for ever, and lead never again."""
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def work() -> dict[str, int]:
        if begun.is_set():
            goes_on.set()
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise WatchError("A ConnectionError occurred while watching one or more keys") from None
        return {}

    sweeping = asyncio.create_task(sweeper._repeat(aclient, work, 0.0))
    await begun.wait()
    sweeping.cancel()
    again = asyncio.create_task(goes_on.wait())
    await asyncio.wait((sweeping, again), return_when="FIRST_COMPLETED")
    assert sweeping.cancelled()
    again.cancel()
