"""A warm process that becomes the next worker: it has imported everything, and has neither model nor threads.

    Standby.start -> process imports, at low priority -> "ready" -> waits
    Child._spawn -> Standby.take -> argv, environment, output -> process: has anything changed? -> it is the worker

`Standby` starts the process and hands programs over; `standby_process` is what runs there, with the list of imports.

The first one of `penstock up` begins with the first line of that command (`workers.processes.ahead`), at full priority.
The first worker is handed to it before it is ready, and becomes it as soon as it is.

What happens when a process dies:

| who dies | when | then |
| --- | --- | --- |
| supervisor | at any time | the kernel kills the standby (`guard`); elsewhere it reads an end of file and exits |
| standby | before it is taken | the next worker starts normally; after that start there is a new standby |
| standby | between the request and its answer | the supervisor reads an end of file and starts the worker normally |
| standby, stuck | it is ready, and does not answer within ANSWER_S | it is killed and reaped; a normal start |
| standby | after its answer | it was the worker by then, and is restarted as any |
| begun ahead | before `Standby` has it | `Standby` reads an end of file, and the first worker starts normally |
| begun ahead | stuck in its imports | a worker would be, too: there is no limit, and Ctrl-C kills it |
| `penstock up` | it refuses an option, before there is a `Standby` | it kills and reaps what it began |

A worker is never started twice: a standby whose answer did not come is dead before the normal start begins.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from workers.processes.ahead import STANDBY, Ahead
from workers.processes.standby_process import MODULES
from workers.processes.supervisor import Child, Process, Program

#: The standby ends when no worker was started or ended for this long (s).
IDLE_S: Final = 3600.0
#: Pause (s) between a worker's start and the next standby's, which would disturb it.
AGAIN_S: Final = 5.0
#: Time (s) in which a standby takes a program, or is killed.
ANSWER_S: Final = 2.0
#: The priority of its imports, the lowest: what runs already goes first.
NICENESS: Final = 19
READY: Final = "ready"
ACCEPTED: Final = "taken"


class Standby:
    """One warm process, which becomes a program whose command line begins with `argv`: a worker's.

    `say(name, line)` gets what happens to it. It ends when nothing came for `idle_s` seconds. `imports`: the modules
    that it imports. `ahead`: the first one, which was started before; a program waits for its imports. `more`: whether
    others follow.
    """

    def __init__(
        self,
        argv: Sequence[str],
        say: Callable[[str, str], None],
        *,
        idle_s: float = IDLE_S,
        again_s: float = AGAIN_S,
        imports: Sequence[str] = MODULES,
        ahead: Ahead | None = None,
        more: bool = True,
    ) -> None:
        self._argv = tuple(argv)
        self._say = say
        self._idle_s = idle_s
        self._again_s = again_s
        self._imports = tuple(imports)
        self._ahead = ahead
        self._more = more
        self._waiting: _Waiting | None = None
        self._on = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pid(self) -> int | None:
        """The id of the process that waits or is being made ready; None if there is none."""
        return None if self._waiting is None else self._waiting.child.pid

    @property
    def ready(self) -> bool:
        """Whether a process waits for a program."""
        return self._waiting is not None and self._waiting.ready

    async def start(self) -> None:
        """Start the process, and from now on another after each use. Returns before it is ready."""
        self._on = True
        await self._begin()

    async def stop(self) -> None:
        """End the process. No other is started."""
        self._on = False
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await self._end()

    def used(self) -> None:
        """Note that a worker starts or ends: a standby is worth its memory for another `idle_s`."""
        if not self._on or not self._more:
            return
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        if self.pid is None:
            self._timer = loop.call_later(self._again_s, self._run, self._begin)
        else:
            self._timer = loop.call_later(self._idle_s, self._run, self._end)

    async def take(self, program: Program, output: int) -> Process | None:
        """Hand a program over; `output` becomes its stdout and stderr.

        Returns None where it has to be started normally: soon, but for one that was started ahead and does not get
        ready.
        """
        waiting = self._waiting
        if waiting is None or not (waiting.ready or waiting.ahead) or not self._fits(program):
            self.used()
            return None
        self._waiting = None
        self.used()
        try:
            answer = await waiting.hand_over(program, output)
        except BaseException:
            waiting.child.order(signal.SIGKILL)
            raise
        finally:
            waiting.socket.close()
        if answer == ACCEPTED:
            return waiting.child.process
        await waiting.child.stop(ANSWER_S, signal.SIGKILL)
        self._say("standby", f"{answer}; {program.name} is started without it")
        return None

    def _fits(self, program: Program) -> bool:
        """Whether the standby can become this program: nothing in it is given by a normal start alone."""
        same = tuple(program.argv[: len(self._argv)]) == self._argv
        return same and not program.pass_fds and program.last is signal.SIGKILL

    def _run(self, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = asyncio.create_task(step())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _begin(self) -> None:
        if self._on and self.pid is None:
            ahead, self._ahead = self._ahead, None
            try:
                self._waiting = await _started(self._imports, self._say) if ahead is None else _kept(ahead, self._say)
            except OSError as error:  # a system without a standby is slower, not broken
                self._say("standby", f"cannot be started: {error}")
            self.used()

    async def _end(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.first_line.cancel()  # a loop that reads from a closed socket would mistake another one for it
            await asyncio.wait((waiting.first_line,))
            waiting.socket.close()
            await waiting.child.stop(ANSWER_S, signal.SIGKILL)


@dataclass(slots=True)
class _Waiting:
    """A standby process and our end of its socket."""

    child: Child
    socket: socket.socket
    first_line: asyncio.Task[str]
    ahead: bool = False
    """Whether a program may be handed to it before it is ready."""

    @property
    def ready(self) -> bool:
        return self.child.pid is not None and self.first_line.done() and self.first_line.result() == READY

    async def hand_over(self, program: Program, output: int) -> str:
        """Send the program and read the answer; a reason to start it normally is also one."""
        message = {"argv": program.argv, "env": {**os.environ, **program.env}}
        data = json.dumps(message).encode("utf-8", "surrogateescape")
        loop = asyncio.get_running_loop()
        try:
            socket.send_fds(self.socket, [struct.pack("!I", len(data))], [output])
            await self.first_line
            async with asyncio.timeout(ANSWER_S):
                await loop.sock_sendall(self.socket, data)
                return await _line(self.socket) or "the standby died"
        except TimeoutError:
            return f"the standby did not answer within {ANSWER_S:g} s"
        except OSError as error:
            return f"the standby is gone: {error}"


async def _started(imports: Sequence[str], say: Callable[[str, str], None]) -> _Waiting:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    argv = [*STANDBY, str(theirs.fileno()), str(NICENESS), *imports]
    child = Child(Program("standby", argv, pass_fds=(theirs.fileno(),)), say)
    try:
        await child.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return _Waiting(child, ours, asyncio.create_task(_line(ours), name="standby gets ready"))


def _kept(ahead: Ahead, say: Callable[[str, str], None]) -> _Waiting:
    child = Child(Program("standby", STANDBY), say)
    child.adopt(Begun(ahead.process))
    first_line = asyncio.create_task(_line(ahead.socket), name="standby gets ready")
    return _Waiting(child, ahead.socket, first_line, ahead=True)


async def _line(ours: socket.socket) -> str:
    """Reads the next line; empty if the process is gone."""
    line = b""
    with suppress(OSError):
        while not line.endswith(b"\n"):
            more = await asyncio.get_running_loop().sock_recv(ours, 1024)
            if not more:
                return ""
            line += more
    return line.decode(errors="replace").strip()


class Begun:
    """A process that was not started by asyncio, as `asyncio.subprocess.Process` has it. Made on its loop."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._reap, args=(loop,), name=f"waits for {self.pid}", daemon=True).start()

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end. Returns its exit status."""
        await self._ended.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(self._ended.set)
