"""A process that was not started by asyncio, as `asyncio.subprocess.Process` has it."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from contextlib import suppress


class Begun:
    """A running child process. Made on the event loop that waits for it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._reap, args=(loop,), name=f"waits for {self.pid}", daemon=True).start()

    @property
    def returncode(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for its end. Returns its exit status."""
        await self._ended.wait()
        assert self._process.returncode is not None
        return self._process.returncode

    def send_signal(self, sig: int) -> None:
        """Send it a signal. Raises ProcessLookupError if it has just ended."""
        self._process.send_signal(sig)

    def _reap(self, loop: asyncio.AbstractEventLoop) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # nobody waits any more: the loop is closed
            loop.call_soon_threadsafe(self._ended.set)
