"""A worker whose model several processes compute is one worker: when a rank is lost, its tasks go on elsewhere."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from producers import Client
from producers.contract.stream import Token
from tests.processes import Worker, valkey
from tests.waiting import gone, until
from tests.workers.rig import Rig

OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_bytes": 16 << 20, "tensor_parallel": 2, "threads": 1}
REAL: dict[str, Any] = {
    "engine_factory": "workers.runtime.worker:load_engine",
    "model": "tiny",
    "engine": OPTIONS,
    "lease": 300.0,
}

#: Twice as many as run at once, so that some still run when a rank is lost, however late that is.
COUNT = 8


def followers(worker: Worker) -> list[int]:
    """The processes of a worker's other ranks."""
    pids = children(worker.process.pid)
    pids += [pid for child in pids for pid in children(child)]  # the lead may have a process of its own
    return [pid for pid in pids if b"ranks.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in listed for child in each.read_text().split()]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("how", "process"),
    [(signal.SIGKILL, False), (signal.SIGSTOP, False), (signal.SIGKILL, True)],
    ids=["SIGKILL", "SIGSTOP", "SIGKILL, with an engine's process"],
)
def test_a_rank_that_is_lost_costs_no_token(how: signal.Signals, process: bool) -> None:
    with valkey() as (url, redis), Client(url) as client:
        rig = Rig(url, redis)
        with Worker(url, name="first", step_limit=5.0, engine_process=process, **REAL) as first:
            first.wait_ready(120)
            (rank,) = followers(first)
            asked: dict[str, Any] = {
                "model": "tiny",
                "prompt": "def f(n):",
                "max_tokens": 600,
                "temperature": 0.8,
                "ignore_eos": True,
            }
            ids = [client.submit(seed=seed, **asked).id for seed in range(COUNT)]
            first.wait_until(lambda: any(rig.tokens(task_id) > 5 for task_id in ids), 120)
            os.kill(rank, how)
            assert first.process.wait(120) == os.EX_SOFTWARE
            assert until(lambda: gone(rank))
        with Worker(url, name="second", **REAL) as second:
            second.wait_ready(120)
            rig.until_settled(ids, 120)
            again = [client.submit(seed=seed, **asked).id for seed in range(COUNT)]
            rig.until_settled(again, 120)
        assert [rig.record(task_id)["status"] for task_id in ids] == ["completed"] * COUNT
        streams = [
            [event.token_id for event in client.get(task_id).stream() if isinstance(event, Token)]
            for task_id in ids + again
        ]
        assert streams[:COUNT] == streams[COUNT:]
        rig.check_nothing_left()
