"""The holds of this process: the consumers of its threads share one for each address and model."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any, Final

from producers.broker.sqs.address import Address
from producers.broker.sqs.hold.hold import Hold

_holds: Final[dict[tuple[Any, ...], Hold]] = {}
_lock: Final = threading.Lock()


def hold_of(address: Address, queues: Sequence[str], store_url: str, home: str) -> Hold:
    """Makes it when first asked for; a process that was forked has its own. `release` it."""
    key = (os.getpid(), address, tuple(queues), store_url, home)
    with _lock:
        hold = _holds.get(key)
        if hold is None:
            hold = _holds[key] = Hold(address, queues, store_url, home)
        hold.users += 1
        return hold


def release(hold: Hold) -> None:
    """Close it with the last of its users; whoever asks for one from then on gets another."""
    with _lock:
        hold.users -= 1
        gone = [key for key, one in _holds.items() if one is hold and not hold.users]
        for key in gone:
            del _holds[key]
    if gone:
        hold.close()
