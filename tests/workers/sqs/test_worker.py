"""Workers on SQS: tasks, tiers, cancels, hand-backs and deaths are as on Redis."""

from __future__ import annotations

import asyncio
import itertools
import signal
from pathlib import Path
from typing import Any

from redis import Redis

from producers import AsyncClient, Client
from producers.admin.fleet import read_fleet
from producers.contract import keys
from tests.aws import Aws
from tests.stub_engine import text_of
from tests.waiting import PATIENCE_S
from tests.workers.rig import LEASE, POOL, TIMES
from tests.workers.sqs.conftest import SqsRig
from workers.connect import check_queues


def make_queues(sqs: SqsRig) -> None:
    """No worker makes them: its polls would go on at SQS without it, and take messages that nobody gets."""
    check_queues(sqs.url, sqs.store_url, POOL.queues[1:], make=True, lease=LEASE)
    sqs.publish_card()


def test_a_task_streams_and_leaves_nothing_behind(sqs: SqsRig) -> None:
    worker = sqs.worker(STUB_STEP_S=0.01)
    with Client(sqs.url, sqs.store_url) as client:
        handle = client.submit(model="stub", prompt=[1, 2], seed=7, max_tokens=20, tenant="Ünï")
        *tokens, end = handle.stream()
        assert [token.position for token in tokens] == list(range(20))
        assert end.status == "completed"
        assert handle.result(timeout=PATIENCE_S).text == text_of(7, 0, 20)
    ids = [handle.id, *sqs.submit(30)]
    sqs.check(ids)
    sqs.check_nothing_left()
    assert worker.stop() == 0
    assert not sqs.store.keys("penstock:lease:*")


def test_better_tiers_begin_first(sqs: SqsRig) -> None:
    make_queues(sqs)
    ids = {tier: sqs.submit(4, tier=tier) for tier in ("batch", "flex", "default", "priority")}
    assert sqs.submit(1, tier="priority", n=2)
    sqs.worker(STUB_SEQS=1)
    sqs.until_settled([one for some in ids.values() for one in some])
    begun = {tier: [int(sqs.record(one)["started"]) for one in some] for tier, some in ids.items()}
    for better, worse in (("priority", "default"), ("default", "flex"), ("flex", "batch")):
        assert max(begun[better]) <= min(begun[worse]), begun


def test_cancels_reach_waiting_and_running_tasks(sqs: SqsRig) -> None:
    make_queues(sqs)
    (waiting,) = sqs.submit(1)
    assert sqs.cancel(waiting) == [1, "cancelled"]
    sqs.worker(STUB_STEP_S=0.01)
    (running,) = sqs.submit(1, max_tokens=4000)
    sqs.until(lambda: sqs.tokens(running) > 3)
    assert sqs.cancel(running)[0] == 1
    sqs.check([waiting, running], "cancelled")
    assert sqs.tokens(waiting) == 1, "its end alone"
    sqs.check_nothing_left()


def test_a_drain_hands_back_to_others_with_the_tokens(sqs: SqsRig, tmp_path: Path) -> None:
    worker = sqs.worker(drain=0.0, STUB_HOLD_AT=5, STUB_GO=tmp_path / "go", STUB_SEQS=4)
    ids = sqs.submit(6, max_tokens=12)
    sqs.until(lambda: sum(sqs.tokens(one) == 5 for one in ids) == 4)
    assert worker.stop() == 0
    assert {sqs.status(one) for one in ids} == {"queued"}
    sqs.worker()
    sqs.check(ids)
    assert {sqs.record(one)["deaths"] for one in ids} == {"0"}
    sqs.check_nothing_left()


