"""Standard output that does not take what is written: a full disk, a reader that went away, none at all.

Such an error is an OSError, as a connection's are: without a name of its own it would be told as the server's.
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
    """Within, writing raises Failure, which says why; or typer.Exit, in silence, where the reader went away (`| head`).

    Where there is no standard output (`>&-`), what is written is lost, and no file or socket takes its number.
    """
    stream = sys.stdout if sys.stdout is not None else open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    sys.stdout = guard = _Guard(stream)
    try:
        yield
        guard.flush()
    finally:
        sys.stdout = stream


class _Guard:
    """What it lacks, it asks the stream for."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if text == "":  # typer finds out so what kind of stream it is, and would swallow what is raised
            return 0
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # whatever a dead letter holds, say: it is shown as its number
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
        os.dup2(nowhere, self._stream.fileno())  # what is left in the buffer is not tried again at the end
        os.close(nowhere)
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(Exit.TASK_FAILED) from None
        raise Failure(f"cannot write to standard output: {error.strerror}", Exit.TASK_FAILED) from None
