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
#: began a moment earlier.
ENOUGH: Final = 0.8
#: Time (s) from a try that had no answer to the next one.
PAUSE_S: Final = 0.2


class Silent(TimeoutError):
    """The server is silent, and nothing was sent. `since`: when the first call without an answer began (monotonic)."""

    def __init__(self, since: float) -> None:
        super().__init__(f"no answer for {time.monotonic() - since:.0f} s")
        self.since = since


class Silence:
    """One server's silence, as the connections of one client see it."""

    __slots__ = ("_found", "_next", "_since", "_where")

    def __init__(self) -> None:
        self._where = ""
        self._since: float | None = None
        self._found = self._next = 0.0

    def enter(self, where: str) -> None:
        """Let a connection to this address be made. Raises Silent while another one tries."""
        if self._since is None or where != self._where:
            return
        now = time.monotonic()
        if now < self._next:
            raise Silent(self._since)
        self._next = now + SILENT_S + PAUSE_S

    def outlived(self, opened: float) -> bool:
        """Whether the server was found silent after this time (monotonic): a connection of before may be lost."""
        return opened < self._found

    def answered(self) -> None:
        self._since = None

    def unanswered(self, where: str, *, waited: float, enough: bool) -> None:
        """A call was given up after `waited` seconds. `enough`: whether that shows a silent server."""
        now = time.monotonic()
        if self._since is None and enough:
            self._where, self._since, self._found, self._next = where, now - waited, now, now + PAUSE_S
        self._next = min(self._next, now + PAUSE_S)
