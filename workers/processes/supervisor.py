"""Keeps child processes running and stops them in order.

    start -> running -> exited -> (back-off, unless it served and a standby waits) -> running ...        until `stop`
                     \\-> `keeper` ends with the exit status, where restarting is not wanted (yet)

Each child has its own session: Ctrl-C in the terminal reaches only this process, which stops its children in order. A
child dies with this process, also when this process is killed (see `guard`).

A worker's leases are ended with its process, so that other workers take its tasks over at once: only who has waited for
a process (waitpid) knows that it is gone. docs/how/deaths.md has what happens when this process dies between two calls.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from redis.exceptions import RedisError

from producers.broker.connect import connect_broker, control_url
from producers.connection.connect import connect_async
from producers.contract import keys
from workers.errors import REFUSED
from workers.processes import guarded
from workers.processes.notify import Readiness

#: Pause (s) before a child is restarted. It doubles with each death that follows soon after a start.
FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 10.0
#: A child that served this long (s) was healthy: its next death counts as the first again.
WELL_S: Final = 20.0
#: Time (s) after the drain timeout in which a worker hands tasks back. It needs at most 2 s of it
#: (`workers.runtime.drain`).
HAND_BACK_S: Final = 5.0
#: Last lines of a child's output, kept for failure messages.
LINES: Final = 200
#: The reason not to restart a worker that exited with 0.
STAYS_STOPPED: Final = "told to stop by another process; it stays stopped"


@dataclass(frozen=True, slots=True)
class Program:
    """A program to run.

    `last`: the signal that it gets when this process dies. `notifies`: the program reports that it serves, and its
    leases, as sd_notify(3) has it; without it, a running program counts as serving. `env`: for leases also their
    servers' URLs.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()
    last: signal.Signals = signal.SIGKILL
    notifies: bool = False


