"""One worker for each GPU: what becomes of it when one of its processes dies, or all are told to stop."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from redis import Redis

from producers.broker.redis import keys as broker_keys
from producers.contract import keys
from tests.processes import ROOT, fill
from tests.waiting import PATIENCE_S, until
from tests.workers.cli.running_up import lives
from workers.cli import supervised
from workers.processes import notify as readinesses
from workers.processes import supervisor
from workers.processes.notify import Readiness, notify_lease, notify_ready, notify_start
from workers.processes.supervisor import Program
from workers.runtime import signals

PYTHON = (sys.executable, "-I", "-S", "-c")
#: Says that it serves, as `workers.processes.notify` does, and waits for SIGTERM; then exits with the status it was
#: given.
SERVES = """
import os, signal, socket, sys, time
signal.signal(signal.SIGTERM, lambda *_: os._exit(int(sys.argv[1])))
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1", "\\0" + os.environ["NOTIFY_SOCKET"][1:])
while True:
    time.sleep(0.02)
"""
#: Serves, and does nothing for SIGTERM.
STUBBORN = SERVES.replace("lambda *_: os._exit(int(sys.argv[1]))", "signal.SIG_IGN")


def program(name: str, source: str, *args: str) -> Program:
    return Program(name, (*PYTHON, source, *args))


class Running:
    """`supervise` within this process. Signals reach it as they would by themselves."""

    def __init__(self, *programs: Program, drain: float = 100.0) -> None:
        self.said: list[tuple[str, str]] = []
        self.task = asyncio.create_task(supervised.supervise(programs, lambda *line: self.said.append(line), drain))

    async def says(self, name: str, pattern: str, times: int = 1) -> str:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = [line for who, line in self.said if who == name and re.search(pattern, line)]
                if len(found) >= times:
                    return found[-1]
                assert not self.task.done(), self.said
                await asyncio.sleep(0.005)

    async def status(self, sig: signal.Signals | None = None) -> int:
        if sig is not None:
            os.kill(os.getpid(), sig)
        async with asyncio.timeout(PATIENCE_S):
            return await self.task


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without long pauses, each signal a new one, and with the test runner's own signal handlers afterwards."""
    monkeypatch.setattr(signals, "SAME_S", 0.0)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 0.002)
    sent = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(sig) for sig in sent]
    yield
    for sig, handler in zip(sent, before, strict=True):
        signal.signal(sig, handler)


class TestStop:
    @pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    async def test_drains_all_and_ends_with_the_worst_status(self, sig: signal.Signals) -> None:
        running = Running(program("gpu0", SERVES, "0"), program("gpu1", SERVES, "5"), program("gpu2", SERVES, "1"))
        for name in ("gpu0", "gpu1", "gpu2"):
            await running.says(name, "serves")
        assert await running.status(sig) == 5

    async def test_of_all_that_obey_is_a_success(self) -> None:
        running = Running(program("gpu0", SERVES, "0"), program("gpu1", SERVES, "0"))
        await running.says("gpu1", "serves")
        await running.says("gpu0", "serves")
        assert await running.status(signal.SIGTERM) == 0

    async def test_a_second_signal_hastens_and_a_third_kills(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervised, "HAND_BACK_S", 100.0)
        handing_back = STUBBORN.replace("while True", "signal.signal(signal.SIGQUIT, signal.SIG_IGN)\nwhile True")
        running = Running(program("gpu0", STUBBORN), program("gpu1", handing_back))
        for name in ("gpu0", "gpu1"):
            await running.says(name, "serves")
        os.kill(os.getpid(), signal.SIGTERM)
        await running.says("worker", "SIGTERM: the workers drain, for at most 100 s")
        os.kill(os.getpid(), signal.SIGTERM)
        await running.says("worker", "SIGTERM: the workers hand back what they run, and stop")
        assert not running.task.done()
        assert await running.status(signal.SIGTERM) == 130
        assert ("worker", "SIGTERM again: killing the workers") in running.said

    async def test_that_is_not_heeded_in_time_kills(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervised, "HAND_BACK_S", 0.1)
        running = Running(program("gpu0", STUBBORN), drain=0.1)
        await running.says("gpu0", "serves")
        assert await running.status(signal.SIGTERM) == 130
        assert ("worker", "not stopped within 0.2 s: killing the workers that are left") in running.said

    async def test_of_one_that_has_not_yet_begun_to_listen_is_what_was_asked_for(self) -> None:
        running = Running(program("gpu0", "print('up', flush=True)\nimport time; time.sleep(60)"))
        await running.says("gpu0", "up")
        assert await running.status(signal.SIGTERM) == 0

    async def test_comes_through_while_one_is_in_a_pause(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 60.0)
        monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 60.0)
        running = Running(program("gpu0", "raise SystemExit(9)"), program("gpu1", SERVES, "0"))
        await running.says("gpu0", "exited with status 9; starting it again")
        await running.says("gpu1", "serves")
        assert await running.status(signal.SIGTERM) == 9


