"""A silent server's wait, borne once: while one connection tries it again, all others of the client fail at once.

    no answer for SILENT_S ─▶ silent ─▶ one new connection at a time, for all other calls Silent ─▶ any answer ─▶ over

A request makes several calls. Without this each of them, and each of the next request, would wait as long again.
"""

from __future__ import annotations

import time
from typing import Final

#: Silence (s) after which a server counts as lost.
SILENT_S: Final = 5.0
#: Share of SILENT_S after which a call that is given up shows a silent server: a caller's own limit of that length
#: began a moment earlier. Nothing may have been heard for that share of its wait.
ENOUGH: Final = 0.8
#: Time (s) from a try that had no answer to the next one.
PAUSE_S: Final = 0.2


class Silent(TimeoutError):
    """The server is silent, and nothing was sent. `since`: when the first call without an answer began (monotonic)."""

    def __init__(self, since: float) -> None:
        super().__init__(f"no answer for {time.monotonic() - since:.0f} s")
        self.since = since


class Silence:
    """One server's silence, as the connections of one client see it. A server that answers others of them while a call
    waits is not silent: that call is slow, or its connection is lost."""

    __slots__ = ("_doubt", "_heard", "_next", "_since", "_where")

    def __init__(self) -> None:
        self._where = ""
        self._since: float | None = None
        self._doubt = self._heard = self._next = 0.0

    def enter(self, where: str) -> float:
        """Let a connection to this address be made. Answers what `tried` is told then. Raises Silent while another
        one tries."""
        if self._since is None or where != self._where:
            return 0.0
        now = time.monotonic()
        if now < self._next:
            raise Silent(self._since)
        if now > self._next + SILENT_S:  # nobody has tried for long, so nothing is known of the server
            self._since = None
            return 0.0
        self._next = now + SILENT_S + PAUSE_S
        return self._next

    def tried(self, entered: float) -> None:
        """The connection that `enter` let in was not made: another one may try."""
        if entered == self._next:
            self._next = time.monotonic() + PAUSE_S

    def doubts(self, heard: float) -> bool:
        """Whether a connection may be lost that was heard last at this time (monotonic): another one's call, which
        began later, had no answer."""
        return heard < self._doubt

    def answered(self) -> float:
        """An answer has come. Answers the time (monotonic)."""
        self._since = None
        self._heard = time.monotonic()
        return self._heard

    def unanswered(self, where: str, waited: float) -> None:
        """A call to this address was given up after so many seconds, enough to show a silent server."""
        now = time.monotonic()
        self._doubt = max(self._doubt, now - waited)
        if self._heard <= now - ENOUGH * waited and (self._since is None or where != self._where):
            self._where, self._since, self._next = where, now - waited, now + PAUSE_S
