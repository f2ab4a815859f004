"""`penstock chaos`, against a system of real processes that somebody else runs."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from producers.broker.redis import keys as broker_keys
from producers.connection.connect import connect
from producers.contract import keys
from tests.chaos.stage import Shape, Stage
from tests.waiting import until
from tests.workers.cli.conftest import Run, Scripted, send
from workers.processes.proc import argv_of
from workers.trials.chaos.injector import Gone
from workers.trials.chaos.load import Load
from workers.trials.chaos.operated import Process

URLS = ("--broker", "redis://127.0.0.1:1/0", "--url", "http://127.0.0.1:1")


@contextlib.contextmanager
def sleeping(*argv: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing, with such words at the end of its command line; unharmed in the end."""
    process = subprocess.Popen([sys.executable, "-c", "input()", *argv], stdin=subprocess.PIPE)
    while not argv_of(process.pid):  # Popen hears of the exec a moment before the kernel has its words
        assert process.poll() is None
        time.sleep(0.01)
    yield process
    assert process.poll() is None
    process.communicate(b"\n", timeout=240)
    assert process.returncode == 0


def test_nothing_is_done_without_a_word_for_it(run: Run) -> None:
    with sleeping("/bin/penstock", "worker") as process:
        target = f"worker:w1={process.pid}"
        ran = run("chaos", "tiny", *URLS, "--process", target, "--seed", "3", "--minutes", "0.5")
        assert ran.status == 2
        assert "say --confirm" in ran.err
        assert f"worker w1 (process {process.pid})" in ran.err


