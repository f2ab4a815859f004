"""`penstock worker` with several models: what is said on its line is what each model's process is told."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis

from engine.execution.turns import Turns
from producers import Client
from producers.contract import keys
from tests.processes import ROOT, guarded
from tests.waiting import PATIENCE_S, suspend, until
from tests.workers.cli.conftest import Run, told
from workers.cli.options import shares_of
from workers.processes import PENSTOCK
from workers.processes.supervisor import Program

URL = "redis://:secret@h:1/0"
BOTH = ("--model", "tiny", "--model", "two=folder")


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The processes that would be supervised."""
    given: list[Program] = []

    async def supervise(each: list[Program], say: object, drain: float) -> int:
        given.extend(each)
        folders = {program.argv[program.argv.index("--turns") + 1] for program in each}
        assert len(folders) == 1, "they take turns with each other"
        folder = folders.pop()
        Turns(folder, 0.1).close()
        with pytest.raises(BlockingIOError):  # as systemd-tmpfiles tries it, which removes old files
            fcntl.flock(os.open(Path(folder).parent, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 3

    monkeypatch.setattr("workers.cli.supervised.supervise", supervise)
    return given


def test_each_model_is_a_worker_with_its_share(
    run: Run, supervised: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--share", "0.7", "--share", "0.2", "--name", "n", "--health-port", "9100", "--dtype", "bfloat16"]
    assert run("worker", "--broker", URL, *BOTH, *options).status == 3
    assert [program.name for program in supervised] == ["tiny", "two"]
    settings = [told(monkeypatch, *program.argv[len(PENSTOCK) :], env=program.env) for program in supervised]
    assert [(each.model, each.name, each.health_port) for each in settings] == [
        ("tiny", "n.tiny", 9100),
        ("two=folder", "n.two", 9101),
    ]
    assert [each.engine["share"] for each in settings] == [0.7, 0.2]
    assert [each.engine["dtype"] for each in settings] == ["bfloat16"] * 2
    assert all("threads" not in each.engine for each in settings), "they compute in turns, each with all cores"
    assert all(each.broker == URL for each in settings)
    assert not any("secret" in word for program in supervised for word in program.argv)


def test_shares_are_equal_unless_they_are_given() -> None:
    assert shares_of(["a", "b", "c"], None) == [1 / 3] * 3
    assert shares_of(["a"], [0.4]) == [0.4]
    assert shares_of(["a"] * 10, [0.1] * 10) == [0.1] * 10, "sums of floats are a little off"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ((*BOTH, "--share", "0.7", "--share", "0.4"), "--share: 0.7 + 0.4 = 1.1; the models of one device have 1"),
        ((*BOTH, "--share", "0", "--share", "0.4"), "--share is 0; it must be a number above 0, up to 1"),
        ((*BOTH, "--share", "0.1", "--share", "-0.4"), "--share is -0.4; it must be a number above 0, up to 1"),
        ((*BOTH, "--share", "nan", "--share", "0.4"), "--share is nan; it must be a number above 0, up to 1"),
        ((*BOTH, "--share", "0.7"), "--share is given 1 times and --model 2 times"),
        (("--model", "tiny", "--share", "1.5"), "--share is 1.5; it must be a number above 0, up to 1"),
        (("--model", "tiny", "--model", "tiny"), "two models are named 'tiny': write NAME=MODEL"),
        (("--model", "tiny", "--batch-window", "51"), "--batch-window is 51.0; it must be a number from 0 to 50"),
    ],
)
def test_shares_that_cannot_be_are_refused_by_name(
    run: Run, supervised: list[Program], options: tuple[str, ...], reason: str
) -> None:
    ran = run("worker", "--broker", URL, *options)
    assert (ran.status, ran.out) == (2, "")
    assert reason in ran.err
    assert not supervised


def test_a_batch_window_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "worker", "--broker", URL, "--model", "tiny", "--batch-window", "20").engine == {
        "batch_window_ms": 20.0
    }


@pytest.fixture
def serving(valkey_url: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, int]]]:
    """A parent with two models, and the process of each."""
    log = tmp_path / "log"
    argv = guarded(*PENSTOCK, "worker", "--model", "tiny", "--model", "two=tiny", "--log-level", "info")
    with log.open("w") as file:
        env = {**os.environ, "BROKER_URL": valkey_url}
        parent = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: len(re.findall(r"serves \(process", log.read_text())) == 2 or parent.poll() is not None)
        pids = dict(re.findall(r"^(tiny|two) \| serves \(process (\d+)\)", log.read_text(), re.MULTILINE))
        yield parent, {name: int(pid) for name, pid in pids.items()}
    finally:
        parent.terminate()
        assert parent.wait(PATIENCE_S) == 0, log.read_text()


@pytest.mark.exhaustive
def test_tasks_of_a_model_count_no_death_of_another_which_shares_its_device(
    serving: tuple[subprocess.Popen[bytes], dict[str, int]], valkey_url: str
) -> None:
    _, pids = serving
    with Client(valkey_url) as client, Redis.from_url(valkey_url, decode_responses=True) as redis:

        def submitted(model: str, tokens: int) -> list[str]:
            return [
                client.submit(model=model, prompt="Once upon a time", max_tokens=tokens, ignore_eos=True).id
                for _ in range(8)
            ]

        def states(ids: list[str]) -> list[str | None]:
            return [redis.hget(keys.task(task_id), "status") for task_id in ids]

        while True:  # until it is stopped in the middle of its tasks, and maybe with the turn
            theirs = submitted("two", 400)
            until(lambda ids=theirs: any(state in ("in_progress", "completed") for state in states(ids)))
            suspend(pids["two"])
            if "in_progress" in states(theirs):
                break
            os.kill(pids["two"], signal.SIGCONT)
        ours = submitted("tiny", 50)
        held = [task for task, state in zip(theirs, states(theirs), strict=True) if state == "in_progress"]
        os.kill(pids["two"], signal.SIGKILL)
        until(lambda: all(state == "completed" for state in states(ours + theirs)))
        deaths = [redis.hget(keys.task(task_id), "deaths") for task_id in held]
        assert set(deaths) == {"1"}
        assert {redis.hget(keys.task(task_id), "deaths") for task_id in ours} <= {"0", None}
        assert {redis.hget(keys.task(task_id), "claims") for task_id in ours} == {"1"}


@pytest.mark.exhaustive
def test_one_model_can_be_drained_alone(
    serving: tuple[subprocess.Popen[bytes], dict[str, int]], valkey_url: str, run: Run
) -> None:
    parent, pids = serving
    with Redis.from_url(valkey_url) as redis:
        leases = [json.loads(redis.get(key) or b"{}") for key in redis.keys(keys.lease("*"))]
    assert {(lease["model"], lease["share"]) for lease in leases} == {("tiny", 0.5), ("two", 0.5)}
    assert all(lease["turn_wait_s"] >= 0 and 0 < lease["turn_share"] <= 1 for lease in leases)
    assert run("drain", "--pid", str(pids["two"])).out == f"worker {pids['two']} has ended\n"
    with Client(valkey_url) as client:
        task = client.submit(model="tiny", prompt="Once upon a time", max_tokens=3)
        assert task.result().status == "completed"
    assert parent.poll() is None
