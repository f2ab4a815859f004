"""The terminal: prints outputs, reads text from standard input, and survives a standard output that fails.

Errors of standard output (a full disk, a reader that went away, no standard output at all) are OSErrors, like those of
connections. `guarded` gives them their own type, so that no server is blamed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO

import typer

from workers.cli.exits import Exit, Failure

#: Control characters, except tab and line break -> visible signs, so that a model's text cannot control a terminal.
VISIBLE = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\t\n"} | {
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


def printable(text: str, terminal: bool) -> str:
    """Text for standard output: unchanged for a file or pipe, without control characters for a terminal."""
    return text.translate(VISIBLE) if terminal else text


def say(line: str) -> None:
    """Print a line that may hold anybody's text."""
    typer.echo(printable(line, sys.stdout.isatty()))


def note(line: str) -> None:
    """Print a line about the progress, on standard error."""
    typer.echo(line, err=True)


def note_end(has_text: bool, reasons: Sequence[str | None]) -> None:
    """Say it on standard error if an output was cut, or if none has any text: nothing else would show that the command
    has worked. `reasons`: why each output ended."""
    if cut := reasons.count("length"):
        which = "" if len(reasons) == 1 else f"{cut} of {len(reasons)} outputs are "
        note(f"({which}cut: --max-tokens or the end of the model's context was reached)")
    elif not has_text:
        note("(the model ended without any text)")


class WaitNotes:
    """Prints what a call waits for, each reason once. `write`: prints a line, on standard error."""

    def __init__(self, write: Callable[[str], None] = note) -> None:
        self._write = write
        self._last = ""

    def show(self, text: str) -> None:
        if text != self._last:
            self._last = text
            self._write(f"(waits for: {printable(text, terminal=True)})")


def relayed(name: str, line: str) -> None:
    """Print a line of a child process. Where nobody reads the output any more, this process goes on serving."""
    with suppress(OSError):
        note(f"{name} | {line}")


def aligned(rows: Sequence[Sequence[object]], left_columns: int = 1) -> Iterator[str]:
    """Rows as lines of columns: the first `left_columns` are aligned to the left, the others to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = [cell.ljust(width) for cell, width in zip(row[:left_columns], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[left_columns:], widths[left_columns:], strict=True)]
        yield "  ".join(cells).rstrip()


def choices(outputs: Sequence[dict[str, Any]]) -> str:
    """The outputs as one text: a single output plain, several each under a heading."""
    if len(outputs) == 1:
        return str(outputs[0]["text"])
    return "\n".join(f"--- {output['index']} ({output['finish_reason']}) ---\n{output['text']}" for output in outputs)


class JsonLines:
    """Prints one JSON event a line."""

    def show(self, event: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Does nothing: every event is printed already."""


class TextStream:
    """Prints a single output's text as it comes, and several outputs each when it is complete."""

    def __init__(self, outputs: int) -> None:
        self._terminal = sys.stdout.isatty()
        self._several = outputs > 1
        self._texts: dict[int, list[str]] = {}
        self._at_line_start = True

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] == "end":
            for index in sorted(self._texts):
                self._whole(index, None)
        elif event["event"] in ("prompt", "chunk"):
            return  # only --json shows the prompt's log probabilities, and which texts are done
        elif not self._several:
            self._write(event["text"])
        else:
            self._texts.setdefault(event["choice"], []).append(event["text"])
            if event.get("finish_reason"):
                self._whole(event["choice"], event["finish_reason"])

    def close(self) -> None:
        """End the last line, so that the next command's output begins on a new one."""
        if not self._at_line_start:
            self._write("\n")

    def _whole(self, index: int, reason: str | None) -> None:
        text = "".join(self._texts.pop(index))
        self._write(f"--- {index} ({reason}) ---\n{text}\n")

    def _write(self, text: str) -> None:
        if text:
            sys.stdout.write(printable(text, self._terminal))
            sys.stdout.flush()
            self._at_line_start = text.endswith("\n")


def text_from(read: Callable[[], str]) -> str:
    """The text that `read` reads from standard input. Raises Failure if it is not UTF-8, and what `read` raises.

    Depending on the locale, Python refuses a byte that is not UTF-8 or turns it into a lone surrogate, which no
    tokenizer and no JSON parser accepts.
    """
    try:
        text = read()
        text.encode()
    except UnicodeError as error:
        raise Failure(f"standard input is not text in UTF-8: {error}") from error
    return text


def prompt_text(argument: str) -> str:
    """The prompt of a command's argument; `-` stands for standard input. Raises Failure if it is empty or not text."""
    text = text_from(sys.stdin.read) if argument == "-" else argument
    if not text:
        raise Failure("the prompt is empty")
    return text


@contextmanager
def guarded_stdout() -> Iterator[None]:
    """Turns a failed write into Failure, or silently into typer.Exit if the reader went away (`| head`).

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
