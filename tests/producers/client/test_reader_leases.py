"""Reader leases: who leaves without a word takes their task along, who is only slow does not."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from producers import AsyncClient
from producers.client.aio import AsyncHandle
from producers.client.leases import (
    LapsedReaders,
    ReaderLeases,
    hold,
    lapsed,
    read_lapsed,
    renewed_within,
)
from producers.client.steps import Step, drive
from producers.connection.script import run
from producers.contract import keys
from producers.store import protocol
from producers.sweeper import tasks as submits
from tests.producers.conftest import QUEUE
from tests.producers.fake_worker import FakeWorker
from tests.producers.proxy import Proxy
from tests.waiting import until


def now_ms(valkey: Redis) -> int:
    seconds, micros = valkey.time()
    return int(seconds) * 1000 + int(micros) // 1000


def lapse(valkey: Redis, *task_ids: str, ago_ms: int = 1000) -> None:
    valkey.zadd(keys.READERS, dict.fromkeys(task_ids, now_ms(valkey) - ago_ms))


def held(valkey: Redis) -> set[str]:
    return {name.decode() for name in valkey.zrange(keys.READERS, 0, -1)}


class Looks:
    """One process's looks, with a clock of its own: each is as long after the one before as a renewal takes."""

    def __init__(self, clock: SimpleNamespace, client: AsyncClient) -> None:
        self._clock = clock
        self._client = client
        self.readers = LapsedReaders()

    async def look(self, after: float = renewed_within(protocol.READER_LEASE_S)) -> int:
        self._clock.now += after
        return await self._client.run(self.readers.sweep())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("producers.client.leases.time", clock)
    return clock


@pytest.fixture
async def task(aclient: AsyncClient, valkey: Redis) -> AsyncHandle:
    """Its reader's lease is over."""
    task = await aclient.submit(model="tiny", prompt=[1])
    lapse(valkey, task.id)
    return task


@pytest.fixture
def looks(clock: SimpleNamespace, aclient: AsyncClient) -> Looks:
    return Looks(clock, aclient)


class TestScripts:
    def test_hold_enters_and_renews_in_server_time(self, valkey: Redis) -> None:
        before = now_ms(valkey)
        assert run(valkey, hold(["a", "b"], 5000)) == 2
        lapse(valkey, "a")
        assert run(valkey, hold(["a", "b", "c"], 5000)) == 1
        for task_id in ("a", "b", "c"):
            over = valkey.zscore(keys.READERS, task_id)
            assert over is not None
            assert before + 5000 <= over <= now_ms(valkey) + 5000

    def test_lapsed_names_those_whose_lease_is_over_oldest_first(self, valkey: Redis) -> None:
        run(valkey, hold(["living"], 60_000))
        lapse(valkey, "old", ago_ms=9000)
        lapse(valkey, "new", ago_ms=10)
        assert list(read_lapsed(run(valkey, lapsed()))) == ["old", "new"]

    def test_lapsed_removes_only_what_is_still_lapsed(self, valkey: Redis) -> None:
        lapse(valkey, "gone", "back")
        run(valkey, hold(["back"], 60_000))
        call = lapsed()
        assert run(valkey, replace(call, args=(*call.args, "gone", "back", "unheard of"))) == []
        assert held(valkey) == {"back"}


