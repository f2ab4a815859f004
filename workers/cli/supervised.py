"""Supervises several processes of one kind: a worker for each GPU, or gateways on one socket.

    start all -> (a child dies -> back-off -> start it again, or give it up) ... -> told to stop -> all stop -> exit

What happens when a process dies:

- this process: the kernel kills its children (see `guard`). Their leases lapse, and other workers take their tasks. A
  child that was being forked finds its parent gone and exits.
- a child before it serves, or soon after: it is restarted after a growing pause, and given up after MOST_DEATHS such
  deaths in a row. A child that is refused (a setting, a model) before it ever served is given up at once. After it has
  served, a refusal has another cause (a restarting broker) and passes.
- a child that serves: its lease is ended for it (docs/how/worker.md). It is restarted with the same name, as a new
  incarnation.
- a child that another process told to stop: it exits with 0. A worker stays stopped, a gateway is restarted.
- a child while all stop: it is not restarted, and its status counts.

The others go on without a child that was given up. When none is left, this process ends with the worst status.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from workers.cli.exits import Exit
from workers.processes.notify import notify_ready
from workers.processes.supervisor import HAND_BACK_S, STAYS_STOPPED, WELL_S, Child, Program
from workers.runtime.signals import signal_queue

#: Deaths in a row, without WELL_S seconds of service between, after which a child is given up (some minutes).
MOST_DEATHS: Final = 8

Say = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of the processes."""

    name: str
    at_once: signal.Signals
    """The signal at which they stop without draining any longer."""
    hands_back: str
    """What they do then, for people."""
    returns: bool = False
    """Whether one that ends well is started again, unless all are to stop."""
    stopping: Callable[[], None] = lambda: None
    """Called when all are to stop; perhaps more than once."""


WORKERS: Final = Kind("worker", signal.SIGQUIT, "hand back what they run, and stop")


async def supervise(programs: Sequence[Program], say: Say, drain: float, kind: Kind = WORKERS) -> int:
    """Run the programs until all are stopped or given up. Returns the exit status.

    On SIGTERM, SIGINT or SIGHUP they drain for at most `drain` seconds. On SIGQUIT, or a second signal of any kind,
    they stop at once, as their kind does. A third signal kills them.
    """
    received = signal_queue()
    fleet = _Fleet(programs, say, kind)
    try:
        await fleet.start()
        return await _until_all_end(fleet, received, drain)
    finally:
        await fleet.close()


async def _until_all_end(fleet: _Fleet, received: asyncio.Queue[signal.Signals], drain: float) -> int:
    ended = asyncio.gather(*(child.keeper for child in fleet.children if child.keeper is not None))
    signals, killed, limit, kind = 0, False, None, fleet.kind
    next_signal = asyncio.create_task(received.get())
    while True:
        await asyncio.wait((ended, next_signal), timeout=limit, return_when="FIRST_COMPLETED")
        if ended.done():
            next_signal.cancel()
            return Exit.INTERRUPTED if killed else fleet.worst()
        if next_signal.done():
            signals += 1
            sig, next_signal = next_signal.result(), asyncio.create_task(received.get())
            at_once = sig is signal.SIGQUIT or signals > 1
            if signals > 2:
                fleet.order(signal.SIGKILL, f"{sig.name} again: killing the {kind.name}s")
                killed = True
            elif at_once:
                fleet.order(kind.at_once, f"{sig.name}: the {kind.name}s {kind.hands_back}")
                limit = HAND_BACK_S
            else:
                fleet.order(signal.SIGTERM, f"{sig.name}: the {kind.name}s drain, for at most {drain:g} s")
                limit = drain + HAND_BACK_S
        else:
            fleet.order(signal.SIGKILL, f"not stopped within {limit:g} s: killing the {kind.name}s that are left")
            killed, limit = True, None


class _Fleet:
    """The child processes."""

    def __init__(self, programs: Sequence[Program], say: Say, kind: Kind) -> None:
        self.kind = kind
        self._say = say
        self._ordered: list[int] = []
        self._told_ready = False
        self.children = [self._child(program) for program in programs]

    def _child(self, program: Program) -> Child:
        child = Child(replace(program, notifies=True), self._say)
        child.restart = True
        child.give_up = lambda status, deaths: self._hopeless(child, status, deaths)
        child.on_serve = lambda: self._on_serve(child)
        return child

    async def start(self) -> None:
        """Start all children. Raises OSError if one cannot be run."""
        for child in self.children:
            await child.start()

    def order(self, sig: signal.Signals, why: str) -> None:
        """Send a signal to all children, also to those in a pause before a restart."""
        self._say(self.kind.name, why)
        self.kind.stopping()
        self._ordered.append(-sig)
        for child in self.children:
            child.order(sig)

    def worst(self) -> int:
        """The worst exit status. Death by our own signal counts as 0; death by another signal as a failure."""
        statuses = [child.keeper.result() for child in self.children if child.keeper is not None]
        return max(0 if status in self._ordered else Exit.TASK_FAILED if status < 0 else status for status in statuses)

    async def close(self) -> None:
        """Kill the children that still run."""
        await asyncio.gather(*(child.stop(0.0, signal.SIGKILL) for child in self.children))

    def _on_serve(self, child: Child) -> None:
        self._say(child.program.name, f"serves (process {child.pid})")
        if all(sibling.served for sibling in self.children) and not self._told_ready:
            self._told_ready = True
            notify_ready()

    def _hopeless(self, child: Child, status: int, deaths: int) -> str | None:
        if status == 0 and not self.kind.returns:
            return STAYS_STOPPED
        if status == Exit.REFUSED:
            return None if child.served else "it was refused and would be refused again: given up"
        if deaths >= MOST_DEATHS:
            return f"death {deaths} in a row without {WELL_S:g} s of service between: given up, see its last output"
        return None
