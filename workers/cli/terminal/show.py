"""Prints outputs on a terminal, or into a file or pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import typer

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


def relayed(name: str, line: str) -> None:
    """Print a line of a child process. Where nobody reads the output any more, this process goes on serving."""
    with suppress(OSError):
        note(f"{name} | {line}")


def aligned(rows: Sequence[Sequence[object]], left: int = 1) -> Iterator[str]:
    """Rows as lines of columns: the first `left` are aligned to the left, the others to the right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        cells = [cell.ljust(width) for cell, width in zip(row[:left], widths, strict=False)]
        cells += [cell.rjust(width) for cell, width in zip(row[left:], widths[left:], strict=True)]
        yield "  ".join(cells).rstrip()


def choices(outputs: Sequence[dict[str, Any]]) -> str:
    """The outputs as one text: a single output plain, several each under a heading."""
    if len(outputs) == 1:
        return str(outputs[0]["text"])
    return "\n".join(f"--- {one['index']} ({one['finish_reason']}) ---\n{one['text']}" for one in outputs)


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
        elif event["event"] == "prompt":
            return  # only --json shows the prompt's log probabilities
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
