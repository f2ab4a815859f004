"""A worker whose model several processes compute is one worker: when a rank is lost, its tasks go on elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from producers import Client
from producers.contract.stream import Token
from tests.limits import bound_memory
from tests.processes import ROOT, Worker, free_port, guarded, ranks_below, valkey
from tests.waiting import PATIENCE_S, StepGate, gone, until
from tests.workers.rig import Rig
from workers.processes import PENSTOCK

OPTIONS = {"dtype": "float32", "max_num_seqs": 4, "kv_cache_bytes": 16 << 20, "threads": 1}


def real(divided: str, kernels: str = "auto") -> dict[str, Any]:
    return {
        "engine_factory": "workers.runtime.worker:load_engine",
        "model": "tiny",
        "engine": {**OPTIONS, divided: 2, "kernels": kernels},
        "lease": 300.0,
    }


DIVIDED = ("tensor_parallel", "pipeline_parallel")
#: Twice as many as run at once.
COUNT = 8


@contextmanager
def machine(port: int, secret: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another machine of the worker that waits at `port`."""
    joining = ["ranks", "--model", "tiny", "--lead", "127.0.0.1", "--port", str(port), "--node", "1"]
    with subprocess.Popen(guarded(*PENSTOCK, *joining, "--ranks-secret", str(secret)), cwd=ROOT) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("divided", "kernels"), [*((divided, "auto") for divided in DIVIDED), *((divided, "ragged") for divided in DIVIDED)]
)
def test_a_worker_of_two_machines_answers_and_ends_both(divided: str, kernels: str, tmp_path: Path) -> None:
    """By the commands that docs/run/deploy.md has, on one machine; with "ragged" as ranks on GPUs do."""
    secret, port = tmp_path / "secret", free_port()
    secret.write_text("a secret of many bytes")
    options = real(divided, kernels)
    options["engine"] |= {"nodes": 2, "ranks_address": f"127.0.0.1:{port}", "ranks_secret": str(secret)}
    with valkey() as (url, redis), Client(url) as client:
        rig = Rig(url, redis)
        with machine(port, secret) as other, Worker(url, name="first", **options) as first:
            first.wait_ready()
            other.terminate()  # which is the worker's to answer
            task = client.submit(model="tiny", prompt="def f(n):", max_tokens=20, temperature=0.0)
            rig.until_settled([task.id])
            assert rig.record(task.id)["status"] == "completed"
            first.process.terminate()
            first.process.wait(PATIENCE_S)
            assert other.wait(PATIENCE_S) == 0


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", ["auto", "ragged"])
def test_a_machine_that_is_lost_and_comes_again_is_of_the_group_again(kernels: str, tmp_path: Path) -> None:
    secret, port = tmp_path / "secret", free_port()
    secret.write_text("a secret of many bytes")
    options = real("tensor_parallel", kernels)
    options["engine"] |= {"nodes": 2, "ranks_address": f"127.0.0.1:{port}", "ranks_secret": str(secret)}
    with valkey() as (url, redis), Client(url) as client:
        rig = Rig(url, redis)
        with machine(port, secret) as other, Worker(url, name="first", **options) as first:
            first.wait_ready()
            ids = [client.submit(model="tiny", prompt="a", max_tokens=40, ignore_eos=True).id for _ in range(COUNT)]
            first.wait_until(lambda: any(rig.tokens(task_id) > 5 for task_id in ids))
            other.kill()
            assert first.process.wait(PATIENCE_S) == os.EX_SOFTWARE
        with machine(port, secret) as other, Worker(url, name="first", **options) as first:
            first.wait_ready()
            rig.until_settled(ids)
            assert [rig.record(task_id)["status"] for task_id in ids] == ["completed"] * len(ids)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("how", "divided", "process", "kernels"),
    [
        *((how, divided, False, "auto") for how in (signal.SIGKILL, signal.SIGSTOP, "memory") for divided in DIVIDED),
        (signal.SIGKILL, "tensor_parallel", True, "auto"),
        *((how, "tensor_parallel", False, "ragged") for how in (signal.SIGKILL, "memory")),
    ],
)
def test_a_rank_that_is_lost_costs_no_token(
    how: signal.Signals | str, divided: str, process: bool, kernels: str, tmp_path: Path
) -> None:
    """Also where the lead has a process of its own below the worker, where the rank has no memory for a step, and with
    the ranks of GPUs ("ragged")."""
    with valkey() as (url, redis), Client(url) as client:
        rig, steps = Rig(url, redis), StepGate(tmp_path)
        options = real(divided, kernels) | steps.environment
        with Worker(url, name="first", step_limit=5.0, engine_process=process, **options) as first:
            first.wait_ready()
            (rank,) = ranks_below(first.process.pid)
            common: dict[str, Any] = {"model": "tiny", "temperature": 0.8, "ignore_eos": True}
            asked = [common | {"prompt": "def f(n):", "max_tokens": 100, "seed": seed} for seed in range(COUNT)]
            (lease,) = rig.leases()
            assert (lease["kind"], lease[divided], lease.get("engine_process", False)) == ("generate", 2, process)
            with steps.held():
                ids = [client.submit(**each).id for each in asked]
                first.wait_until(lambda: any(rig.tokens(task_id) > 5 for task_id in ids))
                os.kill(rank, signal.SIGTERM)  # which is the lead's to answer
                steps.hold(60)
                first.wait_until(lambda: any(rig.tokens(task_id) > 20 for task_id in ids))
                if isinstance(how, signal.Signals):
                    os.kill(rank, how)
                else:
                    bound_memory(rank, 0)
                    asked.append(common | {"prompt": "A prompt of many tokens. " * 60, "max_tokens": 50, "seed": COUNT})
                    ids.append(client.submit(**asked[-1]).id)
            assert first.process.wait(PATIENCE_S) == os.EX_SOFTWARE
            assert until(lambda: gone(rank))
        with Worker(url, name="second", **real(divided, kernels)) as second:
            second.wait_ready()
            rig.until_settled(ids)
            again = [client.submit(**each).id for each in asked]
            rig.until_settled(again)
        assert [rig.record(task_id)["status"] for task_id in ids] == ["completed"] * len(ids)
        streams = [
            [event.token_id for event in client.get(task_id).stream() if isinstance(event, Token)]
            for task_id in ids + again
        ]
        assert streams[: len(ids)] == streams[len(ids) :]
        rig.check_nothing_left()
