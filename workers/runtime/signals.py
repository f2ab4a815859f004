"""Receives the signals that end a process, and drops repeats of the same one.

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


class RepeatFilter:
    """Drops a signal that repeats the one before it. Used by one thread."""

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


def signal_queue() -> asyncio.Queue[signal.Signals]:
    """Returns a queue of the signals that come to this process from now on, in the running loop. Ignored ones stay
    ignored, as SIGHUP under nohup."""
    loop, signals, repeats = asyncio.get_running_loop(), asyncio.Queue[signal.Signals](), RepeatFilter()

    def on_signal(sig: signal.Signals) -> None:
        if repeats.is_new(sig):
            signals.put_nowait(sig)

    for sig in SIGNALS:
        if signal.getsignal(sig) is not signal.SIG_IGN:
            loop.add_signal_handler(sig, on_signal, sig)
    return signals


def on_stop_signal(end: Callable[[], object]) -> None:
    """Calls `end` at each SIGTERM and SIGINT that comes to this process from now on, in the running loop."""
    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, end)


class Stopping(threading.Thread):
    """Receives the signals that end a worker process. Before `serve`, a signal ends the process at once, which holds
    nothing yet.

    The kernel's note of each signal comes to a thread of its own, so that neither a model that loads for minutes nor an
    event loop that waits for a broker keeps it from being heard.

        SIGTERM, SIGINT, SIGHUP: drain   SIGQUIT, or a second one of any: hand back now   a third: end on the spot
    """

    def __init__(self) -> None:
        super().__init__(name="penstock-signals", daemon=True)
        self._drain: Callable[[float, str], None] | None = None
        self._seconds = 0.0
        self._lock = threading.Lock()
        self._count = 0
        self._filter = RepeatFilter()
        self._ours, self._kernels = socket.socketpair()
        self._kernels.setblocking(False)

    def install(self) -> None:
        """Begins to receive signals; call it on the main thread. SIGHUP stays ignored if it is, as under nohup."""
        for sig in SIGNALS:
            if sig is not signal.SIGHUP or signal.getsignal(sig) is not signal.SIG_IGN:
                signal.signal(sig, lambda *_: None)
        signal.set_wakeup_fd(self._kernels.fileno(), warn_on_full_buffer=False)
        self.start()

    def serve(self, drain: Callable[[float, str], None], seconds: float) -> None:
        """Lets signals drain from now on: `drain` gets the time, at most `seconds`, and the reason."""
        with self._lock:
            self._drain, self._seconds = drain, seconds

    def run(self) -> None:
        while True:
            for number in self._ours.recv(64):
                if number in SIGNALS:
                    with self._lock:
                        self._take(signal.Signals(number))

    def _take(self, sig: signal.Signals) -> None:
        if not self._filter.is_new(sig):
            return
        self._count += 1
        if self._drain is None:
            logger.info("%s before anything was taken: ending", sig.name)
            os._exit(os.EX_OK)
        if self._count > 2:
            logger.error("%s, the third signal: ending; what is held returns when the lease lapses", sig.name)
            os._exit(os.EX_SOFTWARE)
        at_once = sig is signal.SIGQUIT or self._count > 1
        self._drain(0.0 if at_once else self._seconds, f"{sig.name} came")
