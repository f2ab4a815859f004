"""All workers killed: what they had sorted by tenant is in the lists again, and the next one runs it once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import pytest

from producers import AsyncClient, Client
from producers.broker.redis import keys as broker_keys
from producers.sweeper.sweeper import SweeperSettings, lead
from tests.stub_engine import STALLED
from tests.waiting import PATIENCE_S
from tests.workers.rig import QUEUE, Rig

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def sweeping(rig: Rig) -> Iterator[None]:
    """One that leads, and looks again and again."""
    settings = SweeperSettings(rig.url, rig.url, every=0.05, orphaned_after=0.2)
    loop = asyncio.new_event_loop()

    async def sweep() -> None:
        async with AsyncClient(rig.url) as client:
            await lead(client, settings)

    task = loop.create_task(sweep())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    loop.call_soon_threadsafe(task.cancel)
    thread.join(PATIENCE_S)
    loop.close()


def test_what_killed_workers_had_sorted_is_seen_in_the_lists_and_runs_once(rig: Rig) -> None:
    rig.publish_card()
    lists = {tier: broker_keys.tier_list(QUEUE, tier) for tier in ("default", "batch")}
    with Client(rig.url) as client:

        def submit(**task: object) -> str:
            return client.submit(model="stub", max_tokens=16, **task).id

        worker = rig.worker(STUB_SEQS=2)
        stalled = [submit(prompt=[STALLED], seed=0) for _ in range(2)]
        rig.until(lambda: all(rig.status(task_id) == "in_progress" for task_id in stalled))
        sent: dict[str, list[str]] = {tier: [] for tier in lists}
        for seed in range(30):
            tier = ("default", "default", "batch")[seed % 3]
            sent[tier].append(submit(prompt=[1], seed=seed, tier=tier, tenant=("a", "b", None)[seed % 4 % 3]))
    rig.until(lambda: not any(map(rig.redis.llen, lists.values())))
    rig.kill(worker)
    with sweeping(rig):
        rig.until(lambda: sum(map(rig.redis.llen, lists.values())) == 32)
        for tier, name in lists.items():
            found = [json.loads(raw)["headers"]["id"] for raw in rig.redis.lrange(name, 0, -1)[::-1]]
            assert found == (stalled if tier == "default" else []) + sent[tier]
        assert not rig.redis.keys(broker_keys.sorted_of("*"))
        # Others come and are killed while it goes on sweeping.
        for _ in range(2):
            worker = rig.worker(STUB_SEQS=4, STUB_STEP_S=0.02, max_deaths=9)
            rig.until(lambda: all(rig.status(task_id) == "in_progress" for task_id in stalled))
            rig.kill(worker)
        rig.worker(STUB_SEQS=4, max_deaths=9)  # three of them die with the stalled ones, if each had time to claim them
        for task_id in stalled:
            rig.until(lambda task_id=task_id: rig.cancel(task_id) and rig.settled([task_id]))
        ids = [task_id for mine in sent.values() for task_id in mine]
        rig.until_settled(ids)
    rig.check(ids)
    rig.check(stalled, "cancelled")
    rig.check_nothing_left()
