"""Turns of steps: engines in several processes share a device, one step at a time, by weight.

    take ─▶ nobody has the turn: it is ours      ─▶ steps, each charged to us ─▶ another is due: hand_over, wake it
         └▶ we wait, and are woken when we get it                             └▶ nothing to do: hand_over

Each engine is a member of a folder: it has an entry in the file `turns`, mapped into memory, which has the time served
to it divided by its weight (start-time fair queueing, Goyal et al. 1996). The turn goes to who waits with the least.
One who had nothing to do begins again where the last step began, so nobody saves up turns, and the others share what it
leaves. A member that makes `batches` hands over after each step if another kind of member waits: those wait for
at most one batch.

A member is woken by a byte in a FIFO of its own. A process that dies leaves a FIFO that nobody reads, at which the
others see that its turn has ended. The lock on the file is the kernel's (flock) and ends with its process, too. So
there is no state that a kill leaves behind, and no process that has to live for the others to go on.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Final

import numpy as np

from engine.errors import EngineError

#: Most members of a folder at a time.
MEMBERS: Final = 64
#: Time (s) between two looks of one who waits at whether the turn's holder has died.
LOOK_S: Final = 0.05
_NOBODY: Final = -1
_HEAD: Final = np.dtype([("begun", "i8"), ("holder", "i8"), ("clock", "f8")])
_MEMBER: Final = np.dtype([("waits", "i8"), ("batches", "i8"), ("weight", "f8"), ("served", "f8")])


class Turns:
    """One member. `take`, `charge`, `due` and `hand_over` are for one thread."""

    def __init__(self, folder: str | Path, weight: float, *, batches: bool = False) -> None:
        """Join the members of a folder of this machine. `weight`: the share of the device's time while all have steps.
        `batches`: see above. Raises EngineError if the folder cannot be used or is full."""
        self._folder = Path(folder)
        self.holds = False
        #: Seconds for which this member has waited for its turn, in all.
        self.waited_s = 0.0
        #: Since when it waits for its turn now (monotonic); None if it does not.
        self.waits_since: float | None = None
        self._since = 0.0
        try:
            self._file = os.open(self._folder / "turns", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EngineError(f"turns={str(folder)!r} cannot be used: {error}") from error
        try:
            self._join(weight, batches)
        except OSError as error:
            os.close(self._file)
            raise EngineError(f"turns={str(folder)!r} cannot be used: {error}") from error
        except BaseException:
            os.close(self._file)
            raise

    def _join(self, weight: float, batches: bool) -> None:
        size = _HEAD.itemsize + MEMBERS * _MEMBER.itemsize
        with self._lock():
            if os.fstat(self._file).st_size < size:
                os.pwrite(self._file, bytes(size), 0)  # not only made longer: a full disk is seen now
            self._memory = mmap.mmap(self._file, size)
            self._head = np.frombuffer(self._memory, _HEAD, 1)
            self._members = np.frombuffer(self._memory, _MEMBER, MEMBERS, _HEAD.itemsize)
            if not self._head["begun"][0]:
                self._head[0] = (1, _NOBODY, 0.0)
            self._member = next((k for k in range(MEMBERS) if not self._lives(k)), _NOBODY)
            if self._member == _NOBODY:
                raise EngineError(f"turns={str(self._folder)!r} has {MEMBERS} members already, the most")
            fifo = self._fifo(self._member)
            with suppress(FileExistsError):
                os.mkfifo(fifo, 0o600)
            # Open for both: reading alone would end whenever no other member has it open.
            self._woken = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            if self._holder == self._member:  # one that died with the turn
                self._head["holder"] = _NOBODY
            self._members[self._member] = (0, batches, weight, self._clock)

    # ---- the member's thread

    def take(self, cancelled: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn. Returns whether it had to wait; `holds` says whether it has the turn now, which it has
        unless it was cancelled."""
        if self.holds:
            return False
        with self._lock():
            mine = self._members[self._member]
            mine["served"] = max(mine["served"], self._clock)
            if self._holder == _NOBODY:
                self._grant(self._member)
            else:
                mine["waits"] = 1
        if self._has_turn():
            self.holds, self._since = True, monotonic()
            return False
        self.waits_since = began = monotonic()
        try:
            self.holds = self._wait(cancelled)
        finally:
            self.waits_since, self._since = None, monotonic()
            self.waited_s += self._since - began
        return True

    def _wait(self, cancelled: Callable[[], bool]) -> bool:
        """Wait until it has the turn. Returns False if it was cancelled before."""
        while not self._has_turn():
            if cancelled():
                self._withdraw()
                return False
            if not self._is_woken():
                self._look_at_holder()
        return True

    def charge(self) -> None:
        """Count the time since the turn was taken, or since the last call, as served."""
        now = monotonic()
        mine = self._members[self._member]
        self._head["clock"] = max(self._clock, self._served(self._member))
        mine["served"] += (now - self._since) / mine["weight"]
        self._since = now

    def due(self) -> bool:
        """Whether another is to have the turn now. Takes no lock: the memory is read as it is."""
        return bool(self._members["waits"].any()) and self._next() is not None

    def hand_over(self) -> None:
        """Give the turn to whoever waits with the least time served, or to nobody."""
        if not self.holds:
            return
        self.charge()
        self.holds = False
        with self._lock():
            self._pass_on()

    def close(self) -> None:
        """Leave. The turn passes to others."""
        self.hand_over()
        os.close(self._woken)
        os.close(self._file)

    # ---- who is next

    def _next(self) -> int | None:
        """The member that is to have the turn after a step of ours; None: we go on."""
        waiting, kinds = self._members["waits"], self._members["batches"]
        others = [int(k) for k in np.flatnonzero(waiting) if k != self._member]
        if kinds[self._member] and (urgent := [k for k in others if not kinds[k]]):
            return min(urgent, key=self._served)
        if not others:
            return None
        least = min(others, key=self._served)
        return least if self._served(least) <= self._served(self._member) else None

    def _served(self, member: int) -> float:
        return float(self._members["served"][member])

    def _pass_on(self) -> None:
        """Under the lock: the turn's holder gives it up, or has died."""
        head, members = self._head, self._members
        last = self._holder
        waiting = [int(k) for k in np.flatnonzero(members["waits"])]
        if last == self._member and (chosen := self._next()) is not None:
            waiting.sort(key=lambda k: (k != chosen, self._served(k)))
        else:
            waiting.sort(key=self._served)
        head["holder"] = _NOBODY
        for member in waiting:
            if self._grant(member):
                return

    def _grant(self, member: int) -> bool:
        """Under the lock. Returns False if the member has died."""
        self._members["waits"][member] = 0
        if member != self._member and not self._wake(member):
            return False
        self._head["holder"] = member
        self._head["clock"] = max(self._clock, self._served(member))
        return True

    def _withdraw(self) -> None:
        with self._lock():
            self._members["waits"][self._member] = 0
            if self._holder == self._member:
                self._pass_on()

    def _look_at_holder(self) -> None:
        """Passes the turn on if its holder has died, or whoever was about to pass it on."""
        with self._lock():
            holder = self._holder
            self._members["waits"][self._member] = holder != self._member
            if holder == _NOBODY or (holder != self._member and not self._lives(holder)):
                self._pass_on()

    # ---- the folder

    @property
    def _holder(self) -> int:
        return int(self._head["holder"][0])

    @property
    def _clock(self) -> float:
        return float(self._head["clock"][0])

    def _has_turn(self) -> bool:
        return self._holder == self._member

    def _fifo(self, member: int) -> Path:
        return self._folder / f"wake.{member}"

    def _is_woken(self) -> bool:
        """Wait to be woken, for LOOK_S at most."""
        if not select.select([self._woken], [], [], LOOK_S)[0]:
            return False
        with suppress(BlockingIOError):
            os.read(self._woken, 4096)
        return True

    def _wake(self, member: int) -> bool:
        """Returns False if nobody reads the member's FIFO: it has died, or left."""
        try:
            fifo = os.open(self._fifo(member), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            with suppress(BlockingIOError):  # it has enough to wake it
                os.write(fifo, b"\0")
        finally:
            os.close(fifo)
        return True

    def _lives(self, member: int) -> bool:
        try:
            os.close(os.open(self._fifo(member), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            return False
        return True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
