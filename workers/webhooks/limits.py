"""Limits on tries that run at once, so that receivers who hang slow nobody else.

Each receiver (scheme, host, port, and whose it is) has a window: tries that may run there at once. It grows with each
success, and is halved by each try without an answer or with that of an overload. A row beyond it is put off until the
receiver should have room for it.

Places are of three kinds. A try that takes longer than a second is slow, and so are those to a receiver whose last try
was. New receivers may have half of the quick places. So those who hang take places from each other
alone, and the other half of the quick places is for receivers who have answered.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from typing import Final, Literal

Kind = Literal["quick", "new", "slow"]

#: Places of quick tries, new receivers' included, and of slow ones. Each try has a socket.
QUICK, SLOW = 256, 1024
#: Places of receivers of whom nothing is known.
NEW: Final = QUICK // 2
#: Slow tries from which on a new or slow receiver may have only one try at a time.
CROWD: Final = SLOW // 4
#: A receiver's window at first, and the largest.
FIRST_WINDOW, MAX_WINDOW = 4, 64
#: Age (s) at which a try is slow.
SLOW_AFTER_S: Final = 1.0
#: Time (s) that a try takes at a receiver of whom nothing is known.
USUAL_S: Final = 0.1
#: Weight of the last try in a receiver's mean time.
NEWEST: Final = 0.2
#: Longest time (s) for which a row is put off.
LONGEST_S: Final = 30.0
#: Shortest and longest time (s) for which a row is put off for want of a place.
CROWDED_S: Final = (1.0, 3.0)
#: Receivers that are remembered; those without a try that were used last go last.
REMEMBERED: Final = 4096


class Receiver:
    """The state of one receiver."""

    __slots__ = ("kind", "line", "mean_s", "running", "window")

    def __init__(self) -> None:
        self.kind: Kind = "new"
        """Of its next try's place."""
        self.running = 0
        self.window = float(FIRST_WINDOW)
        self.mean_s = USUAL_S
        self.line = 0.0
        """Time (monotonic) at which the last row that was put off should have its turn."""


class Visit:
    """One try that runs. Call `leave` at its end."""

    def __init__(self, limits: Limits, receiver: Receiver) -> None:
        self._limits, self._receiver = limits, receiver
        self._began = time.monotonic()
        self._kind = receiver.kind
        limits.in_use[self._kind] += 1
        receiver.running += 1
        self._timer = asyncio.get_running_loop().call_later(SLOW_AFTER_S, self._takes_long)

    def leave(self, well: bool | None) -> None:
        """`well`: whether the receiver keeps up; None where the try does not show it."""
        self._timer.cancel()
        receiver, elapsed = self._receiver, time.monotonic() - self._began
        receiver.running -= 1
        receiver.mean_s += NEWEST * (elapsed - receiver.mean_s)
        receiver.kind = "slow" if elapsed > SLOW_AFTER_S else "quick"
        if well is not None:
            receiver.window = min(MAX_WINDOW, receiver.window + 1) if well else max(1.0, receiver.window / 2)
        self._limits.in_use[self._kind] -= 1
        self._limits.room.set()

    def _takes_long(self) -> None:
        self._receiver.kind = "slow"
        in_use = self._limits.in_use
        if self._kind != "slow" and in_use["slow"] < SLOW:
            in_use[self._kind] -= 1
            self._kind = "slow"
            in_use["slow"] += 1
            self._limits.room.set()


class Limits:
    """The tries of one process. `in_use`: places by kind; `room`: set when a place may be free again."""

    def __init__(self) -> None:
        self.in_use: dict[Kind, int] = {"quick": 0, "new": 0, "slow": 0}
        self.room = asyncio.Event()
        self._receivers: OrderedDict[str, Receiver] = OrderedDict()

    @property
    def free(self) -> int:
        """Quick places that are free."""
        return max(0, QUICK - self.in_use["quick"] - self.in_use["new"])

    def visit(self, receiver: str) -> Visit | None:
        """A place for a try at this receiver; None if it has no room now."""
        known_receiver = self._receiver_of(receiver)
        narrow = known_receiver.kind != "quick" and self.in_use["slow"] > CROWD
        if self._crowded(known_receiver) or known_receiver.running >= (1 if narrow else int(known_receiver.window)):
            return None
        return Visit(self, known_receiver)

    def put_off_s(self, receiver: str) -> float:
        """Seconds until the next row of this receiver should have its turn, behind those put off before."""
        entry, now = self._receiver_of(receiver), time.monotonic()
        if self._crowded(entry):
            return random.uniform(*CROWDED_S)  # noqa: S311 - spreads load
        entry.line = min(max(entry.line, now) + entry.mean_s / entry.window, now + LONGEST_S)
        return (entry.line - now) * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load

    def _crowded(self, receiver: Receiver) -> bool:
        """Whether there is no place of its kind."""
        return (
            self.in_use["slow"] >= SLOW
            if receiver.kind == "slow"
            else receiver.kind == "new" and self.in_use["new"] >= NEW
        )

    def _receiver_of(self, receiver: str) -> Receiver:
        entry = self._receivers.get(receiver)
        if entry is None:
            entry = self._receivers[receiver] = Receiver()
            if len(self._receivers) > REMEMBERED:
                self._forget()
        self._receivers.move_to_end(receiver)
        return entry

    def _forget(self) -> None:
        oldest = next((name for name, entry in self._receivers.items() if not entry.running), None)
        if oldest is not None:
            del self._receivers[oldest]