class TestSweep:
    async def test_a_task_is_cancelled_once_its_lease_was_seen_lapsed_for_as_long_as_a_renewal_takes(
        self, looks: Looks, aclient: AsyncClient, valkey: Redis, worker: FakeWorker
    ) -> None:
        queued = await aclient.submit(model="tiny", prompt=[1])
        running = await aclient.submit(model="tiny", prompt=[1])
        worker.claim(running.id)
        lapse(valkey, queued.id, running.id)
        assert [await looks.look() for _ in range(2)] == [0, 2]
        assert (await queued.status()).status == "cancelled"
        assert worker.append(running.id, 0, ["x"])[0] == "cancel"
        assert held(valkey) == set()
        assert await looks.look() == 0

    async def test_looks_that_come_faster_cancel_no_sooner(
        self, looks: Looks, task: AsyncHandle, valkey: Redis
    ) -> None:
        """A living reader's next renewal may be a third of its lease away, and need a second try."""
        assert [await looks.look(after=1.0) for _ in range(6)] == [0] * 6
        assert (await task.status()).status == "queued"
        assert await looks.look(after=1.0) == 1

    async def test_an_outage_begins_everybodys_time_anew(
        self, looks: Looks, proxy: Proxy, clock: SimpleNamespace, task: AsyncHandle, valkey: Redis, model: str
    ) -> None:
        async with AsyncClient(proxy.url) as client:
            behind = Looks(clock, client)
            assert await behind.look() == 0
            proxy.fail(b"EVALSHA", "before", 1)
            with pytest.raises((RedisError, OSError)):
                await behind.look()
            assert [await behind.look(after=0.1), await behind.look()] == [0, 1]

    async def test_a_reader_that_came_back_in_between_is_left_alone(
        self, looks: Looks, task: AsyncHandle, valkey: Redis
    ) -> None:
        """After an outage of the store all leases are over."""
        await looks.look()
        run(valkey, hold([task.id], 60_000))
        assert await looks.look() == 0
        lapse(valkey, task.id, ago_ms=5)  # and lapses anew: it is seen for the first time again
        assert await looks.look() == 0
        assert (await task.status()).status == "queued"

    async def test_one_that_comes_back_between_the_look_and_the_cancel_is_left_alone(
        self, looks: Looks, task: AsyncHandle, valkey: Redis, clock: SimpleNamespace
    ) -> None:
        await looks.look()
        clock.now += renewed_within(protocol.READER_LEASE_S)

        def perform(step: Step) -> Any:
            if step != lapsed():
                run(valkey, hold([task.id], 60_000))
            return run(valkey, step)  # type: ignore[arg-type]

        assert drive(looks.readers.sweep(), perform) == 0
        assert held(valkey) == {task.id}
        assert (await task.status()).fields.get("cancel") is None

    @pytest.mark.parametrize("state", ["final", "gone"])
    async def test_what_has_ended_is_only_removed(
        self, looks: Looks, aclient: AsyncClient, valkey: Redis, worker: FakeWorker, state: str
    ) -> None:
        task = await aclient.submit(model="tiny", prompt=[1])
        worker.serve(task.id)
        if state == "gone":
            valkey.delete(keys.task(task.id))
        lapse(valkey, task.id)
        assert [await looks.look(), await looks.look()] == [0, 1]
        assert held(valkey) == set()
        if state == "final":
            assert (await task.status()).status == "completed"

    async def test_what_one_sweeper_has_cancelled_another_leaves(
        self, looks: Looks, clock: SimpleNamespace, aclient: AsyncClient, task: AsyncHandle, valkey: Redis
    ) -> None:
        other = Looks(clock, aclient)
        assert [await looks.look(), await other.look(), await other.look(), await looks.look(0.0)] == [0, 0, 1, 0]

    async def test_one_that_was_never_sent_ends_cancelled_once_it_is(
        self, looks: Looks, aclient: AsyncClient, valkey: Redis, worker: FakeWorker
    ) -> None:
        """Its gateway died between ADMIT and the broker."""
        record: dict[str, Any] = {"task": "{}", "model": "tiny", "queue": QUEUE, "tier": "default", "n": 1, "tokens": 9}
        run(valkey, protocol.admit("t", "t", now_ms(valkey), record))
        lapse(valkey, "t")
        assert [await looks.look(), await looks.look()] == [0, 1]
        await submits.send_unsent(aclient, age_ms=0)
        assert worker.claim(worker.take(QUEUE) or "").answer == "settle"
        assert (await aclient.get("t").result(5, raise_for_status=False)).status == "cancelled"


class TestLeases:
    async def test_they_are_kept_up_in_one_call_for_all(self, aclient: AsyncClient, valkey: Redis) -> None:
        leases = ReaderLeases(aclient, lease_s=0.3)
        keeping = asyncio.create_task(leases.run())
        ids = [f"t{k}" for k in range(50)]
        await leases.enter(ids)
        before = {task_id: valkey.zscore(keys.READERS, task_id) or 0 for task_id in ids}
        await asyncio.to_thread(until, lambda: all((valkey.zscore(keys.READERS, t) or 0) > before[t] for t in ids))
        # At one instant: the next renewal may be on its way.
        renewed = {over for _, over in valkey.zrange(keys.READERS, 0, -1, withscores=True)}
        assert len(renewed) == 1
        keeping.cancel()

    async def test_they_are_left_at_the_end_and_not_renewed_any_more(self, aclient: AsyncClient, valkey: Redis) -> None:
        leases = ReaderLeases(aclient, lease_s=0.3)
        await leases.enter(["ended", "to lapse", "waits"])
        await leases.leave(["ended", "to lapse"], lapse={"to lapse"})
        assert (held(valkey), len(leases)) == ({"to lapse", "waits"}, 1)
        before = dict(valkey.zrange(keys.READERS, 0, -1, withscores=True))
        keeping = asyncio.create_task(leases.run())
        await asyncio.to_thread(until, lambda: (valkey.zscore(keys.READERS, "waits") or 0) > before[b"waits"])
        after = dict(valkey.zrange(keys.READERS, 0, -1, withscores=True))
        assert after == {b"to lapse": before[b"to lapse"], b"waits": after[b"waits"]}
        keeping.cancel()

    async def test_renewing_goes_on_after_an_outage(self, proxy: Proxy, valkey: Redis, model: str) -> None:
        async with AsyncClient(proxy.url, patience=0.1) as client:
            leases = ReaderLeases(client, lease_s=0.3)
            await leases.enter(["t"])
            keeping = asyncio.create_task(leases.run())
            proxy.fail(b"EVALSHA", "before", 3)
            lapse(valkey, "t")
            await asyncio.to_thread(until, lambda: (valkey.zscore(keys.READERS, "t") or 0) > now_ms(valkey))
            keeping.cancel()

    async def test_a_store_that_is_away_refuses_to_enter(self, proxy: Proxy, model: str) -> None:
        async with AsyncClient(proxy.url) as client:
            proxy.fail(b"EVALSHA", "before", 1000)
            leases = ReaderLeases(client, patience_s=0.1)
            with pytest.raises((RedisError, OSError)):
                await leases.enter(["t"])
            assert len(leases) == 0
