"""Lets the busiest callers wait while a gateway's event loop is behind with its work.

    every LOOK_S: how late the loop came to it ─▶ behind: a pause, which grows, else it shrinks to none
    a request while the loop is behind ─▶ its caller had more than a fair share of the latest requests ─▶ it waits

One process answers all callers. Limits of keys count tasks, but what is refused, or only reads, takes time as well: a
caller with many connections would have most of it. A caller who is alone has all of it, and none waits while the loop
keeps up. A caller is a key that works, else an address.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.types import Scope

from producers.connection.hosts import network_of
from producers.gateway.http.caller import token_of

#: Time (s) between two looks at the loop.
LOOK_S: Final = 0.05
#: The loop is behind if it comes later than this (s) to what it has to do, on average.
BEHIND_S: Final = 0.01
#: It is to blame for that only if it computes for this part of the time: else others have the processor.
BUSY: Final = 0.25
#: Weight of the latest look in the averages.
WEIGHT: Final = 0.3
#: Shortest and longest pause (s), and by how much one look changes it.
SHORTEST_S, LONGEST_S, GROWS, SHRINKS = 0.005, 0.5, 1.5, 0.8
#: Looks after which the requests that were counted are forgotten, in two halves.
WINDOW: Final = 10
#: Requests of a caller in that time that never wait.
FREE: Final = 10


class FairShare:
    """The callers of one gateway, counted while its loop is behind."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._late = 0.0
        self._load = 0.0
        self._looks = 0
        self._counts: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._total = self._total_before = 0

    @property
    def behind(self) -> bool:
        """Whether requests are counted, and may have to wait (`pause`)."""
        return self._late > BEHIND_S or self._pause > 0

    def pause(self, caller: str) -> float:
        """Count a caller's request. Returns the seconds for which it has to wait before it is handled."""
        self._total += 1
        self._counts[caller] = self._counts.get(caller, 0) + 1
        if not self._pause:
            return 0.0
        count = self._counts[caller] + self._before.get(caller, 0)
        fair = (self._total + self._total_before) / max(len(self._counts), len(self._before))
        return self._pause if count > max(FREE, fair) else 0.0

    def look(self, late: float, load: float) -> None:
        """Take what the last LOOK_S showed: how late the loop came (s), and the part of the time that it computed."""
        self._late += WEIGHT * (late - self._late)
        self._load += WEIGHT * (load - self._load)
        if self._late > BEHIND_S and self._load > BUSY:
            self._pause = min(LONGEST_S, max(SHORTEST_S, GROWS * self._pause))
        else:
            shorter = SHRINKS * self._pause
            self._pause = shorter if shorter >= SHORTEST_S else 0.0
        self._looks += 1
        if self._looks % (WINDOW // 2) == 0:
            self._before, self._counts = self._counts, {}
            self._total_before, self._total = self._total, 0

    async def run(self) -> None:
        """Look at the loop that runs this, until it is cancelled."""
        due, used = time.monotonic() + LOOK_S, time.thread_time()
        while True:
            await asyncio.sleep(due - time.monotonic())
            now, used_now = time.monotonic(), time.thread_time()
            self.look(max(0.0, now - due), (used_now - used) / (now - due + LOOK_S))
            due, used = now + LOOK_S, used_now


def caller_of(scope: Scope) -> str:
    """The caller of a request: the id of its key if that has let somebody in here, else its address (of IPv6: 64 bits).

    That is no authentication. A key that is asked for again now and then is not counted with all who share its address.
    """
    callers = scope["app"].state.gateway.callers if "app" in scope else None
    if callers is not None:
        key = callers.opened_before(token_of(scope["headers"]))
        if key is not None:
            return str(key)
    client = scope.get("client")
    return network_of(client[0]) if client else "nobody"
