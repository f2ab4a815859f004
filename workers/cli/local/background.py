"""Runs a whole system on a thread beside one command, for as long as the command lasts."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from workers.cli.exits import Exit, Failure
from workers.cli.local.plan import Plan
from workers.cli.local.system import System
from workers.errors import Refused
from workers.library import Found

#: Last lines of the processes' output shown after a failure.
SAID = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def running(models: tuple[Found, ...], *, drain: float = 1.0, worker_options: tuple[str, ...] = ()) -> Iterator[System]:
    """Serve the models with a system in a temporary folder; stop it on leaving, also after an exception.

    Raises Failure if the system does not start. The caller's thread stays free for the terminal: Ctrl-C raises
    KeyboardInterrupt there and does not reach the system's processes. SIGTERM and SIGHUP (a closed terminal) exit the
    caller, and with it the system. Signals that come while the system stops hasten it.
    """
    said: list[str] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        plan = Plan(models, Path(folder), port=0, drain=drain, worker_options=worker_options)
        system = System(plan, lambda name, line: said.append(f"{name} | {line}"))
        life = _Life(system)

        def leave() -> None:
            _hear(SIGNALS, life.hasten)  # a second exception might come between a lock and its release
            sys.exit(Exit.INTERRUPTED)

        _hear((signal.SIGTERM, signal.SIGHUP), leave)
        thread = threading.Thread(target=lambda: asyncio.run(life.run()), name="penstock-system")
        thread.start()
        try:
            life.up.result()
            yield system
        except Refused as refused:
            last = "".join(f"\n  {line}" for line in said[-SAID:])
            raise Failure(f"{refused}{last}", refused.status) from refused
        finally:
            try:
                _hear(SIGNALS, life.hasten)
            finally:  # also where one more signal came before that
                life.end()
                thread.join()


def _hear(signals: Iterable[signal.Signals], act: Callable[[], None]) -> None:
    """Call this at each of these signals from now on. What is ignored stays so, as SIGHUP under nohup."""
    for sig in signals:
        if signal.getsignal(sig) is not signal.SIG_IGN:
            signal.signal(sig, lambda *_: act())


@dataclass(slots=True)
class _Life:
    system: System
    up: Future[None] = field(default_factory=Future)
    _over: threading.Event = field(default_factory=threading.Event)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._over.is_set():  # `end` was called before the loop ran
            self._ended.set()
        starting = asyncio.create_task(self.system.start())
        ending = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait((starting, ending), return_when="FIRST_COMPLETED")
            if not starting.done():
                starting.cancel()
                await asyncio.wait((starting,))
            if starting.cancelled():
                self.up.cancel()
            elif starting.exception() is not None:
                self.up.set_exception(starting.exception())
            else:
                self.up.set_result(None)
                await ending
        finally:
            ending.cancel()
            await self.system.stop()

    def end(self) -> None:
        """Stop the system. Callable from any thread, at any time."""
        self._over.set()
        self._call(self._ended.set)

    def hasten(self) -> None:
        """Make the workers hand back their running tasks now. Callable like `end`."""
        self._call(self.system.hasten)

    def _call(self, what: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(what)