class TestDeath:
    async def test_in_a_row_is_given_up_and_the_others_go_on(self) -> None:
        running = Running(program("gpu0", "raise SystemExit(3)"), program("gpu1", SERVES, "0"))
        await running.says("gpu1", "serves")
        last = await running.says("gpu0", "given up")
        assert last.startswith("exited with status 3; death 8 in a row without 20 s of service between")
        assert len([1 for name, line in running.said if name == "gpu0" and "starting it again" in line]) == 7
        assert not running.task.done()
        assert await running.status(signal.SIGTERM) == 3

    async def test_after_a_good_while_is_the_first_again(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(supervisor, "WELL_S", 0.0)  # any while after it was heard is a good one
        monkeypatch.setattr(supervised, "MOST_DEATHS", 2)
        die = tmp_path / "die"
        running = Running(program("gpu0", f"{SERVES}    if os.path.exists({str(die)!r}): sys.exit(3)\n", "0"))
        for time in range(1, 5):
            await running.says("gpu0", "serves", time)
            die.touch()
            await running.says("gpu0", "exited with status 3; starting it again", time)
            die.unlink()
        await running.says("gpu0", "serves", times=5)
        assert await running.status(signal.SIGTERM) == 0

    async def test_by_a_signal_is_a_failure(self) -> None:
        running = Running(program("gpu0", "import os; os.kill(os.getpid(), 9)"))
        assert await running.status() == 1

    async def test_of_the_last_that_is_not_given_up_ends_all(self) -> None:
        running = Running(program("gpu0", "raise SystemExit(2)"), program("gpu1", "raise SystemExit(2)"))
        assert await running.status() == 2
        for name in ("gpu0", "gpu1"):
            assert (name, "exited with status 2; it was refused and would be refused again: given up") in running.said

    async def test_by_refusal_of_one_that_has_served_passes(self, tmp_path: Path) -> None:
        """Its broker restarts, say."""
        served = tmp_path / "served"
        refused = f"import os, sys\nif os.path.exists({str(served)!r}): sys.exit(2)\n"
        running = Running(program("gpu0", refused + SERVES, "7"))
        pid = int((await running.says("gpu0", "serves")).rpartition(" ")[2].rstrip(")"))
        served.touch()
        os.kill(pid, signal.SIGTERM)
        await running.says("gpu0", "exited with status 2; starting it again", times=10)
        served.unlink()
        await running.says("gpu0", "serves", times=2)
        assert await running.status(signal.SIGTERM) == 7

    async def test_by_somebody_elses_order_is_not_undone(self) -> None:
        running = Running(program("gpu0", SERVES, "0"), program("gpu1", SERVES, "0"))
        await running.says("gpu1", "serves")
        pid = int((await running.says("gpu0", "serves")).rpartition(" ")[2].rstrip(")"))
        os.kill(pid, signal.SIGTERM)
        await running.says("gpu0", "told to stop by another process; it stays stopped")
        assert not running.task.done()
        assert await running.status(signal.SIGTERM) == 0


class TestReadiness:
    async def test_is_handed_on_once_all_serve(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
            systemd.bind("")
            systemd.setblocking(False)
            monkeypatch.setenv("NOTIFY_SOCKET", "@" + systemd.getsockname()[1:].decode())
            waits = tmp_path / "waits"
            waits.touch()
            slow = f"import os, time\nwhile os.path.exists({str(waits)!r}): time.sleep(0.01)\n{SERVES}"
            running = Running(program("gpu0", SERVES, "0"), program("gpu1", slow, "0"))
            await running.says("gpu0", "serves")
            with pytest.raises(BlockingIOError):
                systemd.recv(100)
            waits.unlink()
            await running.says("gpu1", "serves")
            async with asyncio.timeout(PATIENCE_S):
                assert await asyncio.get_running_loop().sock_recv(systemd, 100) == b"STATUS=\nREADY=1"
            assert await running.status(signal.SIGTERM) == 0

    async def test_comes_with_what_the_program_says_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        readiness = Readiness(heard.put_nowait, lambda name, pid: None)
        try:
            monkeypatch.setenv("NOTIFY_SOCKET", readiness.address)
            for status in ("Ready in 2.31 s: imports 1.20", ""):
                notify_ready(status)
                async with asyncio.timeout(PATIENCE_S):
                    assert await heard.get() == status
        finally:
            readiness.close()

    async def test_says_before_what_the_program_is_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        heard: asyncio.Queue[str] = asyncio.Queue()
        readiness = Readiness(lambda status: heard.put_nowait(f"ready: {status}"), lambda *_: None, heard.put_nowait)
        try:
            monkeypatch.setenv("NOTIFY_SOCKET", readiness.address)
            notify_start("reading weights")
            notify_ready("Ready in 2 s")
            async with asyncio.timeout(PATIENCE_S):
                assert [await heard.get() for _ in range(2)] == ["reading weights", "ready: Ready in 2 s"]
        finally:
            readiness.close()

    async def test_of_another_user_is_not_heard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All users of a machine find the socket, in /proc/net/unix, and may send to it, without end."""
        heard: list[str] = []
        readiness = Readiness(heard.append, lambda name, pid: heard.append(name))
        try:
            monkeypatch.setenv("NOTIFY_SOCKET", readiness.address)
            with monkeypatch.context() as another:
                another.setattr(readinesses, "_sender", lambda aside: (os.getpid(), os.geteuid() + 1))
                notify_ready("a stranger's")
                notify_lease("a worker's")
                readiness.read()
            assert heard == []
            notify_ready("its own")
            readiness.read()
            assert heard == ["its own"]
            messages = itertools.repeat((b"READY=1", [], 0, None))
            monkeypatch.setattr(readiness, "_socket", Mock(wraps=readiness._socket, recvmsg=lambda *_: next(messages)))
            readiness.read()
            assert len(heard) == 1 + readinesses.AT_ONCE
        finally:
            readiness.close()


class Fleet:
    """`tests.workers.cli.gpu_fleet`: the parent in a process of its own, workers with the stub engine below it."""

    def __init__(self, url: str, gpus: str, drain: float) -> None:
        self.out = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.workers.cli.gpu_fleet", url, gpus, str(drain)],
            cwd=ROOT,
            env={**os.environ, "STUB_STEP_S": "0.02"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.out += line

    def pids(self, count: int) -> list[int]:
        """Of the processes that have said so far that they serve, once there are so many."""
        found: list[str] = until(lambda: len(f := re.findall(r"serves \(process (\d+)\)", self.out)) >= count and f)
        return list(map(int, found))


@pytest.fixture
def fleet(valkey_url: str) -> Iterator[Any]:
    started: list[Fleet] = []

    def start(gpus: str, drain: float) -> Fleet:
        started.append(Fleet(valkey_url, gpus, drain))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.mark.slow
def test_workers_have_a_gpu_and_a_name_each_come_back_with_it_and_lose_nothing(fleet: Any, valkey: Redis) -> None:
    parent = fleet("gpu0,gpu3", drain=20.0)
    pids = parent.pids(2)
    environments = [Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in pids]
    visible = [next(one for one in found if one.startswith(b"CUDA_VISIBLE")) for found in environments]
    assert sorted(visible) == [b"CUDA_VISIBLE_DEVICES=0", b"CUDA_VISIBLE_DEVICES=3"]

    def nodes() -> list[str]:
        return sorted(name.decode().rpartition(".")[0] for name in valkey.hkeys(broker_keys.INCARNATIONS))

    until(lambda: nodes() == ["node.gpu0", "node.gpu3"])
    queue = next(name.decode() for name in valkey.hkeys(keys.POOLS))
    with Redis.from_url(
        f"redis://127.0.0.1:{valkey.connection_pool.connection_kwargs['port']}/0", decode_responses=True
    ) as redis:
        ids = fill(redis, queue, 40, max_tokens=100)
        until(lambda: redis.hget(keys.task(ids[-1]), "status") != "queued")
        killed = [pid for pid in pids if b"CUDA_VISIBLE_DEVICES=0" in environments[pids.index(pid)]]
        os.kill(killed[0], signal.SIGKILL)
        until(lambda: not lives(killed[0]))
        assert len(parent.pids(3)) == 3
        until(lambda: nodes() == ["node.gpu0", "node.gpu3"])  # its first lease ended with it, minutes early
        until(lambda: all(redis.hget(keys.task(one), "status") == "completed" for one in ids))
        parent.process.send_signal(signal.SIGTERM)
        assert parent.process.wait(PATIENCE_S) == 0
        assert not redis.hkeys(broker_keys.INCARNATIONS)
    assert not any(map(lives, parent.pids(3)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_parent_that_is_killed_takes_its_workers_along(fleet: Any) -> None:
    parent = fleet("gpu0,gpu1", drain=20.0)
    pids = parent.pids(2)
    parent.process.kill()
    until(lambda: not any(map(lives, pids)))
