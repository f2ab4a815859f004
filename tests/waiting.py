"""Waiting for what comes about by itself, for so long that nothing that works takes it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

#: Long (s) for a test that shares its two cores with eighty others' processes, where a minute was not enough.
PATIENCE_S: Final = 180.0
#: The longest pause between two looks, seconds.
LONGEST_S: Final = 0.05


def pauses(least_s: float = 0.005) -> Iterator[float]:
    """Seconds to sleep before each next look: a twentieth of what was waited so far, and four times what the last look
    took, since most of these looks ask a server or go through all processes, which takes time from what is waited for.
    """
    began = asked = time.monotonic()
    while True:
        now = time.monotonic()
        pause = max(least_s, min(LONGEST_S, max((now - began) / 20, 4 * (now - asked))))
        asked = now + pause
        yield pause


def until(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """Wait for a true answer, and give it."""
    deadline, pause = time.monotonic() + seconds, pauses()
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(next(pause))
    return answer


def within(condition: Callable[[], Any], seconds: float = PATIENCE_S, every_s: float = 0.01) -> bool:
    """Whether it comes true in time. `every_s`: longer, where looking takes something from what is waited for."""
    deadline, pause = time.monotonic() + seconds, pauses(every_s)
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(next(pause))
    return True


async def auntil(condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """`until` for asyncio."""
    deadline, pause = time.monotonic() + seconds, pauses()
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(next(pause))
    return answer


class StepGate:
    """Holds the engines of workers that have its `environment` amid a task, so that a test finds it there."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "held"
        self.environment: Final = {"WORKER_PLUGINS": "tests.workers.plugins:waits_for_steps", "STEPS_HELD": self._file}

    @contextlib.contextmanager
    def held(self, tokens: int = 20) -> Iterator[None]:
        """Engines go on until some output has so many tokens, and then take no step until this ends."""
        self.hold(tokens)
        try:
            yield
        finally:
            self._file.unlink()

    def hold(self, tokens: int) -> None:
        scratch = self._file.with_suffix(".new")
        scratch.write_text(str(tokens))
        scratch.rename(self._file)


def suspend(pid: int) -> None:
    """Send SIGSTOP, and wait until the process stands still or has ended: until then its threads may run on.

    Whoever started it may be another process, so that it cannot be waited for.
    """
    os.kill(pid, signal.SIGSTOP)
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
            time.sleep(0.001)


def gone(pid: int) -> bool:
    """Whether a process has ended: there is none, or it is one that nobody has asked for yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
