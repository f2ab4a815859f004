"""A standby becomes the next program; one that cannot costs no more than a normal start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest

from producers.client.blocking import Client
from tests.waiting import PATIENCE_S
from tests.waiting import auntil as until
from tests.workers.processes.test_supervisor import gone, said
from workers.processes import PENSTOCK, ahead, supervisor
from workers.processes.standby import Standby
from workers.processes.standby_process import MODULES
from workers.processes.supervisor import Child, Program

PROGRAM = (sys.executable, "-P", "-m", "stands_in")
#: Tells who it is, and waits.
SOURCE = """
import os, sys, time
import warm_module
print(os.getpid(), os.environ["CUDA_VISIBLE_DEVICES"], *sys.argv[1:], flush=True)
if "fail" in sys.argv:
    sys.exit(3)
time.sleep(600)
"""

Make = Callable[..., Standby]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the program, and of a module that the standby has imported."""
    (tmp_path / "stands_in.py").write_text(SOURCE)
    (tmp_path / "warm_module.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name in ("COLUMNS", "LINES"):  # readline, which pytest may import, gives them to children alone
        monkeypatch.delenv(name, raising=False)
        os.unsetenv(name)
    return tmp_path


@pytest.fixture
async def make(code: Path) -> AsyncIterator[Make]:
    """Makes standbys; `told` is what they say."""
    made: list[Standby] = []
    told: list[str] = []

    def standby(argv: tuple[str, ...] = PROGRAM, **options: Any) -> Standby:
        options = {"again_s": 0.01, "imports": ("warm_module", "workers.runtime.cold_start"), **options}
        made.append(Standby(argv, lambda name, line: told.append(line), **options))
        return made[-1]

    standby.told = told  # type: ignore[attr-defined]
    yield standby
    for one in made:
        await one.stop()


def child(standby: Standby, *arguments: str, argv: tuple[str, ...] = PROGRAM, **env: str) -> Child:
    program = Program("it", (*argv, *arguments), {"CUDA_VISIBLE_DEVICES": "7", **env})
    return Child(program, lambda name, line: None, standby)


async def ready(standby: Standby) -> int:
    """Start it; the process id of who waits."""
    await standby.start()
    await until(lambda: standby.ready)
    assert standby.pid is not None
    return standby.pid


async def started(one: Child, *arguments: str) -> int:
    """Start the program; its process id, after it has told who it is."""
    await one.start()
    assert one.pid is not None
    await said(one, " ".join((str(one.pid), "7", *arguments)))
    return one.pid


def title(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def nice_and_memory(pid: int) -> tuple[int, int]:
    """The niceness of its first thread, and its memory in bytes."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(stat[16]), int(stat[21]) * os.sysconf("SC_PAGE_SIZE")


async def test_it_becomes_the_program_and_another_follows(make: Make) -> None:
    standby = make()
    waiting = await ready(standby)
    assert b"penstock: standby" in title(waiting)
    one = child(standby, "a", "b c")
    assert await started(one, "a", "b c") == waiting
    assert b"stands_in a b c" in title(waiting)
    await until(lambda: standby.ready)
    assert standby.pid != waiting
    assert await one.stop(60)


async def test_a_program_that_served_is_taken_over_at_once_and_pauses_when_it_dies_again_soon(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FIRST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(supervisor, name, 600.0)
    standby = make()
    await ready(standby)
    one = child(standby, "a")
    one.restart = True
    first = await started(one, "a")
    await until(lambda: standby.ready)
    waiting = standby.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: one.pid == waiting)
    await said(one, "was ended by SIGKILL; starting it again at once, by the standby")
    await until(lambda: standby.ready)
    assert waiting is not None
    os.kill(waiting, signal.SIGKILL)
    await said(one, "was ended by SIGKILL; starting it again in 600 s")
    assert await one.stop(60)


async def test_its_status_is_the_programs_and_a_restart_may_use_the_next(make: Make) -> None:
    standby = make()
    await ready(standby)
    one = child(standby, "fail")
    await one.start()
    assert one.keeper is not None
    assert await one.keeper == 3


def kill(pid: int, code: Path) -> str:
    os.kill(pid, signal.SIGKILL)
    return ""


def stick(pid: int, code: Path) -> str:
    os.kill(pid, signal.SIGSTOP)
    return "did not answer"


def change_the_environment(pid: int, code: Path) -> str:
    os.environ["OMP_NUM_THREADS"] = "3"
    return "OMP_NUM_THREADS has another value"


def change_the_code(pid: int, code: Path) -> str:
    (code / "warm_module.py").write_text("new = True")
    return f"{code / 'warm_module.py'} has changed"


@pytest.mark.parametrize("spoil", [kill, stick, change_the_environment, change_the_code])
async def test_one_that_cannot_be_used_is_gone_before_the_normal_start_and_is_replaced(
    make: Make, code: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[int, Path], str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    standby = make()
    waiting = await ready(standby)
    why = spoil(waiting, code)
    one = child(standby)
    assert await started(one) != waiting
    await until(lambda: gone(waiting))
    assert why in " ".join(make.told)  # type: ignore[attr-defined]
    await until(lambda: standby.ready)
    second, two = standby.pid, child(standby)
    assert await started(two) == second
    await asyncio.gather(one.stop(60), two.stop(60))


async def test_it_leaves_other_programs_alone(make: Make) -> None:
    standby = make()
    waiting = await ready(standby)
    one = child(standby, argv=(sys.executable, "-c", "import os; print(os.getpid(), 7, flush=True); input()"))
    await one.start()
    assert one.pid != waiting
    assert standby.pid == waiting
    await one.stop(60)


async def test_it_ends_when_nothing_comes(make: Make) -> None:
    standby = make(idle_s=0.01)
    await standby.start()
    waiting = standby.pid
    assert waiting is not None
    await until(lambda: standby.pid is None and gone(waiting))


@pytest.fixture
def begin(code: Path) -> Iterator[Callable[[], ahead.Ahead]]:
    """Begins a process ahead, which takes a moment for its imports."""
    begun: list[ahead.Ahead] = []

    def one() -> ahead.Ahead:
        (code / "warm_module.py").write_text("import time; time.sleep(0.3)")
        ahead.begin("warm_module", "workers.runtime.cold_start")
        found = ahead.take()
        assert found is not None
        begun.append(found)
        return found

    yield one
    for found in begun:
        found.end()


async def test_one_begun_ahead_becomes_the_program_once_it_is_ready(
    make: Make, begin: Callable[[], ahead.Ahead]
) -> None:
    begun = begin()
    standby = make(ahead=begun, more=False)
    await standby.start()
    assert not standby.ready
    one, two = child(standby, "a"), child(standby, "b")
    assert await started(one, "a") == begun.process.pid
    assert await started(two, "b") != begun.process.pid
    assert standby.pid is None, "no other follows"
    assert await one.stop(60)
    assert await two.stop(60)


async def test_one_begun_ahead_that_dies_costs_a_normal_start(make: Make, begin: Callable[[], ahead.Ahead]) -> None:
    begun = begin()
    os.kill(begun.process.pid, signal.SIGKILL)
    standby = make(ahead=begun)
    await standby.start()
    one = child(standby)
    assert await started(one) != begun.process.pid
    assert gone(begun.process.pid)
    await until(lambda: standby.ready)
    await one.stop(60)


async def test_one_begun_ahead_ends_with_a_start_that_is_given_up(make: Make, begin: Callable[[], ahead.Ahead]) -> None:
    begun = begin()
    standby = make(ahead=begun)
    await standby.start()
    starting = asyncio.create_task(child(standby).start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait((starting,))
    await until(lambda: gone(begun.process.pid))


def test_one_begun_ahead_that_nobody_takes_is_ended(code: Path) -> None:
    source = """
    from workers.processes import ahead
    ahead.begin("time")
    print(ahead._begun.process.pid)
    ahead.end()
    """
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(source)], text=True)
    assert gone(int(said))


def test_one_begun_ahead_that_is_ended_has_its_socket_until_it_is_dead() -> None:
    """Else it may come to say, by a traceback, that it was cut off."""
    calls = Mock()
    ahead.Ahead(calls, calls.socket).end()
    assert calls.mock_calls == [call.kill(), call.wait(), call.socket.close()]


def test_it_dies_with_its_parent(code: Path) -> None:
    source = """
    import asyncio
    from workers.processes.standby import Standby
    async def main():
        standby = Standby(["x"], print, imports=["warm_module"])
        await standby.start()
        print(standby.pid, flush=True)
        await asyncio.sleep(600)
    asyncio.run(main())
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(6000):
        if gone(pid):
            return
        asyncio.run(asyncio.sleep(0.01))
    raise AssertionError("it lives")


@pytest.mark.slow
async def test_it_becomes_a_worker_that_serves_within_its_memory(make: Make, valkey_url: str) -> None:
    argv = (*PENSTOCK, "worker")
    standby = make(argv, imports=MODULES, again_s=600.0)
    waiting = await ready(standby)
    nice, memory = nice_and_memory(waiting)
    assert nice == os.nice(0), "a worker has the priority of any process, though it was imported at a low one"
    assert memory <= 400 << 20
    urls = {"BROKER_URL": valkey_url, "STORE_URL": valkey_url}
    one = child(standby, "--model", "tiny", "--threads", "1", argv=argv, **urls)
    await one.start()
    assert one.pid == waiting
    await until(lambda: any("Serving tiny" in line for line in one.lines))
    with Client(valkey_url) as client:
        handle = client.submit(model="tiny", prompt="def f(x):", max_tokens=4, ignore_eos=True)
        result = await asyncio.to_thread(handle.result, 60)
    assert result.usage["output_tokens"] == 4
    assert await one.stop(60)


async def test_one_that_is_ended_before_it_is_ready_leaves_the_loop_as_it_was(make: Make, code: Path) -> None:
    """A new socket gets the number of the old one, and is read."""
    (code / "warm_module.py").write_text("import time; time.sleep(600)")
    standby = make()
    await standby.start()
    await asyncio.sleep(0)  # it is being listened to
    await standby.stop()
    loop = asyncio.get_running_loop()
    for _ in range(20):
        ours, theirs = socket.socketpair()
        with theirs, ours:
            ours.setblocking(False)
            loop.call_soon(theirs.send, b"x")
            async with asyncio.timeout(PATIENCE_S):
                assert await loop.sock_recv(ours, 1) == b"x"
