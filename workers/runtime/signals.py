"""The signals that end a process, and which of them are news.

One that comes again at once is still the same one: `timeout` signals a process and then its group, and systemd all
processes of a unit, of which the one above the workers (`--gpus`) passes it on.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
#: Within so long (s) after a signal, it is no second one that comes again. (The kernel makes those one that wait.)
SAME_S: Final = 0.5


class News:
    """Used by one thread."""

    def __init__(self) -> None:
        self._last: signal.Signals | None = None
        self._at = 0.0

    def is_new(self, sig: signal.Signals) -> bool:
        """True unless `sig`, which comes just now, is the one before it once more."""
        now = time.monotonic()
        if sig is self._last and now < self._at + SAME_S:
            return False
        self._last, self._at = sig, now
        return True


def coming() -> asyncio.Queue[signal.Signals]:
    """A queue of the signals that come to this process from now on, in the running loop. What is ignored stays so, as
    SIGHUP under nohup."""
    loop, came, news = asyncio.get_running_loop(), asyncio.Queue[signal.Signals](), News()

    def heard(sig: signal.Signals) -> None:
        if news.is_new(sig):
            came.put_nowait(sig)

    for sig in SIGNALS:
        if signal.getsignal(sig) is not signal.SIG_IGN:
            loop.add_signal_handler(sig, heard, sig)
    return came
