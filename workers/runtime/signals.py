"""The signals that end a process, and which of them are news.

One that comes again at once is still the same one: `timeout` signals a process and then its group, and systemd all
processes of a unit, of which the one above the workers (`--gpus`) passes it on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

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


def when_told(end: Callable[[], object]) -> None:
    """Call it at each SIGTERM and SIGINT that comes to this process from now on, in the running loop."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, end)


class Stopping(threading.Thread):
    """Hears the signals that end a worker process. `serve` once there is something to drain; what comes before that
    ends the process, which holds nothing yet.

    The kernel's note of each signal comes to a thread of its own, so that neither a model that loads for minutes nor an
    event loop that waits for a broker keeps it from being heard.

        SIGTERM, SIGINT, SIGHUP: drain   SIGQUIT, or a second one of any: hand back now   a third: end on the spot
    """

    def __init__(self) -> None:
        super().__init__(name="penstock-signals", daemon=True)
        self._drain: Callable[[float, str], None] | None = None
        self._seconds = 0.0
        self._lock = threading.Lock()
        self._heard = 0
        self._news = News()
        self._ours, self._kernels = socket.socketpair()
        self._kernels.setblocking(False)

    def install(self) -> None:
        """Begin to hear; call it on the main thread. SIGHUP stays ignored where it is, as under nohup."""
        for sig in SIGNALS:
            if sig is not signal.SIGHUP or signal.getsignal(sig) is not signal.SIG_IGN:
                signal.signal(sig, lambda *_: None)
        signal.set_wakeup_fd(self._kernels.fileno(), warn_on_full_buffer=False)
        self.start()

    def serve(self, drain: Callable[[float, str], None], seconds: float) -> None:
        """Let signals drain from now on: `drain` is told for how long, at most `seconds`, and why."""
        with self._lock:
            self._drain, self._seconds = drain, seconds

    def run(self) -> None:
        while True:
            for number in self._ours.recv(64):
                if number in SIGNALS:
                    with self._lock:
                        self._take(signal.Signals(number))

    def _take(self, sig: signal.Signals) -> None:
        if not self._news.is_new(sig):
            return
        self._heard += 1
        if self._drain is None:
            logger.info("%s before anything was taken: ending", sig.name)
            os._exit(os.EX_OK)
        if self._heard > 2:
            logger.error("%s, the third signal: ending; what is held returns when the lease lapses", sig.name)
            os._exit(os.EX_SOFTWARE)
        at_once = sig is signal.SIGQUIT or self._heard > 1
        self._drain(0.0 if at_once else self._seconds, f"{sig.name} came")
