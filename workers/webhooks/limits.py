"""Limits on tries that run at once, so that receivers who hang slow nobody else.

Each receiver (scheme, host, port, and whose it is) has a window: tries that may run there at once. It grows with each
success, and is halved by each try without an answer or with that of an overload. A row beyond it is put off until the
receiver should have room for it.

Tries are quick or slow. A try that takes longer than a second, or goes to a receiver whose last one did, is slow. Slow
tries have places of their own, so receivers who hang take the quick places for a second at most.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from typing import Final

#: Places of quick and of slow tries. Each try has a socket.
QUICK, SLOW = 256, 512
#: A receiver's window at first, and the largest.
FIRST_WINDOW, MAX_WINDOW = 4, 64
#: Age (s) at which a try is slow.
SLOW_AFTER_S: Final = 1.0
#: Time (s) that a try takes at a receiver that nothing is known of.
USUAL_S: Final = 0.1
#: Weight of the last try in a receiver's mean time.
NEWEST: Final = 0.2
#: Longest time (s) for which a row is put off.
LONGEST_S: Final = 30.0
#: Receivers that are remembered; those without a try that were used last go last.
REMEMBERED: Final = 4096


class Receiver:
    """What is known of one receiver."""

    __slots__ = ("line", "mean_s", "running", "slow", "window")

    def __init__(self) -> None:
        self.running = 0
        self.window = float(FIRST_WINDOW)
        self.mean_s = USUAL_S
        self.slow = False
        self.line = 0.0
        """Time (monotonic) at which the last row that was put off should have its turn."""


class Visit:
    """One try that runs. Call `leave` at its end."""

    def __init__(self, limits: Limits, receiver: Receiver) -> None:
        self._limits, self._receiver = limits, receiver
        self._began = time.monotonic()
        self.slow = receiver.slow
        limits.enter(self)
        receiver.running += 1
        self._timer = asyncio.get_running_loop().call_later(SLOW_AFTER_S, self._takes_long)

    def leave(self, well: bool | None) -> None:
        """`well`: whether the receiver keeps up; None where the try does not show it."""
        self._timer.cancel()
        one, took = self._receiver, time.monotonic() - self._began
        one.running -= 1
        self._limits.leave(self)
        one.mean_s += NEWEST * (took - one.mean_s)
        one.slow = took > SLOW_AFTER_S
        if well is not None:
            one.window = min(MAX_WINDOW, one.window + 1) if well else max(1.0, one.window / 2)

    def _takes_long(self) -> None:
        self._receiver.slow = True
        if not self.slow and self._limits.slow < SLOW:
            self._limits.leave(self)
            self.slow = True
            self._limits.enter(self)


class Limits:
    """The tries of one process. `room`: set when there may be a place for a quick try again."""

    def __init__(self) -> None:
        self.quick = self.slow = 0
        self.room = asyncio.Event()
        self._receivers: OrderedDict[str, Receiver] = OrderedDict()

    @property
    def free(self) -> int:
        """Quick places that are free."""
        return max(0, QUICK - self.quick)

    def visit(self, receiver: str) -> Visit | None:
        """A place for a try at this receiver; None if it has no room now."""
        one = self._known(receiver)
        crowded = one.slow and self.slow >= SLOW
        # Once the slow places are half full, nobody may have more than one of them.
        window = 1 if one.slow and self.slow > SLOW // 2 else int(one.window)
        return None if crowded or one.running >= window else Visit(self, one)

    def put_off_s(self, receiver: str) -> float:
        """Seconds until the next row of this receiver should have its turn, behind those put off before."""
        one, now = self._known(receiver), time.monotonic()
        one.line = min(max(one.line, now) + one.mean_s / one.window, now + LONGEST_S)
        return (one.line - now) * random.uniform(0.8, 1.2)  # noqa: S311 - spreads load

    def enter(self, visit: Visit) -> None:
        if visit.slow:
            self.slow += 1
        else:
            self.quick += 1

    def leave(self, visit: Visit) -> None:
        if visit.slow:
            self.slow -= 1
        else:
            self.quick -= 1
            self.room.set()

    def _known(self, receiver: str) -> Receiver:
        one = self._receivers.get(receiver)
        if one is None:
            one = self._receivers[receiver] = Receiver()
            if len(self._receivers) > REMEMBERED:
                self._forget()
        self._receivers.move_to_end(receiver)
        return one

    def _forget(self) -> None:
        oldest = next((name for name, one in self._receivers.items() if not one.running), None)
        if oldest is not None:
            del self._receivers[oldest]
