"""Shows the progress of a long command on standard error: a line that is rewritten on a terminal, else a line now and
then. Nothing is shown where the command is quiet, and nothing stays of a line that is rewritten.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

#: Pauses (s) between two lines: rewritten, and one below the other.
REWRITTEN_S, BELOW_S = 0.2, 5.0
#: Characters of a bar.
WIDTH: Final = 24


class Progress:
    """Shows the text that it got last, with the time since it began; from a thread, so also while nothing is new.

    It is used as a context manager. `show` takes a text, or what gives it whenever a line is due, which is to be quick
    and may raise OSError. `note` prints a line that stays. `quiet`: nothing is shown, and `note` prints nothing.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet or sys.stderr is None
        self._rewrites = not self._quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._text: str | Callable[[], str] = ""
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if not self._quiet:
            self._thread = threading.Thread(target=self._run, name="penstock-progress", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._rewrites:
            self._write("\r\033[K")

    def show(self, text: str | Callable[[], str]) -> None:
        """Show this text from now on."""
        self._text = text

    def note(self, line: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._write(f"\r\033[K{line}\n" if self._rewrites else f"{line}\n")

    def _run(self) -> None:
        while not self._ended.wait(REWRITTEN_S if self._rewrites else BELOW_S):
            with suppress(OSError):  # of what gives the text
                text = self._text if isinstance(self._text, str) else self._text()
                if text:
                    self._write(self._line(f"{time.monotonic() - self._began:.0f} s: {text}"))

    def _line(self, text: str) -> str:
        return f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}" if self._rewrites else f"{text}\n"

    def _write(self, text: str) -> None:
        with self._lock, suppress(OSError):  # nobody reads it any more: the command goes on
            sys.stderr.write(text)
            sys.stderr.flush()


def bar(done: float, total: float) -> str:
    """The finished share, as a bar with its share; empty where the whole is nothing."""
    if total <= 0:
        return ""
    share = min(1.0, max(0.0, done / total))
    full = int(WIDTH * share)
    return f"[{'#' * full}{'.' * (WIDTH - full)}] {share:4.0%}"


def bytes_bar(done: int, total: int) -> str:
    """The same of bytes, which it names in MB or GB."""
    unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
    return f"{bar(done, total)}  {done / unit:,.1f} of {total / unit:,.1f} {name}".strip()
