"""Handles errors of standard output: a full disk, a reader that went away, no standard output at all.

These errors are OSErrors, like those of connections. Here they get their own type, so that no server is blamed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

import typer

from workers.cli.exits import Exit, Failure


@contextmanager
def guarded() -> Iterator[None]:
    """Within it, a failed write raises Failure, or silently typer.Exit if the reader went away (`| head`).

    Without a standard output (`>&-`), output is lost, and no file or socket gets its descriptor.
    """
    stream = sys.stdout if sys.stdout is not None else open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    sys.stdout = guard = _Guard(stream)
    try:
        yield
        guard.flush()
    finally:
        sys.stdout = stream


class _Guard:
    """A text stream that turns errors of `stream` into Failure or typer.Exit. All else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text == "":  # typer's probe of the stream's kind, which would swallow an exception
            return 0
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # e.g. from a dead letter: escape the character
            coding = self._stream.encoding
            return self._stream.write(text.encode(coding, "backslashreplace").decode(coding))
        except OSError as error:
            self._lost(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> NoReturn:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # the exit must not try the rest of the buffer again
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(Exit.TASK_FAILED) from None
        raise Failure(f"cannot write to standard output: {error.strerror}", Exit.TASK_FAILED) from None
