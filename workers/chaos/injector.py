"""Does to a system what a plan says, at its times, and writes down what it did.

plan -> (due) -> wait until it fits -> journal -> scene begins it -> ... -> scene ends it -> journal
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from producers.connection.connect import connect
from workers.chaos.checker.at_work import at_work
from workers.chaos.journal import Journal
from workers.chaos.plan import Fault, Plan
from workers.chaos.pulse import Pulse

#: How long a fault is put off while its target, or what should survive it, is not up (s).
PATIENCE_S = 60.0
#: What a process has sent arrives within this time (s) after it was held still.
UNDER_WAY_S = 0.05
#: Ends what a fault began.
Healing = Callable[[], None]


class Gone(Exception):
    """The target is not there, or what should be done to it could not be."""


class Handle(Protocol):
    """One process of the system. `process`: what it calls itself, where it has a lease."""

    name: str
    role: str

    @property
    def process(self) -> str:
        """Of the process that runs now."""

    def kill(self) -> None:
        """SIGKILL; whoever looks after it starts another."""

    def pause(self) -> None:
        """SIGSTOP."""

    def resume(self) -> None:
        """SIGCONT."""

    def drain(self) -> None:
        """SIGTERM; whoever looks after it starts another."""


class Scene(Protocol):
    """A system that faults may befall."""

    @property
    def handles(self) -> Mapping[str, Handle]:
        """Its processes, by name."""

    def fits(self, fault: Fault) -> bool:
        """Whether the target is up, and what should outlive it, too."""

    def begin(self, fault: Fault) -> Healing | None:
        """Of a kind that is not about a process alone. What ends it, where it lasts."""

    def after(self, fault: Fault) -> None:
        """A process was told to end: where nobody else does, start it again."""


class Injector:
    """`open_tasks()` tells the ids of tasks that have not ended; `broker` and `store` are asked who has them; `pulse`
    is told which streams stand still."""

    def __init__(
        self,
        scene: Scene,
        journal: Journal,
        broker: str,
        store: str,
        open_tasks: Callable[[], Iterable[str]],
        pulse: Pulse,
    ) -> None:
        self._scene, self._journal, self._open_tasks, self._pulse = scene, journal, open_tasks, pulse
        self._broker = connect(broker, timeout=2, decode=True)
        self._store = connect(store, timeout=2, decode=True)
        self._healings: list[tuple[float, int, Fault, Healing]] = []
        self._order = itertools.count()
        self._late = 0.0

    def run(self, plan: Plan, say: Callable[[str], None] = lambda line: None) -> None:
        """Returns when all faults are over, but not before the plan's time is. Where one had to wait, those after it
        come as much later."""
        began = time.monotonic()
        try:
            for number, fault in enumerate(plan.faults, 1):
                self._sleep_until(began + fault.at + self._late)
                due = time.monotonic()
                while not self._scene.fits(fault) and time.monotonic() < due + PATIENCE_S:
                    self._sleep_until(time.monotonic() + 0.05)
                self._late += time.monotonic() - due
                say(f"{number}/{len(plan.faults)} at {time.monotonic() - began:.1f} s: {_said(fault)}")
                try:
                    self._begin(fault)
                except Gone as gone:
                    self._journal.write("missed", kind=fault.kind, target=fault.target, why=str(gone))
                    say(f"missed: {gone}")
            self._sleep_until(began + plan.seconds + self._late)
        finally:
            self.heal()

    def heal(self) -> None:
        """End all that lasts."""
        while self._healings:
            self._end(*heapq.heappop(self._healings)[2:])

    def _sleep_until(self, when: float) -> None:
        while True:
            now = time.monotonic()
            if self._healings and self._healings[0][0] <= now:
                self._end(*heapq.heappop(self._healings)[2:])
                continue
            if now >= when:
                return
            due = self._healings[0][0] if self._healings else when
            time.sleep(max(0.0, min(due, when) - now))

    def _begin(self, fault: Fault) -> None:
        handle, healing, about = self._scene.handles.get(fault.target), None, dict[str, Any]()
        if handle is not None:
            about = {"process": handle.process, "role": handle.role}
        if handle is not None and fault.kind == "kill":
            with _going_on(handle):
                if handle.role == "worker":
                    about["stood"] = round(time.monotonic(), 4)
                    with suppress(Gone):  # held still first, where that can be: what it is at is known for certain then
                        handle.pause()
                    time.sleep(UNDER_WAY_S)
                    about |= at_work(self._broker, self._store, handle.process, self._open_tasks())
                self._journal.write("fault", kind=fault.kind, target=fault.target, **about)
                handle.kill()
            self._pulse.stopped(about.get("stopped", {}))
            self._scene.after(fault)
            return
        self._journal.write(
            "fault", kind=fault.kind, target=fault.target, seconds=fault.seconds, amount=fault.amount, **about
        )
        if handle is not None and fault.kind == "pause":
            with _going_on(handle):
                handle.pause()
            healing = handle.resume
        elif handle is not None and fault.kind == "drain":
            handle.drain()
            self._scene.after(fault)
        else:
            healing = self._scene.begin(fault)
        if healing is not None:
            when = time.monotonic() + fault.seconds
            heapq.heappush(self._healings, (when, next(self._order), fault, healing))

    def _end(self, fault: Fault, healing: Healing) -> None:
        try:
            healing()
        except Gone:  # it was killed meanwhile
            self._journal.write("missed", kind=f"end of {fault.kind}", target=fault.target)
        else:
            self._journal.write("healed", kind=fault.kind, target=fault.target)


@contextmanager
def _going_on(handle: Handle) -> Iterator[None]:
    """What may have been held still goes on where this is interrupted, or what was to come next could not be done."""
    try:
        yield
    except BaseException:
        with suppress(Gone):
            handle.resume()
        raise


def _said(fault: Fault) -> str:
    lasts = f" for {fault.seconds:g} s" if fault.seconds else ""
    amount = f" ({fault.amount:g})" if fault.amount else ""
    return f"{fault.kind} {fault.target}{amount}{lasts}"
