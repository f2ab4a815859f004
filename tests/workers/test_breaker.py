"""A worker that fails, or is slow among its peers, gets no tasks until it has proved itself; nobody loses a token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from producers import Client
from producers.contract import keys
from tests.processes import Worker
from tests.workers.rig import POOL, TIMES, Rig

#: The judgement in a second instead of a minute.
SOON = TIMES | {
    "workers.breaker:SLICE_S": 0.2,
    "workers.breaker:FIRST_S": 0.2,
    "workers.breaker:MOST_S": 0.5,
    "workers.breaker:TRIAL_S": 1.0,
    "workers.breaker:GIVE_UP": 1000,
}


class Pool:
    """Workers, one of which can be made sick."""

    def __init__(self, rig: Rig, folder: Path, well: int, **sick: Any) -> None:
        self.rig = rig
        self.fault = folder / "sick"
        self.well = [rig.worker(times=SOON, STUB_SEQS=4, STUB_STEP_S=0.01) for _ in range(well)]
        self.sick = rig.worker(times=SOON, STUB_SEQS=4, STUB_STEP_S=0.01, STUB_SICK=self.fault, **sick)

    def make_sick(self, how: str) -> None:
        self.fault.write_text(how)

    def mend(self) -> None:
        self.fault.write_text("")

    def said(self, worker: Worker) -> dict[str, Any]:
        return next((one for one in self.rig.leases() if one["worker"] == worker.name), {})

    def state(self, worker: Worker) -> str:
        return str(self.said(worker).get("breaker"))

    def until_state(self, *states: str) -> None:
        self.rig.until(lambda: self.state(self.sick) in states)

    def held_back(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self.rig.store.smembers(keys.ejected(POOL.queue))}

    def check_no_tries_spent(self, ids: list[str]) -> None:
        assert {self.rig.record(task_id)["status"] for task_id in ids} == {"completed"}
        assert {self.rig.record(task_id).get("deaths", "0") for task_id in ids} == {"0"}


def given_back(rig: Rig, ids: list[str]) -> set[str]:
    return {task_id for task_id in ids if "breaker" in rig.record(task_id).get("given_back", "")}


def test_a_worker_that_fails_gets_no_tasks_until_a_probe_passes(rig: Rig, tmp_path: Path) -> None:
    pool = Pool(rig, tmp_path, well=2)
    pool.make_sick("fail")
    ids = rig.fill(60, max_tokens=30)
    pool.until_state("open")
    # A lease that was written as it asked may come after the one that says that it has opened.
    rig.until(lambda: "its engine fails a probe" in str(pool.said(pool.sick)["unready"]))
    rig.until(lambda: pool.said(pool.sick)["breaker_openings"] == pool.said(pool.sick)["breaker_open"] == 1)
    rig.until(lambda: pool.held_back() == {pool.sick.name})
    rig.check(ids)
    assert given_back(rig, ids)
    failed = pool.said(pool.sick)["engine_failures"]
    more = rig.fill(20, max_tokens=30)
    rig.check(more)
    assert pool.state(pool.sick) == "open"
    assert pool.said(pool.sick)["engine_failures"] == failed, "it got none"
    assert not given_back(rig, more)
    pool.mend()
    pool.until_state("half_open", "closed")
    rig.until(lambda: rig.fill(1, max_tokens=5) and pool.state(pool.sick) == "closed")
    rig.until(lambda: not pool.held_back())
    assert [pool.said(one)["breaker_openings"] for one in pool.well] == [0, 0]


def test_the_last_worker_waits_for_its_own_probe(rig: Rig, tmp_path: Path) -> None:
    """Its tasks wait in the queue meanwhile, where anyone sees them, and none of them fails for good."""
    pool = Pool(rig, tmp_path, well=0)
    pool.make_sick("fail")
    ids = rig.fill(4, max_tokens=30)
    pool.until_state("open")
    rig.until(lambda: not pool.said(pool.sick)["tasks"])
    assert {rig.status(task_id) for task_id in ids} == {"queued"}
    pool.mend()
    rig.check(ids)
    assert pool.sick.stop() == 0
    rig.check_nothing_left()


def test_another_pool_goes_on_with_what_the_last_worker_of_its_pool_gave_back(rig: Rig, tmp_path: Path) -> None:
    go = tmp_path / "go"
    pool = Pool(rig, tmp_path, well=0, STUB_HOLD_AT=20, STUB_GO=go)
    ids = rig.begun(4, more_than=5, max_tokens=40)
    pool.make_sick("fail")
    go.touch()
    pool.until_state("open")
    rig.worker(times=SOON, STUB_FINGERPRINT="other")
    rig.check(ids)
    assert pool.state(pool.sick) == "open"
    assert len(given_back(rig, ids)) >= 2, "the first ones were tried again, as after any fault"
    rig.check_nothing_left()


def test_an_engine_that_fails_every_probe_is_given_up(rig: Rig, tmp_path: Path) -> None:
    times = SOON | {"workers.breaker:FIRST_S": 0.01, "workers.breaker:GIVE_UP": 5}
    fault = tmp_path / "sick"
    fault.write_text("fail")
    worker = rig.worker(times=times, STUB_SICK=fault)
    ids = rig.fill(4, max_tokens=30)
    rig.until(lambda: worker.process.poll() is not None)
    assert worker.process.wait() == 70
    assert "its engine failed 5 probes in a row" in worker.log.read_text()
    rig.worker()
    rig.check(ids)
    assert {rig.record(task_id).get("deaths", "0") for task_id in ids} == {"0"}


def test_bad_requests_break_no_worker(rig: Rig) -> None:
    """The engine answers a probe, so that the requests are to blame, and their tries are spent."""
    rig.worker(times=SOON, STUB_FAULTS=9, max_retries=0)
    bad = rig.fill(12, max_tokens=10)
    rig.until_settled(bad)
    assert "the requests are to blame" in rig.logs()
    rig.check(bad, "failed")
    assert rig.leases()[0]["breaker_openings"] == 0


@pytest.mark.slow
def test_a_slow_worker_gets_no_tasks_until_it_is_as_fast_as_its_peers(rig: Rig, tmp_path: Path) -> None:
    pool = Pool(rig, tmp_path, well=2)
    pool.make_sick("slow 0.05")
    ids: list[str] = []

    def loaded() -> None:
        ids.extend(rig.fill(12, max_tokens=60))

    def opened() -> bool:
        if sum(map(rig.waiting, POOL.queues)) < 6:
            loaded()
        return pool.state(pool.sick) == "open"

    rig.until(opened)
    assert "times as long as" in pool.said(pool.sick)["unready"][0]
    assert pool.held_back() == {pool.sick.name}
    assert pool.said(pool.sick)["engine_failures"] == 0
    pool.mend()
    rig.until(lambda: not opened() and pool.state(pool.sick) == "closed")
    rig.check(ids)
    pool.check_no_tries_spent(ids)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_on_a_sick_device_among_two_good_ones(rig: Rig, tmp_path: Path) -> None:
    """The real engine: slow, then well, then failing, then well. Each task has the tokens of a quiet run."""
    fault, engine = tmp_path / "fault", {"dtype": "float32", "threads": 1, "max_num_seqs": 4, "deterministic": True}
    times = json.dumps(SOON)
    real = {"model": "tiny", "lease": 300.0, "engine": engine | {"kv_cache_bytes": 16 << 20}, "WORKER_TIMES": times}
    with (
        Client(rig.url) as client,
        Worker(rig.url, engine_factory="tests.failing_device:load", DEVICE_FAULT=fault, **real) as sick,
        Worker(rig.url, engine_factory="workers.runtime.worker:load_engine", **real) as one,
        Worker(rig.url, engine_factory="workers.runtime.worker:load_engine", **real) as other,
    ):
        for worker in (sick, one, other):
            worker.wait_ready()
        asked: dict[str, int] = {}

        def ask() -> str:
            """Keep all of them busy. Returns the state of the sick one's breaker."""
            few = sum(rig.status(task_id) == "queued" for task_id in list(asked)[-16:]) < 4
            for seed in [*range(8)] * 2 if few else []:
                task = {"model": "tiny", "prompt": "def f(n):", "max_tokens": 60, "seed": seed, "temperature": 0.8}
                asked[client.submit(ignore_eos=True, **task).id] = seed
            said = {lease["worker"]: lease for lease in rig.leases()}
            return str(said[sick.name]["breaker"])

        for how, why in (("slow 0.1", "times as long as its peers"), ("fail", "its engine fails a probe")):
            fault.write_text(how)
            rig.until(lambda: ask() == "open")
            assert why in sick.log.read_text()
            fault.write_text("")
            rig.until(lambda: ask() == "closed")
        rig.until_settled(list(asked))
        assert {rig.status(task_id) for task_id in asked} == {"completed"}
        outputs: dict[int, set[str]] = {}
        for task_id, seed in asked.items():
            outputs.setdefault(seed, set()).add(client.get(task_id).result().text)
        assert all(len(texts) == 1 for texts in outputs.values())
        assert any("breaker" in rig.record(task_id).get("given_back", "") for task_id in asked)
