"""Carries out a plan's faults at their times, writes each one to a journal, and notes when stopped streams resume.

plan -> (due) -> wait until it fits -> journal -> scene begins it -> ... -> scene ends it -> journal
`Pulse`: stopped(ids) -> (compare lengths in the store many times a second, while any is stopped) -> journal: `resumed`
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, Protocol

from redis.exceptions import RedisError

from producers.connection.connect import connect
from workers.trials.chaos.checker.case import Journal
from workers.trials.chaos.checker.rest import at_work
from workers.trials.chaos.plan import Fault, Plan

#: Longest delay (s) of a fault whose target, or the process that must survive it, is not up.
PATIENCE_S = 60.0
#: Time (s) in which a stopped process's sent data arrives.
UNDER_WAY_S = 0.05
#: A function that ends a lasting fault.
Healing = Callable[[], None]
#: Time between two looks (s).
EVERY_S: Final = 0.05
#: Time (s) after which a stopped stream is no longer watched: it may be compacted soon.
LONG_S: Final = 120.0


class Gone(Exception):
    """The target does not exist, or the fault could not be done to it."""


class Handle(Protocol):
    """One process of the system. `process`: its own name, as in its lease if it has one."""

    name: str
    role: str

    @property
    def process(self) -> str:
        """The name of the process that runs now."""

    def kill(self) -> None:
        """Send SIGKILL. Its supervisor starts another."""

    def pause(self) -> None:
        """Send SIGSTOP."""

    def resume(self) -> None:
        """Send SIGCONT."""

    def drain(self) -> None:
        """Send SIGTERM. Its supervisor starts another."""


class Scene(Protocol):
    """A system that faults can be injected into."""

    @property
    def handles(self) -> Mapping[str, Handle]:
        """The system's processes, by name."""

    def fits(self, fault: Fault) -> bool:
        """Whether the target is up, and also the processes that must survive the fault."""

    def begin(self, fault: Fault) -> Healing | None:
        """Begin a fault that concerns more than one process. Returns what ends it, or None."""

    def after(self, fault: Fault) -> None:
        """Restart a process that was ended, if it has no supervisor."""


class Injector:
    """Injects a plan's faults into a scene.

    `open_tasks()` returns the ids of tasks that have not ended. `broker` and `store` show which worker has them.
    `pulse` learns which streams have stopped.
    """

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
        """Carry out the plan. Returns when all faults are over and the plan's time has passed.

        If a fault had to wait, those after it come as much later.
        """
        began = time.monotonic()
        try:
            for number, fault in enumerate(plan.faults, 1):
                self._sleep_until(began + fault.at + self._late)
                due = time.monotonic()
                while not self._scene.fits(fault) and time.monotonic() < due + PATIENCE_S:
                    self._sleep_until(time.monotonic() + 0.05)
                self._late += time.monotonic() - due
                say(f"{number}/{len(plan.faults)} at {time.monotonic() - began:.1f} s: {_described(fault)}")
                try:
                    self._begin(fault)
                except Gone as gone:
                    self._journal.write("missed", kind=fault.kind, target=fault.target, why=str(gone))
                    say(f"missed: {gone}")
            self._sleep_until(began + plan.seconds + self._late)
        finally:
            self.heal()

    def heal(self) -> None:
        """End all lasting faults."""
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
        handle = self._scene.handles.get(fault.target)
        fields = {} if handle is None else {"process": handle.process, "role": handle.role}
        if handle is not None and fault.kind == "kill":
            self._kill(fault, handle, fields)
            return
        self._journal.write(
            "fault", kind=fault.kind, target=fault.target, seconds=fault.seconds, amount=fault.amount, **fields
        )
        # Until its healing is listed, nobody else would end it.
        with _going_on(handle) if handle is not None and fault.kind == "pause" else nullcontext():
            healing = self._done_to(handle, fault) if handle is not None else self._scene.begin(fault)
            if healing is not None:
                when = time.monotonic() + fault.seconds
                heapq.heappush(self._healings, (when, next(self._order), fault, healing))

    def _done_to(self, handle: Handle, fault: Fault) -> Healing | None:
        if fault.kind == "pause":
            handle.pause()
            return handle.resume
        if fault.kind == "drain":
            handle.drain()
            self._scene.after(fault)
            return None
        return self._scene.begin(fault)

    def _kill(self, fault: Fault, handle: Handle, fields: dict[str, Any]) -> None:
        """A worker is paused first if possible: its work is then known for certain."""
        with _going_on(handle):
            if handle.role == "worker":
                fields["stood"] = round(time.monotonic(), 4)
                with suppress(Gone):
                    handle.pause()
                time.sleep(UNDER_WAY_S)
                fields |= at_work(self._broker, self._store, handle.process, self._open_tasks())
            self._journal.write("fault", kind=fault.kind, target=fault.target, **fields)
            handle.kill()
        self._pulse.stopped(fields.get("stopped", {}))
        self._scene.after(fault)

    def _end(self, fault: Fault, healing: Healing) -> None:
        try:
            healing()
        except Gone:  # the target was killed meanwhile
            self._journal.write("missed", kind=f"end of {fault.kind}", target=fault.target)
        else:
            self._journal.write("healed", kind=fault.kind, target=fault.target)


@contextmanager
def _going_on(handle: Handle) -> Iterator[None]:
    """Resumes a possibly paused process if the body fails or is interrupted."""
    try:
        yield
    except BaseException:
        with suppress(Gone):
            handle.resume()
        raise


def _described(fault: Fault) -> str:
    lasts = f" for {fault.seconds:g} s" if fault.seconds else ""
    amount = f" ({fault.amount:g})" if fault.amount else ""
    return f"{fault.kind} {fault.target}{amount}{lasts}"


class Pulse(threading.Thread):
    """The watching thread. `store`: the store's URL."""

    def __init__(self, store: str, journal: Journal) -> None:
        super().__init__(name="pulse", daemon=True)
        self._store = connect(store, timeout=2, decode=True)
        self._journal = journal
        self._still: dict[str, tuple[int, float]] = {}
        self._changed = threading.Condition()
        self._over = False

    def stopped(self, lengths: Mapping[str, int]) -> None:
        """Watch stopped streams: task id -> number of entries."""
        with self._changed:
            self._still |= {task_id: (length, time.monotonic()) for task_id, length in lengths.items()}
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        self.join()
        self._store.close()

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._still or self._over)
                if self._over:
                    return
                still = dict(self._still)
            self._look(still)
            with self._changed:
                self._changed.wait_for(lambda: self._over, EVERY_S)

    def _look(self, still: Mapping[str, tuple[int, float]]) -> None:
        try:
            with self._store.pipeline(transaction=False) as pipe:
                for task_id in still:
                    pipe.xlen(f"penstock:stream:{task_id}")
                lengths = pipe.execute()
        except RedisError:
            return
        now = time.monotonic()
        moved = {
            task_id for (task_id, (length, _)), is_now in zip(still.items(), lengths, strict=True) if is_now > length
        }
        for task_id in moved:
            self._journal.write("resumed", id=task_id, length=still[task_id][0])
        gone = moved | {task_id for task_id, (_, since) in still.items() if now > since + LONG_S}
        with self._changed:
            for task_id in gone:
                if self._still.get(task_id) == still[task_id]:  # otherwise it was stopped again meanwhile
                    del self._still[task_id]
