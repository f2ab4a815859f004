"""A device that fails under a real worker: its streams go on elsewhere, and its process is started anew."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from producers import Client
from producers.broker.redis import keys as broker_keys
from producers.contract.stream import Token
from tests.exhaustive import few
from tests.processes import ROOT, Worker, valkey
from tests.waiting import PATIENCE_S
from tests.workers.rig import Rig
from workers.processes.supervisor import Child, Program

#: Longer than the test takes: nothing here happens because one lapses.
LEASE = 300.0
OPTIONS = {"dtype": "float32", "threads": 1, "max_num_seqs": 4, "kv_cache_bytes": 16 << 20, "deterministic": True}
PROMPT = "def fibonacci(n):\n    "
#: Of which little is made before a fault is thrown, on a busy machine too; the healthy worker takes no pauses.
LENGTH = 300
REAL = {"engine_factory": "workers.runtime.worker:load_engine"}


class Supervised:
    """A worker that the product's own supervisor starts again, on an event loop of its own."""

    def __init__(self, rig: Rig, fault: Path, name: str) -> None:
        self.name, self.lines = name, list[str]()
        settings = {"broker": rig.url, "store": rig.url, "model": "tiny", "lease": LEASE, "name": name}
        settings |= {"engine": OPTIONS, "engine_factory": "tests.failing_device:load"}
        argv = [sys.executable, "-m", "tests.worker_process", json.dumps(settings)]
        env = {"DEVICE_FAULT": str(fault), "DEVICE_STEP_S": "0.02", "PYTHONPATH": str(ROOT)}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.child = Child(Program(name, argv, env), lambda _, line: self.lines.append(line))
        self.child.restart = True
        self._do(self.child.start())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    @property
    def ends(self) -> list[str]:
        """What the supervisor said when a process ended."""
        return [line for line in self.lines if "starting it again" in line]

    def said(self, words: str) -> bool:
        return any(words in line for line in self.lines)

    def stop(self) -> None:
        self._do(self.child.stop(0.0, signal.SIGKILL))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def supervised(rig: Rig, fault: Path) -> Iterator[Supervised]:
    worker = Supervised(rig, fault, "failing")
    try:
        rig.until(lambda: rig.leases())
        yield worker
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *worker.lines[-60:]])) from error
    finally:
        worker.stop()


def _ask(client: Client, seeds: range) -> list[str]:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0.8, "ignore_eos": True}
    return [client.submit(seed=seed, **asked).id for seed in seeds]


def _tokens(client: Client, task_id: str) -> list[int]:
    return [event.token_id for event in client.get(task_id).stream() if isinstance(event, Token)]


#: Fault -> what is said of it: lost at once, and for each call that comes after; memory for nobody.
FATAL = {
    "lost": "Giving this worker up: the device is lost: DeviceLostError: cuda:0 does nothing more",
    "room 0": "has no memory for the step of a single sequence",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fatal", few(FATAL, "lost"))
def test_a_device_that_fails_costs_no_token(tmp_path: Path, fatal: str) -> None:
    fault = tmp_path / "fault"
    with valkey() as (url, redis), Client(url) as client, supervised(rig := Rig(url, redis), fault) as failing:
        # Memory for less than there was: steps become smaller, nobody is harmed, and the process goes on.
        ids = _ask(client, range(4))
        rig.until(lambda: all(rig.tokens(task_id) > 5 for task_id in ids))
        before = sum(map(rig.tokens, ids))
        fault.write_text("room 2")
        rig.until(lambda: sum(map(rig.tokens, ids)) > before + 20)
        fault.write_text("hold")
        rig.until(lambda: failing.said("the device has no memory for a step"))
        assert not failing.ends
        with Worker(url, model="tiny", name="healthy", lease=LEASE, engine=OPTIONS, warm=True, **REAL) as healthy:
            healthy.wait_ready()
            fault.write_text(fatal)
            rig.until(lambda: failing.ends)
            fault.write_text("")
            assert f"exited with status {os.EX_SOFTWARE}" in failing.ends[0]
            rig.until(lambda: failing.said(FATAL[fatal]))
            rig.until_settled(ids)
            # That is not the requests' fault: that they got on absolves them of the worker that was lost. Those that
            # lacked memory at the time, and were in no step, were handed back before it was lost: no death counts.
            found = [(r["status"], r["stuck"], r.get("deaths", "0")) for r in map(rig.record, ids)]
            assert ("completed", "0", "1") in found
            assert {*found} <= {("completed", "0", "0"), ("completed", "0", "1")}
            rig.until(lambda: len(rig.leases()) == 2)
            quiet = _ask(client, range(4))
            rig.until_settled(quiet)
        assert [_tokens(client, one) for one in ids] == [_tokens(client, one) for one in quiet]
        assert redis.llen(broker_keys.DEAD) == 0
        rig.check_nothing_left()


NAN, ECC = ("nan", "the model is broken, not a request"), ("ecc", "uncorrectable ECC error")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("faults", [[ECC], [NAN, ECC]], ids=["once", "one after the other"])
def test_memory_that_fails_counts_against_no_task(tmp_path: Path, faults: list[tuple[str, str]]) -> None:
    """Weights that are NaN from some step on, and an error that the device could not correct.

    `make test` has both with a stub engine (tests/workers/runtime/test_watchdog.py).
    """
    fault = tmp_path / "fault"
    with valkey() as (url, redis), Client(url) as client, supervised(rig := Rig(url, redis), fault) as failing:
        found: list[list[str]] = []
        for what, says in faults:
            rig.until(rig.leases)
            found.append(ids := _ask(client, range(4)))
            rig.until(lambda ids=ids: all(rig.tokens(task_id) > 5 for task_id in ids))
            ended = len(failing.ends)
            fault.write_text(what)
            rig.until(lambda ended=ended: len(failing.ends) > ended)
            fault.write_text("")
            assert f"exited with status {os.EX_SOFTWARE}" in failing.ends[ended]
            rig.until(lambda says=says: failing.said(says))
            rig.until_settled(ids)  # by the process that was started in its place
            assert {(r["status"], r.get("deaths", "0")) for r in map(rig.record, ids)} == {("completed", "0")}
        quiet = _ask(client, range(4))
        rig.until_settled(quiet)
        for ids in found:
            assert [_tokens(client, one) for one in ids] == [_tokens(client, one) for one in quiet]
        assert redis.llen(broker_keys.DEAD) == 0
        rig.check_nothing_left()
