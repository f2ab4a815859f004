"""`penstock worker --gpus`: one worker process for each GPU, and this process above them.

    start all -> (a child dies -> back-off -> start it again, or give it up) ... -> told to stop -> all stop -> exit

Each child sees one GPU (CUDA_VISIBLE_DEVICES) and is a worker like any other, with a name and a lease of its own. This
process holds no lease and no model, and loads neither torch nor the driver.

What stands when a process dies between any two lines:

- this one, however: the kernel kills its children (see `guard`); their leases lapse, and others take their tasks up. A
  child that was being forked finds its parent gone, and never begins.
- a child before it serves, or soon after: it is started again after a pause that grows; after MOST_DEATHS such in a row
  it is given up. One that is refused (a setting, a model) before it ever served would be again: given up at once. Once
  it has served, what refuses it is elsewhere (a broker that restarts) and passes.
- a child that serves: its lease lapses as any worker's; it is started again with the same name, as a new incarnation.
- a child that somebody else told to stop exits with 0, and stays stopped.
- a child while all stop: it is not started again, and its status counts.

The others go on without one that was given up. When none is left this process ends; its status is the worst of theirs.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from workers.cli.exits import Exit
from workers.cli.gpus.choice import Chosen
from workers.cli.local.supervisor import HAND_BACK_S, TOLD, WELL_S, Child, Program
from workers.runtime.notify import notify_ready
from workers.runtime.signals import coming

#: Deaths in a row, none after it served for WELL_S seconds, after which a child is given up: some minutes, with pauses.
MOST_DEATHS: Final = 8

Say = Callable[[str, str], None]


def programs(
    gpus: Sequence[Chosen], argv: Sequence[str], env: Mapping[str, str], name: str, ports: Sequence[int | None]
) -> list[Program]:
    """Of one worker a GPU: `argv` is the command of one, to which its own name and port for probes are added."""
    found = []
    for gpu, port in zip(gpus, ports, strict=True):
        own = [] if port is None else ["--health-port", str(port)]
        env = {**env, "CUDA_VISIBLE_DEVICES": gpu.visible}
        found.append(Program(gpu.label, [*argv, *own, "--name", f"{name}.{gpu.label}"], env))
    return found


async def supervise(asked: Sequence[Program], say: Say, drain: float) -> int:
    """Run them until all are stopped or given up; the exit status of the whole.

    SIGTERM, SIGINT or SIGHUP: each drains, for `drain` seconds at most. SIGQUIT, or a second signal of any kind: each
    hands back at once. A third kills them.
    """
    came = coming()
    fleet = _Fleet(asked, say)
    try:
        await fleet.start()
        return await _until_all_end(fleet, came, drain)
    finally:
        await fleet.close()


async def _until_all_end(fleet: _Fleet, came: asyncio.Queue[signal.Signals], drain: float) -> int:
    ended = asyncio.gather(*(child.keeper for child in fleet.children if child.keeper is not None))
    signals, killed, limit = 0, False, None
    told = asyncio.create_task(came.get())
    while True:
        await asyncio.wait((ended, told), timeout=limit, return_when="FIRST_COMPLETED")
        if ended.done():
            told.cancel()
            return Exit.INTERRUPTED if killed else fleet.worst()
        if told.done():
            signals += 1
            sig, told = told.result(), asyncio.create_task(came.get())
            at_once = sig is signal.SIGQUIT or signals > 1
            if signals > 2:
                fleet.order(signal.SIGKILL, f"{sig.name} again: killing the workers")
                killed = True
            elif at_once:
                fleet.order(signal.SIGQUIT, f"{sig.name}: the workers hand back what they run, and stop")
                limit = HAND_BACK_S
            else:
                fleet.order(signal.SIGTERM, f"{sig.name}: the workers drain, for at most {drain:g} s")
                limit = drain + HAND_BACK_S
        else:
            fleet.order(signal.SIGKILL, f"not stopped within {limit:g} s: killing the workers that are left")
            killed, limit = True, None


class _Fleet:
    """The children, and the sockets by which they say that they serve."""

    def __init__(self, asked: Sequence[Program], say: Say) -> None:
        self._say = say
        self._sockets: list[socket.socket] = []
        self._ordered: list[int] = []
        self._told_ready = False
        self.children = [self._child(program) for program in asked]

    def _child(self, program: Program) -> Child:
        # One each, by a name that the kernel makes up and forgets with us.
        hears = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        hears.bind("")
        self._sockets.append(hears)
        address = "@" + hears.getsockname()[1:].decode()
        child = Child(replace(program, env={**program.env, "NOTIFY_SOCKET": address}, tells=True), self._say)
        child.restart = True
        child.give_up = lambda status, deaths: self._hopeless(child, status, deaths)
        asyncio.get_running_loop().add_reader(hears.fileno(), self._heard, child, hears)
        return child

    async def start(self) -> None:
        """Raises OSError where one cannot be run at all."""
        for child in self.children:
            await child.start()

    def order(self, sig: signal.Signals, why: str) -> None:
        """To all that run, and to those that are in a pause before they are started again."""
        self._say("worker", why)
        self._ordered.append(-sig)
        for child in self.children:
            child.order(sig)

    def worst(self) -> int:
        """Of all exit statuses. One that was ended by our signal before it could take it in did as it was told; any
        other that was ended by a signal has failed."""
        statuses = [child.keeper.result() for child in self.children if child.keeper is not None]
        return max(0 if status in self._ordered else Exit.TASK_FAILED if status < 0 else status for status in statuses)

    async def close(self) -> None:
        """Nothing of it is left."""
        await asyncio.gather(*(child.stop(0.0, signal.SIGKILL) for child in self.children))
        for hears in self._sockets:
            asyncio.get_running_loop().remove_reader(hears.fileno())
            hears.close()

    def _heard(self, child: Child, hears: socket.socket) -> None:
        with suppress(BlockingIOError):
            if b"READY=1" in hears.recv(4096).split(b"\n"):
                child.serves()
                self._say(child.program.name, f"serves (process {child.pid})")
                if all(one.served for one in self.children) and not self._told_ready:
                    self._told_ready = True
                    notify_ready()

    def _hopeless(self, child: Child, status: int, deaths: int) -> str | None:
        if status == 0:
            return TOLD
        if status == Exit.REFUSED:
            return None if child.served else "it was refused, and would be again: given up"
        if deaths >= MOST_DEATHS:
            return f"the {deaths}th time in a row without {WELL_S:g} s of service between: given up, see its last words"
        return None
