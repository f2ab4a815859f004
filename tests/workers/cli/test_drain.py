"""`penstock drain` tells one worker, and no other process, and waits for its end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from tests.waiting import PATIENCE_S
from tests.workers.cli.conftest import invoke
from workers.cli import worker as worker_command
from workers.cli.exits import Exit, Failure
from workers.cli.worker import workers_here
from workers.processes import proc

#: A process that `ps` shows as a worker: it says what signal came, and takes a while to end, or until a file is there.
STAND_IN = """
import os, signal, sys, time
def ended(number, frame):
    print(signal.Signals(number).name, flush=True)
    time.sleep(float(sys.argv[3]))
    while sys.argv[4:] and not os.path.exists(sys.argv[4]):
        time.sleep(0.02)
    os._exit(0)
signal.signal(signal.SIGTERM, ended)
signal.signal(signal.SIGQUIT, ended)
print("up", flush=True)
while True:
    time.sleep(0.02)
"""


def stand_in(*argv: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", STAND_IN, *argv], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[str]]:
    with stand_in("workers.cli", "worker", "0.3") as process:
        yield process
        process.kill()


def run(*argv: str) -> Result:
    return invoke("drain", *argv)


def refused(*argv: str) -> Failure:
    error = run(*argv).exception
    assert isinstance(error, Failure)
    return error


@pytest.mark.parametrize(("options", "sent"), [((), "SIGTERM\n"), (("--now",), "SIGQUIT\n")])
def test_it_is_over_when_the_worker_is(worker: subprocess.Popen[str], options: tuple[str, ...], sent: str) -> None:
    result = run("--pid", str(worker.pid), *options)
    assert (result.exit_code, result.output) == (0, f"worker {worker.pid} has ended\n")
    assert worker.wait(PATIENCE_S) == 0
    assert worker.stdout is not None
    assert worker.stdout.read() == sent


def test_one_that_takes_too_long_goes_on(tmp_path: Path) -> None:
    with stand_in("workers.cli", "worker", "0", str(tmp_path / "go")) as worker:
        error = refused("--pid", str(worker.pid), "--timeout", "0.05")
        assert error.status is Exit.TIMEOUT
        (tmp_path / "go").touch()
        assert worker.wait(PATIENCE_S) == 0


def test_no_other_process_is_touched() -> None:
    with stand_in("penstock", "gateway", "0") as process:
        error = refused("--pid", str(process.pid))
        assert f"process {process.pid} is no worker" in str(error)
        assert process.poll() is None
        process.kill()
    assert "there is no process" in str(refused("--pid", str(process.pid)))
    assert run("--pid", "99999999999").exit_code == 2


@pytest.mark.parametrize("argv", [("--pid", "0"), ("--pid", "x"), ("--timeout", "-1")])
def test_what_is_no_such_thing_is_refused(argv: tuple[str, ...]) -> None:
    assert run(*argv).exit_code == 2


@pytest.mark.parametrize(
    ("processes", "found"),
    [
        ({1: (0, "/usr/bin/python\0-P\0-m\0workers.cli\0worker\0--model\0tiny")}, [1]),
        ({1: (0, "/sbin/tini\0--\0penstock\0worker"), 7: (1, "python\0/usr/bin/penstock\0worker")}, [1]),
        ({5: (1, "penstock\0worker\0--gpus\0all"), 6: (5, "python\0-m\0workers.cli\0worker")}, [5]),
        ({5: (1, "penstock\0worker"), 6: (1, "penstock\0worker")}, [5, 6]),
        ({5: (1, "penstock\0up"), 6: (1, "grep\0worker"), 7: (1, "")}, []),
    ],
)
def test_the_workers_here_are_found(
    processes: dict[int, tuple[int, str]], found: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, (parent, argv) in processes.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_text(argv + "\0")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a ) b) S {parent} 1 1")
    monkeypatch.setattr(proc, "PROC", tmp_path)
    assert workers_here() == found
    if len(found) != 1:
        assert ("choose one with --pid" if found else "no worker runs here") in str(refused())


def test_the_only_worker_is_told_where_it_runs_in_this_folder(
    worker: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another folder it may be another system's."""
    monkeypatch.setattr(worker_command, "workers_here", lambda: [worker.pid])
    with monkeypatch.context() as elsewhere:
        elsewhere.chdir(tmp_path)
        error = refused()
        assert f"{worker.pid}, runs in {proc.folder_of(worker.pid)}" in str(error)
        assert worker.poll() is None
    assert run().exit_code == 0


def test_a_wait_that_cannot_be_reckoned_with_is_refused_before_anything_is_told(worker: subprocess.Popen[str]) -> None:
    result = run("--pid", str(worker.pid), "--timeout", "inf")
    assert result.exit_code == 2
    assert "not a length of time" in result.output
    assert worker.poll() is None