class Process(Protocol):
    """A process, as `asyncio.subprocess.Process` has it."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...


class Warm(Protocol):
    """Processes that have imported what programs need (`workers.processes.standby`)."""

    async def take(self, program: Program, output: int) -> Process | None:
        """Make one of them the program, with this output; None: it has to be started normally."""

    def used(self) -> None:
        """Note that a program has ended."""

    @property
    def ready(self) -> bool:
        """Whether one waits for a program."""


class Child:
    """A child process that runs one program. `say(name, line)` gets its output and what happens to it.

    `standby`: processes that may become the program.

    `restart`: whether it is started again when it exits; may be set at any time. `give_up(status, deaths)` is called
    for each exit that was not ordered; it returns a reason not to restart, or None. `deaths` counts deaths in a row
    without WELL_S seconds of service between them. `on_serve` is called for each process that serves.
    """

    def __init__(self, program: Program, say: Callable[[str, str], None], standby: Warm | None = None) -> None:
        self.program = program
        self._standby = standby
        self.restart = False
        self.give_up: Callable[[int, int], str | None] = lambda status, deaths: None
        self.on_serve: Callable[[], None] = lambda: None
        self.served = False
        """Whether any of its processes has served, not only the current one."""
        self.status = ""
        """The status line of the last process that served, for people."""
        self.starting = ""
        """What a process is at that does not serve yet, for people; empty where it has not said so."""
        self._serves_since: float | None = None
        self.lines: deque[str] = deque(maxlen=LINES)
        """The last lines of its output and of what happened to it."""
        self.output: deque[str] = deque(maxlen=LINES)
        """The last lines that the latest process wrote; another object for each."""
        self._say = say
        self.process: Process | None = None
        self._relays: set[asyncio.Task[None]] = set()
        self._leases: list[str] = []
        self._ending: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self._ordered: signal.Signals | None = None
        self._spawning = False
        self._readiness: Readiness | None = None
        self.keeper: asyncio.Task[int] | None = None

    @property
    def serves(self) -> bool:
        """Whether the current process serves; of one that has just died: whether it did."""
        return self._serves_since is not None

    @property
    def pid(self) -> int | None:
        """The process id; None while it does not run."""
        running = self.process is not None and self.process.returncode is None
        return self.process.pid if running and self.process is not None else None

    async def start(self) -> None:
        """Start the program. Raises OSError if it cannot be run."""
        if self.program.notifies:
            self._readiness = Readiness(self._serves, self._leased, self._starts)
            variable = {"NOTIFY_SOCKET": self._readiness.address}
            self.program = replace(self.program, env={**self.program.env, **variable})
        try:
            await self._spawn()
        except BaseException:
            self._close_socket()
            raise
        self._begin_to_keep()

    def adopt(self, process: Process) -> None:
        """Keep a process that runs the program already, and whose output goes elsewhere."""
        self.process = process
        self._begin_to_keep()

    def _begin_to_keep(self) -> None:
        self.keeper = asyncio.create_task(self._keep(), name=f"keep {self.program.name}")

    def order(self, sig: signal.Signals) -> None:
        """Send a signal to stop it and do not restart it. May be called again with another signal."""
        self._ordered = sig
        self._stopping.set()
        self._send(sig)

    async def stop(self, grace: float, sig: signal.Signals = signal.SIGTERM) -> bool:
        """Order it to stop, and kill it after `grace` seconds. Returns whether it stopped without being killed."""
        if self.keeper is None:
            return True
        self.order(sig)
        done, _ = await asyncio.wait((self.keeper,), timeout=grace)
        if not done:
            self._log(f"did not stop within {grace:g} s: killed")
            self.order(signal.SIGKILL)
            await asyncio.wait((self.keeper,))
        if pending := self._relays | self._ending:
            await asyncio.wait(pending, timeout=1.0)
        return bool(done)

    def _starts(self, status: str) -> None:
        self.starting = status

    def _serves(self, status: str = "") -> None:
        self.served, self.status, self.starting = True, status, ""
        self._serves_since = time.monotonic()
        if not self._spawning:
            self.on_serve()

    def _leased(self, lease: str, sender: int | None) -> None:
        """Note a lease of the current process: not of another, which may live on."""
        if sender is None or (self.process is not None and sender == self.process.pid):
            self._leases.append(lease)

    def _end_leases(self, status: int) -> None:
        """Ends the leases of a process that has ended with an error. One that ended well gave its leases up itself."""
        if self._readiness is not None:
            self._readiness.read()  # its last notifications
        leases, self._leases = self._leases, []
        if status != 0 and leases:
            task = asyncio.create_task(self._end(leases))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _end(self, leases: Sequence[str]) -> None:
        try:
            count = await end_leases(leases, self.program.env)
            self._log(f"its lease is ended: returned its {count} deliveries to the queue")
        except (RedisError, OSError, ValueError, KeyError) as error:
            self._log(f"its lease is left to others, or lapses: {error}")

    async def _keep(self) -> int:
        """Restart the child until it is stopped or given up. Returns the last exit status."""
        try:
            return await self._until_it_ends()
        finally:
            self._close_socket()

    def _close_socket(self) -> None:
        if self._readiness is not None:
            self._readiness.close()

    async def _until_it_ends(self) -> int:
        deaths = 0
        while True:
            assert self.process is not None
            status = await self.process.wait()
            self._end_leases(status)
            if self._standby is not None:
                self._standby.used()
            if self._stopping.is_set() or not self.restart:
                return status
            since = self._serves_since
            # A refused child never served, however long it took, e.g. to load a model of many GB.
            well = since is not None and time.monotonic() - since >= WELL_S and status != REFUSED
            deaths = 1 if well else deaths + 1
            ending = ended(status)
            reason = self.give_up(status, deaths)
            if reason is not None:
                self._log(f"{ending}; {reason}")
                return status
            # Its callers wait. A program that dies again and again takes the standby once, and then pauses.
            at_once = deaths == 1 and since is not None and self._standby is not None and self._standby.ready
            while not await self._again(f"{ending}; starting it again", 0 if at_once else deaths):
                if self._stopping.is_set():
                    return status
                at_once, deaths, ending = False, deaths + 1, "cannot be started"

    async def _again(self, reason: str, deaths: int) -> bool:
        """Start it after a pause; without `deaths` at once, by the standby. Returns False if it was told to stop
        meanwhile or cannot be run now."""
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (deaths - 1)) if deaths else 0.0
        self._log(f"{reason} in {pause:g} s" if deaths else f"{reason} at once, by the standby")
        if deaths:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
                return False
        try:
            await self._spawn()
        except OSError as error:  # e.g. no file descriptor or memory left, which may pass
            self._log(f"cannot be started: {error}")
            return False
        return True

    async def _spawn(self) -> None:
        self._serves_since, self.starting, self.output = None, "", deque(maxlen=LINES)
        ours, theirs = os.pipe()
        self._spawning = True
        try:
            self.process = await self._from_standby(theirs) or await self._execute(theirs)
        except BaseException:
            os.close(ours)
            raise
        finally:
            self._spawning = False
            os.close(theirs)
        if not self.program.notifies:
            self._serves()
        elif self._serves_since is not None:  # it said so before its process was known here
            self.on_serve()
        relay = asyncio.create_task(self._relay(ours, self.output))
        self._relays.add(relay)
        relay.add_done_callback(self._relays.discard)
        if self._ordered is not None:  # told to stop while it was being started
            self._send(self._ordered)

    async def _from_standby(self, output: int) -> Process | None:
        return None if self._standby is None else await self._standby.take(self.program, output)

    async def _execute(self, output: int) -> Process:
        program = self.program
        return await asyncio.create_subprocess_exec(
            *guarded(program.argv, program.last),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **program.env},
            pass_fds=program.pass_fds,
            start_new_session=True,
        )

    def _send(self, sig: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            # asyncio's send_signal may reap one that has just exited (CPython before 3.13): its status would be lost.
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, sig)

    async def _relay(self, pipe: int, output: deque[str]) -> None:
        """Relay output from our own pipe: `Process.wait` would wait until grandchildren close asyncio's pipe, too."""
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", 0)
        )
        try:
            remainder = b""
            while chunk := await reader.read(1 << 16):
                *lines, remainder = (remainder + chunk).split(b"\n")
                if len(remainder) > 1 << 16:  # too long for one line: pass it on
                    lines, remainder = [*lines, remainder], b""
                for line in lines:
                    self._pass_on(line, output)
            if remainder:
                self._pass_on(remainder, output)
        finally:
            transport.close()

    def _pass_on(self, line: bytes, output: deque[str]) -> None:
        output.append(line.decode(errors="replace"))
        self._log(output[-1])

    def _log(self, line: str) -> None:
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


async def end_leases(leases: Sequence[str], env: Mapping[str, str]) -> int:
    """End these incarnations, whose process has ended; `env` has its servers' URLs. Returns the number of deliveries
    that went back to their queues. Raises redis errors, OSError and ValueError; then the leases lapse."""
    broker_url = env["BROKER_URL"]
    store_url = env.get("STORE_URL") or broker_url
    count = 0
    # The store's first: while it stands, CLAIM answers `busy`.
    for url in dict.fromkeys((store_url, control_url(broker_url, store_url))):
        async with connect_async(url) as server:
            await server.delete(*map(keys.lease, leases))
    async with aclosing(connect_broker(broker_url, store_url)) as broker:
        for lease in leases:
            count += max(0, await broker.reap(lease))
    return count