def test_others_take_over_at_once_what_a_killed_worker_had(sqs: SqsRig, tmp_path: Path) -> None:
    """Its messages are hidden for an hour: nobody waits for that."""
    killed = sqs.worker(STUB_HOLD_AT=5, STUB_GO=tmp_path / "go", STUB_SEQS=4)
    ids = sqs.submit(6, max_tokens=12)
    sqs.until(lambda: sum(sqs.tokens(one) == 5 for one in ids) == 4)
    sqs.worker(STUB_SEQS=4)
    sqs.kill(killed)
    sqs.check(ids)
    assert sorted(sqs.record(one)["deaths"] for one in ids) == ["0", "0", "1", "1", "1", "1"]
    sqs.check_nothing_left()


def test_a_killed_worker_is_noticed_before_its_lease_lapses(sqs: SqsRig, tmp_path: Path) -> None:
    times = {**TIMES, "workers.leases.neighbours:STOOD_LEASES": 0.001}
    killed = sqs.worker(times=times, STUB_HOLD_AT=5, STUB_GO=tmp_path / "go", STUB_SEQS=4)
    ids = sqs.submit(4, max_tokens=12)
    sqs.until(lambda: all(sqs.tokens(one) == 5 for one in ids))
    sqs.worker(times=times)
    killed.stop(signal.SIGKILL)
    sqs.check(ids)
    assert {sqs.record(one)["deaths"] for one in ids} == {"1"}
    sqs.check_nothing_left()


def test_what_a_dead_workers_own_poll_takes_comes_back_soon(sqs: SqsRig, tmp_path: Path) -> None:
    """It had room: its poll goes on at SQS without it, and gets what others show again."""
    times = {**TIMES, "producers.broker.sqs.receiver.receive:FIRST_S": 2}
    killed = sqs.worker(times=times, STUB_HOLD_AT=5, STUB_GO=tmp_path / "go", STUB_SEQS=16)
    ids = sqs.submit(6, max_tokens=12)
    sqs.until(lambda: all(sqs.tokens(one) == 5 for one in ids))
    sqs.kill(killed)
    sqs.worker()
    sqs.check(ids)
    sqs.check_nothing_left()


def test_workers_and_what_waits_are_listed(sqs: SqsRig, tmp_path: Path) -> None:
    async def fleet() -> tuple[int, int, int]:
        async with AsyncClient(sqs.url, sqs.store_url) as client:
            (pool,) = (one for one in (await read_fleet(client.store, client.broker)).pools if one.workers)
            listed = [one for one in await client.broker.workers() if one.remaining_s is not None]
            waiting = await client.broker.waiting(keys.version_queue("stub", "v1"))
            return len(pool.workers), len(listed), waiting.tiers["flex"]

    sqs.worker(STUB_SEQS=1, STUB_HOLD_AT=2, STUB_GO=tmp_path / "go")
    sqs.worker(STUB_SEQS=1, STUB_HOLD_AT=2, STUB_GO=tmp_path / "go")
    ids = sqs.submit(5, tier="flex")
    sqs.until(lambda: sum(sqs.tokens(one) == 2 for one in ids) == 2)
    sqs.until(lambda: asyncio.run(fleet()) == (2, 2, 3))
    (tmp_path / "go").touch()
    sqs.until_settled(ids)
    for worker in sqs.workers:
        assert worker.stop(signal.SIGTERM) == 0
    sqs.check_nothing_left()


def test_tasks_of_one_key_run_one_after_another(aws: Aws, valkey_url: str, valkey: Redis) -> None:
    rig = SqsRig(aws, valkey_url, fifo="1")
    try:
        rig.worker(times={**TIMES, "producers.broker.sqs.receiver.receive:WAIT_S": 1}, STUB_STEP_S=0.01)
        with Client(rig.url, rig.store_url) as client:
            task: dict[str, Any] = {"model": "stub", "prompt": [1], "max_tokens": 10}
            ids = [client.submit(**task, seed=seed, order_key="conversation/7").id for seed in range(2)]
        rig.check(ids)
        records = [rig.record(one) for one in ids]
        for before, after in itertools.pairwise(records):
            assert int(before["finished"]) <= int(after["started"])
        assert {record["order_key"] for record in records} == {"conversation/7"}
    finally:
        rig.close()
