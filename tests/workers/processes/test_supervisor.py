"""Children are told apart, kept running, stopped in time, and never outlive us."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S
from workers.processes import GUARD, supervisor
from workers.processes.supervisor import Child, Program, ended

PYTHON = (sys.executable, "-I", "-S", "-c")
#: Says that it is up, then waits for SIGTERM.
WAITS = "import time; print('up', flush=True); time.sleep(600)"
#: Says what it was told, and stays.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"no\\n"))
print("up", flush=True)
while True:
    time.sleep(0.02)
"""

Make = Callable[..., Child]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes children from Python source; what is left of them is killed."""
    made: list[Child] = []

    def child(source: str, **options: Any) -> Child:
        made.append(Child(Program("it", (*PYTHON, textwrap.dedent(source)), **options), lambda name, line: None))
        return made[-1]

    yield child
    for one in made:
        await one.stop(0.0, signal.SIGKILL)


async def begun(child: Child) -> int:
    """Start it; its process id, once it says that it is up."""
    await child.start()
    await said(child, "up")
    assert child.pid is not None
    return child.pid


async def status(child: Child) -> int:
    """Its last exit status."""
    assert child.keeper is not None
    async with asyncio.timeout(PATIENCE_S):
        return await child.keeper


async def said(child: Child, line: str, times: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if list(child.lines).count(line) >= times:
                return
            await asyncio.sleep(0.005)


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the latter: it went between open and read
        return True
    return state == "Z"  # an orphan that nobody reaps is dead all the same


class TestOutput:
    async def test_is_told_line_by_line_with_the_name(self) -> None:
        heard: list[tuple[str, str]] = []
        source = "import sys; print('a'); print('b', file=sys.stderr, end='')"
        child = Child(Program("it", (*PYTHON, source)), lambda name, line: heard.append((name, line)))
        await child.start()
        await status(child)
        await child.stop(60)
        assert sorted(heard) == [("it", "a"), ("it", "b")]

    async def test_need_not_be_text_nor_have_lines(self, make: Make) -> None:
        child = make("import sys; sys.stdout.buffer.write(b'\\xff\\n' + b'x' * 300_000 + b'\\nend\\n')")
        await child.start()
        await said(child, "end")
        first, *rest, _ = child.lines
        assert first == "\ufffd"
        assert "".join(rest) == "x" * 300_000

    async def test_is_kept_to_the_last_lines(self, make: Make) -> None:
        child = make("for k in range(1000): print(k)")
        await child.start()
        await said(child, "999")
        assert list(child.lines) == [str(k) for k in range(800, 1000)]


class TestStop:
    async def test_ends_a_child_that_obeys(self, make: Make) -> None:
        child = make(WAITS)
        pid = await begun(child)
        assert await child.stop(60)
        assert child.pid is None
        assert gone(pid)

    async def test_kills_a_child_that_does_not(self, make: Make) -> None:
        child = make(STUBBORN)
        await begun(child)
        child.order(signal.SIGTERM)
        await said(child, "no")
        assert not await child.stop(0.2)
        assert "did not stop within 0.2 s: killed" in child.lines
        assert child.pid is None

    async def test_of_a_child_that_never_started_or_has_ended_is_nothing(self, make: Make) -> None:
        assert await make(WAITS).stop(0)
        child = make("pass")
        await child.start()
        await status(child)
        assert await child.stop(0)

    async def test_is_not_held_up_by_a_grandchild_that_has_our_pipe(self, make: Make) -> None:
        child = make(
            """
            import os, signal, time
            grandchild = os.fork()
            if grandchild == 0:
                time.sleep(100)
                os._exit(0)
            print(grandchild, flush=True)
            print("up", flush=True)
            signal.pause()
            """
        )
        await begun(child)
        async with asyncio.timeout(PATIENCE_S):
            assert await child.stop(90)
        os.kill(int(child.lines[0]), signal.SIGKILL)

    async def test_reaches_a_child_that_is_just_being_started(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, reached, go = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

        async def slow(*args: Any, **options: Any) -> Any:
            process = await real(*args, **options)
            reached.set()
            await go.wait()
            return process

        monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.0)
        child = make(WAITS)
        child.restart = True
        await child.start()
        monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await reached.wait()
        child.order(signal.SIGTERM)
        go.set()
        assert await status(child) == -signal.SIGTERM


class TestRestart:
    async def test_starts_a_child_again_whenever_it_dies(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
        child = make("print('up')")
        child.restart = True
        await child.start()
        await said(child, "up", 4)
        assert await child.stop(60)
        count = list(child.lines).count("up")
        await asyncio.sleep(0.2)
        assert list(child.lines).count("up") == count

    @pytest.mark.parametrize(
        ("status", "well_s", "pauses"),
        [
            (3, 20.0, ("0.002", "0.004", "0.005", "0.005")),
            (70, 0.0, ("0.002", "0.002", "0.002", "0.002")),  # it was healthy each time
            (2, 0.0, ("0.002", "0.004", "0.005", "0.005")),  # it was long in finding out, and is no healthier for it
        ],
    )
    async def test_pauses_longer_after_each_death_that_follows_soon_or_is_a_refusal(
        self, make: Make, monkeypatch: pytest.MonkeyPatch, status: int, well_s: float, pauses: tuple[str, ...]
    ) -> None:
        for name, seconds in {"FIRST_PAUSE_S": 0.002, "LONGEST_PAUSE_S": 0.005, "WELL_S": well_s}.items():
            monkeypatch.setattr(supervisor, name, seconds)
        child = make(f"raise SystemExit({status})")
        child.restart = True
        await child.start()
        await said(child, f"exited with status {status}; starting it again in {pauses[-1]} s", pauses.count(pauses[-1]))
        await child.stop(60)
        assert list(child.lines)[: len(pauses)] == [
            f"exited with status {status}; starting it again in {pause} s" for pause in pauses
        ]

    async def test_goes_on_where_a_child_cannot_be_started_just_now(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.001)
        child = make("print('up')")
        await child.start()
        child.restart = True
        executable = sys.executable
        monkeypatch.setattr(sys, "executable", "/no/such/file")
        await said(child, "cannot be started; starting it again in 0.004 s")
        assert any("No such file" in line for line in child.lines)
        monkeypatch.setattr(sys, "executable", executable)
        count = list(child.lines).count("up")
        await said(child, "up", count + 2)
        assert await child.stop(60)

    async def test_is_given_up_at_once_when_told_to_stop_in_a_pause(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 60.0)
        monkeypatch.setattr(supervisor, "LONGEST_PAUSE_S", 60.0)
        child = make("pass")
        child.restart = True
        await child.start()
        await said(child, "exited with status 0; starting it again in 60 s")
        async with asyncio.timeout(PATIENCE_S):
            assert await child.stop(60)

    async def test_is_not_done_where_it_is_not_wanted(self, make: Make) -> None:
        child = make("raise SystemExit(7)")
        await child.start()
        assert await status(child) == 7


class TestGuard:
    async def test_gives_a_child_its_environment_descriptors_and_a_session_of_its_own(self, make: Make) -> None:
        ours, theirs = os.pipe()
        child = make(
            f"import os; os.write({theirs}, os.environ['WORD'].encode()); print(os.getsid(0) == os.getpid())",
            env={"WORD": "hello"},
            pass_fds=(theirs,),
        )
        await child.start()
        await said(child, "True")
        os.close(theirs)
        assert os.read(ours, 100) == b"hello"
        os.close(ours)

    def test_does_not_start_what_nobody_waits_for(self, tmp_path: Path) -> None:
        argv = [sys.executable, "-I", "-S", GUARD, "1", "9", *PYTHON, f"open({str(tmp_path / 'x')!r}, 'w')"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "is gone" in done.stderr
        assert not (tmp_path / "x").exists()

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
    def test_ends_the_children_of_a_parent_that_was_killed(self, tmp_path: Path) -> None:
        parent = subprocess.Popen(
            [sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
        parent.wait()
        give_up = time.monotonic() + 60
        while not all(map(gone, pids)):
            assert time.monotonic() < give_up, "children outlived their parent"
            time.sleep(0.01)
        assert (tmp_path / "graceful").exists()  # the one that is sent SIGTERM had the time to say so


#: A parent of one child that is killed with it and ignores SIGTERM, and of one that may end as it likes.
ORPHANS = f"""
import asyncio, signal, sys
from workers.processes.supervisor import Child, Program

GRACEFUL = '''
import signal, sys, time
def leave(*_):
    open(sys.argv[1] + "/graceful", "w")
    sys.exit()
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True:
    time.sleep(0.02)
'''

async def main():
    children = [
        Child(Program("stubborn", {[*PYTHON, STUBBORN]!r}), lambda *_: None),
        Child(Program("graceful", [*{PYTHON!r}, GRACEFUL, sys.argv[1]], last=signal.SIGTERM), lambda *_: None),
    ]
    for child in children:
        await child.start()
        while "up" not in child.lines:
            await asyncio.sleep(0.005)
        print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (0, "exited with status 0"),
        (2, "exited with status 2"),
        (-9, "was ended by SIGKILL"),
        (-99, "was ended by signal 99"),
    ],
)
def test_an_exit_status_is_put_in_words(status: int, words: str) -> None:
    assert ended(status) == words