STRANGERS = {
    "another program": (("worker:w1",), ("make", "worker"), "is not worker w1: it runs"),
    "another of our processes": (("gateway:g",), ("penstock", "worker"), "is not gateway g: it runs"),
    "a worker for a server": (("broker:b",), ("penstock", "worker"), "is not broker b: it runs"),
    "another worker": (("worker:w1",), ("penstock", "worker", "--name", "w2"), "is worker w2, not w1"),
    "another worker, in one word": (("worker:w1",), ("penstock", "worker", "--name=w2"), "is worker w2, not w1"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_what_is_not_what_it_is_said_to_be_is_refused_and_left_alone(run: Run, name: str) -> None:
    (said,), argv, why = STRANGERS[name]
    with sleeping(*argv) as process:
        target = f"{said}={process.pid}"
        ran = run("chaos", "tiny", *URLS, "--process", target, "--faults", "kill,pause,drain,restart", "--confirm")
        assert ran.status == 2
        assert why in " ".join(ran.err.split())


def test_a_process_id_that_has_become_another_process_s_is_left_alone(tmp_path: Path) -> None:
    """In a file, or because the number was used anew."""
    pid = tmp_path / "pid"
    with sleeping("-m", "workers.cli", "worker", "--name", "w1") as worker, sleeping("sh") as stranger:
        pid.write_text(str(worker.pid))
        process = Process.parse(f"worker:w1={pid}", {})
        process.look()
        process.resume()
        pid.write_text(str(stranger.pid))
        assert process.alive
        with pytest.raises(ValueError, match="is not worker w1"):
            process.look()
        for harm in (process.kill, process.pause, process.drain):
            with pytest.raises(Gone, match="is not worker w1"):
                harm()


@pytest.mark.parametrize("pid", ["4194305", "99999999999", "no"])
def test_a_process_that_is_not_there_is_told_of_before_anything_is_done(run: Run, tmp_path: Path, pid: str) -> None:
    """Of one whose file says none, another may begin."""
    (tmp_path / "pid").write_text("4194305")
    process = f"worker:w1={pid if pid.isdecimal() else tmp_path / 'pid'}"
    ran = run("chaos", "tiny", *URLS, "--process", process)
    assert ran.status == 2
    assert (f"there is no process {pid}" if pid.isdecimal() else "say --confirm") in " ".join(ran.err.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "name at least one --process"),
        (("--process", "w1"), "must be ROLE:NAME"),
        (("--process", "cook:w1=1"), "must be ROLE:NAME"),
        (("--process", "worker:w1=/no/such/file"), "neither a process id nor a file"),
        (("--process", "worker:w1"), "give its process id"),
        (("--process", "broker:b=0"), "a process id must be 1 or more"),
        (("--process", "worker:w1=1", "--process", "worker:w1=2"), "two processes are called w1"),
        (("--process", "worker:w1=1", "--exec", "kill"), "must be VERB=COMMAND"),
        (("--process", "worker:w1=1", "--exec", "hug=true"), "must be VERB=COMMAND"),
        (("--process", "worker:w1=1", "--exec", "kill='"), '--exec is "kill=\'": No closing quotation'),
        (("--process", "worker:w1=1", "--faults", "kill,flood"), "it can do"),
        (("--process", "broker:b=1", "--faults", "restart"), "nothing here can suffer restart"),
        (("--process", "worker:w1=1", "--plan", "/no/such/plan"), "No such file"),
        (("--process", "worker:w1=1", "--plan", "/dev/null"), "/dev/null holds no plan"),
        (("--process", "worker:w1=1", "--minutes", "inf"), "inf is not a length of time"),
        (("--process", "worker:w1=1", "--max-interval", "inf"), "inf is not a length of time"),
        (("--process", "worker:w1=1", "--lease", "inf"), "inf is not a length of time"),
        (("--broker", "sqs://us-east-1", "--process", "worker:w1=1"), "the store is missing"),
        (
            ("--broker", "sqs://us-east-1", "--store", "redis://127.0.0.1:1/0", "--process", "broker:b=1"),
            "sqs://us-east-1 has no process that could be harmed",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(run: Run, options: tuple[str, ...], said: str) -> None:
    ran = run("chaos", "tiny", *URLS, *options)
    assert ran.status == 2
    assert said in " ".join(ran.err.split())


def test_nothing_is_harmed_where_nobody_serves_the_model(run: Run, valkey_url: str) -> None:
    """A run in which nothing was accepted would prove every promise."""
    with sleeping("penstock", "gateway") as process:
        urls = ("--broker", valkey_url, "--url", "http://127.0.0.1:1")
        ran = run("chaos", "nobodys", *urls, "--process", f"gateway:g={process.pid}", "--minutes", "0.05", "--confirm")
        assert ran.status == 2
        assert "no worker has ever announced 'nobodys'" in " ".join(ran.err.split())


def test_nothing_is_harmed_where_no_gateway_answers(run: Run, valkey_url: str) -> None:
    connect(valkey_url).hset(keys.MODELS, "tiny", "{}")
    with sleeping("penstock", "gateway") as process:
        urls = ("--broker", valkey_url, "--url", "http://127.0.0.1:1")
        ran = run("chaos", "tiny", *urls, "--process", f"gateway:g={process.pid}", "--minutes", "0.05", "--confirm")
        assert ran.status == 3
        assert "no answer from http://127.0.0.1:1" in " ".join(ran.err.split())


@pytest.mark.slow
def test_who_ends_it_ends_what_it_began(scripted: Scripted, valkey_url: str, tmp_path: Path) -> None:
    """`timeout 600 penstock chaos ...`, say: a server that stands still must go on."""
    connect(valkey_url).hset(keys.MODELS, "tiny", "{}")
    scripted.answers = [send(200, b'{"data": []}')]
    argv = ["chaos", "tiny", "--broker", valkey_url, "--url", scripted.url, "--process", "broker:b"]
    argv += ["--exec", f"pause=touch {tmp_path}/paused", "--exec", f"resume=touch {tmp_path}/resumed"]
    argv += [
        "--faults",
        "pause",
        "--max-interval",
        "0.1",
        "--lease",
        "10000",
        "--report-dir",
        str(tmp_path / "f"),
        "--confirm",
    ]
    with subprocess.Popen([sys.executable, "-m", "workers.cli", *argv], stderr=subprocess.PIPE, text=True) as trial:
        until((tmp_path / "paused").exists)
        assert not (tmp_path / "resumed").exists()
        trial.terminate()
        _, said = trial.communicate(timeout=240)
    assert (tmp_path / "resumed").exists()
    assert trial.returncode == 130
    assert "interrupted: nothing was judged" in said


@pytest.mark.parametrize("said", ["0", "-1"])
def test_a_pid_file_that_means_many_processes_harms_none(said: str, tmp_path: Path) -> None:
    """To kill(2), 0 is the caller's own group, -1 all that it may signal."""
    (tmp_path / "pid").write_text(said)
    process = Process.parse(f"gateway:g={tmp_path / 'pid'}", {})
    assert not process.alive
    with pytest.raises(Gone, match="not a process id"):
        process.resume()


@pytest.fixture
def system(tmp_path: Path) -> Iterator[Stage]:
    """Whoever runs it starts a worker anew under another name."""
    shape = Shape(servers=1, hasty=True, keys=True, forked=True, longest=60, step=0.02)
    stage = Stage(shape, 1, tmp_path / "system")
    try:
        stage.up()
        yield stage
    finally:
        stage.down()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_system_that_keeps_its_promises_is_told_so(
    run: Run, system: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress_texts: list[str]
) -> None:
    monkeypatch.setattr("workers.trials.chaos.load.Load", partial(Load, ids=600))  # its engine has no tokenizer
    monkeypatch.setenv("PENSTOCK_API_KEY", system.holders[-1].token)
    # Kills by the name that a process was given, as `kubectl delete pod` does.
    kill = f"sh -c 'kill -9 $(cat {tmp_path}/{{name}})'"
    for name in ("worker-1", "worker-2"):
        slot = system.slots[name]
        (tmp_path / slot.process).write_text(str(slot._popen.pid))
    folder = tmp_path / "trial"
    # Of what was before, nothing is its fault.
    connect(system.broker.url).lpush(broker_keys.DEAD, json.dumps({"reason": "long ago", "message": "{}"}))
    ran = run(
        *("chaos", "stub", "--broker", system.broker.url, "--url", f"http://127.0.0.1:{system.gateways[0]}"),
        *("--process", "worker:worker-1.g1", "--process", "worker:worker-2.g1", "--faults", "kill", "--min-kills", "1"),
        *("--exec", f"kill={kill}", "--max-interval", "1.5", "--lease", "2"),
        *("--max-output-tokens", "60", "--concurrency", "6", "--report-dir", str(folder), "--confirm"),
        "--exclusive",
    )
    assert ran.status == 0, ran.err
    report = json.loads((folder / "report.json").read_text())
    assert report["kills"] == {"worker": 1}
    assert report["lost"] == report["outputs_different"] == 0
    assert report["choices_compared"], "no task got through"
    faults = json.loads((folder / "plan.json").read_text())["faults"]
    begin, *told = progress_texts
    assert begin == "load without faults"
    assert [re.sub(r"at [0-9.]+ s: .*", "", text) for text in told[:-2] if "missed: " not in text] == [
        f"since then: {number}/{len(faults)} " for number in range(1, len(faults) + 1)
    ]
    assert told[-2:] == [
        "since then: calm: open tasks are read to their ends",
        "since then: quiet: the same tasks once more, without faults",
    ]
    assert all(text.removeprefix("since then: ") in ran.err for text in told), "each is a line that stays, too"
    assert system.slots["worker-1"].process + system.slots["worker-2"].process != "worker-1.g1worker-2.g1"
