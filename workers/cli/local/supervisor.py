"""Child processes that are kept running, and are stopped in good order or not at all.

    start -> running -> exited -> (back-off) -> running ...        until `stop`
                     \\-> `keeper` ends with the exit status, where restarting is not wanted (yet)

A child has a session of its own: Ctrl-C in the terminal reaches only us, and we say who stops when. It dies with us,
also when we are killed (see `guard`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from workers.cli.exits import Exit

GUARD: Final = Path(__file__).with_name("guard.py")
#: Pause (s) before a child is started again: doubled for each death that follows soon on a start.
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0
#: A child that served for this long (s) was well; its next death is the first one again.
WELL_S: Final = 20.0
#: Beyond the drain time (s): what a worker may take to hand things back. It is gone within 2 s of it
#: (`workers.runtime.drain`).
HAND_BACK_S: Final = 5.0
#: Lines of a child's output that are kept, for when it fails.
KEPT: Final = 200
#: Why a worker that exited with 0 is left alone.
TOLD: Final = "told so by somebody else; it stays stopped"


@dataclass(frozen=True, slots=True)
class Program:
    """What to run. `last`: the signal that it gets when we die. `tells`: its owner hears from it when it serves, and
    calls `Child.serves`; else it is taken to serve as soon as it runs."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()
    last: signal.Signals = signal.SIGKILL
    tells: bool = False


class Child:
    """One program. `say(name, line)` is told what it prints, and what happens to it.

    `restart`: whether it is started again when it exits; it may be set at any time. `give_up(status, deaths)`: why it
    is not after all, if there is a reason; `deaths` are those in a row, with no good while between them. It is asked
    for each exit that nobody ordered.
    """

    def __init__(self, program: Program, say: Callable[[str, str], None]) -> None:
        self.program = program
        self.restart = False
        self.give_up: Callable[[int, int], str | None] = lambda status, deaths: None
        self.served = False
        """Some process of it, not only the one that runs now."""
        self._serves_since: float | None = None
        self.lines: deque[str] = deque(maxlen=KEPT)
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._ordered: signal.Signals | None = None
        self.keeper: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        running = self._process is not None and self._process.returncode is None
        return self._process.pid if running and self._process is not None else None

    async def start(self) -> None:
        """Raises OSError where it cannot be run."""
        await self._spawn()
        self.keeper = asyncio.create_task(self._keep(), name=f"keep {self.program.name}")

    def serves(self) -> None:
        """The process that runs now has said so."""
        self.served = True
        self._serves_since = time.monotonic()

    def order(self, sig: signal.Signals) -> None:
        """Tell it to stop; it will not be started again. May be called again, with another signal."""
        self._ordered = sig
        self._stopping.set()
        self._send(sig)

    async def stop(self, grace: float, sig: signal.Signals = signal.SIGTERM) -> bool:
        """Tell it to stop, and kill it if it has not after `grace` seconds. Whether it stopped by itself."""
        if self.keeper is None:
            return True
        self.order(sig)
        done, _ = await asyncio.wait((self.keeper,), timeout=grace)
        if not done:
            self._tell(f"did not stop within {grace:g} s: killed")
            self.order(signal.SIGKILL)
            await asyncio.wait((self.keeper,))
        if self._relays:
            await asyncio.wait(self._relays, timeout=1.0)
        return bool(done)

    async def _keep(self) -> int:
        """Ends with the last exit status: when told to stop, or where it is not to be restarted."""
        deaths = 0
        while True:
            assert self._process is not None
            status = await self._process.wait()
            if self._stopping.is_set() or not self.restart:
                return status
            since = self._serves_since
            # Who is refused never served, however long it took to find out: a model of many GB, say.
            well = since is not None and time.monotonic() - since >= WELL_S and status != Exit.REFUSED
            deaths = 1 if well else deaths + 1
            said = ended(status)
            reason = self.give_up(status, deaths)
            if reason is not None:
                self._tell(f"{said}; {reason}")
                return status
            while not await self._again(f"{said}; starting it again", deaths):
                if self._stopping.is_set():
                    return status
                deaths, said = deaths + 1, "cannot be started"

    async def _again(self, said: str, deaths: int) -> bool:
        """Start it after a pause; False where it was told to stop meanwhile, or cannot be run just now."""
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (deaths - 1))
        self._tell(f"{said} in {pause:g} s")
        with suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._stopping.wait()
            return False
        try:
            await self._spawn()
        except OSError as error:  # no descriptor or no memory left, say: that may pass
            self._tell(f"cannot be started: {error}")
            return False
        return True

    async def _spawn(self) -> None:
        program = self.program
        guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(int(program.last))]
        ours, theirs = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *guard,
                *program.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                env={**os.environ, **program.env},
                pass_fds=program.pass_fds,
                start_new_session=True,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._serves_since = None
        if not program.tells:
            self.serves()
        relay = asyncio.create_task(self._relay(ours))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)
        if self._ordered is not None:  # told to stop while it was being started
            self._send(self._ordered)

    def _send(self, sig: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):  # it has just exited
                self._process.send_signal(sig)

    async def _relay(self, pipe: int) -> None:
        """A pipe of our own: `Process.wait` would wait for asyncio's to be closed, by grandchildren too."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
        )
        try:
            rest = b""
            while chunk := await reader.read(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > 1 << 16:  # no line: do not wait for its end
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._tell(line.decode(errors="replace"))
            if rest:
                self._tell(rest.decode(errors="replace"))
        finally:
            transport.close()

    def _tell(self, line: str) -> None:
        self.lines.append(line)
        self._say(self.program.name, line)


def ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
