"""Accounts whose requests of this minute are known to be used up, so that more of them cost nobody anything.

ADMIT's answers, REFUSED's ─▶ note ─▶ until the minute ends: check, before a body is read, and without the store

The store alone decides what is charged. What is noted here it has said, and a minute's requests only grow, so nothing
is refused that ADMIT would let in: but for a limit that was raised meanwhile, which goes before what is noted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from producers.store.access.principal import Account
from producers.store.usage.limits import Charge

#: Most accounts that are noted; the one noted first makes room.
KEPT: Final = 10_000


@dataclass(frozen=True, slots=True)
class _Minute:
    """An account's minute, until `until` (monotonic). `requests`: so many were charged. `tokens`: what was left of a
    minute's tokens, and of how many; -1: no such limit."""

    until: float
    requests: int
    tokens: tuple[int, int]


class Spent:
    """The accounts of one gateway's callers that are used up. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: OrderedDict[str, _Minute] = OrderedDict()

    def __len__(self) -> int:
        return len(self._noted)

    def note(self, charge: Charge | None) -> None:
        """Take what the store answered about a request's accounts, if it says which of them is used up."""
        if charge is None or not charge.answer or charge.answer[3] != 0 or (account := charge.used_up) is None:
            return
        _, _, wait_ms, _, _, *tokens = charge.answer
        self._noted.pop(account.name, None)
        minute = _Minute(self._clock() + wait_ms / 1000, account.limits.counted["rpm"], (tokens[0], tokens[1]))
        self._noted[account.name] = minute
        if len(self._noted) > KEPT:
            self._noted.popitem(last=False)

    def charge_of(self, account: Account) -> Charge | None:
        """What ADMIT would say of one more task of this account, if that is noted: a charge that was `told` so."""
        minute = self._noted.get(account.name)
        if minute is None:
            return None
        remaining_s = minute.until - self._clock()
        if remaining_s <= 0:
            del self._noted[account.name]
            return None
        rpm = account.limits.rpm
        if rpm is None or rpm > minute.requests:
            return None
        return Charge((account,), answer=["rpm", 0, max(1, int(remaining_s * 1000)), 0, rpm, *minute.tokens])
